"""π between models of different shapes: which part of a tensor of A goes where in B, and by which maps.

Every part of B's tensors that corresponds to one of A's gets ``share · produced · Q_out · τ · Q_inᵀ / read``.
The matrices Q are isometries into the wider model, or projections onto the narrower one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from blake3 import blake3
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from transfusion.alignment.alignment import Alignment, NormFold, require_between
from transfusion.alignment.pi_file import (
    KEY,
    RECTANGULAR,
    FoldInfo,
    damaged,
    format_of,
    other_shapes,
    read_rectangular_file,
)
from transfusion.alignment.provenance import Number, Provenance, ProvenanceInfo
from transfusion.files.publishing import publish_file, write_tensors
from transfusion.files.tensor_content import tensor_digest
from transfusion.model.model import Model
from transfusion.model.part_roles import Role

BlockInfo: TypeAlias = Annotated[
    list[Annotated[int, Field(ge=0, le=2**16)]], Field(min_length=2, max_length=2)
]


class RoleInfo(TypedDict):
    """A role in a file."""

    stack: str
    block: Annotated[int, Field(ge=0, le=2**16)] | None
    use: str
    number: Annotated[int, Field(ge=0, le=2**16)]


class PartPairInfo(TypedDict):
    """A pair of parts in a file."""

    target: RoleInfo
    source: RoleInfo
    share: Number
    writes: str | None
    reads: str | None
    fold_a: FoldInfo | None
    fold_b: FoldInfo | None


class ScalesInfo(TypedDict):
    """The scales of a map in a file."""

    produced: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    read: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RectangularHeader(TypedDict):
    """The metadata of a file of π between shapes."""

    format: int
    digest: str
    scales: dict[str, ScalesInfo]
    pairs: list[PartPairInfo]
    paths: dict[str, list[BlockInfo]]
    provenance: ProvenanceInfo


@dataclass(frozen=True)
class RectangularMap:
    """From the units of an axis of A to those of an axis of B."""

    matrix: Tensor
    """(B's units, A's units)."""
    produced: float = 1.0
    """How much larger B's activations are where they are written."""
    read: float = 1.0
    """How much larger they are where they are read."""

    def written(self, values: Tensor) -> Tensor:
        """Map the first dimension of a change to what writes the axis."""
        return self.produced * (self.matrix.to(values.dtype) @ values)

    def reading(self, values: Tensor) -> Tensor:
        """Map the first dimension of a change to what reads the axis."""
        return self.matrix.to(values.dtype) @ values / self.read


@dataclass(frozen=True)
class PartPair:
    """A part of B's tensors, and the part of A's whose change it gets."""

    target: Role
    source: Role
    share: float = 1.0
    """The share of the change, if it is divided among several blocks."""
    writes: str | None = None
    """The name of the map of the axis that it writes; None if the axis stays."""
    reads: str | None = None
    fold_a: NormFold | None = None
    """The norm that A's part reads through."""
    fold_b: NormFold | None = None


@dataclass(frozen=True, repr=False)
class RectangularAlignment:
    """π from A to a model B of another shape.

    >>> pi = transfusion.align("models/a", "models/deeper", method="functional")
    >>> isinstance(pi, transfusion.RectangularAlignment), sorted(pi.paths), len(pi.paths["layer"])
    (True, ['layer'], 4)
    """

    maps: Mapping[str, RectangularMap]
    pairs: tuple[PartPair, ...]
    provenance: Provenance
    paths: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By stack, the pairs of blocks (of A, of B) that correspond."""

    def __repr__(self) -> str:
        made = self.provenance
        return f"<π between shapes: {len(self.maps)} axes, from {made.source} to {made.target}>"

    @cached_property
    def by_target(self) -> dict[Role, list[PartPair]]:
        found: dict[Role, list[PartPair]] = {}
        for pair in self.pairs:
            found.setdefault(pair.target, []).append(pair)
        return found

    def map_between(self, target: str, source: str) -> RectangularMap | None:
        """Return the map from an axis of A to an axis of B, if there is one."""
        return self.maps.get(map_name(target, source))

    def expected(
        self, outputs: Mapping[str, Tensor], of_a: Mapping[str, str | None], of_b: Mapping[str, str | None]
    ) -> dict[str, Tensor]:
        """Return the outputs that B should have if A has these; those on an axis that moves are moved.

        ``of_a`` and ``of_b`` name the axis of every output, empty for one that stays. Outputs that only one
        of the two has, or whose axis has no map, are left out.
        """
        found: dict[str, Tensor] = {}
        for name, value in outputs.items():
            ours, theirs = of_a.get(name, ""), of_b.get(name, "")
            if ours is None or theirs is None or bool(ours) != bool(theirs):
                continue
            if not ours or not theirs:
                found[name] = value
            elif (map_ := self.map_between(theirs, ours)) is not None:
                found[name] = map_.read * (value @ map_.matrix.to(value.dtype).T)
        return found

    @property
    def moved_axes(self) -> int:
        """The number of axes with a map: all of them."""
        return len(self.maps)

    @property
    def nbytes(self) -> int:
        """The bytes of all maps."""
        return sum(map_.matrix.nbytes for map_ in self.maps.values())

    @property
    def kept_share(self) -> float:
        """The mean share of A's directions that B has room for; 1 if no axis of B is narrower."""
        shares = [min(1.0, one.matrix.shape[0] / one.matrix.shape[1]) for one in self.maps.values()]
        return sum(shares) / max(1, len(shares))

    @cached_property
    def digest(self) -> str:
        """A hash of everything that decides what is moved where."""
        pairs, paths = [_pair_info(pair) for pair in self.pairs], sorted(self.paths.items())
        total = blake3(json.dumps([pairs, paths]).encode())
        for name in sorted(self.maps):
            map_ = self.maps[name]
            total.update(f"{name}:{map_.produced!r}:{map_.read!r}:".encode() + tensor_digest(map_.matrix))
        return total.hexdigest()

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write a file of π; an existing file is replaced only with ``force``."""
        header = {
            "format": RECTANGULAR,
            "digest": self.digest,
            "scales": {name: {"produced": one.produced, "read": one.read} for name, one in self.maps.items()},
            "pairs": [_pair_info(pair) for pair in self.pairs],
            "paths": {stack: list(path) for stack, path in self.paths.items()},
            "provenance": asdict(self.provenance),
        }
        tensors = {name: one.matrix.contiguous() for name, one in self.maps.items()}
        return publish_file(
            Path(path),
            lambda staged: write_tensors(staged, tensors, {KEY: json.dumps(header)}),
            force=force,
        )

    @classmethod
    def load(cls, path: str | Path) -> RectangularAlignment:
        """Read a file of π between shapes; refuse a damaged file."""
        header, tensors = read_rectangular_file(path, RectangularHeader)
        if header["scales"].keys() != tensors.keys():
            raise damaged(path, "the maps are not those that were saved")
        if any(one.ndim != 2 or not one.is_floating_point() for one in tensors.values()):
            raise damaged(path, "a map is not a matrix")
        maps = {name: RectangularMap(tensors[name], **scales) for name, scales in header["scales"].items()}
        found = cls(
            maps,
            tuple(_pair(info) for info in header["pairs"]),
            Provenance.from_json(header["provenance"]),
            {stack: tuple((i, j) for i, j in cells) for stack, cells in header["paths"].items()},
        )
        if found.digest != header["digest"]:
            raise damaged(path, "the maps are not those that were saved")
        return found

    def require_between(self, *, source: Model | None = None, target: Model | None = None) -> None:
        """Refuse a π that was made from or for other weights."""
        require_between(self.provenance, source, target)


AnyAlignment: TypeAlias = Alignment | RectangularAlignment
"""π between models of one shape, or of two."""


def load_alignment(path: str | Path) -> AnyAlignment:
    """Read a file of π of either kind."""
    return RectangularAlignment.load(path) if format_of(path) == RECTANGULAR else Alignment.load(path)


def require_one_shape(via: AnyAlignment | str | Path) -> Alignment:
    """Return π, or read its file; refuse one between models of different shapes."""
    if isinstance(via, RectangularAlignment):
        raise other_shapes("this is")
    return via if isinstance(via, Alignment) else Alignment.load(via)


def map_name(target: str, source: str) -> str:
    """Return the name of the map from an axis of A to an axis of B."""
    return f"{target} <- {source}"


def _pair_info(pair: PartPair) -> dict[str, Any]:
    return asdict(pair)


def _pair(info: Mapping[str, Any]) -> PartPair:
    folds = {name: info[name] and NormFold(**info[name]) for name in ("fold_a", "fold_b")}
    roles = {name: Role(**info[name]) for name in ("target", "source")}
    return PartPair(**{**info, **folds, **roles})
