"""Fusion by optimal transport: one pass through the network, a transport plan for every axis.

After Imfeld et al., "Transformer Fusion with Optimal Transport" (ICLR 2024). The axes are solved once, in the
order of the forward pass. The cost of an axis is the distance between the features of B's units and A's, with
all earlier axes already mapped; the cheapest transport of A's units to B's is the axis's plan. Where a branch
returns to the residual stream, the plans of the branch and of the stream are combined. Features are incoming
weights, or activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transfusion.alignment.maps import Map, move_tensor
from transfusion.architecture.architecture import Architecture, Shortcut
from transfusion.architecture.layouts import Layout
from transfusion.architecture.table import Symmetry
from transfusion.errors import SettingError
from transfusion.matching.assignment import assign
from transfusion.matching.methods import EvidenceKind, FusionOptions, StreamJoin
from transfusion.matching.weights import WeightPair, unfold
from transfusion.model.model import Model
from transfusion.running.activations import ModuleRecord, record_outputs
from transfusion.running.live_model import LiveModel


def fuse(
    a: Model,
    b: Model,
    options: FusionOptions,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    on_axis: Callable[[str, int], None] = lambda axis, total: None,
) -> dict[str, Map]:
    """Return a map for every free axis of two models of one architecture and policy.

    An axis with children, such as the experts of a mixture, always gets a permutation: its children can
    follow only one of its units.
    """
    architecture, weights = a.architecture, WeightPair(a, b, vectors=True, dtype=dtype, device=device)
    by_activations = options.evidence is EvidenceKind.ACTIVATIONS
    activations = (
        RawActivations(a, b, dtype=dtype, device=device, draws=options.draws) if by_activations else None
    )
    maps: dict[str, Map] = {}
    sizes: dict[str, Tensor] = {}
    for space in architecture.free():
        found = activations.features(space.id, maps) if activations else None
        found = weight_features(weights, space.id, maps) if found is None else found
        if found is not None:
            ours, theirs = found
            soft = options.soft and space.id not in architecture.children
            cost = distances(ours, theirs)
            own = soft_plan(cost, options.regularisation) if soft else hard_plan(cost)
            size = ours.norm(dim=2)[0]
            cut = _shortcut_to(space.id, architecture, maps)
            if cut is None:
                maps[space.id], sizes[space.id] = own, size
            else:
                measured = activations.stream(cut) if activations else None
                stream = sizes[cut.source] if measured is None else measured
                maps[space.id] = join(own, maps[cut.source], options.join, size, stream)
                sizes[space.id] = (size.square() + stream.square()).sqrt()
        on_axis(space.id, len(architecture.free()))
    return maps


def distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return Euclidean distances between B's units and A's, each of length 1: (rows, size in B, size in A).

    Without the normalisation a short unit would be near to every other, and soft plans, which shorten what
    they mix, would make all later units short.
    """
    ours, theirs = (torch.nn.functional.normalize(units.double(), dim=2) for units in (ours, theirs))
    products = ours @ theirs.transpose(1, 2)  # (rows, units of B, units of A)
    return (2 - 2 * products).clamp(min=0).sqrt()


def _shortcut_to(id: str, architecture: Architecture, maps: Mapping[str, Map]) -> Shortcut | None:
    """Return the shortcut that ends at this point of the stream, if its source has a map."""
    ending = (cut for cut in architecture.shortcuts if cut.target == id and cut.source != id)
    return next((cut for cut in ending if cut.source in maps), None)


def join(branch: Map, stream: Map, how: StreamJoin, branch_size: Tensor, stream_size: Tensor) -> Map:
    """Return one map for the point where a branch returns to the stream; sizes are norms per unit of B.

    Equal maps are kept; a mixture of different permutations is a transport plan.
    """
    if how is StreamJoin.BRANCH or branch == stream:
        return branch
    if how is StreamJoin.SHORTCUT:
        return stream
    share = torch.full_like(branch_size, 0.5, dtype=torch.float64)
    if how is StreamJoin.WEIGHTED:
        share = _share(branch_size.norm(), stream_size.norm()).expand_as(share)
    elif how is StreamJoin.MATRIX:
        share = _share(branch_size, stream_size)
    weights = share.cpu().numpy()[None, :, None]
    return Map.plan(weights * branch.matrix + (1 - weights) * stream.matrix)


def _share(first: Tensor, second: Tensor) -> Tensor:
    """Return the share of the first in the sum of both; a half where both are zero."""
    first, second = first.double(), second.double()
    total = first + second
    return torch.where(total > 0, first / total.clamp(min=torch.finfo(torch.float64).tiny), 0.5)


# ── features of units ────────────────────────────────────────────────────────────────────────


def weight_features(weights: WeightPair, id: str, maps: Mapping[str, Map]) -> tuple[Tensor, Tensor] | None:
    """Return B's units and A's as vectors, (rows, size, features), with A's other axes moved by ``maps``.

    The tensors that produce the axis count, with their biases. Tensors whose other axes have no map yet are
    left out if there are others; if no tensor produces the axis, all count.
    """
    architecture = weights.architecture
    around = architecture.sizes, architecture.parents
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for name, dim in _places(weights, id, maps):
        layout, moved = weights.tensors[name], weights.read("a", name)
        for at in range(len(layout.items)):  # all axes, except this one in its dimension
            here = maps if at != dim else {other: map_ for other, map_ in maps.items() if other != id}
            moved = move_tensor(moved, layout, here, *around, dims=[at])
        ours += unfold(weights.read("b", name), layout, id, dim, architecture)
        theirs += unfold(moved, layout, id, dim, architecture)
    return (torch.cat(ours, dim=2), torch.cat(theirs, dim=2)) if ours else None


def _places(weights: WeightPair, id: str, found: Container[str]) -> list[tuple[str, int]]:
    """Return the tensors and dimensions by which units are compared: the best kind that exists."""
    tensors, spaces = weights.tensors, weights.architecture.spaces

    def is_mapped(name: str) -> bool:
        return all(
            other == id or other in found or spaces[other].group is not Symmetry.PERMUTATION
            for other in tensors[name].names()
        )

    everywhere = [(name, dim) for name, layout in tensors.items() for dim in layout.dims_with(id)]
    matrices = [(name, dim) for name, dim in everywhere if len(tensors[name].items) > 1]
    producing = [(name, dim) for name, dim in matrices if dim in tensors[name].outputs]
    if known := [place for place in producing if is_mapped(place[0])]:
        biases = [
            (f"{name.removesuffix('weight')}bias", dim - tensors[name].outputs.start)
            for name, dim in known
            if name.endswith("weight")
        ]
        return [*known, *(place for place in biases if place[0] in tensors)]
    return [place for place in matrices if is_mapped(place[0])] or producing or matrices or everywhere


class RawActivations:
    """The outputs of the modules of A and B, over several draws of random inputs."""

    def __init__(
        self, a: Model, b: Model, *, dtype: torch.dtype, device: str, draws: int = 4, batch: int = 8
    ) -> None:
        self.architecture = a.architecture
        self._a, self._b = (_record(model, draws, batch, dtype, device) for model in (a, b))

    def features(self, id: str, maps: Mapping[str, Map]) -> tuple[Tensor, Tensor] | None:
        """Return B's units and A's as vectors, (rows, size, samples): the outputs of every module that
        produces the axis, or else of those that hand it on; None where no module's output has it.

        A's activations stay in A's order, whatever was found before; only ancestors of the axis are moved.
        """
        first_a, first_b = self._a[0].outputs, self._b[0].outputs
        having = [name for name in first_b if name in first_a and id in first_b[name][0].names()]
        producing = [name for name in having if self.architecture.tensors[f"{name}.weight"].arrow]
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        others = {other: map_ for other, map_ in maps.items() if other != id}
        for name in producing or having:
            for of_a, of_b in zip(self._a, self._b, strict=True):
                ours += self._unfolded(of_b.outputs[name], id, {})
                theirs += self._unfolded(of_a.outputs[name], id, others)
        return (torch.cat(ours, dim=2), torch.cat(theirs, dim=2)) if ours else None

    def stream(self, cut: Shortcut) -> Tensor | None:
        """Return the norm of each unit of B's stream where a shortcut begins."""
        values = [record.streams[cut.entry] for record in self._b if cut.entry in record.streams]
        if not values or values[0].shape[-1] != self.architecture.sizes[cut.source]:
            return None
        samples = torch.cat([value.flatten(0, -2) for value in values])
        return samples.square().sum(dim=0).sqrt()

    def _unfolded(self, output: tuple[Layout, Tensor], id: str, maps: Mapping[str, Map]) -> list[Tensor]:
        layout, value = output
        value = move_tensor(value, layout, maps, self.architecture.sizes, self.architecture.parents)
        return [
            piece
            for dim in layout.dims_with(id)
            for piece in unfold(value, layout, id, dim, self.architecture)
        ]


def _record(model: Model, draws: int, batch: int, dtype: torch.dtype, device: str) -> list[ModuleRecord]:
    """Run a model on some draws of random inputs."""
    live, records = LiveModel.of(model, device=device), list[ModuleRecord]()
    for seed in range(draws):
        with record_outputs(live) as record:
            live.drawn(model, batch=batch, seed=seed).outputs()
        outputs = {
            name: (layout, value.to(device, dtype)) for name, (layout, value) in record.outputs.items()
        }
        streams = {name: value.to(device, dtype) for name, value in record.streams.items()}
        records.append(ModuleRecord(outputs, streams))
    return records


SOFTEST, HARDEST = 100.0, 0.01
_ROUNDS = 500
_PRECISION = 1e-6


def hard_plan(cost: Tensor) -> Map:
    """Return the cheapest permutation for each row of a cost of shape (rows, size in B, size in A)."""
    return assign(-cost)


def soft_plan(cost: Tensor, regularisation: float) -> Map:
    """Return the entropically regularised plan for each row of a cost of that shape.

    The regularisation is in standard deviations of the row's costs, so that one value means the same in every
    layer: at 1 similar units mix freely, at 0.01 hardly any do.
    """
    if not HARDEST <= regularisation <= SOFTEST:
        raise SettingError(
            f"regularisation = {regularisation}: not between {HARDEST:g} and {SOFTEST:g}",
            hint="for less regularisation, use hard plans",
        )
    return Map.plan(np.stack([_sinkhorn(one, regularisation) for one in cost.cpu().double().numpy()]))


def _sinkhorn(cost: NDArray[np.float64], regularisation: float) -> NDArray[np.float64]:
    """Return a plan whose rows sum to 1 exactly, and whose columns do up to the rounds.

    Subtracting the least cost of every row and column changes no plan, and keeps the kernel from vanishing.
    """
    size, spread = len(cost), float(cost.std())
    if spread == 0:
        return np.full((size, size), 1 / size)
    cost = cost - cost.min(axis=1, keepdims=True)
    cost = cost - cost.min(axis=0, keepdims=True)
    weights = np.full(size, 1 / size)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # about convergence: rows are normalised below
        import ot

        plan = ot.sinkhorn(
            weights,
            weights,
            cost,
            regularisation * spread,
            method="sinkhorn_stabilized",
            numItermax=_ROUNDS,
            stopThr=_PRECISION,
            warn=False,
        )
    result: NDArray[np.float64] = plan / plan.sum(axis=1, keepdims=True)
    return result
