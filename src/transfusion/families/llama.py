"""Llama and its kin as in transformers: RMSNorm, rotary positions, grouped queries, a gated MLP.

SmolLM3 has blocks without rotary positions; Helium and ERNIE 4.5 rotate neighbouring units; OLMo's norms have
no weights; Granite multiplies each branch by a number.
"""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    GROUPED,
    GROUPED_ATTENTION,
    GROUPED_FIXED,
    GROUPED_INTERLEAVED,
    KNOWN,
    SOME_ROTARY,
    family,
    grouped_decoder,
    grouped_partly,
    lines,
    rope_blocks,
    rotary_kinds,
    rotary_sizes,
)
from transfusion.families._shared import PLAIN

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.weight            scale x",
    GROUPED_ATTENTION,
    "layers.{}.post_attention_layernorm.weight   scale y",
    GATED_MLP,
    "norm.weight                                 scale x@last",
)
SMOLLM3 = ROWS.replace(GROUPED_ATTENTION.strip(), SOME_ROTARY.strip())
BARE = lines(EMBEDDING, GROUPED_ATTENTION, GATED_MLP)

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.down_proj
"""


def table(config: Config, names: frozenset[str]) -> Table:
    # A key of old configurations; what installed releases do with it is not known.
    axes = GROUPED_FIXED if config.get("rope_interleaved") else GROUPED
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, axes=axes)


def interleaved(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, axes=GROUPED_INTERLEAVED)


def ernie(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=True, axes=GROUPED_INTERLEAVED)


def smollm3(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(
        config,
        SMOLLM3,
        SHORTCUTS,
        tied=True,
        axes=grouped_partly(),
        kinds=rotary_kinds(config, rope_blocks(config)),
        sizes=rotary_sizes(config),
    )


def granite(config: Config, names: frozenset[str]) -> Table:
    factor = config.get("residual_multiplier", 1.0)
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, branch_factor=factor)


def olmo(config: Config, names: frozenset[str]) -> Table:
    # What is clipped unit by unit may not be rotated.
    axes = GROUPED if config.get("clip_qkv") is None else GROUPED_FIXED
    return grouped_decoder(config, BARE, SHORTCUTS, tied=False, axes=axes)


SIGNATURE = """
embed_tokens.weight layers.0.input_layernorm.weight layers.0.self_attn.q_proj.weight
layers.0.post_attention_layernorm.weight layers.0.mlp.gate_proj.weight norm.weight
"""

MULTIPLIERS = frozenset(
    {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
)
"""Keys of Granite: numbers that multiply all units alike."""

# Only a configuration tells them from a Llama, so most have no signature.
FAMILIES = (
    family(
        "llama",
        ("llama", "mistral", "qwen2", "ministral", "ministral3", "seed_oss", "cwm"),
        table,
        SIGNATURE,
        known_keys=KNOWN | {"rope_interleaved", "pretraining_tp", "attention_out_bias", "residual_dropout"},
    ),
    family("helium", ("helium",), interleaved, ""),
    family(
        "ernie4_5",
        ("ernie4_5",),
        ernie,
        "",
        known_keys=KNOWN | {"use_bias"},
        required={**PLAIN, "use_rmsnorm": (True,)},
    ),
    family(
        "smollm3",
        ("smollm3",),
        smollm3,
        "",
        known_keys=KNOWN | {"no_rope_layers", "no_rope_layer_interval", "pretraining_tp"},
    ),
    family("granite", ("granite",), granite, "", known_keys=KNOWN | MULTIPLIERS),
    family(
        "olmo",
        ("olmo",),
        olmo,
        "embed_tokens.weight layers.0.self_attn.q_proj.weight layers.0.mlp.gate_proj.weight",
        known_keys=KNOWN | {"clip_qkv"},
    ),
)
