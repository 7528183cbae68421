"""Pixtral's tower, and Mistral 3 with it, as in transformers: rotary positions along rows and columns.

The patches of all images of a batch are one sequence, and in Mistral 3 four neighbours become one token.
"""

from __future__ import annotations

from transfusion.architecture.table import Axis, Component, Config, Family, Stack, Table, rotary
from transfusion.families._composition import CELL, TEXT, VISION, composed
from transfusion.families._placeholders import Inputs, with_image_tokens
from transfusion.families._shared import HARMLESS, PATCH, PLAIN, usual_sizes
from transfusion.families.llava import ALIASES, KEYS

ROWS = """
patch_conv.weight                                  x@first <- channel row column
ln_pre.weight                                      scale x@first
transformer.layers.{}.attention_norm.weight        scale x
transformer.layers.{}.attention.q_proj.weight      (head qk) <- x
transformer.layers.{}.attention.k_proj.weight      (head qk) <- x
transformer.layers.{}.attention.v_proj.weight      (head vo) <- x
transformer.layers.{}.attention.o_proj.weight      y <- (head vo)
transformer.layers.{}.ffn_norm.weight              scale y
transformer.layers.{}.feed_forward.gate_proj.*     ffn <- y
transformer.layers.{}.feed_forward.up_proj.*       ffn <- y
transformer.layers.{}.feed_forward.down_proj.*     x@next <- ffn
"""
SHORTCUTS = """
transformer.layers.{}.attention_norm   x -> y        transformer.layers.{}.attention.o_proj
transformer.layers.{}.ffn_norm         y -> x@next   transformer.layers.{}.feed_forward.down_proj
"""
AXES = (
    Axis("head"),
    rotary("qk", "head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
    *PATCH,
)
CONNECTION = """
multi_modal_projector.norm.weight                         scale vision.x@last
multi_modal_projector.patch_merger.merging_layer.weight   merged <- (vision.x@last cell)
multi_modal_projector.linear_1.*                          projection <- merged
multi_modal_projector.linear_2.*                          layer.x@first <- projection
"""


def tower(config: Config, names: frozenset[str]) -> Table:
    config = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, **config}
    depth = config.get("num_hidden_layers", 24)
    stack = Stack("vision", depth, ROWS, AXES, usual_sizes(config), SHORTCUTS)
    return Table(stacks=(stack,), outputs={"last_hidden_state": "vision.x@last"})


def mistral3(config: Config, names: frozenset[str]) -> Table:
    # The library ties them by default, unless files have both.
    tied = bool(config.get("tie_word_embeddings", True)) and "lm_head.weight" not in names
    axes = (Axis("merged"), Axis("projection"), CELL)
    return composed(MISTRAL3, config, names, tied=tied, connection=CONNECTION, axes=axes)


DOWN, ACROSS = 4, 2
"""The tokens of a probe's image; the model takes any number."""


def frame(config: Config) -> tuple[int, int, int]:
    """Return the size of a probe's image, which is not square."""
    vision = config[VISION]
    side = vision["patch_size"] * config["spatial_merge_size"]
    return vision.get("num_channels", 3), DOWN * side, ACROSS * side


def inputs(config: Config, given: Inputs) -> Inputs:
    pixels = given["pixel_values"]
    ids = with_image_tokens(given["input_ids"], config["image_token_index"], DOWN * ACROSS)
    sizes = pixels.new_tensor([pixels.shape[2:]] * len(pixels)).long()
    return {**given, "input_ids": ids, "image_sizes": sizes}


MISTRAL3 = Family(
    name="mistral3",
    library="transformers",
    table=mistral3,
    model_types=("mistral3",),
    inputs=("image", "tokens"),
    frame=frame,
    arrange=inputs,
    components={
        VISION: Component("vision_tower.", "pixtral"),
        TEXT: Component("language_model.", "mistral"),
    },
    prefixes=("model.",),
    aliases=ALIASES,
    known_keys=KEYS | {"multimodal_projector_bias", "spatial_merge_size"},
    required={**PLAIN, "vision_feature_layer": (-1,)},
)

FAMILIES = (
    MISTRAL3,
    Family(
        name="pixtral",
        library="transformers",
        table=tower,
        signature=("patch_conv.weight", "ln_pre.weight", "transformer.layers.0.attention_norm.weight"),
        model_types=("pixtral",),
        inputs=("image",),
        known_keys=HARMLESS
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim"}
        | {"image_size", "patch_size", "num_channels", "rope_theta", "rope_parameters"},
        required=PLAIN,
    ),
)
