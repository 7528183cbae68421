"""Features of units from the weights that produce them, for optimal transport."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.alignment.moves import move_dim
from transfusion.architecture.table import Symmetry
from transfusion.matching.weights.unit_vectors import unfold
from transfusion.model.model import Model
from transfusion.model.pair import shared_tensors


class IncomingWeights:
    """The incoming weights of two models of one architecture."""

    def __init__(self, a: Model, b: Model, *, dtype: torch.dtype, device: str) -> None:
        self.a, self.b, self.dtype, self.device = a, b, dtype, device
        self.architecture = a.architecture
        self.tensors = {name: a.architecture.tensors[name] for name in shared_tensors(a, b)}

    def features(self, id: str, maps: Mapping[str, Map]) -> tuple[Tensor, Tensor] | None:
        """Return B's units and A's as vectors, (rows, size, features), with A's other axes moved by ``maps``.

        The tensors that produce the axis count, with their biases. Tensors whose other axes have no map yet
        are left out if there are others; if no tensor produces the axis, all count.
        """
        places = self._places(id, maps)
        if not places:
            return None
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for name, dim in places:
            layout = self.tensors[name]
            ours += unfold(self._read(self.b, name), layout, id, dim, self.architecture)
            theirs += unfold(self._moved(name, dim, id, maps), layout, id, dim, self.architecture)
        return torch.cat(ours, dim=2), torch.cat(theirs, dim=2)

    def _read(self, model: Model, name: str) -> Tensor:
        return model.read(name).to(device=self.device, dtype=self.dtype)

    def _moved(self, name: str, dim: int, id: str, maps: Mapping[str, Map]) -> Tensor:
        """Return a tensor of A with all axes moved, except the axis in question in its dimension."""
        layout, tensor = self.tensors[name], self._read(self.a, name)
        others = {other: map_ for other, map_ in maps.items() if other != id}
        for at in range(len(layout.items)):
            here = others if at == dim else maps
            tensor = move_dim(tensor, at, layout, here, self.architecture.sizes, self.architecture.parents)
        return tensor

    def _places(self, id: str, found: Container[str]) -> list[tuple[str, int]]:
        """Return the tensors and dimensions by which units are compared: the best kind that exists."""
        everywhere = list(self._occurrences(id))
        matrices = [(name, dim) for name, dim in everywhere if len(self.tensors[name].items) > 1]
        producing = [(name, dim) for name, dim in matrices if dim in self.tensors[name].outputs]
        kinds = (
            [place for place in producing if self._is_mapped(id, place[0], found)],
            [place for place in matrices if self._is_mapped(id, place[0], found)],
            producing,
            matrices,
        )
        best = next((places for places in kinds if places), everywhere)
        return [*best, *self._biases(best)] if best is kinds[0] else best

    def _occurrences(self, id: str) -> Iterator[tuple[str, int]]:
        for name in self.architecture.occurrences[id]:
            if layout := self.tensors.get(name):
                yield from ((name, dim) for dim in layout.dims_with(id))

    def _is_mapped(self, id: str, name: str, found: Container[str]) -> bool:
        """Return whether every other axis of a tensor has a map, or needs none."""
        return all(
            other == id or other in found or self.architecture.spaces[other].group is not Symmetry.PERMUTATION
            for other in self.tensors[name].names()
        )

    def _biases(self, places: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yield the biases of weights; their dimensions are the outputs of the weights."""
        for name, dim in places:
            bias = f"{name.removesuffix('weight')}bias"
            if name.endswith("weight") and bias in self.tensors:
                yield bias, dim - self.tensors[name].outputs.start
