"""Files of weights: what their headers say; pickles go through the restricted unpickler only."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transfusion.errors import CheckpointError
from transfusion.references import PICKLES

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def headers(file: Path) -> dict[str, TensorInfo]:
    """What a file of weights says that it holds."""
    if file.suffix in PICKLES:
        return {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, file)
            for name, tensor in unpickle(file).items()
        }
    result: dict[str, TensorInfo] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            if "transfusion" in (opened.metadata() or {}):
                raise CheckpointError(
                    f"{file}: a file of π, not a model", hint="the arguments may be in another order"
                )
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                piece = opened.get_slice(name)
                dtype = SAFETENSORS_DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{file}: {name} is stored as {piece.get_dtype()}, which is not supported",
                        hint="quantised checkpoints cannot be moved; use the original weights",
                    )
                result[name] = TensorInfo(name, tuple(piece.get_shape()), dtype, file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file ({error})",
            hint="it may be truncated by an interrupted download; fetch it again",
        ) from error
    return result


def unpickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle; one that would execute code is not loaded."""
    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: this pickle holds more than tensors and would execute code; it was not loaded",
            hint="convert it to safetensors where you trust it, or save only its state_dict()",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a whole checkpoint ({str(error).splitlines()[0]})",
            hint="it may be truncated by an interrupted download; fetch it again",
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(
            f"{file}: a dictionary of tensors was expected",
            hint="save the model's state_dict() alone",
        )
    return state
