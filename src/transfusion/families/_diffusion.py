"""Axes, settings and helpers that the families of diffusers share."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Draw, fixed

DIFFUSERS = frozenset(["_class_name", "_diffusers_version", "_name_or_path", "_commit_hash"])
"""Keys of diffusers that cannot change a symmetry."""

NORMED = "a norm that all heads share scales each unit, and rotary positions rotate pairs of units"

ATTENTION_NORMED = (
    Axis("head"),
    fixed("qk", NORMED, scope="layer"),
    Axis("vo", within="head"),
    Axis("ffn"),
)
"""Attention whose queries and keys are normalised and rotated in each head, and a plain MLP."""

FREQUENCY = fixed("frequency", "the sines of the time step come in this order")
LATENT = fixed("latent", "the channels of the image come in this order")
LATENT_OUT = fixed("latent_out", "the channels of the image come in this order")
TEXT = fixed("text", "the text encoder's units come in this order")
POOLED = fixed("pooled", "the text encoder's units come in this order")

PATCH_OF_IMAGE = (
    fixed("row", "rows of a patch come in this order"),
    fixed("column", "columns of a patch come in this order"),
)
PATCH_OF_VIDEO = (fixed("frame", "frames of a patch come in this order"), *PATCH_OF_IMAGE)

COMPUTED_POSITIONS = "the library computes the positions, and adds them here"

MODULATED = (
    "is multiplied unit by unit by what the time step says, between a norm and its branch: it may be permuted"
    " only"
)
"""Why the streams of these families are permuted only."""


def three_axes(size: int) -> list[int]:
    """Divide a head's units among the three axes of rotary positions: of 128, 16, 56 and 56."""
    return [size // 8, size * 7 // 16, size * 7 // 16]


TIME = Draw(low=0.0)
"""The time step of models that count it from 0 to 1."""
