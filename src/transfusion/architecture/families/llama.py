"""Llama, Mistral and Qwen2 as in transformers: RMSNorm, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from transfusion.architecture.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    GROUPED,
    GROUPED_ATTENTION,
    GROUPED_FIXED,
    KNOWN,
    family,
    grouped_decoder,
    lines,
)
from transfusion.architecture.table import Config, Table

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.weight            scale x",
    GROUPED_ATTENTION,
    "layers.{}.post_attention_layernorm.weight   scale y",
    GATED_MLP,
    "norm.weight                                 scale x@last",
)

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.down_proj
"""


def table(config: Config, names: frozenset[str]) -> Table:
    # A key of old configurations; what installed releases do with it is not known.
    axes = GROUPED_FIXED if config.get("rope_interleaved") else GROUPED
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, axes=axes)


SIGNATURE = """
embed_tokens.weight layers.0.input_layernorm.weight layers.0.self_attn.q_proj.weight
layers.0.post_attention_layernorm.weight layers.0.mlp.gate_proj.weight norm.weight
"""

FAMILIES = (
    family(
        "llama",
        ("llama", "mistral", "qwen2"),
        table,
        SIGNATURE,
        known_keys=KNOWN | {"rope_interleaved", "pretraining_tp"},
    ),
)
