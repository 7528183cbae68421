"""ViT-MAE as in transformers: a ViT that sees some patches, and a smaller one that paints the others."""

from __future__ import annotations

from dataclasses import replace

from transfusion.architecture.table import Config, Stack, Table
from transfusion.families import vit
from transfusion.families._placeholders import Inputs, scattered
from transfusion.families._shared import ATTENTION, POSITION, both_ends_below

ENDS = """
decoder.decoder_embed.*     x@first <- layer.x@last
decoder.mask_token          _ _ x@first
decoder.decoder_pos_embed   _ position x@first
decoder.decoder_norm.*      scale x@last
decoder.decoder_pred.*      pixel <- x@last
"""
BLOCK, DECODER = "encoder.layer.{}", "decoder.decoder_layers.{}"


def table(config: Config, names: frozenset[str]) -> Table:
    whole = vit.table(config, names)
    if "decoder.decoder_embed.weight" not in names:
        return whole
    blocks = [line for line in vit.ROWS.strip().splitlines() if line.startswith(BLOCK)]
    sizes = {key: config[f"decoder_{key}"] for key in ("hidden_size", "num_attention_heads")}
    decoder = Stack(
        "decoder",
        config["decoder_num_hidden_layers"],
        "\n".join([ENDS.strip(), *blocks]).replace(BLOCK, DECODER),
        (*ATTENTION, POSITION),
        {
            "x": sizes["hidden_size"],
            "head": sizes["num_attention_heads"],
            "ffn": config["decoder_intermediate_size"],
        },
        both_ends_below("", vit.SHORTCUTS).replace(BLOCK, DECODER),
    )
    # The encoder's stream has no other outputs here, and no other heads.
    outputs = {"mask": None, "loss": None}  # the mask was given, and the loss is for training
    return replace(whole, stacks=(*whole.stacks, decoder), heads="", outputs=outputs)


def inputs(config: Config, given: Inputs) -> Inputs:
    """The patches that are hidden are drawn at random, unless they are given."""
    patches = (config["image_size"] // config["patch_size"]) ** 2
    return {**given, "noise": scattered(given["pixel_values"], patches)}


LAYERS = tuple(
    (other.replace("layers.{}", "decoder.decoder_layers.{}"), ours.replace(BLOCK, DECODER))
    for other, ours in vit.FAMILIES[0].aliases
    if other != "layers.{}"
)

FAMILIES = (
    replace(
        vit.FAMILIES[0],
        name="vit_mae",
        table=table,
        signature=(*vit.FAMILIES[0].signature, "decoder.decoder_embed.weight", "decoder.mask_token"),
        model_types=("vit_mae",),
        arrange=inputs,
        aliases=(
            *LAYERS,
            ("decoder.decoder_encoder.layer.{}", "decoder.decoder_layers.{}"),
            *vit.FAMILIES[0].aliases,
        ),
        known_keys=vit.FAMILIES[0].known_keys
        | {"decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads"}
        | {"decoder_intermediate_size", "mask_ratio", "norm_pix_loss"},
    ),
)
