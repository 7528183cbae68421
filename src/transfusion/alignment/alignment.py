"""π: a map for every axis, and which part of B comes from which part of A."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from blake3 import blake3
from torch import Tensor

from transfusion.alignment.maps import Map, Mover, NormFold
from transfusion.alignment.pi_file import damaged, read_pi_file, write_pi_file
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Architecture, Shortcut
from transfusion.architecture.layouts import Index, Item, Layout, names_in
from transfusion.errors import AlignmentError, MismatchError, listing
from transfusion.files.tensor_files import Rows
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, is_place, moves, tensor_parts
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.runtime.shown import Shown

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOVERS = 16
"""The number of layouts whose indices are cached: more than are moved at once."""


@dataclass(frozen=True, repr=False)
class Alignment(Shown):
    """A map for every axis that moves, from A's basis to B's. Axes without a map stay.

    If A and B have one shape, every tensor of B corresponds to that of A with the same name, and maps have
    the names of axes. Otherwise ``paths`` tell which blocks correspond, parts of tensors are paired by their
    roles (see `pairs`), and a map goes from a whole dimension of A to one of B (see `map_name`).

    >>> pi = transfusion.Alignment.load("pi.safetensors")
    >>> print(pi.provenance.source, pi.provenance.target, pi.maps["layer.0.head"].index)
    models/a models/b [[3 0 2 1]]
    >>> pi = transfusion.align("models/a", "models/deeper", method="functional")
    >>> print(pi.other_shape, len(pi.paths["layer"]))
    True 4
    """

    maps: Mapping[str, Map]
    sizes: Mapping[str, int]
    """The sizes of A's axes."""
    parents: Mapping[str, str]
    provenance: Provenance
    folds: Mapping[str, NormFold] = field(default_factory=dict)
    """For rotations: the tensors of A that read the stream through a norm, and the norm."""
    sizes_b: Mapping[str, int] = field(default_factory=dict)
    """The sizes of B's axes; empty if A and B have one shape."""
    folds_b: Mapping[str, NormFold] = field(default_factory=dict)
    """The same as ``folds`` for B's tensors, if it has another shape; see `folds_onto`."""
    paths: Mapping[str, BlockPath] = field(default_factory=dict)
    """For every stack, the blocks of A and of B that correspond; empty if A and B have one shape."""
    _movers: dict[Layout, Mover] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The cached movers of the layouts that were moved last."""

    @classmethod
    def of(
        cls,
        maps: Mapping[str, Map],
        architecture: Architecture,
        provenance: Provenance,
        folds: Mapping[str, NormFold] | None = None,
    ) -> Alignment:
        return cls(dict(maps), architecture.sizes, architecture.parents, provenance, dict(folds or {}))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without caches, which other processes fill themselves."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"_movers": {}}

    def __rich__(self) -> RenderableType:
        from transfusion.alignment.description import alignment_tables, describe_alignment

        return alignment_tables(describe_alignment(self))

    @property
    def other_shape(self) -> bool:
        """Whether B has another shape than A."""
        return bool(self.sizes_b)

    @property
    def folds_onto(self) -> Mapping[str, NormFold]:
        """The tensors of B that read the stream through a norm, and the norm."""
        return self.folds_b if self.other_shape else self.folds

    def pairs(self, a: Architecture, b: Architecture) -> list[PartPair]:
        """Return the parts of B's tensors that get a change, each with the part of A's that it comes from."""
        if not self.other_shape:
            return [PartPair.whole(name, layout) for name, layout in a.tensors.items() if name in b.tensors]
        return [pair for pair in part_pairs(a, b, self.paths) if pair.maps <= self.maps.keys()]

    def map_between(self, target: Item | str, source: Item | str) -> Map | None:
        """Return the map from a dimension of A to a dimension of a B of another shape, if there is one."""
        return self.maps.get(map_name(target, source))

    def move(self, tensor: Tensor, layout: Layout, onto: Layout | None = None) -> Tensor:
        """Return π of one tensor. ``onto`` is its layout in B, if B has another shape."""
        if self.other_shape:
            return self._move_between(tensor, layout, onto or layout)
        mover = self._mover(layout)
        for dim in range(len(layout.items)):
            tensor = mover.move_dim(tensor, dim)
        return tensor

    def _move_between(self, tensor: Tensor, layout: Layout, onto: Layout) -> Tensor:
        """Map every dimension of A's layout to the one of B's; transpose where B stores inputs first."""
        turned = len(layout.items) == 2 and layout.outputs != onto.outputs
        theirs = onto.items[::-1] if turned else onto.items
        for dim, (target, source) in enumerate(zip(theirs, layout.items, strict=True)):
            if (map_ := self.map_between(target, source)) is not None:
                tensor = map_.apply(tensor, dim, reads=dim in layout.inputs)
        return tensor.T if turned else tensor

    def moved_shape(self, shape: Sequence[int], layout: Layout, onto: Layout) -> tuple[int, ...]:
        """Return the shape of π of a tensor that B stores in the same order of dimensions."""
        items = zip(onto.items, layout.items, strict=True)
        maps = [self.map_between(target, source) for target, source in items]
        return tuple(one.size if one else size for one, size in zip(maps, shape, strict=True))

    @cached_property
    def activations(self) -> Alignment:
        """The alignment of activations as their readers get them: y = s · M x with the scale of inputs."""
        return replace(
            self, maps={name: replace(map_, produced=map_.read) for name, map_ in self.maps.items()}
        )

    @cached_property
    def squares(self) -> Alignment:
        """The alignment of scales of single units: B's are means of A's, weighted by squared entries."""
        maps: dict[str, Map] = {}
        for name, map_ in self.maps.items():
            scale = np.ones_like(map_.read) if self.other_shape else map_.read
            square = replace(map_, values=np.square(map_.values), produced=scale)
            maps[name] = square if map_.rotates else map_
        return replace(self, maps=maps)

    @cached_property
    def norms(self) -> frozenset[str]:
        """The norms of A whose scale and shift are moved with the tensors that read their output."""
        return frozenset(fold.norm for fold in self.folds.values())

    @property
    def rotates(self) -> bool:
        """Whether π has rotations: maps from activations, whose errors are spread over all units."""
        return any(map_.rotates for map_ in self.maps.values())

    @property
    def permutes(self) -> bool:
        """Whether every unit of B is one unit of A."""
        return all(map_.permutes for map_ in self.maps.values())

    def moves_by_rows(self, layout: Layout) -> bool:
        """Return whether `move_rows` can move a tensor of this layout."""
        return not self.other_shape and self._mover(layout).by_rows

    def move_rows(self, read: Callable[[Rows], Tensor], layout: Layout, rows: slice) -> Tensor:
        """Return some rows of π of a tensor; only their source rows are read."""
        return self._mover(layout).move_rows(read, rows)

    def _mover(self, layout: Layout) -> Mover:
        mover = self._movers.get(layout)
        if mover is None:
            for oldest in list(self._movers)[: 1 - _MOVERS]:  # of a copy: other threads may change it
                self._movers.pop(oldest, None)
            mover = self._movers[layout] = Mover(layout, self.maps, self.sizes, self.parents)
        return mover

    def broken_shortcuts(self, shortcuts: Iterable[Shortcut]) -> list[Shortcut]:
        """Return the shortcuts whose ends have different maps, which a plain shortcut cannot connect."""

        def at(id: str) -> Map:
            return self.maps.get(id, Map.identity(self.sizes[id]))

        return [cut for cut in shortcuts if cut.source in self.sizes and at(cut.source) != at(cut.target)]

    def lineage(self, id: str) -> Index:
        """Return the source row of every row of an axis's map, in the order of the destination."""
        parent = self.parents.get(id)
        if parent is None:
            return np.zeros(1, dtype=np.int64)
        above, size = self.lineage(parent), self.sizes[parent]
        map_ = self.maps.get(parent, Map.identity(size, len(above)))
        if not map_.permutes:
            raise AlignmentError(f"{parent} has axes within it, so its map must be a permutation")
        return (above[:, None] * size + map_.index).reshape(-1)  # (blocks of the parent · its units,)

    def inverse(self) -> Alignment:
        """Return π⁻¹, from B's basis back to A's.

        >>> back = transfusion.Alignment.load("pi.safetensors").inverse()
        >>> print(back.provenance.source, back.provenance.target)
        models/b models/a
        """
        self._require_one_shape("inverted")
        provenance = self.provenance
        return replace(
            self,
            maps={id: map_.inverse(self.lineage(id)) for id, map_ in self.maps.items()},
            provenance=replace(
                provenance,
                method=f"{provenance.method}, inverted",
                source=provenance.target,
                source_fingerprint=provenance.target_fingerprint,
                target=provenance.source,
                target_fingerprint=provenance.source_fingerprint,
                vocabulary=_swapped(provenance.vocabulary),
            ),
        )

    def after(self, first: Alignment) -> Alignment:
        """Return the alignment that applies ``first`` (A → B) and then this one (B → C).

        >>> pi = transfusion.Alignment.load("pi.safetensors")
        >>> all(map.is_identity() for map in pi.inverse().after(pi).maps.values())
        True
        """
        for one in (self, first):
            one._require_one_shape("chained")
        if (self.sizes, self.parents) != (first.sizes, first.parents):
            raise MismatchError(
                "two alignments of different architectures or policies cannot be chained",
                hint="make both with the same `residual`, `inner` and `heads`",
            )
        maps: dict[str, Map] = {}
        for id in {**first.maps, **self.maps}:
            lineage = self.lineage(id)
            earlier = first.maps.get(id, Map.identity(self.sizes[id], len(lineage)))
            later = self.maps.get(id, Map.identity(self.sizes[id], len(lineage)))
            maps[id] = later.after(earlier, lineage)
        provenance = replace(
            self.provenance,
            method=f"{first.provenance.method}, then {self.provenance.method}",
            source=first.provenance.source,
            source_fingerprint=first.provenance.source_fingerprint,
            vocabulary=_chained(first.provenance.vocabulary, self.provenance.vocabulary),
        )
        return replace(self, maps=maps, provenance=provenance, folds={**first.folds, **self.folds})

    def _require_one_shape(self, what: str) -> None:
        if self.other_shape:
            raise AlignmentError(
                f"a π between models of different shapes cannot be {what}",
                hint="align the two models directly",
            )

    @cached_property
    def digest(self) -> str:
        """The BLAKE3 hash of the maps, the norms that are folded, and the paths between blocks."""
        total = blake3(json.dumps(self._settings(), sort_keys=True).encode())
        for id in sorted(self.maps):
            map_ = self.maps[id]
            total.update(f"{id}:{map_.kind}:".encode())
            for values in (map_.values, map_.produced, map_.read):
                total.update(np.ascontiguousarray(values).view(np.uint8).data)
        return total.hexdigest()

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def _settings(self) -> dict[str, Any]:
        """Return what is saved beside the maps, the sizes and the provenance."""
        return {
            "folds": {tensor: asdict(fold) for tensor, fold in self.folds.items()},
            "folds_b": {tensor: asdict(fold) for tensor, fold in self.folds_b.items()},
            "paths": {
                stack: [{"a": i, "b": j, "share": share} for i, j, share in path]
                for stack, path in self.paths.items()
            },
        }

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write a file of π; an existing file is replaced only with ``force``.

        >>> pi = transfusion.Alignment.load("pi.safetensors")
        >>> print(pi.inverse().save("back.safetensors"))
        back.safetensors
        """
        header = {
            **self._settings(),
            "digest": self.digest,
            "sizes": dict(self.sizes),
            "sizes_b": dict(self.sizes_b),
            "parents": dict(self.parents),
            "provenance": asdict(self.provenance),
        }
        return write_pi_file(Path(path), header, self.maps, force=force)

    @classmethod
    def load(cls, path: str | Path) -> Alignment:
        """Read a file of π; refuse a damaged file, and any other file.

        >>> transfusion.Alignment.load("pi.safetensors").provenance.method
        'auto'
        """
        header, maps = read_pi_file(path)
        paths = {
            stack: tuple((one["a"], one["b"], one["share"]) for one in path)
            for stack, path in header["paths"].items()
        }
        alignment = cls(
            maps,
            header["sizes"],
            header["parents"],
            header["provenance"],
            header["folds"],
            header["sizes_b"],
            header["folds_b"],
            paths,
        )
        if alignment.digest != header["digest"]:
            raise damaged(path, "the maps are not those that were saved")
        return alignment

    # ── checks ──────────────────────────────────────────────────────────────────────────────

    def require_for(self, architecture: Architecture) -> None:
        """Refuse an alignment of another architecture."""
        provenance = self.provenance
        if provenance.family != architecture.family:
            raise AlignmentError(
                f"this π is for a {provenance.family}, but the model is a {architecture.family}",
                hint="align these two models first",
            )
        differing = [
            f"{id} ({self.sizes.get(id, 'absent')} in π, {architecture.sizes[id]} in the model)"
            for id in architecture.backbone_spaces
            if self.sizes.get(id) != architecture.sizes[id]
        ]
        other = {id for id in self.maps if self.parents.get(id) != architecture.parents.get(id)}
        if differing or other or provenance.architecture != architecture.digest():
            raise AlignmentError(
                "this π is for other sizes of the architecture"
                + (f": {listing(differing, 4)}" if differing else ""),
                hint="align these two models first",
            )

    def fitted(self, architecture: Architecture) -> Alignment:
        """Return the alignment for a model whose vocabulary has another size.

        Only a π between two vocabularies fits both: tokens are matched by their spelling, and not by π.
        """
        size = architecture.sizes.get(VOCABULARY)
        if not self.provenance.vocabulary.get("moved") or size in (None, self.sizes.get(VOCABULARY)):
            return self
        if self.provenance.architecture != architecture.resized(VOCABULARY, self.sizes[VOCABULARY]).digest():
            return self  # another architecture altogether, which `require_for` refuses
        made = replace(self.provenance, architecture=architecture.digest())
        return replace(self, sizes={**self.sizes, VOCABULARY: size}, provenance=made)

    def require_vocabulary(self, a: Model) -> None:
        """Refuse an alignment that was made for other vocabularies than those between which A is read."""
        then, now = self.provenance.vocabulary, a.vocabulary
        if now is None and not then.get("moved"):
            return
        if now is not None and (then.get("source"), then.get("target")) == (now.source, now.target):
            return
        why = (
            "the tokenizers were not compared then"
            if not then
            else "the tokenizers cannot be compared now"
            if now is None
            else "the tokenizers were others then"
        )
        raise AlignmentError(
            f"this π was made for other vocabularies of {self.provenance.source} and"
            f" {self.provenance.target}: {why}",
            hint="align these two models first, with the tokenizer.json of each in its folder",
        )

    @property
    def moved_axes(self) -> int:
        """The number of axes whose units do not stay where they are."""
        return sum(not map_.is_identity() for map_ in self.maps.values())

    def require_between(self, *, source: Model | None = None, target: Model | None = None) -> None:
        """Refuse an alignment that was made from or for other weights."""
        made = self.provenance
        for role, model, made_for, wanted in (
            ("from", source, made.source, made.source_fingerprint),
            ("for", target, made.target, made.target_fingerprint),
        ):
            if model is not None and model.fingerprint != wanted:
                raise AlignmentError(
                    f"this π was made {role} the weights of {made_for} ({wanted[:12]}…), but"
                    f" {model.label} has other weights ({model.fingerprint[:12]}…)",
                    hint="align these two models first, or give the π that belongs to them",
                )


def _swapped(vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of two vocabularies, seen from the other one."""
    if not vocabulary:
        return {}
    (of_a, of_b), common = vocabulary["tokens"], vocabulary["common"]
    other = {"source": vocabulary["target"], "target": vocabulary["source"], "tokens": [of_b, of_a]}
    lost = {"dropped": max(0, of_b - common), "dropped_first": [], "new": max(0, of_a - common)}
    return {**vocabulary, **other, **lost}


def _chained(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of the two ends of a chain of vocabularies; the counts are those of one step."""
    if not first or not second:
        return {}
    step, ends = second if second["moved"] else first, (first["source"], second["target"])
    return {**step, "source": ends[0], "target": ends[1], "moved": ends[0] != ends[1]}


def random_maps(architecture: Architecture, seed: int) -> dict[str, Map]:
    """Return a random permutation of every axis that may be permuted."""
    rng = np.random.default_rng(seed)
    return {
        space.id: Map.random(space.size, architecture.rows(space.id), rng) for space in architecture.free()
    }


def fixed_points(map_: Map) -> Iterator[float]:
    """Return the share of positions that stay, for every block of a permutation."""
    if map_.permutes:
        yield from (map_.index == np.arange(map_.size)).mean(axis=1).tolist()


def require_one_shape(via: Alignment | str | Path) -> Alignment:
    """Return π, or read its file; refuse one between models of different shapes."""
    found = via if isinstance(via, Alignment) else Alignment.load(via)
    if found.other_shape:
        what = "this is" if isinstance(via, Alignment) else f"{via}:"
        raise AlignmentError(
            f"{what} a π between models of different shapes, which cannot be used here",
            hint="use it in transport, merge, inspect, verify or report",
        )
    return found


# ── parts of tensors ─────────────────────────────────────────────────────────────────────


BlockPath: TypeAlias = tuple[tuple[int, int, float], ...]
"""The blocks of a stack that correspond: A's block, B's block, and the share of A's change that B's gets."""


def map_name(target: Item | str, source: Item | str) -> str:
    """Return the name of the map from a whole dimension of A to one of B."""
    return f"{target} <- {source}"


@dataclass(frozen=True)
class PartPair:
    """A part of B's tensors, and the part of A's whose change it gets."""

    target: TensorPart
    source: TensorPart
    share: float = 1.0
    """The share of the change, if it is divided among several blocks."""
    writes: str | None = None
    """The name of the map of the axis that it writes; None if the axis stays, and between equal shapes."""
    reads: str | None = None

    @classmethod
    def whole(cls, tensor: str, layout: Layout) -> PartPair:
        """Return the pair of a tensor that both models have."""
        part = TensorPart(tensor, layout, Role("", None, tensor))
        return cls(part, part)

    @property
    def maps(self) -> set[str]:
        """The names of the maps that it needs."""
        return {name for name in (self.writes, self.reads) if name is not None}


def part_pairs(a: Architecture, b: Architecture, paths: Mapping[str, BlockPath]) -> Iterator[PartPair]:
    """Yield the parts of B's tensors that have a counterpart in A."""
    parts_a = tensor_parts(a)

    def name_of(source: Item | None, target: Item | None) -> str | None:
        if source is None or target is None or not list(names_in(target)):
            return None
        return map_name(target, source) if moves(a, source) and moves(b, target) else None

    for role, target in tensor_parts(b).items():
        for block, share in _blocks_of(role, paths):
            source = parts_a.get(replace(role, block=block))
            if source is not None and _fits(source, target, a, b):
                writes, reads = name_of(source.output, target.output), name_of(source.input, target.input)
                yield PartPair(target, source, share, writes, reads)


def block_behind(paths: Mapping[str, BlockPath], stack: str, block: int | None) -> int | None:
    """Return B's number of a block of A: one past A's last is one past B's last, others stay."""
    if path := paths.get(stack):
        last_a, last_b, _ = path[-1]
        return last_b + 1 if block == last_a + 1 else block
    return block


def _blocks_of(role: Role, paths: Mapping[str, BlockPath]) -> Iterator[tuple[int | None, float]]:
    """Yield A's blocks for a role in B, each with its share."""
    if role.block is None or role.stack not in paths:
        yield role.block, 1.0
        return
    path = paths[role.stack]
    last_a, last_b, _ = path[-1]
    if role.block == last_b + 1:  # behind the last block
        yield last_a + 1, 1.0
    yield from ((i, share) for i, j, share in path if j == role.block)


def _fits(source: TensorPart, target: TensorPart, a: Architecture, b: Architecture) -> bool:
    """Return whether all axes that stay have the same size in both, or can be resampled."""
    if len(source.layout.items) != len(target.layout.items):
        return False
    for ours, theirs in zip(source.layout.items, target.layout.items, strict=True):
        if moves(a, ours) and moves(b, theirs):
            continue
        sizes = [a.sizes[name] for name in names_in(ours)], [b.sizes[name] for name in names_in(theirs)]
        if sizes[0] != sizes[1] and not (is_place(ours) and is_place(theirs)):
            return False
    return True
