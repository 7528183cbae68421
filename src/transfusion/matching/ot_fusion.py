"""Fusion by optimal transport: one pass through the network, a transport plan for every axis.

After Imfeld et al., "Transformer Fusion with Optimal Transport" (ICLR 2024). The axes are solved once, in the
order of the forward pass. The cost of an axis is the distance between the features of B's units and A's, with
all earlier axes already mapped; the cheapest transport of A's units to B's is the axis's plan. Where a branch
returns to the residual stream, the plans of the branch and of the stream are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import Architecture, Shortcut
from transfusion.matching.activations.raw_activations import RawActivations
from transfusion.matching.methods import EvidenceKind, FusionOptions, StreamJoin
from transfusion.matching.solvers.transport_plans import hard_plan, soft_plan
from transfusion.matching.weights.incoming_weights import IncomingWeights
from transfusion.model.model import Model
from transfusion.runtime.devices import require_device


class _Features(Protocol):
    def features(self, id: str, maps: Mapping[str, Map]) -> tuple[Tensor, Tensor] | None: ...


def fuse(
    a: Model,
    b: Model,
    options: FusionOptions,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    on_axis: Callable[[str], None] = lambda axis: None,
) -> dict[str, Map]:
    """Return a map for every free axis of two models of one architecture and policy.

    An axis with children, such as the experts of a mixture, always gets a permutation: its children can
    follow only one of its units.
    """
    architecture = a.architecture
    weights = IncomingWeights(a, b, dtype=dtype, device=require_device(device))
    activations = (
        RawActivations(a, b, dtype=dtype, device=device, draws=options.draws)
        if options.evidence is EvidenceKind.ACTIVATIONS
        else None
    )
    maps: dict[str, Map] = {}
    sizes: dict[str, Tensor] = {}
    for space in architecture.free():
        found = _features(space.id, maps, activations, weights)
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
        on_axis(space.id)
    return maps


def _features(id: str, maps: Mapping[str, Map], *sources: _Features | None) -> tuple[Tensor, Tensor] | None:
    """Return the features of an axis from the first source that has any."""
    all_found = (source.features(id, maps) for source in sources if source is not None)
    return next((found for found in all_found if found is not None), None)


def distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return Euclidean distances between B's units and A's, each of length 1: (rows, size in B, size in A).

    Without the normalisation a short unit would be near to every other, and soft plans, which shorten what
    they mix, would make all later units short.
    """
    ours, theirs = (torch.nn.functional.normalize(units.double(), dim=2) for units in (ours, theirs))
    products = ours @ theirs.transpose(1, 2)
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
