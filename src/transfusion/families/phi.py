"""Phi (partial rotary positions, parallel branches) and Phi-3 (fused projections) as in transformers."""

from __future__ import annotations

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Config, Stack, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GROUPED,
    GROUPED_FIXED,
    KNOWN,
    PARTLY_ROTARY,
    decoder,
    family,
    grouped_decoder,
    lines,
    rotated,
)
from transfusion.families._shared import PLAIN

PHI = lines(
    EMBEDDING,
    """
    layers.{}.input_layernorm.*      scale x
    layers.{}.self_attn.q_proj.*     (head [rot|qk]) <- x
    layers.{}.self_attn.k_proj.*     (head [rot|qk]) <- x
    layers.{}.self_attn.v_proj.*     (head vo) <- x
    layers.{}.self_attn.dense.*      x@next <- (head vo)
    layers.{}.mlp.fc1.*              ffn <- x
    layers.{}.mlp.fc2.*              x@next <- ffn
    final_layernorm.*                scale x@last
    """,
)

PHI3 = lines(
    EMBEDDING,
    """
    layers.{}.input_layernorm.weight            scale x
    layers.{}.self_attn.qkv_proj.*              [(group rep qk)|(group qk)|(group vo)] <- x
    layers.{}.self_attn.o_proj.*                y <- (group rep vo)
    layers.{}.post_attention_layernorm.weight   scale y
    layers.{}.mlp.gate_up_proj.*                [ffn|ffn] <- y
    layers.{}.mlp.down_proj.*                   x@next <- ffn
    norm.weight                                 scale x@last
    """,
)

PHI_SHORTCUTS = "layers.{}.input_layernorm   x -> x@next   layers.{}.self_attn.dense"

PHI3_SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.down_proj
"""


def phi(config: Config, names: frozenset[str]) -> Table:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    unit = shared(width, heads, "the width among the heads")
    sizes = {
        "x": width,
        "head": heads,
        "rot": rotated(config, unit, 0.5),
        "vo": unit,
        "ffn": config["intermediate_size"],
    }
    stack = Stack(
        "layer", config["num_hidden_layers"], PHI, PARTLY_ROTARY, sizes, PHI_SHORTCUTS, points=("x",)
    )
    return decoder(stack, tied=bool(config.get("tie_word_embeddings", False)))


def phi3(config: Config, names: frozenset[str]) -> Table:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or shared(width, heads, "the width among the heads")
    # If some units are not rotated, the units of a pair are not half a head apart.
    axes = GROUPED if rotated(config, head, 1.0) == head else GROUPED_FIXED
    return grouped_decoder(config, PHI3, PHI3_SHORTCUTS, tied=False, axes=axes, sizes={"qk": head})


KEYS = KNOWN | {"partial_rotary_factor", "original_max_position_embeddings", "embed_pdrop"}

FAMILIES = (
    family(
        "phi",
        ("phi",),
        phi,
        "embed_tokens.weight layers.0.self_attn.dense.weight layers.0.mlp.fc1.weight final_layernorm.weight",
        known_keys=KEYS,
        required={**PLAIN, "qk_layernorm": (False, None)},
    ),
    family(
        "phi3",
        ("phi3",),
        phi3,
        "embed_tokens.weight layers.0.self_attn.qkv_proj.weight layers.0.mlp.gate_up_proj.weight norm.weight",
        known_keys=KEYS,
    ),
)
