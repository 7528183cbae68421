"""Matching heads, groups of heads and the experts of a mixture, and the units within each.

Libraries keep the experts of a block in one module, and run each on the tokens that a router sends to it.
Here every neuron is computed from the weights, on all inputs of the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.layouts import Index, Layout, Name, names_in
from transfusion.architecture.table import Symmetry
from transfusion.matching.activations.axis_activations import AxisActivations, AxisPiece
from transfusion.matching.activations.procrustes import (
    mean_ratio,
    nearest,
    normalise_units,
    product_of_norms,
    unit,
    writing_rotation,
)
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.solvers.assignment import assign, best_totals
from transfusion.matching.solvers.rotary_pairs import split_pairs
from transfusion.running.activations import INPUT


@dataclass(frozen=True)
class _HeadCovariances:
    """Sums over the activations of heads: all that matching needs. The samples themselves are not kept."""

    axes: tuple[str, ...]
    covariances: Tensor
    """Of units: (B's head, query; A's head, query; B's unit, A's unit); without groups, one query."""
    sizes_a: Tensor
    """The norm of the activations of every head of A."""
    sizes_b: Tensor
    group: Symmetry = Symmetry.FIXED
    """How the units may be rotated: freely, in pairs, or not at all."""

    @classmethod
    def of(cls, piece: AxisPiece, group: Symmetry) -> _HeadCovariances:
        a, b = (one if one.ndim == 4 else one.unsqueeze(1) for one in (piece.a, piece.b))
        sizes_a, sizes_b = (torch.linalg.vector_norm(one, dim=(1, 2, 3)) for one in (a, b))
        covariances = torch.einsum("hrun,gsvn->hrgsuv", b, a).div_(product_of_norms(sizes_b, sizes_a))
        return cls(piece.axes, covariances, sizes_a, sizes_b, group)

    @property
    def sharing(self) -> str | None:
        """The axis between the head and the units: the queries that share a key head."""
        return self.axes[1] if len(self.axes) == 3 else None

    def norm_ratio(self, i: int, j: int) -> float:
        """Return the ratio of the norms of B's head i and A's head j."""
        return float(self.sizes_b[i] / self.sizes_a[j].clamp(min=1e-30))

    @cached_property
    def agreement(self) -> Tensor:
        """The agreement under the best rotation: (B's head, query; A's head, query)."""
        if self.group is Symmetry.PERMUTATION:
            return nuclear_norms(self.covariances)
        if self.group.rotates_pairs:
            return split_pairs(self.covariances, self.group).abs().sum(-1)
        return torch.diagonal(self.covariances, dim1=-2, dim2=-1).sum(-1)

    def head_scores(self) -> Tensor:
        """Return the agreement of whole heads, with their queries assigned in the best way."""
        return self.summed_over_queries(self.agreement.unsqueeze(-1)).squeeze(-1)

    def planes(self) -> Tensor:
        """Return the complex covariances of rotary planes: (B's head, A's head, plane)."""
        return self.summed_over_queries(split_pairs(self.covariances, self.group))

    def summed_over_queries(self, values: Tensor) -> Tensor:
        """Sum over the queries of a head, under the best assignment for each pair of heads."""
        heads, sharing = self.agreement.shape[:2]
        by_pair = self.agreement.permute(0, 2, 1, 3).reshape(heads * heads, sharing, sharing)
        assigned = torch.from_numpy(assign(by_pair).index).to(values.device)[:, :, None, None]
        rest = values.permute(0, 2, 1, 3, 4).reshape(heads * heads, sharing, sharing, -1)
        return rest.take_along_dim(assigned, dim=2).sum((1, 2)).reshape(heads, heads, -1)


def nuclear_norms(matrices: Tensor) -> Tensor:
    """Return the sum of the singular values of every matrix, from the eigenvalues of its products."""
    products = matrices.double()
    squares = torch.linalg.eigvalsh(products.transpose(-1, -2) @ products)
    norms: Tensor = squares.clamp(min=0).sqrt().sum(-1)
    return norms


def match_heads(
    evidence: AxisActivations, id: str, options: FunctionalOptions, known: Mapping[str, Map]
) -> dict[str, Map]:
    """Match heads by their agreement under the best rotation, and then rotate the units of every pair.

    ``known`` has the maps of axes that all heads share.
    """
    spaces = evidence.architecture.spaces
    free = spaces[id].group is not Symmetry.FIXED
    members = {
        child.id: child.group
        for child in spaces.values()
        if child.parent == id and child.group is not Symmetry.FIXED
    }
    views = _summed(evidence.pieces(id), id, members, known)
    if not views:
        return {}
    maps: dict[str, Map] = {}
    order = Map.identity(evidence.sizes[id])
    if free:
        maps[id] = order = assign(_head_scores(views)[None])
    heads = order.index[0].tolist()
    queries = _query_maps(views, heads)
    maps.update({axis: map_ for axis, map_ in queries.items() if axis in members})
    gradients = _summed(evidence.gradients(id), id, members) if options.gradients else []
    for child in sorted(members.keys() - queries.keys()):
        mine, back = ([view for view in some if view.axes[-1] == child] for some in (views, gradients))
        if mine:
            maps[child] = _unit_rotation(mine, back, heads, queries, options)
    return maps


def _summed(
    pieces: Iterable[AxisPiece],
    id: str,
    members: Mapping[str, Symmetry],
    known: Mapping[str, Map] = MappingProxyType({}),
) -> list[_HeadCovariances]:
    """Return the sums of all activations of heads; nobody holds samples while the next ones are read."""

    def is_by_head(piece: AxisPiece) -> bool:
        return piece.axes[0] == id and len(piece.axes) in (2, 3)

    def summed(piece: AxisPiece) -> _HeadCovariances:
        group = members.get(piece.axes[-1], Symmetry.FIXED)
        return _HeadCovariances.of(_with_known(piece, known), group)

    return list(map(summed, filter(is_by_head, pieces)))


def _head_scores(views: Sequence[_HeadCovariances]) -> Tensor:
    """Return the scores of all pairs of heads. In each rotary plane, queries and keys rotate by one angle."""
    scores = [view.head_scores() for view in views if not view.group.rotates_pairs]
    rotary = {view.axes[-1] for view in views if view.group.rotates_pairs}
    for axis in sorted(rotary):
        planes = [view.planes() for view in views if view.axes[-1] == axis]
        scores.append(torch.stack(planes).sum(0).abs().sum(-1))
    return torch.stack(scores).sum(0)


def _with_known(piece: AxisPiece, known: Mapping[str, Map]) -> AxisPiece:
    """Return the piece with A's units of the last axis moved by their map, if there is one."""
    map_ = known.get(piece.axes[-1])
    if map_ is None or map_.blocks != 1:
        return piece
    return replace(piece, a=map_.reading.apply(piece.a, piece.a.ndim - 2))


def _query_maps(views: Sequence[_HeadCovariances], heads: Sequence[int]) -> dict[str, Map]:
    """Return the permutation of the queries within every head of B."""
    sharing = [view for view in views if view.sharing is not None]
    if not sharing:
        return {}
    total = torch.stack([view.agreement for view in sharing]).sum(0)
    axis = sharing[0].sharing
    assert axis is not None
    return {axis: assign(torch.stack([total[i, :, j, :] for i, j in enumerate(heads)]))}


def _unit_rotation(
    views: Sequence[_HeadCovariances],
    gradients: Sequence[_HeadCovariances],
    heads: Sequence[int],
    queries: dict[str, Map],
    options: FunctionalOptions,
) -> Map:
    """Return the rotation of the units within every head of B, from those of its head of A."""
    group = views[0].group
    matrices: list[Tensor] = []
    writing: list[Tensor] = []
    sizes: list[float] = []
    for i, j in enumerate(heads):
        together = _of_heads(views, i, j, queries)
        matrices.append(nearest(together, group))
        if gradients:
            back = _of_heads(gradients, i, j, queries)
            writing.append(writing_rotation(together, back, options.gradients, group))
        ratio = mean_ratio(view.norm_ratio(i, j) for view in views)
        sizes.append(ratio or 1.0 if options.scaled else 1.0)
    return Map.rotation(
        torch.stack(matrices).float().cpu().numpy(),
        np.array(sizes),
        np.array(sizes),
        torch.stack(writing).float().cpu().numpy() if writing else None,
    )


def _of_heads(views: Sequence[_HeadCovariances], i: int, j: int, queries: dict[str, Map]) -> Tensor:
    """Return the covariance of the units of B's head i and A's head j, over all queries of both."""
    together = views[0].covariances.new_zeros(())
    for view in views:
        query: Index = queries[view.sharing].index[i] if view.sharing else np.zeros(1, dtype=np.int64)
        for r, s in enumerate(query.tolist()):
            together = together + view.covariances[i, r, j, s]
    return together


COMPARED = 4096
"""The most neurons of all experts together by which experts are compared."""


@dataclass(frozen=True)
class _Stack:
    """A tensor with the matrices of all experts, whose outputs are the experts' neurons."""

    evidence: AxisActivations
    name: str
    experts: str
    neurons: str

    @property
    def inputs(self) -> tuple[Tensor, Tensor] | None:
        """The inputs of the experts, in A and in B."""
        return self.evidence.pair(self.name.rpartition(".")[0], INPUT)

    def outputs(self, given: tuple[Tensor, Tensor], which: int, expert: int) -> Tensor:
        """Return the outputs of one expert's neurons on all samples; gate and up, if it has both, joined."""
        model = (self.evidence.a, self.evidence.b)[which]
        (weight,) = model.read(self.name, slice(expert, expert + 1)).to(given[which])
        parts = weight.split(self.evidence.sizes[self.neurons])
        return torch.cat([unit(part @ given[which].T) for part in parts], dim=1)


def expert_stacks(evidence: AxisActivations) -> dict[str, _Stack]:
    """Return the axes of experts: those with a dimension of their own before that of their children."""
    return {stack.experts: stack for stack in _stacks(evidence)}


def _stacks(evidence: AxisActivations) -> Iterator[_Stack]:
    parents = evidence.architecture.parents
    for name, layout in evidence.architecture.tensors.items():
        if len(layout.outputs) == 2 and isinstance(experts := layout.items[layout.outputs[0]], Name):
            within = set(names_in(layout.items[layout.outputs[1]]))
            if len(within) == 1 and parents.get(neurons := within.pop()) == experts.text:
                yield _Stack(evidence, name, experts.text, neurons)


def match_experts(stack: _Stack) -> dict[str, Map]:
    """Match experts by the correlation of the router's outputs and of their best-matched neurons.

    Then match the neurons of every pair. Gates multiply, so neurons are permuted, not rotated.
    """
    evidence, given = stack.evidence, stack.inputs
    if given is None:
        return {}
    order = assign((_router_agreement(stack, given) + _neuron_agreement(stack, given))[None])
    neurons = []
    for i, j in enumerate(order.index[0].tolist()):
        b, a = normalise_units(stack.outputs(given, 1, i)), normalise_units(stack.outputs(given, 0, j))
        neurons.append(assign((b @ a.T)[None]).index[0])
    moving = {space.id for space in evidence.architecture.moving()}
    maps = {stack.experts: order, stack.neurons: Map.permutation(np.stack(neurons))}
    return {id: map_ for id, map_ in maps.items() if id in moving}


def _neuron_agreement(stack: _Stack, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean correlation of the most active neurons, best matched: (B's expert, A's expert)."""
    count, size = stack.evidence.sizes[stack.experts], stack.evidence.sizes[stack.neurons]
    some = min(size, max(8, COMPARED // count))
    a, b = (
        torch.stack([_most_active(stack.outputs(given, which, expert), some) for expert in range(count)])
        for which in (0, 1)
    )
    together = torch.einsum("ikn,jln->ijkl", normalise_units(b), normalise_units(a))
    return best_totals(together.flatten(0, 1).cpu())[1].to(a).reshape(count, count) / some


def _most_active(values: Tensor, count: int) -> Tensor:
    return values[torch.linalg.vector_norm(values, dim=1).topk(count).indices]


def _router_agreement(stack: _Stack, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the correlation of the router's logits: (B's expert, A's expert).

    The mean over experts changes no routing, and is subtracted.
    """
    count = stack.evidence.sizes[stack.experts]
    total = given[0].new_zeros(count, count)
    for name, layout in stack.evidence.architecture.tensors.items():
        if _is_router(layout, stack.experts):
            weights = (model.read(name).to(given[0]) for model in (stack.evidence.a, stack.evidence.b))
            a, b = (
                normalise_units((one - one.mean(0)) @ samples.T)
                for one, samples in zip(weights, given, strict=True)
            )
            total = total + b @ a.T
    return total


def _is_router(layout: Layout, experts: str) -> bool:
    outputs = [layout.items[dim] for dim in layout.outputs]
    return outputs == [Name(experts)] and layout.arrow == "<-" and len(layout.inputs) == 1
