"""The file of π: safetensors with one tensor per map, and a header that is checked before any map is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from os.path import isdir, isfile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import TypedDict

from transfusion.alignment.maps import Kind, Map, NormFold
from transfusion.alignment.provenance import Number, Provenance
from transfusion.architecture.layouts import parse, size_of
from transfusion.errors import AlignmentError, LayoutError, listing
from transfusion.files.publishing import publish_file
from transfusion.files.writing import LazyTensor, write_shard
from transfusion.runtime.untrusted_files import parse_json, validate

FORMAT = 7
"""Formats 1 to 6 were those of earlier versions."""
KEY = "transfusion"
"""The key of the header in the metadata of a safetensors file."""
_NESTED = 16
"""The limit of axes that lie within each other."""
_AGAIN = "make it again with 'transfusion align'"
_MAKE = "make one with 'transfusion align A B -o PI'"
_WHOLE = frozenset(["I8", "U8", "I16", "I32", "I64"])
_REAL = frozenset(["F32", "F64"])

Scales: TypeAlias = list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
Sizes: TypeAlias = dict[str, Annotated[int, Field(ge=1, le=2**24)]]
Block: TypeAlias = Annotated[int, Field(ge=0, le=2**16)]


class BlockInfo(TypedDict):
    """A block of A, the block of B that gets its change, and the share that it gets."""

    a: Block
    b: Block
    share: Number


class MapInfo(TypedDict):
    """The kind and the scales of a map."""

    kind: Literal["permutation", "plan", "rotation", "rectangular"]
    produced: Scales
    read: Scales


class AlignmentHeader(TypedDict):
    """The metadata of a file of π."""

    format: int
    digest: str
    maps: dict[str, MapInfo]
    sizes: Sizes
    parents: dict[str, str]
    folds: dict[str, NormFold]
    sizes_b: Sizes
    folds_b: dict[str, NormFold]
    paths: dict[str, list[BlockInfo]]
    provenance: Provenance


def damaged(path: str | Path, what: str) -> AlignmentError:
    """Return the error for a file whose content is not what was saved."""
    return AlignmentError(f"{path}: {what}; the file is damaged", hint=_AGAIN)


def write_pi_file(path: Path, header: Mapping[str, Any], maps: Mapping[str, Map], *, force: bool) -> Path:
    """Write maps with a header; the format, the kinds and the scales are added to it."""
    infos = {
        name: {"kind": one.kind, "produced": one.produced.tolist(), "read": one.read.tolist()}
        for name, one in maps.items()
    }
    text = json.dumps({**header, "format": FORMAT, "maps": infos})
    tensors = {name: LazyTensor.of(_stored(one.values)) for name, one in maps.items()}
    return publish_file(path, lambda staged: write_shard(staged, tensors, metadata={KEY: text}), force=force)


def _stored(values: Any) -> Tensor:
    """Return the numbers of a map as they are stored: an index in 32 bits."""
    return torch.from_numpy(values.astype(np.int32) if values.dtype == np.int64 else values)


def read_pi_file(path: str | Path) -> tuple[AlignmentHeader, dict[str, Map]]:
    """Return the checked header of a file of π, and its maps."""
    with _opened(path) as opened:
        header = _header(path, opened.metadata() or {})
        if header["maps"].keys() != set(opened.keys()):
            raise damaged(path, "the maps are not those that were saved")
        maps: dict[str, Map] = {}
        for name, info in header["maps"].items():
            _require_shape(path, name, header, opened.get_slice(name))
            try:
                values = opened.get_tensor(name).numpy()
                maps[name] = Map.of(Kind(info["kind"]), values, info["produced"], info["read"])
            except (AlignmentError, ValueError) as error:
                raise damaged(path, str(error)) from error
    return header, maps


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    if not isfile(path):
        what = "a folder, not a file of π" if isdir(path) else "no such file of π"
        raise AlignmentError(f"{path}: {what}", hint=_MAKE)
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise AlignmentError(f"{path}: not a readable file of π ({error})", hint=_AGAIN) from error


def _header(path: str | Path, metadata: Mapping[str, str]) -> AlignmentHeader:
    """Return the checked metadata of a file; refuse axes that are their own ancestors."""
    if KEY not in metadata:
        raise AlignmentError(f"{path}: a safetensors file, but not one of π", hint=_MAKE)
    info = parse_json(metadata[KEY], f"{path}: its metadata cannot be read", AlignmentError)
    if isinstance(info, dict) and isinstance(found := info.get("format"), int) and found != FORMAT:
        raise AlignmentError(
            f"{path}: written in format {found}, but this version reads format {FORMAT}",
            hint="make it again with this version, or install the version that wrote it",
        )
    where = f"{path}: its metadata cannot be read, the file is damaged"
    header = validate(
        metadata[KEY], AlignmentHeader, where, hint=_AGAIN, error=AlignmentError, from_text=True
    )
    sizes, parents = header["sizes"], header["parents"]
    of_axes = [name for name, one in header["maps"].items() if Kind(one["kind"]) is not Kind.RECTANGULAR]
    if strange := [id for id in (*of_axes, *parents, *parents.values()) if id not in sizes]:
        raise damaged(path, f"axes without a size: {listing(dict.fromkeys(strange))}")
    for id in parents:
        _ancestors(path, id, parents)
    return header


def _ancestors(path: str | Path, id: str, parents: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    while (id := parents.get(id, "")) != "":
        if id in found or len(found) > _NESTED:
            raise damaged(path, f"the parents of {found[0]} form a circle")
        found.append(id)
    return found


def _require_shape(path: str | Path, name: str, header: AlignmentHeader, found: Any) -> None:
    """Refuse a map whose type or shape does not fit its axis and its parents, before it is read."""
    kind, sizes = Kind(header["maps"][name]["kind"]), header["sizes"]
    if kind is Kind.RECTANGULAR:
        target, _, source = name.partition(" <- ")
        try:
            size = size_of(parse(target).items[0], header["sizes_b"])
            wanted: tuple[int, ...] = (1, size, size_of(parse(source).items[0], sizes))
        except (LayoutError, KeyError, IndexError) as error:
            raise damaged(path, f"{name} is no map between two axes") from error
    else:
        size, blocks = sizes[name], prod(sizes[one] for one in _ancestors(path, name, header["parents"]))
        wanted = (blocks, size) if kind is Kind.PERMUTATION else (blocks, size, size)
    shape, type = tuple(found.get_shape()), found.get_dtype()
    if shape != wanted or type not in (_WHOLE if kind is Kind.PERMUTATION else _REAL):
        raise damaged(path, f"{name} must be a {kind} of shape {wanted}, but is {type} of shape {shape}")


def is_alignment(path: str | Path) -> bool:
    """Return whether a path is a file of π, damaged or not."""
    if not isfile(path):
        return False
    try:
        with safe_open(path, framework="pt") as opened:
            return KEY in (opened.metadata() or {})
    except (SafetensorError, OSError):
        return False
