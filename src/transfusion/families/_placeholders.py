"""Inputs of models that see and read: a text in which some tokens stand for an image.

Tables need no torch, so tensors are only used through their methods here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Inputs: TypeAlias = Mapping[str, Any]


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


def scattered(pixels: Any, count: int) -> Any:
    """Return a number between 0 and 1 for each of ``count`` patches, the same for every image."""
    return (12.9898 * pixels.new_ones(len(pixels), count).cumsum(1)).sin().mul(43758.5453).frac().abs()
