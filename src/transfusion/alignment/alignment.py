"""π: a map for every axis, with its provenance. Moves tensors; is saved to and loaded from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from torch import Tensor

from transfusion.alignment.maps import KINDS, Map, Permutation, Rotation
from transfusion.alignment.pi_file import FORMAT, KEY, WRITING, damaged, read_pi_file
from transfusion.alignment.provenance import Provenance
from transfusion.alignment.tensor_moves import RowMover, move_tensor, moves_by_rows
from transfusion.architecture.architecture import Architecture, Shortcut
from transfusion.architecture.layouts import Index, Layout, names_in
from transfusion.errors import AlignmentError, MismatchError, listing
from transfusion.files.publishing import publish_file
from transfusion.files.shard_writer import LazyTensor, write_shard
from transfusion.files.tensor_content import tensor_digest
from transfusion.files.tensor_files import Rows
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.model.weight_sample import weight_sample

_MOVERS = 16
"""The number of layouts whose indices are cached: more than are moved at once."""


@dataclass(frozen=True)
class NormFold:
    """A norm whose output a tensor reads. Its scale and shift are moved with the tensor, not on their own."""

    norm: str
    """The module."""
    offset: float = 0.0
    """The number that the norm adds to its weight: 1 in some families."""


@dataclass(frozen=True, repr=False)
class Alignment:
    """A map for every axis that moves, from A's basis to B's. Axes without a map stay.

    >>> pi = transfusion.Alignment.load("pi.safetensors")
    >>> print(pi.provenance.source, pi.provenance.target, pi.maps["layer.0.head"].index)
    models/a models/b [[3 0 2 1]]
    """

    maps: Mapping[str, Map]
    sizes: Mapping[str, int]
    parents: Mapping[str, str]
    provenance: Provenance
    folds: Mapping[str, NormFold] = field(default_factory=dict)
    """For rotations: the tensors that read the stream through a norm, and the norm."""
    _movers: dict[Layout, RowMover] = field(default_factory=dict, init=False, repr=False, compare=False)
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
        return {**self.__dict__, "_movers": {}}

    def __repr__(self) -> str:
        made = self.provenance
        return f"<π: {len(self.maps)} axes, {made.method}, from {made.source} to {made.target}>"

    def move(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return π of one tensor."""
        here = {name: self.maps[name] for name in layout.names() if name in self.maps}
        if not here:
            return tensor
        sizes = {name: self.sizes[name] for name in layout.names() if name in self.sizes}
        return move_tensor(tensor, layout, here, sizes, self.parents)

    def rotate(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return π of one tensor without the scales of its rotations."""
        rotations = {id: one for id in layout.names() if isinstance(one := self.maps.get(id), Rotation)}
        ones = {id: replace(one, produced=one.produced * 0 + 1) for id, one in rotations.items()}
        return replace(self, maps={**self.maps, **ones}).move(tensor, layout)

    @property
    def rotates(self) -> bool:
        """Whether π has rotations: maps from activations, whose errors are spread over all units."""
        return any(isinstance(map_, Rotation) for map_ in self.maps.values())

    @property
    def writes_apart(self) -> bool:
        """Whether some rotation has a matrix of its own for what is written."""
        return any(isinstance(one, Rotation) and one.writing is not None for one in self.maps.values())

    @property
    def reading(self) -> Alignment:
        """The alignment of activations: every axis by the map of those that read it."""
        if not self.writes_apart:
            return self
        return replace(self, maps={id: map_.reading for id, map_ in self.maps.items()})

    def moves_by_rows(self, layout: Layout) -> bool:
        """Return whether `move_rows` can move a tensor of this layout."""
        return moves_by_rows(layout, self.maps, self.parents)

    def scatters(self, layout: Layout) -> bool:
        """Return whether neighbouring rows of the moved tensor come from distant rows."""
        return any(axis in self.maps for item in layout.items[:1] for axis in names_in(item))

    def move_rows(self, read: Callable[[Rows], Tensor], layout: Layout, rows: slice) -> Tensor:
        """Return some rows of π of a tensor; only their source rows are read."""
        mover = self._movers.get(layout)
        if mover is None:
            here = {name: self.maps[name] for name in layout.names() if name in self.maps}
            while len(self._movers) >= _MOVERS:
                oldest = next(iter(tuple(self._movers)))  # of a copy: other threads may change it meanwhile
                self._movers.pop(oldest, None)
            mover = self._movers[layout] = RowMover(layout, here, self.sizes, self.parents)
        return mover(read, rows)

    def rotated(self, shortcuts: Iterable[Shortcut]) -> list[Shortcut]:
        """Return the shortcuts whose ends have different maps, which a plain shortcut cannot connect."""

        def at(id: str) -> Map:
            return self.maps.get(id, Permutation.identity(self.sizes[id]))

        return [cut for cut in shortcuts if cut.source in self.sizes and at(cut.source) != at(cut.target)]

    def lineage(self, id: str) -> Index:
        """Return the source row of every row of an axis's map, in the order of the destination."""
        parent = self.parents.get(id)
        if parent is None:
            return np.zeros(1, dtype=np.int64)
        above, size = self.lineage(parent), self.sizes[parent]
        map_ = self.maps.get(parent, Permutation.identity(size, len(above)))
        if not isinstance(map_, Permutation):
            raise AlignmentError(f"{parent} has axes within it, so its map must be a permutation")
        return (above[:, None] * size + map_.index).reshape(-1)

    def inverse(self) -> Alignment:
        """Return π⁻¹, from B's basis back to A's.

        >>> back = transfusion.Alignment.load("pi.safetensors").inverse()
        >>> print(back.provenance.source, back.provenance.target)
        models/b models/a
        """
        provenance = self.provenance
        return replace(
            self,
            maps={id: map_.inverse(self.lineage(id)) for id, map_ in self.maps.items()},
            provenance=replace(
                provenance,
                method=f"{provenance.method}, inverted",
                source=provenance.target,
                source_digest=provenance.target_digest,
                source_sample=provenance.target_sample,
                target=provenance.source,
                target_digest=provenance.source_digest,
                target_sample=provenance.source_sample,
                vocabulary=_swapped(provenance.vocabulary),
            ),
        )

    def after(self, first: Alignment) -> Alignment:
        """Return the alignment that applies ``first`` (A → B) and then this one (B → C).

        >>> pi = transfusion.Alignment.load("pi.safetensors")
        >>> all(map.is_identity() for map in pi.inverse().after(pi).maps.values())
        True
        """
        if (self.sizes, self.parents) != (first.sizes, first.parents):
            raise MismatchError(
                "two alignments of different architectures or policies cannot be chained",
                hint="make both with the same `residual`, `inner` and `heads`",
            )
        maps: dict[str, Map] = {}
        for id in {**first.maps, **self.maps}:
            lineage = self.lineage(id)
            earlier = first.maps.get(id, Permutation.identity(self.sizes[id], len(lineage)))
            later = self.maps.get(id, Permutation.identity(self.sizes[id], len(lineage)))
            maps[id] = later.after(earlier, lineage)
        provenance = replace(
            self.provenance,
            method=f"{first.provenance.method}, then {self.provenance.method}",
            source=first.provenance.source,
            source_digest=first.provenance.source_digest,
            source_sample=first.provenance.source_sample,
            vocabulary=_chained(first.provenance.vocabulary, self.provenance.vocabulary),
        )
        return replace(self, maps=maps, provenance=provenance, folds={**first.folds, **self.folds})

    @cached_property
    def digest(self) -> str:
        """The BLAKE3 hash of the maps and folds."""
        total = blake3()
        for id in sorted(self.maps):
            total.update(f"{id}:{self.maps[id].kind}:".encode())
            total.update(tensor_digest(self.maps[id].to_tensor()))
        for tensor, fold in sorted(self.folds.items()):
            # Spelled out: the hash must not depend on the name of a class.
            total.update(f"{tensor}:Fold(norm={fold.norm!r}, offset={fold.offset!r})".encode())
        return total.hexdigest()

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write a file of π; an existing file is replaced only with ``force``.

        >>> pi = transfusion.Alignment.load("pi.safetensors")
        >>> print(pi.inverse().save("back.safetensors"))
        back.safetensors
        """
        header = {
            "format": WRITING if self.writes_apart else FORMAT,
            "digest": self.digest,
            "kinds": {id: map_.kind for id, map_ in self.maps.items()},
            "sizes": dict(self.sizes),
            "parents": dict(self.parents),
            "folds": {tensor: asdict(fold) for tensor, fold in self.folds.items()},
            "provenance": asdict(self.provenance),
        }
        lazy_tensors = {id: _lazy_tensor(map_) for id, map_ in self.maps.items()}

        def write(staged: Path) -> None:
            write_shard(staged, lazy_tensors, metadata={KEY: json.dumps(header)})

        return publish_file(Path(path), write, force=force)

    @classmethod
    def load(cls, path: str | Path) -> Alignment:
        """Read a file of π; refuse a damaged file, and any other file.

        >>> transfusion.Alignment.load("pi.safetensors").provenance.method
        'guarded'
        """
        header, tensors = read_pi_file(path)
        try:
            maps = {id: KINDS[header["kinds"][id]].from_tensor(tensors[id]) for id in tensors}
            made = Provenance.from_json(header["provenance"])
        except (AlignmentError, TypeError, ValueError) as error:
            raise damaged(path, str(error)) from error
        folds = {tensor: NormFold(**fold) for tensor, fold in header.get("folds", {}).items()}
        alignment = cls(maps, header["sizes"], header["parents"], made, folds)
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

    @property
    def nbytes(self) -> int:
        """The bytes of all maps."""
        return sum(map_.to_tensor().nbytes for map_ in self.maps.values())

    def require_between(self, *, source: Model | None = None, target: Model | None = None) -> None:
        """Refuse an alignment that was made from or for other weights."""
        require_between(self.provenance, source, target)

    def require_samples(self, a: Model, b: Model) -> None:
        """Refuse an alignment that was made for weights with other samples: at once, and not always."""
        made = self.provenance
        for role, model, name, wanted in (
            ("from", a, made.source, made.source_sample),
            ("for", b, made.target, made.target_sample),
        ):
            if wanted and weight_sample(model) != wanted:
                raise AlignmentError(
                    f"this π was made {role} the weights of {name}, but {model.label} has other weights",
                    hint=_OTHER_WEIGHTS,
                )


_OTHER_WEIGHTS = "align these two models first, or give the π that belongs to them"


def require_between(provenance: Provenance, source: Model | None, target: Model | None) -> None:
    """Refuse models with other weights than those that an alignment was made from and for."""
    for role, model, made_for, wanted in (
        ("from", source, provenance.source, provenance.source_digest),
        ("for", target, provenance.target, provenance.target_digest),
    ):
        if model is not None and model.digest != wanted:
            raise AlignmentError(
                f"this π was made {role} the weights of {made_for} ({wanted[:12]}…), but"
                f" {model.label} has other weights ({model.digest[:12]}…)",
                hint=_OTHER_WEIGHTS,
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
        space.id: Permutation.random(space.size, architecture.rows(space.id), rng)
        for space in architecture.free()
    }


def fixed_points(map_: Map) -> Iterator[float]:
    """Return the share of positions that stay, for every row of a permutation."""
    if isinstance(map_, Permutation):
        yield from (map_.index == np.arange(map_.size)).mean(axis=1).tolist()


def _lazy_tensor(map_: Map) -> LazyTensor:
    """Return a map as it is written: rotations of wide models together take as much memory as a model."""
    tensor = map_.to_tensor()
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: [map_.to_tensor])
