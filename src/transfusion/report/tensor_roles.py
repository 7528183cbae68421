"""Roles: the part of a transformer that a tensor belongs to, from its layout."""

from __future__ import annotations

from collections.abc import Iterable

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import Layout, names_in

EMBEDDING = "embeddings"
NORM = "norms"
VALUE = "value"
OUTPUT = "attention output"
FUSED = "query, key and value in one"
MLP_IN = "MLP in"
MLP_OUT = "MLP out"
HEAD = "task head"
REST = "other"
_QK, _VO = "qk", "vo"


def roles(architecture: Architecture) -> dict[str, str]:
    """Return the role of each tensor.

    A bias has the role of its weight. Queries and keys have the same layout, so their role is the name of
    their module.
    """
    found: dict[str, str] = {}
    for name in architecture.tensors:
        module = name.rpartition(".")[0]
        beside = f"{module}.weight"
        leader = beside if beside in architecture.tensors else name
        found[name] = HEAD if name in architecture.heads else _role(architecture, leader)
    return found


def _role(architecture: Architecture, name: str) -> str:
    layout = architecture.tensors[name]
    inner = [id for id in layout.names() if architecture.spaces[id].stream is None]
    in_a_block = any(part.isdigit() for part in name.split("."))
    if layout.arrow is None and not inner:
        return NORM if name.endswith(".weight") else REST if in_a_block else EMBEDDING
    written, read = (_axes(architecture, layout, dims) for dims in (layout.outputs, layout.inputs))
    ends = {_end(axis) for axis in written}
    if {_QK, _VO} <= ends:
        return FUSED
    if _QK in ends:
        return name.split(".")[-2]
    if _VO in ends:
        return VALUE
    if any(_end(axis) == _VO for axis in read):
        return OUTPUT
    if not in_a_block:
        return EMBEDDING
    return (
        MLP_IN
        if _units(architecture, layout, layout.outputs)
        else (MLP_OUT if _units(architecture, layout, layout.inputs) else REST)
    )


def _units(architecture: Architecture, layout: Layout, dims: Iterable[int]) -> bool:
    """Whether these dimensions hold a free axis that is neither the stream nor the parent of another."""
    free = {space.id for space in architecture.free() if space.stream is None}
    ids = {id for dim in dims for id in names_in(layout.items[dim])}
    return bool(ids & free - set(architecture.children))


def _axes(architecture: Architecture, layout: Layout, dims: Iterable[int]) -> set[str]:
    return {architecture.spaces[id].axis for dim in dims for id in names_in(layout.items[dim])}


def _end(axis: str) -> str:
    """``cross_qk`` is a ``qk``."""
    return axis.rsplit("_", 1)[-1]
