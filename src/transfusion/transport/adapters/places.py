"""Where an adapter acts: on a tensor of the table, a piece of one, or a member of a stack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from transfusion.architecture.architecture import Architecture
from transfusion.architecture.layouts import ANONYMOUS, Concat, Layout, Name, names_in, size_of
from transfusion.architecture.naming import Naming, OriginalNames, without_part
from transfusion.errors import AdapterError, listing
from transfusion.files.lora_keys import LoraKey
from transfusion.transport.adapters.settings import WRAPPED

_BLOCK = re.compile(r"\{(?:last)?\}")  # in the authors' names: the number of a block, or of the last block


@dataclass(frozen=True)
class Place:
    """A place within a tensor; by default the whole tensor."""

    tensor: str  # the canonical name
    piece: int | None = None  # the index of a piece of a concatenation
    member: int | None = None  # the index of a member of a stack, such as an expert

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of this place, from that of the tensor."""
        one = whole if self.member is None else Layout(whole.items[1:], whole.arrow, whole.split - 1)
        return one if self.piece is None else one.piece(self.piece)

    def index(self, whole: Layout, sizes: Mapping[str, int]) -> tuple[int | slice, ...]:
        """Return the index of this place in the tensor."""
        cuts: list[int | slice] = []
        for item in whole.items:
            if self.piece is None or not isinstance(item, Concat):
                cuts.append(slice(None))
            else:
                start = sum(size_of(part, sizes) for part in item.parts[: self.piece])
                cuts.append(slice(start, start + size_of(item.parts[self.piece], sizes)))
        return tuple(cuts) if self.member is None else (self.member, *cuts[1:])

    @property
    def bias(self) -> Place:
        """The same place in the module's bias."""
        return Place(self.tensor.removesuffix("weight") + "bias", self.piece, self.member)


def joined_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of weights that are joined along their outputs, as a fused projection has."""
    first = layouts[0]
    if len(layouts) == 1:
        return first
    inputs = {(one.arrow, one.split, one.part(one.inputs)) for one in layouts}
    assert len(inputs) == 1 == len(first.outputs), f"other inputs: {listing(map(str, layouts))}"
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


def as_matrix(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a weight as a matrix with one row per output and one column per input; a vector as it is."""
    if layout.arrow is None:
        return tensor
    rotated = tensor.permute(*layout.outputs, *layout.inputs)
    return rotated.reshape(rotated.shape[: len(layout.outputs)].numel(), -1)  # (outputs, inputs)


def as_stored(matrix: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """Return the matrix of a weight in the shape that the weight is stored in."""
    if layout.arrow is None:
        return matrix
    order = [*layout.outputs, *layout.inputs]
    rotated = matrix.reshape([like.shape[dim] for dim in order])
    return rotated.permute([order.index(dim) for dim in range(len(order))])


# ── modules ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Places:
    """Finds the weights of modules on a base, by the names that PEFT and LoRA files give them."""

    naming: Naming
    architecture: Architecture
    ties: Mapping[str, str]

    def of_module(self, module: str) -> Place:
        """Return the place of a live module's weight. The base need not have the tensor."""
        module = module.replace(WRAPPED, ".")
        packed = self.naming.canonical(f"{module}.in_proj_weight")  # the weight of nn.MultiheadAttention
        if packed in self.architecture.tensors:
            return Place(packed)
        if found := re.fullmatch(r"(.+)#(\d{1,9})(\[\d{1,9}\])?", self.naming.canonical(f"{module}.weight")):
            return Place(found[1], without_part(found[0])[1], int(found[2]))
        return Place(*without_part(self.naming.canonical(module) + ".weight"))

    def of_key(self, label: str, key: LoraKey) -> tuple[Place, ...]:
        """Return the places of a module of a LoRA file, joined along their outputs; none if absent.

        A name that is joined with underscores is compared with all names of the base's modules, and not taken
        apart.
        """
        if not key.underscored:
            if key.module in self._known:
                return self._known[key.module]
            place = self.of_module(key.module)
            return (place,) if place.tensor in self.architecture.tensors else ()
        found = {self._known[name]: name for name in self._underscored.get(key.module, ())}
        if len(found) > 1:
            raise AdapterError(
                f"{label}: {key.owner} may be {listing(sorted(found.values()))}",
                hint="save the LoRA with points in the names of its modules, as diffusers does",
            )
        return next(iter(found), ())

    @cached_property
    def _underscored(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in self._known:
            names.setdefault(name.replace(".", "_"), []).append(name)
        return names

    @cached_property
    def _known(self) -> dict[str, tuple[Place, ...]]:
        """The places of every module, by the table's name and by the authors' name, if it has another."""
        ours = {name.removesuffix(".weight"): (Place(name),) for name in self.architecture.tensors}
        prefixed = {
            prefix + name: one for prefix in self.naming.family.prefixes for name, one in ours.items()
        }
        return {**prefixed, **ours, **dict(self._originals(ours))}

    def _originals(self, ours: Mapping[str, tuple[Place]]) -> Iterator[tuple[str, tuple[Place, ...]]]:
        for original, module in OriginalNames(self.naming.family).modules.items():
            for block in _blocks(without_part(module.parts[0])[0], ours):
                parts = [without_part(_BLOCK.sub(block, part)) for part in module.parts]
                found = [(ours.get(name.removesuffix(".weight")), piece) for name, piece in parts]
                places = tuple(Place(whole[0].tensor, piece) for whole, piece in found if whole)
                if len(places) == len(found):
                    yield _BLOCK.sub(block, original), places


def _blocks(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the numbers of the blocks that have a module; one empty number if it is in no block."""
    if "{" not in pattern:
        return [""]
    wanted = re.compile(r"(\d+)".join(map(re.escape, _BLOCK.split(pattern.removesuffix(".weight")))))
    blocks = sorted((found[1] for name in names if (found := wanted.fullmatch(name))), key=int)
    return blocks[-1:] if "{last}" in pattern else blocks


def prompt_layout(architecture: Architecture) -> Layout:
    """Return the layout of a prompt's tensor: virtual tokens on the axis of the token embeddings."""
    found = {
        layout.items[1]
        for layout in architecture.backbone.values()
        if layout.arrow == "->"
        and {architecture.spaces[id].axis for id in names_in(layout.items[0])} == {"vocab"}
    }
    if len(found) != 1:
        raise AdapterError(
            f"a prompt needs one token embedding, and this {architecture.family} has {len(found)}",
            hint="a prompt cannot be merged into the weights either; train it again on B",
        )
    return Layout((Name(ANONYMOUS), *found))
