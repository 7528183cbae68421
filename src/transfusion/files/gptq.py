"""Weights in two, four or eight bits, as GPTQ packs them: read as the numbers that the model computes with.

Whole numbers lie side by side in words of 32 bits, the first in the lowest bits: those of a weight down its
inputs (``qweight``), and the zeros of its groups along its outputs (``qzeros``). Every input belongs to a
group (``g_idx``), which has a zero and a scale for each output. The older format stores zeros less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import CheckpointError
from transfusion.files.checkpoint import Checkpoint

WORD = 32
_BITS = (2, 4, 8)
_OLD, _NEW = "gptq", "gptq_v2"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_AGAIN = "the checkpoint is damaged; fetch it again"
_ORIGINAL = "give the original weights, or what transformers saves after `model.dequantize()`"


@dataclass(frozen=True)
class GptqWeight:
    """One weight: the name of its module, how many bits its numbers have, and how its zeros are stored."""

    module: str
    shape: tuple[int, int]
    dtype: torch.dtype
    bits: int
    less_one: bool

    @property
    def keys(self) -> list[str]:
        """The keys of its tensors."""
        return [f"{self.module}.{part}" for part in _PARTS]

    def read(self, stored: Checkpoint) -> Tensor:
        """Return the weight, bit for bit as gptqmodel computes it, but with its outputs first."""
        words, zeros, scales, groups = (stored.read(key) for key in self.keys)
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise CheckpointError(
                f"{stored.label}: {self.keys[3]} names groups that are not there", hint=_AGAIN
            )
        if self.less_one:  # in all numbers of a word at once, so that what was taken from the next comes back
            zeros = zeros + sum(1 << place for place in range(0, WORD, self.bits))
        outputs, inputs = self.shape
        numbers = self._unpacked(words).transpose(1, 2).reshape(-1, outputs)[:inputs]
        from_zero = numbers - self._unpacked(zeros).reshape(len(zeros), -1)[groups.long(), :outputs]
        return (scales[groups.long()] * from_zero.to(scales.dtype)).T.contiguous()

    def _unpacked(self, words: Tensor) -> Tensor:
        """Return the numbers of every word, in one more dimension."""
        places = torch.arange(0, WORD, self.bits, dtype=words.dtype)
        return (words[..., None] >> places & (1 << self.bits) - 1).short()


def gptq_weights(checkpoint: Checkpoint, about: Mapping[str, Any]) -> dict[str, GptqWeight]:
    """Return the weights of a checkpoint of GPTQ by name; refuse other ways to pack them."""
    packing = about.get("checkpoint_format", about.get("format", _OLD))
    if packing not in (_OLD, _NEW):
        raise CheckpointError(
            f"{checkpoint.label}: GPTQ as {packing!r:.60} packs it is not known", hint=_ORIGINAL
        )
    modules = [name.removesuffix(".qweight") for name in checkpoint.tensors if name.endswith(".qweight")]
    stated = [one for one in (about.get("bits"), *_BITS) if one in _BITS]
    return {f"{one}.weight": _weight(checkpoint, one, stated, packing == _OLD) for one in modules}


def _weight(checkpoint: Checkpoint, module: str, stated: list[int], less_one: bool) -> GptqWeight:
    """Return how one weight is packed; ``stated`` are the numbers of bits, the likeliest first."""
    where = f"{checkpoint.label}: {module}"
    found = [checkpoint.tensors.get(f"{module}.{part}") for part in _PARTS]
    if absent := [part for part, info in zip(_PARTS, found, strict=True) if info is None]:
        raise CheckpointError(f"{where} has no {absent[0]} beside its qweight", hint=_AGAIN)
    words, zeros, scales, groups = (info for info in found if info is not None)
    sizes = [len(info.shape) for info in (words, zeros, scales, groups)]
    if sizes != [2, 2, 2, 1] or scales.dtype not in _SCALES:
        raise CheckpointError(f"{where} does not have the tensors of a linear layer in GPTQ", hint=_AGAIN)
    if any(info.dtype is not torch.int32 for info in (words, zeros, groups)):
        raise CheckpointError(f"{where} is packed in words of other than {WORD} bits", hint=_ORIGINAL)
    (inputs,), outputs = groups.shape, words.shape[1]
    bits = next((one for one in stated if words.shape[0] == _words(inputs, one)), None)
    if bits is None:
        raise CheckpointError(f"{where} has numbers of other than 2, 4 or 8 bits", hint=_ORIGINAL)
    if scales.shape[1] != outputs or zeros.shape != (scales.shape[0], _words(outputs, bits)):
        raise CheckpointError(f"{where} has tensors of sizes that do not fit each other", hint=_AGAIN)
    return GptqWeight(module, (outputs, inputs), scales.dtype, bits, less_one)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD)
