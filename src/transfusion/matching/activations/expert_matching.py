"""Matching the experts of a mixture, and the neurons of each.

Libraries keep the experts of a block in one module, and run each on the tokens that a router sends to it.
Here every neuron is computed from the weights, on all inputs of the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map
from transfusion.architecture.layouts import Layout, Name, names_in
from transfusion.matching.activations.axis_activations import AxisActivations
from transfusion.matching.activations.procrustes import normalise_units, unit
from transfusion.matching.solvers.assignment import assign, best_totals
from transfusion.running.activation_store import INPUT

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
