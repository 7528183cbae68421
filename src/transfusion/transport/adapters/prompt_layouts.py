"""Layouts of prompts: virtual tokens lie on the embedding axis, prefixes on the axes of keys and values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, Concat, Item, Layout, Name, Product, names_in
from transfusion.errors import AdapterError

_HINT = "a prompt cannot be merged into the weights either; train it again on B"
_KEY_AXES = frozenset(["head", "group", "qk", "rot"])
_VALUE_AXES = frozenset(["head", "group", "vo"])


def prompt_layout(kind: str, config: Mapping[str, Any], architecture: Architecture) -> Layout:
    """Return the layout of a prompt's tensor, with one row per virtual token."""
    columns = _prefix(config, architecture) if kind == "PREFIX_TUNING" else _embedding(architecture)
    return Layout((Name(ANONYMOUS), columns))


def _embedding(architecture: Architecture) -> Item:
    """Return the axis of the token embeddings."""
    found = {
        layout.items[1]
        for layout in architecture.backbone.values()
        if layout.arrow == "->" and _axes(layout.items[0], architecture) == {"vocab"}
    }
    if len(found) != 1:
        raise AdapterError(
            f"a prompt needs one token embedding, and this {architecture.family} has {len(found)}",
            hint=_HINT,
        )
    return next(iter(found))


def _prefix(config: Mapping[str, Any], architecture: Architecture) -> Item:
    """Return the concatenated axes of the keys and values of each block, in the order of the blocks."""
    if (config.get("num_transformer_submodules") or 1) != 1:
        raise AdapterError("a prefix for an encoder and a decoder at once cannot be moved", hint=_HINT)
    blocks: dict[str, dict[str, set[Item]]] = {}
    for item in _produced(architecture):
        axes = _axes(item, architecture)
        role = "values" if "vo" in axes and axes <= _VALUE_AXES else "keys"
        if role == "values" or (axes & {"qk", "rot"} and axes <= _KEY_AXES):
            blocks.setdefault(_block(item), {"keys": set(), "values": set()})[role].add(item)
    whole = [blocks[name] for name in sorted(blocks, key=_numbers)]
    if not whole or any(len(items) != 1 for block in whole for items in block.values()):
        raise AdapterError(
            f"a prefix needs the keys and the values of each block, and the table of {architecture.family}"
            " has no separate axes for them",
            hint=_HINT,
        )
    return Concat(tuple(next(iter(items)) for block in whole for items in block.values()))


def _produced(architecture: Architecture) -> Iterator[Item]:
    """Yield the outputs of linear maps, with keys and values separated."""
    for layout in architecture.backbone.values():
        for item in layout.part(layout.outputs).items:
            yield from _separated(item, architecture)


def _separated(item: Item, architecture: Architecture) -> Iterator[Item]:
    axes = _axes(item, architecture)
    match item:
        case Concat(parts) if "vo" in axes:
            for part in parts:
                yield from _separated(part, architecture)
        case Product((*around, Concat(parts))) if "vo" in axes:  # concatenated within each head
            for part in parts:
                yield Product((*around, part))
        case _:
            yield item


def _axes(item: Item, architecture: Architecture) -> set[str]:
    return {architecture.spaces[id].axis for id in names_in(item)}


def _block(item: Item) -> str:
    return next(iter(names_in(item))).rpartition(".")[0]


def _numbers(text: str) -> list[int | str]:
    """Return a sort key for names that orders their numbers as numbers."""
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", text)]
