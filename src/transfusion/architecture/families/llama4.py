"""Llama 4 (text) as in transformers: experts beside a shared one, and blocks without rotary positions.

The norm of queries and keys has no weight, so pairs of units may still be rotated.
"""

from __future__ import annotations

from transfusion.architecture.families._decoders import (
    EMBEDDING,
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
from transfusion.architecture.families.mixtral import KNOWN_OF_EXPERTS, NORM
from transfusion.architecture.table import Axis, Config, Table

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.weight            scale x",
    SOME_ROTARY,
    """
    layers.{}.post_attention_layernorm.weight               scale y
    layers.{sparse}.feed_forward.router.weight              expert <- y
    layers.{sparse}.feed_forward.experts.gate_up_proj       expert y -> [ffn|ffn]
    layers.{sparse}.feed_forward.experts.down_proj          expert ffn -> x@next
    layers.{sparse}.feed_forward.shared_expert.gate_proj.*  shared <- y
    layers.{sparse}.feed_forward.shared_expert.up_proj.*    shared <- y
    layers.{sparse}.feed_forward.shared_expert.down_proj.*  x@next <- shared
    layers.{dense}.feed_forward.gate_proj.*                 mlp <- y
    layers.{dense}.feed_forward.up_proj.*                   mlp <- y
    layers.{dense}.feed_forward.down_proj.*                 x@next <- mlp
    """,
    NORM,
)

SHORTCUTS = """
layers.{}.input_layernorm            x -> y        layers.{}.self_attn.o_proj
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.feed_forward
"""

OTHERS = tuple(axis for axis in grouped_partly(interleaved=True) if axis.name != "ffn")
AXES = (*OTHERS, Axis("expert"), Axis("ffn", within="expert"), Axis("shared"), Axis("mlp"))


def table(config: Config, names: frozenset[str]) -> Table:
    depth, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step") or 1
    listed = config.get("moe_layers")
    sparse = frozenset(range(step - 1, depth, step) if listed is None else listed)
    kinds = {"sparse": sparse, "dense": frozenset(range(depth)) - sparse}
    sizes = {"expert": config["num_local_experts"], "mlp": config["intermediate_size_mlp"]}
    return grouped_decoder(
        config,
        ROWS,
        SHORTCUTS,
        tied=False,
        axes=AXES,
        kinds={**rotary_kinds(config, rope_blocks(config)), **kinds},
        sizes={**rotary_sizes(config), **sizes},
    )


KEYS = (
    KNOWN
    | KNOWN_OF_EXPERTS
    | {"attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale", "use_qk_norm"}
    | {"interleave_moe_layer_step", "moe_layers", "intermediate_size_mlp", "for_llm_compressor"}
    | {"no_rope_layers", "no_rope_layer_interval"}
)

FAMILIES = (
    family(
        "llama4",
        ("llama4_text",),
        table,
        "",
        known_keys=KEYS,
    ),
)
