"""Experts: which of A's is which of B's, and which of its neurons are which.

Libraries keep the experts of a block in one module, and run each on what a router sends to it. Here every
neuron is computed from the weights, on everything that the module reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transfusion.alignment.maps import Map, Permutation
from transfusion.layouts import Layout, Name, names_in
from transfusion.live.activations import INPUT
from transfusion.matching.activations.axis_activations import AxisActivations
from transfusion.matching.activations.procrustes import solve_units, unit
from transfusion.matching.solvers.assignment import assign, best_totals

TOGETHER = 4096
"""How many neurons of all experts, at most, have a say in which expert is which."""


@dataclass(frozen=True)
class _Stack:
    """Matrices of all experts in one tensor, whose outputs are the experts' neurons."""

    evidence: AxisActivations
    name: str
    experts: str
    neurons: str

    @property
    def given(self) -> tuple[Tensor, Tensor] | None:
        """What the experts read, in A and in B."""
        return self.evidence.pair(self.name.rpartition(".")[0], INPUT)

    def made(self, given: tuple[Tensor, Tensor], which: int, expert: int) -> Tensor:
        """What the neurons of one expert make of all samples: gate and up, if there are two, in a row."""
        model = (self.evidence.a, self.evidence.b)[which]
        (weight,) = model.read(self.name, slice(expert, expert + 1)).double()
        parts = weight.split(self.evidence.sizes[self.neurons])
        return torch.cat([unit(part @ given[which].T) for part in parts], dim=1)


def expert_stacks(evidence: AxisActivations) -> dict[str, _Stack]:
    """The axes of experts, which have a dimension of their own before that of what lies within them."""
    return {stack.experts: stack for stack in _stacks(evidence)}


def _stacks(evidence: AxisActivations) -> Iterator[_Stack]:
    parents = evidence.architecture.parents
    for name, layout in evidence.architecture.tensors.items():
        if len(layout.outputs) == 2 and isinstance(experts := layout.items[layout.outputs[0]], Name):
            within = set(names_in(layout.items[layout.outputs[1]]))
            if len(within) == 1 and parents.get(neurons := within.pop()) == experts.text:
                yield _Stack(evidence, name, experts.text, neurons)


def match_experts(stack: _Stack) -> dict[str, Map]:
    """Experts are paired by how well the router's outputs and their neurons go together, each neuron with the
    one that suits it best; then the neurons of every pair are. Gates multiply, so neurons are not turned.
    """
    evidence, given = stack.evidence, stack.given
    if given is None:
        return {}
    order = assign((_routed(stack, given) + _alike(stack, given))[None])
    neurons = []
    for i, j in enumerate(order.index[0].tolist()):
        b, a = solve_units(stack.made(given, 1, i)), solve_units(stack.made(given, 0, j))
        neurons.append(assign((b @ a.T)[None]).index[0])
    moving = {space.id for space in evidence.architecture.moving()}
    maps = {stack.experts: order, stack.neurons: Permutation(np.stack(neurons))}
    return {id: map_ for id, map_ in maps.items() if id in moving}


def _alike(stack: _Stack, given: tuple[Tensor, Tensor]) -> Tensor:
    """How well the loudest neurons of B's experts go with those of A's, on average: (B's expert, A's)."""
    count, size = stack.evidence.sizes[stack.experts], stack.evidence.sizes[stack.neurons]
    some = min(size, max(8, TOGETHER // count))
    a, b = (
        torch.stack([_loudest(stack.made(given, which, expert), some) for expert in range(count)])
        for which in (0, 1)
    )
    together = torch.einsum("ikn,jln->ijkl", solve_units(b), solve_units(a))
    return best_totals(together.flatten(0, 1))[1].reshape(count, count) / some


def _loudest(values: Tensor, count: int) -> Tensor:
    return values[torch.linalg.vector_norm(values, dim=1).topk(count).indices]


def _routed(stack: _Stack, given: tuple[Tensor, Tensor]) -> Tensor:
    """How what the router says of B's experts goes with what it says of A's. What it says of all of them
    alike changes nothing, and does not count.
    """
    count = stack.evidence.sizes[stack.experts]
    total = given[0].new_zeros(count, count)
    for name, layout in stack.evidence.architecture.tensors.items():
        if _is_router(layout, stack.experts):
            weights = (model.read(name).double() for model in (stack.evidence.a, stack.evidence.b))
            a, b = (
                solve_units((one - one.mean(0)) @ samples.T)
                for one, samples in zip(weights, given, strict=True)
            )
            total = total + b @ a.T
    return total


def _is_router(layout: Layout, experts: str) -> bool:
    outputs = [layout.items[dim] for dim in layout.outputs]
    return outputs == [Name(experts)] and layout.arrow == "<-" and len(layout.inputs) == 1
