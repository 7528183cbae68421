"""Gemma 1 to 3 (text) as in transformers: norms scale by 1 + w; Gemma 2 and 3 also norm after each branch."""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families import llama
from transfusion.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    GROUPED_ATTENTION,
    GROUPED_NORMED,
    KNOWN,
    family,
    grouped_decoder,
    lines,
)
from transfusion.families.qwen3 import QK_NORM

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.weight              scale x",
    GROUPED_ATTENTION,
    "layers.{}.post_attention_layernorm.weight     scale y",
    "layers.{}.pre_feedforward_layernorm.weight    scale y",
    GATED_MLP,
    "layers.{}.post_feedforward_layernorm.weight   scale x@next",
    "norm.weight                                   scale x@last",
)

SHORTCUTS = """
layers.{}.input_layernorm             x -> y        layers.{}.post_attention_layernorm
layers.{}.pre_feedforward_layernorm   y -> x@next   layers.{}.post_feedforward_layernorm
"""


def first(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, llama.ROWS, llama.SHORTCUTS, tied=True)


def second(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=True)


def third(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, lines(ROWS, QK_NORM), SHORTCUTS, tied=True, axes=GROUPED_NORMED)


KEYS = KNOWN | {
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "use_bidirectional_attention",
    "cache_implementation",
}

# Without its configuration a Gemma 1 looks like a Llama, so it has no signature.
SECOND = f"{llama.SIGNATURE} layers.0.pre_feedforward_layernorm.weight"
THIRD = f"{SECOND} layers.0.self_attn.q_norm.weight"

FAMILIES = (
    family("gemma", ("gemma",), first, "", known_keys=KEYS),
    family("gemma2", ("gemma2",), second, SECOND, known_keys=KEYS),
    family("gemma3", ("gemma3_text",), third, THIRD, known_keys=KEYS),
)
