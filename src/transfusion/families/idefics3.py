"""Idefics 3 and SmolVLM as in transformers: SigLIP's tower, neighbouring patches side by side, a Llama."""

from __future__ import annotations

from transfusion.architecture.table import Component, Config, Family, Table
from transfusion.families import siglip
from transfusion.families._composition import CELL, TEXT, VISION, composed
from transfusion.families._placeholders import Inputs, with_image_tokens
from transfusion.families._shared import HARMLESS, PLAIN

CONNECTOR = "connector.modality_projection.proj.weight   layer.x@first <- (cell vision.x@last)"


def vision(config: Config, names: frozenset[str]) -> Table:
    return Table(stacks=siglip.vision(config, names, joint=False))


def table(config: Config, names: frozenset[str]) -> Table:
    tied = bool(config.get("tie_word_embeddings", False))
    return composed(FAMILY, config, names, tied=tied, connection=CONNECTOR, axes=(CELL,))


def inputs(config: Config, given: Inputs) -> Inputs:
    tower, factor = config[VISION], config["scale_factor"]
    count = (tower["image_size"] // tower["patch_size"]) ** 2 // factor**2
    ids = with_image_tokens(given["input_ids"], config["image_token_id"], count)
    return {**given, "input_ids": ids, "pixel_values": given["pixel_values"].unsqueeze(1)}


# The tower is a SigLIP, and cannot be run alone: it wants a mask of patches.
TOWER = Family(
    name="idefics3-tower",
    library="transformers",
    table=vision,
    known_keys=siglip.KNOWN | {"max_image_size", "size", "use_base_siglip"},
    required=PLAIN,
)

FAMILY = Family(
    name="idefics3",
    library="transformers",
    table=table,
    model_types=("idefics3", "smolvlm"),
    inputs=("image", "tokens"),
    arrange=inputs,
    components={
        VISION: Component("vision_model.", family=TOWER),
        TEXT: Component(
            "text_model.",
            "llama",
            known_keys=frozenset(
                {"_flash_attn_2_enabled", "is_llama_config", "neftune_noise_alpha", "perceiver_config"}
                | {"pixel_shuffle_factor", "use_unsloth"}
            ),
            required={"qk_layer_norms": (False,), "use_resampler": (False,)},
        ),
    },
    prefixes=("model.",),
    known_keys=HARMLESS | {"image_token_id", "scale_factor", "image_seq_len", "_pad_token_id"},
    required=PLAIN,
)

FAMILIES = (FAMILY,)
