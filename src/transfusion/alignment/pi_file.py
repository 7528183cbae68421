"""The file of π: the format of its header, checked before any map is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from os.path import isdir, isfile
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import TypedDict

from transfusion.alignment.provenance import Number, ProvenanceInfo
from transfusion.errors import AlignmentError, listing
from transfusion.runtime.untrusted_files import parse_json, validate

FORMAT = 4
"""Formats 1 to 3 were those of this and the next two, with SHA-256 digests."""
WRITING = 5
"""The format of files with rotations that write by other matrices than they read by."""
RECTANGULAR = 6
"""The format of files of π between models of different shapes."""
KEY = "transfusion"
"""The key of the header in the metadata of a safetensors file."""
_NESTED = 16
"""The limit of axes that lie within each other."""
_AGAIN = "make it again with 'transfusion align'"
Info = TypeVar("Info")
_WHOLE = frozenset(["I8", "U8", "I16", "I32", "I64"])
_REAL = frozenset(["F32", "F64"])


class FoldInfo(TypedDict):
    """A folded norm in a file."""

    norm: str
    offset: Number


class AlignmentHeader(TypedDict):
    """The metadata of a file of π."""

    format: int
    digest: str
    kinds: dict[str, Literal["permutation", "plan", "rotation"]]
    sizes: dict[str, Annotated[int, Field(ge=1, le=2**24)]]
    parents: dict[str, str]
    folds: NotRequired[dict[str, FoldInfo]]
    provenance: ProvenanceInfo


def damaged(path: str | Path, what: str) -> AlignmentError:
    """Return the error for a file whose content is not what was saved."""
    return AlignmentError(f"{path}: {what}; the file is damaged", hint=_AGAIN)


def other_shapes(which: str) -> AlignmentError:
    """Return the error for a π between models of different shapes where one shape is needed."""
    return AlignmentError(
        f"{which} a π between models of different shapes, which cannot be used here",
        hint="use it in transport, merge, inspect, verify or report",
    )


def read_pi_file(path: str | Path) -> tuple[AlignmentHeader, dict[str, Tensor]]:
    """Return the checked header of a file of π, and its maps as tensors."""
    with _opened(path) as opened:
        header = _header(path, opened.metadata() or {})
        _require_shapes(path, header, opened)
        return header, {id: opened.get_tensor(id) for id in header["kinds"]}


def read_rectangular_file(path: str | Path, schema: type[Info]) -> tuple[Info, dict[str, Tensor]]:
    """Return the checked header of a file of π between shapes, and its maps as tensors."""
    with _opened(path) as opened:
        header = _validated(path, opened.metadata() or {}, schema, (RECTANGULAR,))
        return header, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def format_of(path: str | Path) -> int | None:
    """Return the format of a file of π, if the file tells it."""
    with _opened(path) as opened:
        info = parse_json((opened.metadata() or {}).get(KEY, "{}"), f"{path}: damaged", AlignmentError)
    return info.get("format") if isinstance(info, dict) else None


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    if not isfile(path):
        what = "a folder, not a file of π" if isdir(path) else "no such file of π"
        raise AlignmentError(f"{path}: {what}", hint="make one with 'transfusion align A B -o PI'")
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        what = f"not a readable file of π ({error})"
        raise AlignmentError(f"{path}: {what}", hint=_AGAIN) from error


def _validated(
    path: str | Path, metadata: Mapping[str, str], schema: type[Info], known: tuple[int, ...]
) -> Info:
    """Return the checked metadata of a file in one of the known formats."""
    if KEY not in metadata:
        what = "a safetensors file, but not one of π"
        raise AlignmentError(f"{path}: {what}", hint="make one with 'transfusion align A B -o PI'")
    info = parse_json(metadata[KEY], f"{path}: its metadata cannot be read", AlignmentError)
    if isinstance(info, dict) and info.get("format") == RECTANGULAR and RECTANGULAR not in known:
        raise other_shapes(f"{path}:")
    if isinstance(info, dict) and isinstance(info.get("format"), int) and info["format"] not in known:
        raise AlignmentError(
            f"{path}: written in format {info['format']}, but this version reads format"
            f" {' and '.join(map(str, known))}",
            hint="make it again with this version, or install the version that wrote it",
        )
    where = f"{path}: its metadata cannot be read, the file is damaged"
    return validate(info, schema, where, hint=_AGAIN, error=AlignmentError)


def _header(path: str | Path, metadata: Mapping[str, str]) -> AlignmentHeader:
    """Return the checked metadata of a file; refuse axes that are their own ancestors."""
    header = _validated(path, metadata, AlignmentHeader, (FORMAT, WRITING))
    sizes, parents = header["sizes"], header["parents"]
    if strange := [id for id in (*header["kinds"], *parents, *parents.values()) if id not in sizes]:
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


def _require_shapes(path: str | Path, provenance: AlignmentHeader, opened: Any) -> None:
    """Refuse maps whose type or shape does not fit their axis and its parents, before reading them."""
    if provenance["kinds"].keys() != set(opened.keys()):
        raise damaged(path, "the maps are not those that were saved")
    sizes = provenance["sizes"]
    for id, kind in provenance["kinds"].items():
        size, rows = sizes[id], prod(sizes[one] for one in _ancestors(path, id, provenance["parents"]))
        wanted = {"permutation": (rows, size), "plan": (rows, size, size), "rotation": (rows, size + 2, size)}
        found = opened.get_slice(id)
        shape, type = tuple(found.get_shape()), found.get_dtype()
        if kind == "rotation" and provenance["format"] == WRITING and shape[1:2] == (2 * size + 2,):
            wanted[kind] = (rows, 2 * size + 2, size)
        if shape != wanted[kind] or type not in (_WHOLE if kind == "permutation" else _REAL):
            raise damaged(
                path, f"{id} must be a {kind} of shape {wanted[kind]}, but is {type} of shape {shape}"
            )


def is_alignment(path: str | Path) -> bool:
    """Return whether a path is a file of π, damaged or not."""
    if not isfile(path):
        return False
    try:
        with safe_open(path, framework="pt") as opened:
            return KEY in (opened.metadata() or {})
    except (SafetensorError, OSError):
        return False
