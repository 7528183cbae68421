"""Quantised weights: read as the numbers that the model computes with.

A QLoRA was trained on these numbers, and not on those of the model that was quantised. bitsandbytes puts two
of them into a byte, as places in a table of sixteen values; each block has one scale. Scales that are
quantised themselves ("double quantisation") are bytes, with a table of 256 values, scales of their own, and
an offset. Those of GPTQ are in `gptq`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil, prod
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from transfusion.errors import CheckpointError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.gptq import GptqWeight, gptq_weights
from transfusion.files.tensor_files import Rows, TensorInfo, content
from transfusion.runtime.untrusted_files import parse_json, validate

QUANTISATION = "quantization_config"
_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_AGAIN = "the checkpoint is damaged; fetch it again"
_LARGEST_STATE = 4096

Count = Annotated[int, Field(ge=1, le=2**40)]
Block = Annotated[int, Field(ge=1, le=2**16)]


class _State(TypedDict):
    """What bitsandbytes stores beside the tensors of one weight."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Block
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[Count], Field(min_length=1, max_length=4)]
    nested_blocksize: NotRequired[Block]
    nested_offset: NotRequired[Annotated[float, Field(allow_inf_nan=False)]]


@dataclass(frozen=True)
class FourBits:
    """One weight: the keys of its tensors, and how they are read."""

    name: str
    state: Mapping[str, Any]
    nested: bool

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.state["dtype"])
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    def key(self, part: str) -> str:
        return f"{self.name}.{part}"

    @property
    def keys(self) -> list[str]:
        """The keys of its tensors, and of its state."""
        parts = _PARTS if self.nested else _PARTS[:2]
        return [self.name, *map(self.key, parts), f"{self.name}{_STATE}{self.state['quant_type']}"]

    def sizes(self) -> dict[str, int]:
        """Return how many numbers every part has; the weight itself, how many bytes."""
        numbers = prod(self.state["shape"])
        scales = ceil(numbers / self.state["blocksize"])
        found = {self.name: ceil(numbers / 2), self.key("absmax"): scales, self.key("quant_map"): 16}
        if self.nested:
            found[self.key("nested_absmax")] = ceil(scales / self.state["nested_blocksize"])
            found[self.key("nested_quant_map")] = 256
        return found

    def read(self, stored: Checkpoint) -> Tensor:
        """Return the weight, bit for bit as bitsandbytes computes it."""
        state, scales = self.state, stored.read(self.key("absmax")).flatten()
        if self.nested:
            tables = (stored.read(self.key(part)) for part in _PARTS[2:])
            own, values = (table.flatten().float() for table in tables)
            scales = _scaled(values[scales.long()], own, state["nested_blocksize"]) + state["nested_offset"]
        packed = torch.frombuffer(bytearray(content(stored.read(self.name))), dtype=torch.uint8)
        places = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: prod(state["shape"])]
        values = stored.read(self.key("quant_map")).flatten().float()[places.int()]
        return _scaled(values, scales.float(), state["blocksize"]).reshape(state["shape"]).to(self.dtype)


def _scaled(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply each block of values by its scale; the last block may be shorter."""
    return values * scales.repeat_interleave(size)[: len(values)]


@dataclass
class DequantisedCheckpoint(Checkpoint):
    """A quantised checkpoint, read as the numbers that it computes with."""

    stored: Checkpoint | None = None
    weights: Mapping[str, FourBits | GptqWeight] = field(default_factory=dict)
    _last: tuple[str, Tensor] | None = field(default=None, repr=False)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        assert self.stored is not None
        if name not in self.weights:
            return self.stored.read(name, rows)
        last = self._last
        if last is None or last[0] != name:  # read in blocks of rows, one after the other
            self._last = last = name, self.weights[name].read(self.stored)
        return last[1].clone() if rows is None else last[1][rows]

    def _bytes(self, name: str, start: int, count: int) -> bytes:
        return bytes(content(self.read(name))[start : start + count])

    def sample(self, pieces: Sequence[str]) -> bytes:
        """Return a sample of the bytes that are stored."""
        assert self.stored is not None
        keys = (self.weights[one].keys if one in self.weights else [one] for one in pieces)
        return b"".join(self.stored.sample([key]) for several in keys for key in several)


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of bitsandbytes in four bits, or of GPTQ, as what it computes with; any other as it
    is.
    """
    about = (checkpoint.config or {}).get(QUANTISATION)
    weights = _quantised(checkpoint, about) if isinstance(about, Mapping) else {}
    if not weights:
        return checkpoint
    used = {key for one in weights.values() for key in one.keys}
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in used}
    for name, one in weights.items():
        stored = checkpoint.tensors[one.keys[0]]
        tensors[name] = TensorInfo(name, one.shape, one.dtype, stored.file, stamp=stored.stamp)
    assert checkpoint.config is not None
    config = {key: value for key, value in checkpoint.config.items() if key != QUANTISATION}
    own = {one.name: getattr(checkpoint, one.name) for one in fields(Checkpoint)}
    found = DequantisedCheckpoint(**own, stored=checkpoint, weights=weights)
    return replace(found, tensors=tensors, config=config)


def _quantised(checkpoint: Checkpoint, about: Mapping[str, Any]) -> Mapping[str, FourBits | GptqWeight]:
    """Return the weights that are read here, by name."""
    match about.get("quant_method"):
        case "bitsandbytes":
            states = (name for name in checkpoint.tensors if _STATE in name)
            return {one.name: one for one in (_four_bits(checkpoint, state) for state in states)}
        case "gptq":
            return gptq_weights(checkpoint, about)
    return {}


def _four_bits(checkpoint: Checkpoint, key: str) -> FourBits:
    """Return how one weight is stored; refuse parts that are missing or do not fit."""
    name, _, kind = key.partition(_STATE)
    where = f"{checkpoint.label}: {key}"
    if checkpoint.tensors[key].nbytes > _LARGEST_STATE:
        raise CheckpointError(f"{where} has {checkpoint.tensors[key].nbytes} bytes", hint=_AGAIN)
    text = bytes(content(checkpoint.read(key))).decode("utf-8", "replace")
    state: Any = validate(parse_json(text, where), _State, where, hint=_AGAIN)
    nested = f"{name}.nested_absmax" in checkpoint.tensors
    if state["quant_type"] != kind or nested != {"nested_blocksize", "nested_offset"}.issubset(state):
        raise CheckpointError(f"{where} does not fit the tensors beside it", hint=_AGAIN)
    found = FourBits(name, state, nested)
    for part, size in found.sizes().items():
        info = checkpoint.tensors.get(part)
        there = 0 if info is None else info.nbytes if part == name else prod(info.shape)
        if there != size:
            raise CheckpointError(
                f"{checkpoint.label}: {part} has {there} numbers instead of {size}", hint=_AGAIN
            )
    return found
