"""StableLM as in transformers: a Llama with LayerNorm that rotates a part of each head."""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    KNOWN,
    family,
    grouped_decoder,
    grouped_partly,
    head_size,
    lines,
    rotated,
)
from transfusion.families._shared import PLAIN
from transfusion.families.llama import SHORTCUTS

ROWS = lines(
    EMBEDDING,
    """
    layers.{}.input_layernorm.*            scale x
    layers.{}.self_attn.q_proj.*           (group rep [rot|qk]) <- x
    layers.{}.self_attn.k_proj.*           (group [rot|qk]) <- x
    layers.{}.self_attn.v_proj.*           (group vo) <- x
    layers.{}.self_attn.o_proj.*           y <- (group rep vo)
    layers.{}.post_attention_layernorm.*   scale y
    """,
    GATED_MLP,
    "norm.*                                 scale x@last",
)


def table(config: Config, names: frozenset[str]) -> Table:
    head = head_size(config)
    turned = rotated(config, head, 0.25)
    sizes = {"rot": turned, "qk": head - turned, "vo": head}
    return grouped_decoder(config, ROWS, SHORTCUTS, tied=False, axes=grouped_partly(), sizes=sizes)


FAMILIES = (
    family(
        "stablelm",
        ("stablelm",),
        table,
        "",
        known_keys=KNOWN
        | {"partial_rotary_factor", "use_qkv_bias", "norm_eps", "rope_pct", "rotary_scaling_factor"},
        required={
            **PLAIN,
            "qk_layernorm": (False, None),
            "use_parallel_residual": (False, None),
        },
    ),
)
