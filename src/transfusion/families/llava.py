"""LLaVA, PaliGemma and Gemma 3 as in transformers: a vision tower, a projection, a language model.

The tower and the language model may be of any family that has a table.
"""

from __future__ import annotations

from typing import Any

from transfusion.architecture.table import Axis, Component, Config, Family, Table
from transfusion.families._composition import TEXT, TOWER, VISION, composed, section_of
from transfusion.families._placeholders import Inputs, with_image_tokens
from transfusion.families._shared import HARMLESS, PLAIN

PROJECTION = """
multi_modal_projector.linear_1.*   projection <- {features}
multi_modal_projector.linear_2.*   layer.x@first <- projection
"""
PALIGEMMA = "multi_modal_projector.linear.*   layer.x@first <- vision.x@last"
GEMMA3 = """
multi_modal_projector.mm_soft_emb_norm.weight       scale vision.x@last
multi_modal_projector.mm_input_projection_weight    vision.x@last -> layer.x@first
"""


def llava(config: Config, names: frozenset[str]) -> Table:
    """The projection reads what enters a block of the tower, mostly its last one."""
    depth = section_of(LLAVA, config, VISION)["num_hidden_layers"]
    chosen = config.get("vision_feature_layer", -2)
    layers = chosen if isinstance(chosen, list) else [chosen]
    points = [f"{TOWER}.x@{layer % (depth + 1)}" for layer in layers]
    features = points[0] if len(points) == 1 else f"[{'|'.join(points)}]"
    # The text says so in files of older releases; Llama and its kin are not tied otherwise.
    text = section_of(LLAVA, config, TEXT)
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    connection = PROJECTION.format(features=features)
    return composed(LLAVA, config, names, tied=tied, connection=connection, axes=(Axis("projection"),))


def paligemma(config: Config, names: frozenset[str]) -> Table:
    tied = bool(config.get("tie_word_embeddings", True))
    return composed(PALIGEMMA_FAMILY, config, names, tied=tied, connection=PALIGEMMA)


def gemma3(config: Config, names: frozenset[str]) -> Table:
    tied = bool(config.get("tie_word_embeddings", True))
    return composed(GEMMA3_FAMILY, config, names, tied=tied, connection=GEMMA3)


# ── inputs ───────────────────────────────────────────────────────────────────────────────────


def _patches(config: Config) -> int:
    vision = config[VISION]
    return int((vision["image_size"] // vision["patch_size"]) ** 2)


def _shown(config: Config, inputs: Inputs, count: int) -> dict[str, Any]:
    token = config.get("image_token_index", config.get("image_token_id"))
    return {**inputs, "input_ids": with_image_tokens(inputs["input_ids"], token, count)}


def llava_inputs(config: Config, given: Inputs) -> Inputs:
    if config[VISION]["model_type"] == "pixtral":  # takes images of any size, and wants to be told
        pixels = given["pixel_values"]
        sizes = pixels.new_tensor([pixels.shape[2:]] * len(pixels)).long()
        return {**_shown(config, given, _patches(config)), "image_sizes": sizes}
    class_token = config[VISION]["model_type"] == "clip_vision_model"
    dropped = config["vision_feature_select_strategy"] == "default"
    return _shown(config, given, _patches(config) + class_token - dropped)


def paligemma_inputs(config: Config, inputs: Inputs) -> Inputs:
    return _shown(config, inputs, _patches(config))


def gemma3_inputs(config: Config, inputs: Inputs) -> Inputs:
    shown = _shown(config, inputs, config["mm_tokens_per_image"])
    token = config.get("image_token_index", config.get("image_token_id"))
    return {**shown, "token_type_ids": (shown["input_ids"] == token).long()}


# ── families ─────────────────────────────────────────────────────────────────────────────────

ALIASES = (
    ("language_model.lm_head", "lm_head"),
    ("language_model.model", "language_model"),
    ("vision_tower.vision_model", "vision_tower"),
)
"""Names of releases before 4.52."""

KEYS = HARMLESS | {
    "image_token_index",
    "image_token_id",
    "ignore_index",
    "image_seq_length",
    "pretraining_tp",
    "projector_hidden_act",
}

LLAVA = Family(
    name="llava",
    library="transformers",
    table=llava,
    model_types=("llava",),
    inputs=("image", "tokens"),
    arrange=llava_inputs,
    components={
        VISION: Component("vision_tower.", "clip_vision_model"),
        TEXT: Component("language_model.", "llama"),
    },
    prefixes=("model.",),
    aliases=ALIASES,
    known_keys=KEYS
    | {"vision_feature_layer", "vision_feature_select_strategy", "multimodal_projector_bias"}
    | {"image_grid_pinpoints", "image_newline"},
    required=PLAIN,
)

PALIGEMMA_FAMILY = Family(
    name="paligemma",
    library="transformers",
    table=paligemma,
    model_types=("paligemma",),
    inputs=("image", "tokens"),
    arrange=paligemma_inputs,
    components={
        VISION: Component(
            "vision_tower.",
            "siglip_vision_model",
            known_keys=frozenset({"num_image_tokens", "projector_hidden_act"}),
        ),
        TEXT: Component("language_model.", "gemma", known_keys=frozenset({"num_image_tokens"})),
    },
    prefixes=("model.",),
    aliases=ALIASES,
    known_keys=KEYS | {"hidden_size", "num_image_tokens"},
    required=PLAIN,
)

GEMMA3_FAMILY = Family(
    name="gemma3-vision",
    library="transformers",
    table=gemma3,
    model_types=("gemma3",),
    inputs=("image", "tokens"),
    arrange=gemma3_inputs,
    components={
        VISION: Component("vision_tower.", "siglip_vision_model"),
        TEXT: Component("language_model.", "gemma3_text"),
    },
    prefixes=("model.",),
    aliases=ALIASES,
    known_keys=KEYS
    | {"mm_tokens_per_image", "boi_token_index", "eoi_token_index"}
    | {"boi_token_id", "eoi_token_id"},
    required=PLAIN,
)

FAMILIES = (LLAVA, PALIGEMMA_FAMILY, GEMMA3_FAMILY)
