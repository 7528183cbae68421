"""How far B moved from A, block by block: what users of bases of one lineage want to know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from transfusion.alignment.maps import Map
from transfusion.architecture.naming import block_of
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Engine

OUTSIDE = "outside the blocks"
"""The name of everything that belongs to no block, such as embeddings."""


def base_drift(weights: WeightPair, maps: Mapping[str, Map], engine: Engine) -> dict[str, float]:
    """Return |B − π(A)| / |A| for every block."""
    moving = {id: map_ for id, map_ in maps.items() if not map_.is_identity()}
    items = [(name, weights.beside(name, moving)) for name in weights.tensors]
    blocks: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (name, _), sizes in zip(items, engine.map(partial(_distance, weights), items), strict=True):
        block = blocks[block_of(name) or OUTSIDE]
        block[0], block[1] = block[0] + sizes[0], block[1] + sizes[1]
    return {name: relative(moved, of_a) for name, (moved, of_a) in blocks.items()}


def _distance(weights: WeightPair, item: tuple[str, Mapping[str, Map]]) -> tuple[float, float]:
    return weights.distance(*item)


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
