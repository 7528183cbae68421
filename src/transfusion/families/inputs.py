"""Arguments of live models: texts in which some tokens stand for an image, patches, and other odd inputs.

Tables need no torch, so tensors are only used through their methods here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from transfusion.architecture.table import Config

Inputs: TypeAlias = Mapping[str, Any]
VISION = "vision_config"


def with_image_tokens(ids: Any, image_token: int, count: int, *, before: int = 1, others: Any = ()) -> Any:
    """Return texts (batch, tokens) with ``count`` tokens for an image behind the first ``before`` tokens.

    The text itself keeps none of them, and none of the tokens ``others``.
    """
    special = {image_token, *others}
    plain = next(number for number in range(len(special) + 1) if number not in special)
    for one in special:
        ids = ids.where(ids != one, plain)
    whole = ids.new_full((len(ids), ids.shape[1] + count), image_token)
    whole[:, :before] = ids[:, :before]
    whole[:, before + count :] = ids[:, before:]
    return whole


def of_patches(pixels: Any, patch: int, merge: int, frames: int) -> tuple[Any, Any]:
    """Return images (batch, channels, rows, columns) as one list of patches, and the grid of each image.

    A patch is shown ``frames`` times. Patches that are merged into one token follow each other.
    """
    count, channels, rows, columns = pixels.shape
    down, across = rows // patch, columns // patch
    cells = pixels.reshape(
        count, channels, down // merge, merge, patch, across // merge, merge, patch
    ).permute(0, 2, 5, 3, 6, 1, 4, 7)
    flat = cells.unsqueeze(6).expand(*cells.shape[:6], frames, *cells.shape[6:])
    flat = flat.reshape(count * down * across, channels * frames * patch * patch)
    grid = pixels.new_tensor([[1, down, across]] * count).long()
    return flat, grid


def mae_inputs(config: Config, given: Inputs) -> Inputs:
    """ViT-MAE: hidden patches are drawn at random, unless numbers between 0 and 1 are given for all."""
    pixels, patches = given["pixel_values"], (config["image_size"] // config["patch_size"]) ** 2
    numbers = pixels.new_ones(len(pixels), patches).cumsum(1)  # (images, patches), the same for every image
    return {**given, "noise": (12.9898 * numbers).sin().mul(43758.5453).frac().abs()}


def sam_inputs(config: Config, given: Inputs) -> Inputs:
    """SAM: every image is asked about with one point."""
    pixels = given["pixel_values"]
    side = pixels.shape[-1]
    return {**given, "input_points": pixels.new_tensor([[[[side / 3, side / 2]]]] * len(pixels))}


def sam3_inputs(config: Config, given: Inputs) -> Inputs:
    """SAM 3: every image is asked about with a text and two boxes, of which one shows what is not meant."""
    boxes = given["pixel_values"].new_tensor([[[0.4, 0.5, 0.3, 0.6], [0.7, 0.3, 0.4, 0.2]]])
    count = len(given["pixel_values"])
    labels = given["input_ids"].new_tensor([[1, 0]])
    return {**given, "input_boxes": boxes.expand(count, 2, 4), "input_boxes_labels": labels.expand(count, 2)}


def pair_inputs(config: Config, given: Inputs) -> Inputs:
    """A pair of an encoder and a decoder: what the encoder takes, and the decoder's text."""
    ids = given["input_ids"]
    heard = {name: given[name] for name in ("pixel_values", "input_values") if name in given}
    heard = heard or {"input_ids": ids % config["encoder"]["vocab_size"]}
    told = given.get("decoder_input_ids", ids) % config["decoder"]["vocab_size"]
    return {**heard, "decoder_input_ids": told}


# ── images and texts ─────────────────────────────────────────────────────────────────────────


def llava_inputs(config: Config, given: Inputs) -> Inputs:
    if config[VISION]["model_type"] == "pixtral":  # takes images of any size, and wants to be told
        pixels = given["pixel_values"]
        sizes = pixels.new_tensor([pixels.shape[2:]] * len(pixels)).long()
        return {**_shown(config, given, _patches(config)), "image_sizes": sizes}
    class_token = config[VISION]["model_type"] == "clip_vision_model"
    dropped = config["vision_feature_select_strategy"] == "default"
    return _shown(config, given, _patches(config) + class_token - dropped)


def llava_next_inputs(config: Config, given: Inputs) -> Inputs:
    """Every image has the first size of the grid, and is seen whole and in cuts, which are turned here."""
    pixels, vision = given["pixel_values"], config[VISION]
    side, (height, width) = vision["image_size"], config["image_grid_pinpoints"][0]
    rows, columns = height // side, width // side
    seen = [pixels.roll(number, -1) for number in range(rows * columns + 1)]
    shown = pixels.new_zeros(len(pixels), len(seen), *pixels.shape[1:])
    for number, one in enumerate(seen):
        shown[:, number] = one
    across = side // vision["patch_size"]
    count = across**2 + rows * across * (columns * across + 1)
    sizes = pixels.new_tensor([[height, width]] * len(pixels)).long()
    return {**_shown(config, given, count), "pixel_values": shown, "image_sizes": sizes}


def internvl_inputs(config: Config, given: Inputs) -> Inputs:
    """Neighbouring patches become one token."""
    vision = config[VISION]
    side, patch = (
        size[0] if isinstance(size, list | tuple) else size
        for size in (vision["image_size"], vision["patch_size"])
    )
    return _shown(config, given, round(side // patch * config["downsample_ratio"]) ** 2)


def paligemma_inputs(config: Config, given: Inputs) -> Inputs:
    inner = config.get("vlm_config", config)  # ColPali
    return _shown(inner, given, _patches(inner))


def gemma3_inputs(config: Config, given: Inputs) -> Inputs:
    shown = _shown(config, given, config["mm_tokens_per_image"])
    return {**shown, "token_type_ids": (shown["input_ids"] == _image_token(config)).long()}


def llama4_inputs(config: Config, given: Inputs) -> Inputs:
    side = config[VISION]["image_size"] // config[VISION]["patch_size"]
    return _shown(config, given, round((side * config[VISION]["pixel_shuffle_ratio"]) ** 2))


def idefics3_inputs(config: Config, given: Inputs) -> Inputs:
    ids = _shown(config, given, _patches(config) // config["scale_factor"] ** 2)["input_ids"]
    return {**given, "input_ids": ids, "pixel_values": given["pixel_values"].unsqueeze(1)}


def mistral3_inputs(config: Config, given: Inputs) -> Inputs:
    pixels, side = given["pixel_values"], config[VISION]["patch_size"] * config["spatial_merge_size"]
    count = (pixels.shape[2] // side) * (pixels.shape[3] // side)
    sizes = pixels.new_tensor([pixels.shape[2:]] * len(pixels)).long()
    return {**_shown(config, given, count), "image_sizes": sizes}


def qwen_inputs(config: Config, given: Inputs) -> Inputs:
    """The image stands between the tokens for its beginning and its end."""
    vision = config[VISION]
    merge = vision["spatial_merge_size"]
    pixels, grid = of_patches(
        given["pixel_values"], vision["patch_size"], merge, vision["temporal_patch_size"]
    )
    special = {key: config[f"{key}_token_id"] for key in ("vision_start", "video", "vision_end")}
    count = len(pixels) // (merge**2 * len(grid))
    ids = with_image_tokens(
        given["input_ids"], config["image_token_id"], count, before=2, others=special.values()
    )
    ids[:, 1] = special["vision_start"]
    shown: dict[str, Any] = {**given, "input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    return {**shown, "mm_token_type_ids": (ids == config["image_token_id"]).int()}


def gemma4_inputs(config: Config, given: Inputs) -> Inputs:
    """An image is a list of patches with their places, and a few of them together become one token.

    If the model hears, the numbers of the image are a sound as well, with a token for four frames.
    """
    vision, pixels = config[VISION], given["pixel_values"]
    side, merged = vision["patch_size"], vision["pooling_kernel_size"]
    count, channels, rows, columns = pixels.shape
    down, across = rows // side, columns // side
    patches = pixels.reshape(count, channels, down, side, across, side).permute(0, 2, 4, 3, 5, 1)
    numbers = pixels.new_ones(down * across).cumsum(0).long() - 1
    places = (numbers % across).unsqueeze(1).repeat(1, 2)  # (patches, 2): column and row of each
    places[:, 1] = numbers // across
    others = {config[f"{kind}_token_id"] for kind in ("video", "audio")}
    image = config["image_token_id"]
    ids = with_image_tokens(given["input_ids"], image, down * across // merged**2, others=others)
    shown: dict[str, Any] = {
        "pixel_values": patches.reshape(count, down * across, -1),
        "image_position_ids": places.expand(count, *places.shape),
    }
    if audio := config.get("audio_config"):
        bands = audio["subsampling_conv_channels"][0]
        frames = min(pixels[0].numel() // bands, 64) // 4 * 4
        shown["input_features"] = pixels.reshape(count, -1)[:, : frames * bands].reshape(count, frames, bands)
        shown["input_features_mask"] = shown["input_features"][..., 0].isfinite()
        ids = with_image_tokens(ids, config["audio_token_id"], frames // 4)
    return {**given, **shown, "input_ids": ids, "mm_token_type_ids": (ids == image).long()}


def colqwen2_inputs(config: Config, given: Inputs) -> Inputs:
    """The patches of each image are a row of their own."""
    made = qwen_inputs(config["vlm_config"], given)
    pixels = made["pixel_values"].reshape(len(made["input_ids"]), -1, made["pixel_values"].shape[1])
    return {key: one for key, one in made.items() if key != "mm_token_type_ids"} | {"pixel_values": pixels}


def _patches(config: Config) -> int:
    vision = config[VISION]
    return int((vision["image_size"] // vision["patch_size"]) ** 2)


def _image_token(config: Config) -> Any:
    return config.get("image_token_index", config.get("image_token_id"))


def _shown(config: Config, given: Inputs, count: int) -> dict[str, Any]:
    """Put tokens that stand for an image into the text."""
    return {**given, "input_ids": with_image_tokens(given["input_ids"], _image_token(config), count)}


# ── diffusion ────────────────────────────────────────────────────────────────────────────────


def flux_inputs(config: Config, given: Inputs) -> Inputs:
    """All images of a batch have the same places."""
    return {**given, "img_ids": given["img_ids"][0], "txt_ids": given["txt_ids"][0]}


def krea2_inputs(config: Config, given: Inputs) -> Inputs:
    """All images of a batch have the same places."""
    return {**given, "position_ids": given["position_ids"][0]}


def qwen_image_inputs(config: Config, given: Inputs) -> Inputs:
    """The sizes of images are numbers."""
    sizes = [[tuple(one) for one in images] for images in given["img_shapes"].tolist()]
    return {**given, "img_shapes": sizes}


def qwen_image21_inputs(config: Config, given: Inputs) -> Inputs:
    """The sizes of images are numbers, and places of images are marked."""
    return {**qwen_image_inputs(config, given), "img_mask": given["img_mask"].bool()}


def pixart_inputs(config: Config, given: Inputs) -> Inputs:
    """The sizes of an image come in one argument."""
    others = dict(given)
    told = {name: others.pop(name, None) for name in ("resolution", "aspect_ratio")}
    return {**others, "added_cond_kwargs": told}


def unet_inputs(config: Config, given: Inputs) -> Inputs:
    """What is known of an image comes in one argument."""
    others = dict(given)
    told = {name: others.pop(name) for name in ("text_embeds", "time_ids") if name in given}
    return {**others, "added_cond_kwargs": told} if told else others


def wan_inputs(config: Config, given: Inputs) -> Inputs:
    """The first and the last image of a video are two of a batch."""
    others = dict(given)
    if (images := others.pop("both_images", None)) is None:
        return others
    return {**others, "encoder_hidden_states_image": images.reshape(2 * len(images), -1, images.shape[2])}


def z_image_inputs(config: Config, given: Inputs) -> Inputs:
    """Images and texts are lists, and sizes of patches numbers. Of several images, the last one is noise."""
    several = "siglip_feats" in given
    names = ("x", "cap_feats", "siglip_feats") if several else ("x", "cap_feats")
    lists = {name: list(given[name].unbind()) for name in names}
    sizes = {name: int(given[name][0]) for name in ("patch_size", "f_patch_size")}
    if not several:
        return {"t": given["t"], **lists, **sizes}
    nested = {name: [list(one.unbind()) for one in items] for name, items in lists.items()}
    return {"t": given["t"], **nested, **sizes, "image_noise_mask": [[0, 1]] * len(given["t"])}
