"""GLM-4 as in transformers: neighbouring units rotated in a part of each head, gate and up in one matrix.

The releases of 2025 (``glm4``) also norm after each branch.
"""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    KNOWN,
    family,
    grouped_decoder,
    grouped_partly,
    head_size,
    lines,
    rotated,
)

ROWS = """
layers.{}.input_layernorm.weight            scale x
layers.{}.self_attn.q_proj.*                (group rep [rot|qk]) <- x
layers.{}.self_attn.k_proj.*                (group [rot|qk]) <- x
layers.{}.self_attn.v_proj.*                (group vo) <- x
layers.{}.self_attn.o_proj.*                y <- (group rep vo)
layers.{}.post_attention_layernorm.weight   scale y
layers.{}.mlp.gate_up_proj.*                [ffn|ffn] <- y
layers.{}.mlp.down_proj.*                   x@next <- ffn
"""
AFTER_BRANCHES = """
layers.{}.post_self_attn_layernorm.weight   scale y
layers.{}.post_mlp_layernorm.weight         scale x@next
"""
NORM = "norm.weight   scale x@last"

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.down_proj
"""
SHORTCUTS_4 = """
layers.{}.input_layernorm            x -> y        layers.{}.post_self_attn_layernorm
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.post_mlp_layernorm
"""


def _table(config: Config, rows: str, shortcuts: str) -> Table:
    head = head_size(config)
    turned = rotated(config, head, 0.5)
    whole = turned == head
    sizes = {"rot": turned, "vo": head} if whole else {"rot": turned, "qk": head - turned, "vo": head}
    rows = lines(EMBEDDING, rows.replace("[rot|qk]", "rot") if whole else rows, NORM)
    return grouped_decoder({**config, "head_dim": None}, rows, shortcuts, tied=False, axes=AXES, sizes=sizes)


AXES = grouped_partly(interleaved=True)


def glm(config: Config, names: frozenset[str]) -> Table:
    return _table(config, ROWS, SHORTCUTS)


def glm4(config: Config, names: frozenset[str]) -> Table:
    return _table(config, lines(ROWS, AFTER_BRANCHES), SHORTCUTS_4)


KEYS = KNOWN | {"partial_rotary_factor"}

FAMILIES = (
    family("glm", ("glm",), glm, "", known_keys=KEYS),
    family(
        "glm4",
        ("glm4",),
        glm4,
        """
        embed_tokens.weight layers.0.self_attn.q_proj.weight layers.0.mlp.gate_up_proj.weight
        layers.0.post_self_attn_layernorm.weight layers.0.post_mlp_layernorm.weight norm.weight
        """,
        known_keys=KEYS,
    ),
)
