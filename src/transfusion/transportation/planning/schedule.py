"""Schedules: when work is done that several cores share."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import pairwise

from transfusion.matching.weights.gain_products import BLOCK


def makespan(seconds: Iterable[float], places: int) -> float:
    """When the last task is done, if every place takes the next one as soon as it is free."""
    free = [0.0] * places
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def shared(height: int, cores: int) -> float:
    """The share of its time that a product takes when cores share its rows, some at a time."""
    edges = [*range(0, height, BLOCK), height]
    return makespan((end - start for start, end in pairwise(edges)), cores) / height if height else 1.0
