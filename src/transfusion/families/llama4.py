"""Llama 4 as in transformers: experts beside a shared one, and blocks without rotary positions.

The norm of queries and keys has no weight, so pairs of units may still be rotated. The tower has rotary
positions along rows and columns, and four neighbouring patches become one token.
"""

from __future__ import annotations

from dataclasses import replace

from transfusion.architecture.table import Axis, Component, Config, Family, Stack, Table, rotary
from transfusion.families._composition import CELL, TEXT, VISION, composed, section_of
from transfusion.families._decoders import (
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
from transfusion.families._placeholders import Inputs, with_image_tokens
from transfusion.families._shared import HARMLESS, PIXEL, PLAIN, POSITION, usual_sizes
from transfusion.families.mixtral import KNOWN_OF_EXPERTS, NORM

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

# ── with its tower ───────────────────────────────────────────────────────────────────────────

TOWER = """
patch_embedding.linear.weight                 x@first <- pixel
class_embedding                               x@first
positional_embedding_vlm                      position x@first
layernorm_pre.*                               scale x@first
model.layers.{}.input_layernorm.*             scale x
model.layers.{}.self_attn.q_proj.*            (head qk) <- x
model.layers.{}.self_attn.k_proj.*            (head qk) <- x
model.layers.{}.self_attn.v_proj.*            (head vo) <- x
model.layers.{}.self_attn.o_proj.*            y <- (head vo)
model.layers.{}.post_attention_layernorm.*    scale y
model.layers.{}.mlp.fc1.*                     ffn <- y
model.layers.{}.mlp.fc2.*                     x@next <- ffn
layernorm_post.*                              scale x@last
"""
TOWER_SHORTCUTS = """
model.layers.{}.input_layernorm            x -> y        model.layers.{}.self_attn.o_proj
model.layers.{}.post_attention_layernorm   y -> x@next   model.layers.{}.mlp.fc2
"""
CONNECTION = """
vision_model.vision_adapter.mlp.fc1.weight   shuffled <- (cell vision.x@last)
vision_model.vision_adapter.mlp.fc2.weight   adapted <- shuffled
multi_modal_projector.linear_1.weight        layer.x@first <- adapted
"""
TOWER_AXES = (
    Axis("head"),
    rotary("qk", "head", interleaved=True),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
    POSITION,
    PIXEL,
)


def tower(config: Config, names: frozenset[str]) -> Table:
    depth, sizes = config["num_hidden_layers"], usual_sizes(config)
    return Table(stacks=(Stack("vision", depth, TOWER, TOWER_AXES, sizes, TOWER_SHORTCUTS),))


def whole(config: Config, names: frozenset[str]) -> Table:
    text = section_of(SEEING, config, TEXT)
    axes = (Axis("shuffled"), Axis("adapted"), CELL)
    tied = bool(text.get("tie_word_embeddings", False))
    made = composed(SEEING, config, names, tied=tied, connection=CONNECTION, axes=axes)
    return replace(made, outputs={**made.outputs, "image_hidden_states": "adapted"})


def inputs(config: Config, given: Inputs) -> Inputs:
    vision = config[VISION]
    side = vision["image_size"] // vision["patch_size"]
    count = round((side * vision["pixel_shuffle_ratio"]) ** 2)
    token = config.get("image_token_index", config.get("image_token_id"))
    return {**given, "input_ids": with_image_tokens(given["input_ids"], token, count)}


TOWER_KEYS = HARMLESS | {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size"),
    *("patch_size", "num_channels", "norm_eps", "pixel_shuffle_ratio", "projector_dropout", "rope_theta"),
    *("projector_input_dim", "projector_output_dim", "vision_output_dim", "rope_parameters"),
    *("vision_feature_layer", "vision_feature_select_strategy", "multi_modal_projector_bias"),
}

SEEING = Family(
    name="llama4-vision",
    library="transformers",
    table=whole,
    model_types=("llama4",),
    inputs=("image", "tokens"),
    arrange=inputs,
    components={
        VISION: Component(
            "vision_model.",
            family=Family("llama4-tower", "transformers", tower, known_keys=TOWER_KEYS, required=PLAIN),
        ),
        TEXT: Component("language_model.", "llama4_text"),
    },
    aliases=(("language_model.lm_head", "lm_head"), ("language_model.model", "language_model")),
    known_keys=HARMLESS
    | {"image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index"}
    | {"eoi_token_id"},
    required=PLAIN,
)

FAMILIES = (
    SEEING,
    family(
        "llama4",
        ("llama4_text",),
        table,
        "",
        known_keys=KEYS,
        whole_only=True,
    ),
)
