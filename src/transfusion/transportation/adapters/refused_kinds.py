"""The kinds of adapters that do not move, each with the reason."""

from __future__ import annotations

_BLOCKS = "it turns blocks of neighbouring units, and units do not keep their neighbours"
_RANDOM = "it weighs random projections that all modules share, and those do not move along"
_SPECTRUM = "its numbers are coefficients of a transform over the order of units"
_SINGULAR = "it is made of singular vectors of the old base's weights, and the new base has others"
_SPARSE = "its numbers belong to single entries that the old base's weights or a seed chose"
_SEVERAL = "it mixes several adapters, and only single ones are described here"
_NETWORK = "it is a network of its own beside the base, and no change of its weights"
_UNDESCRIBED = "what it stores is not described here"

REFUSED = {
    "ADAMSS": _SINGULAR,
    "ADAPTION_PROMPT": _UNDESCRIBED,
    "BOFT": _BLOCKS,
    "BONE": _BLOCKS,
    "C3A": _SPECTRUM,
    "CARTRIDGE": _UNDESCRIBED,
    "CPT": _UNDESCRIBED,
    "DEFT": _UNDESCRIBED,
    "FOURIERFT": _SPECTRUM,
    "FROD": _SINGULAR,
    "GLORA": _UNDESCRIBED,
    "GRALORA": _BLOCKS,
    "LILY": "modules share their factors, and modules do not share their units",
    "LOKR": "a Kronecker product is tied to the order of units",
    "MISS": _BLOCKS,
    "MULTITASK_PROMPT_TUNING": _UNDESCRIBED,
    "OFT": _BLOCKS,
    "OSF": _SINGULAR,
    "PEANUT": "its change is a network applied to the old base's weights",
    "POLY": _SEVERAL,
    "PSOFT": _SINGULAR,
    "PVERA": _RANDOM,
    "RANDLORA": _RANDOM,
    "ROAD": _BLOCKS,
    "SHADOW": _NETWORK,
    "SHIRA": _SPARSE,
    "SUPERTUNING": _SPARSE,
    "TINYLORA": _SINGULAR,
    "UNILORA": _RANDOM,
    "VBLORA": "modules share a bank of vectors, and modules do not share their units",
    "VERA": _RANDOM,
    "WAVEFT": _SPECTRUM,
    "XLORA": _SEVERAL,
}
