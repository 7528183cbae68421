"""Qwen3 as in transformers: a Llama with a norm on queries and keys, shared by all heads."""

from __future__ import annotations

from transfusion.architecture.families._decoders import GROUPED_NORMED, family, grouped_decoder, lines
from transfusion.architecture.families.llama import ROWS, SHORTCUTS, SIGNATURE
from transfusion.architecture.table import Config, Table

QK_NORM = """
layers.{}.self_attn.q_norm.weight   scale qk
layers.{}.self_attn.k_norm.weight   scale qk
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, lines(ROWS, QK_NORM), SHORTCUTS, tied=False, axes=GROUPED_NORMED)


FAMILIES = (family("qwen3", ("qwen3",), table, f"{SIGNATURE} layers.0.self_attn.q_norm.weight"),)
