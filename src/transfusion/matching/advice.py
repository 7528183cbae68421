"""Advice: whether to align two models at all, and how far B moved from A if it descends from it.

Three objectives are compared. A high objective of the identity means that B descends from A: the task vector
is added as it is. The objective of the search is compared with a null: the same search on a B whose units
are shuffled in every tensor independently, so that there is no correspondence to find. A search always
raises the objective; only what exceeds the null is a correspondence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import fmean, stdev
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor

from transfusion.alignment.maps import Map, Mover
from transfusion.architecture.naming import block_of
from transfusion.files.tensor_files import Rows
from transfusion.matching.methods import INSIST, WITH_TRAINING, WITHOUT_TRAINING
from transfusion.matching.search import CHANCE, UNMOVED, Search, Trial, search_blocks
from transfusion.matching.weights import WeightPair, tensor_products
from transfusion.runtime.engines import Engine

BLOCKS_OF_THE_NULL = 24
"""How many blocks in the middle of the model the null is searched in."""
SAMPLE = 4
"""About how many axes of each kind agreements are measured on, if there is no null."""
LINEAGE = 0.8
"""B descends from A if the identity reaches this share of the best objective."""
MATERIAL = 0.1
"""From this share of the way from the null to a perfect match, a correspondence counts as found."""
CERTAIN = 3.0
"""The standard deviations beyond the null that a correspondence must have as well."""


class Verdict(StrEnum):
    """The conclusion: add the task vector as it is, move it, or do something else."""

    ADD = "same lineage"
    MOVE = "alignable"
    DOUBT = "not alignable by permutation"


@dataclass(frozen=True)
class AgreementMargin:
    """One kind of axis, over all layers. Agreements are correlations: 1 is perfect."""

    identity: float
    """How far the identity is above chance, in standard deviations."""
    home: float
    """The share of units that are in place."""
    found: float
    """The mean agreement under the maps found."""
    null: float | None
    """The mean agreement of the null."""
    beyond: float | None
    """How far ``found`` is beyond the null, in standard deviations of the null over layers."""


@dataclass(frozen=True)
class Advice:
    """The verdict on two models, and the numbers behind it."""

    verdict: Verdict
    text: str
    instead: str
    """What to do instead of moving a task vector by this π, if anything."""
    identity: float
    """The objective of the identity."""
    found: float
    """The objective of the maps found."""
    share: float | None
    """The share of the way from the null to a perfect match; None without a null."""
    margins: Mapping[str, AgreementMargin]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a file."""
        return asdict(self)


def advise(search: Search, trial: Trial) -> Advice:
    """Compare the maps found with the identity and with a null, and conclude.

    If all units are in place no null is searched: the similarity in place has measured chance already.
    Agreements are those of the axes in the null, or of a few of each kind: reading all tensors once more
    would take as long as a sweep.
    """
    search.gains.forget()
    null = {} if trial.name == UNMOVED else _null(search)
    agreed = agreements(search.weights, trial.maps, list(null) or _sample(search), search.engine)
    permuted_only = bool(search.weights.architecture.unrotated)
    margins = _margins(search, agreed, null)
    return _conclude(trial.trace[0], trial.trace[-1], margins, permuted_only=permuted_only)


def agreements(
    weights: WeightPair, maps: Mapping[str, Map], ids: Iterable[str], engine: Engine
) -> dict[str, float]:
    """Return for every axis the correlation of π(A) and B over the tensors that have it."""
    parts = tensor_products(weights, weights.tensors_with(ids), maps, engine, "ab", "aa", "bb")
    agreed: dict[str, float] = {}
    for id in ids:
        product, square_a, square_b = (
            sum(parts[name][part] for name in weights.tensors_of[id]) for part in range(3)
        )
        agreed[id] = product / (square_a * square_b) ** 0.5 if square_a and square_b else 0.0
    return agreed


class _Shuffled(WeightPair):
    """Two models, with the units of the second shuffled differently in every tensor."""

    def read(self, side: str, name: str, rows: Rows | None = None) -> Tensor:
        of_model = partial(super().read, side, name)
        if side == "a":
            return of_model(rows)
        every = slice(0, self.b.info(name).shape[0])
        return self._shuffled(name).move_rows(of_model, every if rows is None else rows)

    def _shuffled(self, name: str) -> Mover:
        architecture, layout = self.architecture, self.tensors[name]
        rng = np.random.default_rng(crc32(name.encode()))
        maps: dict[str, Map] = {
            id: Map.random(architecture.sizes[id], architecture.rows(id), rng) for id in layout.names()
        }
        return Mover(layout, maps, architecture.sizes, architecture.parents)


def _null(search: Search) -> dict[str, float]:
    """Search the null, and return the agreement of every axis whose neighbours all took part."""
    real, method = search.weights, search.method
    weights = _Shuffled(real.a, real.b, vectors=method.vectors, **real.place)
    brief = replace(method, starts=method.starts[:1], restarts=0, max_sweeps=2, screen=False)
    middle, whole = middle_axes(search)
    engine, limit = search.engine, search.gains.limit
    null = Search(weights, brief, seed=search.seed, engine=engine, limit=limit, only=middle)
    return agreements(weights, null.run().maps, whole, engine)


def middle_axes(search: Search) -> tuple[list[str], list[str]]:
    """Return the axes in the middle of the model, and those of them with all their neighbours among them.

    Return all axes twice, if some kind of axis would be left out, such as the one map of a tied stream.
    """
    weights, axes = search.weights, search.weights.axes
    found = search_blocks(weights, search.method)
    first = max(0, (len(found) - BLOCKS_OF_THE_NULL) // 2)
    middle = [id for block in found[first : first + BLOCKS_OF_THE_NULL] for id in block.ids]
    whole = [id for id in middle if weights.neighbours[id] & set(axes) <= set(middle)]
    kinds = {weights.architecture.spaces[id].axis for id in axes}
    if {weights.architecture.spaces[id].axis for id in whole} == kinds:
        return middle, whole
    return axes, axes


def _sample(search: Search) -> list[str]:
    """Return a few axes of each kind, evenly spaced."""
    return [id for ids in _kinds(search).values() for id in ids[:: max(1, len(ids) // SAMPLE)]]


def _kinds(search: Search) -> dict[str, list[str]]:
    """Return the axes of each kind."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for id in search.weights.axes:
        kinds[search.weights.architecture.spaces[id].axis].append(id)
    return kinds


def _margins(
    search: Search, agreed: Mapping[str, float], null: Mapping[str, float]
) -> dict[str, AgreementMargin]:
    margins: dict[str, AgreementMargin] = {}
    for kind, members in _kinds(search).items():
        compared = [id for id in members if id in agreed]
        chance = [null[id] for id in compared if id in null]
        found = fmean(agreed[id] for id in compared)
        spread = stdev(chance) if len(chance) > 1 else 0.0
        margins[kind] = AgreementMargin(
            identity=fmean(search.in_place[id].margin for id in members),
            home=fmean(search.in_place[id].home for id in members),
            found=found,
            null=fmean(chance) if chance else None,
            beyond=(found - fmean(chance)) / spread if spread else None,
        )
    return margins


def _conclude(
    identity: float, found: float, margins: Mapping[str, AgreementMargin], *, permuted_only: bool
) -> Advice:
    compared = [margin for margin in margins.values() if margin.null is not None]
    shares = [(m.found - m.null) / (1 - m.null) for m in margins.values() if m.null is not None]
    share = fmean(shares) if shares else None
    certain = [m for m in compared if m.beyond is None or m.beyond > CERTAIN]
    unmoved = [m for m in margins.values() if m.identity > CHANCE]
    instead = ""
    if identity >= LINEAGE * found and 2 * len(unmoved) > len(margins):
        verdict = Verdict.ADD
        text = "the units of B are where A has them: B descends from A, and a change of A fits B as it is"
        if found < identity:
            text += f"; this method moved some of them ({found:.6g} against {identity:.6g})"
            instead = "leave out `method`, and the task vector is added as it is"
    elif share is not None and share >= MATERIAL and 2 * len(certain) > len(compared):
        verdict = Verdict.MOVE
        text = "the units of A were found again in B"
    else:
        verdict = Verdict.DOUBT
        text = "a permutation matches the units of A and B hardly better than chance"
        if share is not None:
            text += f" ({max(share, 0.0):.0%} of the way to a perfect match; {MATERIAL:.0%} would count)"
        instead = what_else(rotates=not permuted_only)
    return Advice(verdict, text, instead, identity, found, share, dict(margins))


def what_else(*, refines: bool = True, rotates: bool = True, insists: bool = False) -> str:
    """Return what to do where no permutation matches, of what a verb and two models are able to do."""
    parts = [(refines, WITH_TRAINING), (rotates, WITHOUT_TRAINING), (insists, INSIST)]
    return " ".join(text for there, text in parts if there) or "Fine-tune B itself."


OUTSIDE = "outside the blocks"
"""The name of everything that belongs to no block, such as embeddings."""


def base_drift(weights: WeightPair, maps: Mapping[str, Map], engine: Engine) -> dict[str, float]:
    """Return |B − π(A)| / |A| for every block."""
    moving = {id: map_ for id, map_ in maps.items() if not map_.is_identity()}
    by_block: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    products = tensor_products(weights, list(weights.tensors), moving, engine, "dd", "aa")
    for name, squares in products.items():
        block = by_block[block_of(name) or OUTSIDE]
        block[0], block[1] = block[0] + squares[0], block[1] + squares[1]
    return {name: relative(moved, of_a) for name, (moved, of_a) in by_block.items()}


def relative(change: float, whole: float) -> float:
    """Return the size of a change relative to that of the whole, from the squares of both."""
    return round((change / whole) ** 0.5, 6) if whole else 0.0


def describe_drift(drift: Mapping[str, float]) -> str:
    """Return in one sentence how far B's weights are from A's."""
    blocks = {name: moved for name, moved in drift.items() if name != OUTSIDE} or dict(drift)
    most = max(blocks, key=blocks.__getitem__)
    least, largest = min(blocks.values()), blocks[most]
    if largest == 0:
        return "B's blocks are exactly A's"
    first, last = f"{least:.1%}", f"{largest:.1%}"
    if first == last:
        return f"B's weights differ from A's by {last}" + " in every block" * (len(blocks) > 1)
    return f"B's weights differ from A's by {first} to {last}, most in {most}"
