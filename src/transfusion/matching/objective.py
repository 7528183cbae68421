"""The objective ⟨π(A), B⟩, tensor by tensor, recomputed only where a map has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from transfusion.alignment.maps import Map
from transfusion.matching.weights.weight_pair import WeightPair
from transfusion.runtime.engines import Engine

_State: TypeAlias = tuple[Map | None, ...]
KEPT = 4
"""Scores kept of each tensor: for current and proposed maps, of a trial and of the copy that goes ahead."""


class Objective:
    """The scores ⟨π(A), B⟩ of all tensors, or of some, with a cache."""

    def __init__(self, weights: WeightPair, engine: Engine, names: Sequence[str] | None = None) -> None:
        self.weights, self.engine = weights, engine
        self.names = list(weights.tensors) if names is None else names
        self._known: dict[str, deque[tuple[_State, float]]] = {}

    def of(self, names: Sequence[str], maps: Mapping[str, Map]) -> dict[str, float]:
        """Return the scores of some tensors."""
        unknown = [name for name in names if self._find(name, maps) is None]
        items = [(name, self.weights.beside(name, maps)) for name in unknown]
        scores = self.engine.each(self.weights, _score, items)
        self.learn(dict(zip(unknown, scores, strict=True)), maps)
        return {name: self._find(name, maps) or 0.0 for name in names}

    def learn(self, scores: Mapping[str, float], maps: Mapping[str, Map]) -> None:
        """Keep scores that are known."""
        for name, score in scores.items():
            kept = self._known.setdefault(name, deque(maxlen=KEPT))
            kept.append((self._state(name, maps), score))

    def total(self, maps: Mapping[str, Map]) -> float:
        """Return the objective."""
        return sum(self.of(self.names, maps).values())

    def _find(self, name: str, maps: Mapping[str, Map]) -> float | None:
        state = self._state(name, maps)
        for known, score in self._known.get(name, ()):
            if all(one is other for one, other in zip(known, state, strict=True)):
                return score
        return None

    def _state(self, name: str, maps: Mapping[str, Map]) -> _State:
        return tuple(maps.get(id) for id in self.weights.tensors[name].names())


def _score(weights: WeightPair, item: tuple[str, Mapping[str, Map]]) -> float:
    return weights.score(*item)
