"""Where an adapter acts: on a tensor of the table, a piece of one, or a member of a stack."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, Concat, Item, Layout, Name, Product, names_in, size_of
from transfusion.architecture.naming import Naming, OriginalNames, without_part
from transfusion.architecture.table import Shapes
from transfusion.errors import AdapterError, listing
from transfusion.files.lora_keys import LoraKey
from transfusion.model.recognition import fitting_models
from transfusion.transport.adapters.kinds import WHOLE, AdapterPart
from transfusion.transport.adapters.settings import WRAPPED


@dataclass(frozen=True)
class TensorSlice:
    """A place within a tensor; by default the whole tensor."""

    tensor: str
    """The canonical name."""
    piece: int | None = None
    """The index of a piece of a concatenation."""
    member: int | None = None
    """The index of a member of a stack, such as an expert."""

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of this place, from that of the tensor."""
        one = whole if self.member is None else Layout(whole.items[1:], whole.arrow, whole.split - 1)
        return one if self.piece is None else one.piece(self.piece)

    def stack(self, whole: Layout) -> tuple[Item, ...]:
        """Return the axis of the stack; empty without a stack."""
        return () if self.member is None else whole.items[:1]

    def index(self, whole: Layout, sizes: Mapping[str, int]) -> tuple[int | slice, ...]:
        """Return the index of this place in the tensor."""
        cuts: list[int | slice] = [_cut(item, self.piece, sizes) for item in whole.items]
        return tuple(cuts) if self.member is None else (self.member, *cuts[1:])

    @property
    def bias(self) -> TensorSlice:
        """The same place in the module's bias."""
        return TensorSlice(self.tensor.removesuffix("weight") + "bias", self.piece, self.member)


def joined_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of weights that are joined along their outputs, as a fused projection has."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    inputs = {(one.arrow, one.split, one.part(one.inputs)) for one in layouts}
    if len(inputs) > 1 or len(first.outputs) != 1:
        raise AssertionError(f"weights that do not read the same inputs: {listing(map(str, layouts))}")
    (dim,) = first.outputs
    outputs = (one.items[dim] for one in layouts)
    parts = tuple(part for item in outputs for part in (item.parts if isinstance(item, Concat) else (item,)))
    return Layout((*first.items[:dim], Concat(parts), *first.items[dim + 1 :]), first.arrow, first.split)


def shares(layouts: Sequence[Layout], factor: Layout, sizes: Mapping[str, int]) -> list[tuple[slice, ...]]:
    """Return, for each of several joined weights, the part of a factor that belongs to it.

    The outputs of the factor are cut; its other dimensions belong to all weights.
    """
    if len(layouts) == 1:
        return [()]
    joined = joined_layout(layouts)
    (outputs,) = joined.part(joined.outputs).items
    found, start = list[tuple[slice, ...]](), 0
    for one in layouts:
        stop = start + size_of(one.items[one.outputs[0]], sizes)
        found.append(tuple(slice(start, stop) if item == outputs else slice(None) for item in factor.items))
        start = stop
    return found


def _cut(item: Item, piece: int | None, sizes: Mapping[str, int]) -> slice:
    if piece is None or not isinstance(item, Concat):
        return slice(None)
    start = sum(size_of(part, sizes) for part in item.parts[:piece])
    return slice(start, start + size_of(item.parts[piece], sizes))


@dataclass(frozen=True)
class TargetWeight:
    """The names and layouts of a base's tensors, to find the weight of a module."""

    naming: Naming
    architecture: Architecture
    ties: Mapping[str, str]

    def weight_of(self, module: str) -> TensorSlice:
        """Return the place of a module's weight. The base need not have the tensor."""
        module = module.replace(WRAPPED, ".")
        packed = self.naming.canonical(f"{module}.in_proj_weight")  # the weight of nn.MultiheadAttention
        if packed in self.architecture.tensors:
            return TensorSlice(packed)
        if found := re.fullmatch(r"(.+)#(\d{1,9})(\[\d{1,9}\])?", self.naming.canonical(f"{module}.weight")):
            _, piece = without_part(found[0])
            return TensorSlice(found[1], piece, int(found[2]))
        tensor, piece = without_part(self.naming.canonical(module) + ".weight")
        return TensorSlice(tensor, piece)


# ── weights as matrices ──────────────────────────────────────────────────────────────────────


def as_matrix(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a weight as a matrix with one row per output and one column per input; a vector as it is."""
    if layout.arrow is None:
        return tensor
    rotated = tensor.permute(*layout.outputs, *layout.inputs)
    return rotated.reshape(rotated.shape[: len(layout.outputs)].numel(), -1)


def as_stored(matrix: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """Return the matrix of a weight in the shape that the weight is stored in."""
    if layout.arrow is None:
        return matrix
    order = [*layout.outputs, *layout.inputs]
    rotated = matrix.reshape([like.shape[dim] for dim in order])
    return rotated.permute([order.index(dim) for dim in range(len(order))])


# ── stored tensors ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AdapterTensor:
    """One stored tensor of an adapter, with its layout on a base."""

    key: str
    """The name in the adapter's file."""
    tensor: str
    """The canonical name of the tensor that it changes or replaces."""
    layout: Layout
    """The axes; for a member of a stack, those of the whole stack."""
    part: AdapterPart = WHOLE
    module: str = ""
    """The live model's name of the target module; empty for a whole tensor."""
    places: tuple[TensorSlice, ...] = ()
    """The places of the module's weight: one, or several tensors that are joined along their outputs."""
    rank: int | None = None
    stack: tuple[str, ...] = ()
    """The keys of all members of the stack that it belongs to; π may permute them."""

    @property
    def whole(self) -> bool:
        """Whether this is a copy of the whole tensor, and not a factor of a change."""
        return self.part is WHOLE

    def tensor_at(self, place: TensorSlice) -> str:
        """Return the canonical name of the tensor that it changes at one of its places."""
        return place.tensor if self.part.of == "weight" else place.bias.tensor


# ── modules of a LoRA file ──────────────────────────────────────────────────────────────────────


_BLOCK = re.compile(r"\{(?:last)?\}")
"""In the authors' names: the number of a block, or of the last block."""

Places: TypeAlias = tuple[TensorSlice, ...]
"""The tensors that a module is on a base, joined along their outputs; mostly one."""


class LoraTargets:
    """Finds the tensors of a base that the modules of a LoRA file change.

    Names that are joined with underscores are compared with all names of the base's modules. No name is
    taken apart at its underscores.
    """

    def __init__(self, place: TargetWeight) -> None:
        self._place = place

    def find(self, label: str, keys: Collection[LoraKey], base: str, shapes: Shapes) -> dict[str, Places]:
        """Return the places of every module, by its full name; refuse names that the base lacks."""
        modules = {one.owner: one for one in keys}
        found = {owner: self._places(label, one) for owner, one in modules.items()}
        if unknown := [owner for owner, places in found.items() if not places]:
            raise AdapterError(
                f"{label}: {len(unknown)} of {len(modules)} modules are not in {base}, a"
                f" {self._place.naming.family.name}: {listing(unknown)}",
                hint=f"the names are those of {' or '.join(fits)}; give such a base as `base`"
                if (fits := fitting_models(keys, shapes))
                else "give the base that the LoRA was trained on as `base`",
            )
        return {owner: places for owner, places in found.items() if places}

    def has(self, label: str, keys: Iterable[LoraKey]) -> bool:
        """Whether the base has all modules of these names."""
        return all(self._places(label, one) for one in keys)

    def _places(self, label: str, key: LoraKey) -> Places | None:
        if key.underscored:
            return self._by_underscores(label, key)
        if key.module in self._known:
            return self._known[key.module]
        place = self._place.weight_of(key.module)
        return (place,) if place.tensor in self._place.architecture.tensors else None

    def _by_underscores(self, label: str, key: LoraKey) -> Places | None:
        found = {self._known[name]: name for name in self._underscored.get(key.module, ())}
        if len(found) > 1:
            raise AdapterError(
                f"{label}: {key.owner} may be {listing(sorted(found.values()))}",
                hint="save the LoRA with points in the names of its modules, as diffusers does",
            )
        return next(iter(found), None)

    @cached_property
    def _underscored(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in self._known:
            names.setdefault(name.replace(".", "_"), []).append(name)
        return names

    @cached_property
    def _known(self) -> dict[str, Places]:
        """The places of every module, by the table's name and by the authors' name, if it has another."""
        tensors = self._place.architecture.tensors
        ours = {name.removesuffix(".weight"): (TensorSlice(name),) for name in tensors}
        prefixed = {prefix + name: one for prefix in self._prefixes for name, one in ours.items()}
        return {**prefixed, **ours, **dict(self._originals(ours))}

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return self._place.naming.family.prefixes

    def _originals(self, ours: Mapping[str, Places]) -> Iterator[tuple[str, Places]]:
        for original, module in OriginalNames(self._place.naming.family).modules.items():
            for block in _blocks(without_part(module.parts[0])[0], ours):
                parts = (without_part(_in_block(part, block)) for part in module.parts)
                pieces = [(ours.get(name.removesuffix(".weight")), piece) for name, piece in parts]
                if all(found for found, _ in pieces):
                    places = (TensorSlice(found[0].tensor, piece) for found, piece in pieces if found)
                    yield _in_block(original, block), tuple(places)


def _blocks(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the numbers of the blocks that have a module; one empty number if it is in no block."""
    if "{" not in pattern:
        return [""]
    wanted = re.compile(r"(\d+)".join(map(re.escape, _BLOCK.split(pattern.removesuffix(".weight")))))
    blocks = sorted((found[1] for name in names if (found := wanted.fullmatch(name))), key=int)
    return blocks[-1:] if "{last}" in pattern else blocks


def _in_block(pattern: str, block: str) -> str:
    """Return a name with the number of a block."""
    return _BLOCK.sub(block, pattern)


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────


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
