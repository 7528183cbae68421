"""Matching heads, groups of heads and the experts of a mixture, and the units within each.

Libraries keep the experts of a block in one module, and run each on the tokens that a router sends to it.
Here every neuron is computed from the weights, on all inputs of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.layouts import Layout, Name, names_in
from transfusion.architecture.table import Symmetry
from transfusion.matching.activations import ActivationPair, AxisPiece
from transfusion.matching.assignment import assign, best_totals
from transfusion.matching.methods import FunctionalOptions
from transfusion.matching.procrustes import (
    mean_ratio,
    nearest,
    normalise_units,
    product_of_norms,
    split_pairs,
    unit,
)
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
    def of(cls, piece: AxisPiece, group: Symmetry, known: Map | None = None) -> _HeadCovariances:
        """Sum over the samples of a piece; ``known`` is the map of its units, if all heads share it."""
        of_a = piece.a if known is None or known.blocks > 1 else known.apply(piece.a, piece.a.ndim - 2)
        # (heads, queries, units, samples)
        a, b = (one if one.ndim == 4 else one.unsqueeze(1) for one in (of_a, piece.b))
        sizes_a, sizes_b = (torch.linalg.vector_norm(one, dim=(1, 2, 3)) for one in (a, b))
        covariances = torch.einsum("hrun,gsvn->hrgsuv", b, a).div_(product_of_norms(sizes_b, sizes_a))
        return cls(piece.axes, covariances, sizes_a, sizes_b, group)

    @property
    def sharing(self) -> str | None:
        """The axis between the head and the units: the queries that share a key head."""
        return self.axes[1] if len(self.axes) == 3 else None

    @cached_property
    def agreement(self) -> Tensor:
        """The agreement under the best rotation: (B's head, query; A's head, query)."""
        if self.group is Symmetry.PERMUTATION:
            return nuclear_norms(self.covariances)
        if self.group.rotates_pairs:
            return split_pairs(self.covariances, self.group).abs().sum(-1)
        return torch.diagonal(self.covariances, dim1=-2, dim2=-1).sum(-1)

    def summed_over_queries(self, values: Tensor) -> Tensor:
        """Sum over the queries of a head, under the best assignment for each pair of heads."""
        heads, sharing = self.agreement.shape[:2]
        # (pairs, queries of B, queries of A)
        by_pair = self.agreement.permute(0, 2, 1, 3).reshape(heads * heads, sharing, sharing)
        assigned = torch.from_numpy(assign(by_pair).index).to(values.device)[:, :, None, None]
        rest = values.permute(0, 2, 1, 3, 4).reshape(heads * heads, sharing, sharing, -1)
        return rest.take_along_dim(assigned, dim=2).sum((1, 2)).reshape(heads, heads, -1)


def nuclear_norms(matrices: Tensor) -> Tensor:
    """Return the sum of the singular values of every matrix, from the eigenvalues of its products."""
    products = matrices.double()
    squares = torch.linalg.eigvalsh(products.transpose(-1, -2) @ products)  # σ² of every matrix
    norms: Tensor = squares.clamp(min=0).sqrt().sum(-1)
    return norms


def match_heads(
    probed: ActivationPair, id: str, options: FunctionalOptions, known: Mapping[str, Map]
) -> dict[str, Map]:
    """Match heads by their agreement under the best rotation, and then rotate the units of every pair.

    ``known`` has the maps of axes that all heads share.
    """
    spaces = probed.architecture.spaces
    members = {
        child.id: child.group
        for child in spaces.values()
        if child.parent == id and child.group is not Symmetry.FIXED
    }
    views: list[_HeadCovariances] = []
    for piece in probed.pieces(id):
        if piece.axes[0] == id and len(piece.axes) in (2, 3):
            axis = piece.axes[-1]
            views.append(_HeadCovariances.of(piece, members.get(axis, Symmetry.FIXED), known.get(axis)))
        del piece  # before the next one is read
    if not views:
        return {}
    maps: dict[str, Map] = {}
    order = Map.identity(probed.sizes[id])
    if spaces[id].group is not Symmetry.FIXED:
        maps[id] = order = assign(_head_scores(views)[None])
    heads = order.index[0].tolist()
    queries: dict[str, Map] = {}
    for sharing in dict.fromkeys(view.sharing for view in views if view.sharing):
        total = torch.stack([view.agreement for view in views if view.sharing == sharing]).sum(0)
        pairs = torch.stack([total[i, :, j, :] for i, j in enumerate(heads)])  # (heads, queries, queries)
        queries[sharing] = assign(pairs)
    maps.update({axis: map_ for axis, map_ in queries.items() if axis in members})
    for child in sorted(members.keys() - queries.keys()):
        if mine := [view for view in views if view.axes[-1] == child]:
            maps[child] = _unit_rotation(mine, heads, queries, options)
    return maps


def _head_scores(views: Sequence[_HeadCovariances]) -> Tensor:
    """Return the scores of all pairs of heads. In each rotary plane, queries and keys rotate by one angle."""
    scores: list[Tensor] = []
    planes: dict[str, Tensor] = {}
    for view in views:
        if view.group.rotates_pairs:
            found = view.summed_over_queries(split_pairs(view.covariances, view.group))
            planes[view.axes[-1]] = planes.get(view.axes[-1], 0) + found
        else:
            scores.append(view.summed_over_queries(view.agreement.unsqueeze(-1)).squeeze(-1))
    return torch.stack([*scores, *(one.abs().sum(-1) for one in planes.values())]).sum(0)


def _unit_rotation(
    views: Sequence[_HeadCovariances],
    heads: Sequence[int],
    queries: Mapping[str, Map],
    options: FunctionalOptions,
) -> Map:
    """Return the rotation of the units within every head of B, from those of its head of A."""
    matrices: list[Tensor] = []
    sizes: list[float] = []
    for i, j in enumerate(heads):
        together = views[0].covariances.new_zeros(())
        for view in views:
            query = queries[view.sharing].index[i].tolist() if view.sharing else [0]
            together = together + view.covariances[i, range(len(query)), j, query].sum(0)
        matrices.append(nearest(together, views[0].group))
        ratio = mean_ratio(float(one.sizes_b[i] / one.sizes_a[j].clamp(min=1e-30)) for one in views)
        sizes.append(ratio or 1.0 if options.scaled else 1.0)
    return Map.rotation(torch.stack(matrices).float().cpu().numpy(), sizes, sizes)


COMPARED = 4096
"""The most neurons of all experts together by which experts are compared."""


@dataclass(frozen=True)
class ExpertStack:
    """A tensor with the matrices of all experts, whose outputs are the experts' neurons."""

    probed: ActivationPair
    name: str
    experts: str
    neurons: str

    @property
    def inputs(self) -> tuple[Tensor, Tensor] | None:
        """The inputs of the experts, in A and in B."""
        return self.probed.pair(self.name.rpartition(".")[0], INPUT)

    def outputs(self, given: tuple[Tensor, Tensor], which: int, expert: int) -> Tensor:
        """Return the outputs of one expert's neurons on all samples; gate and up, if it has both, joined."""
        model = (self.probed.a, self.probed.b)[which].model
        (weight,) = model.read(self.name, slice(expert, expert + 1)).to(given[which])
        parts = weight.split(self.probed.sizes[self.neurons])
        return torch.cat([unit(part @ given[which].T) for part in parts], dim=1)  # (neurons, samples · parts)


def expert_stacks(probed: ActivationPair) -> dict[str, ExpertStack]:
    """Return the axes of experts: those with a dimension of their own before that of their children."""
    return {stack.experts: stack for stack in _stacks(probed)}


def _stacks(probed: ActivationPair) -> Iterator[ExpertStack]:
    parents = probed.architecture.parents
    for name, layout in probed.architecture.tensors.items():
        if len(layout.outputs) == 2 and isinstance(experts := layout.items[layout.outputs[0]], Name):
            within = set(names_in(layout.items[layout.outputs[1]]))
            if len(within) == 1 and parents.get(neurons := within.pop()) == experts.text:
                yield ExpertStack(probed, name, experts.text, neurons)


def match_experts(stack: ExpertStack) -> dict[str, Map]:
    """Match experts by the correlation of the router's outputs and of their best-matched neurons.

    Then match the neurons of every pair. Gates multiply, so neurons are permuted, not rotated.
    """
    probed, given = stack.probed, stack.inputs
    if given is None:
        return {}
    order = assign((_router_agreement(stack, given) + _neuron_agreement(stack, given))[None])
    neurons = []
    for i, j in enumerate(order.index[0].tolist()):
        b, a = normalise_units(stack.outputs(given, 1, i)), normalise_units(stack.outputs(given, 0, j))
        gain = (b @ a.T)[None]  # (1, neurons of B, neurons of A)
        neurons.append(assign(gain).index[0])
    maps = {stack.experts: order, stack.neurons: Map.permutation(np.stack(neurons))}
    return {id: map_ for id, map_ in maps.items() if id in probed.moving}


def _neuron_agreement(stack: ExpertStack, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean correlation of the most active neurons, best matched: (B's expert, A's expert)."""
    count, size = stack.probed.sizes[stack.experts], stack.probed.sizes[stack.neurons]
    some = min(size, max(8, COMPARED // count))
    a, b = (
        torch.stack([_most_active(stack.outputs(given, which, expert), some) for expert in range(count)])
        for which in (0, 1)
    )
    together = torch.einsum("ikn,jln->ijkl", normalise_units(b), normalise_units(a))
    return best_totals(together.flatten(0, 1).cpu())[1].to(a).reshape(count, count) / some


def _most_active(values: Tensor, count: int) -> Tensor:
    return values[torch.linalg.vector_norm(values, dim=1).topk(count).indices]


def _router_agreement(stack: ExpertStack, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the correlation of the router's logits: (B's expert, A's expert).

    The mean over experts changes no routing, and is subtracted.
    """
    count = stack.probed.sizes[stack.experts]
    total = given[0].new_zeros(count, count)
    for name, layout in stack.probed.architecture.tensors.items():
        if _is_router(layout, stack.experts):
            weights = (one.model.read(name).to(given[0]) for one in (stack.probed.a, stack.probed.b))
            a, b = (
                normalise_units((one - one.mean(0)) @ samples.T)
                for one, samples in zip(weights, given, strict=True)
            )
            total = total + b @ a.T  # (experts of B, experts of A)
    return total


def _is_router(layout: Layout, experts: str) -> bool:
    outputs = [layout.items[dim] for dim in layout.outputs]
    return outputs == [Name(experts)] and layout.arrow == "<-" and len(layout.inputs) == 1
