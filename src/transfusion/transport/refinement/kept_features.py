"""Keeping B: how far a student has gone from B on the same inputs.

A student of B's own class is compared by its outputs. A student with other heads is compared by the features
that B's outputs, or B's heads, are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.running.activations import on_module_calls
from transfusion.running.probes.random_inputs import run_model
from transfusion.transport.refinement.output_targets import Outputs, OutputTargets, with_similarities


class KeptFeatures:
    """The outputs or features of B that a student is to keep."""

    def __init__(
        self,
        b: Model,
        module: nn.Module,
        student: nn.Module,
        inputs: Mapping[str, Tensor],
        *,
        same_class: bool,
    ) -> None:
        """``same_class`` says that both have the same heads; ``inputs`` are some to look for features."""
        self.family, self.module, self.student = b.family, module, student
        self.same_class = same_class
        self.features: tuple[str, ...] = () if same_class else _feature_modules(b, module, student, inputs)
        before = self.of_b(inputs)
        self.targets = OutputTargets.between(before, before, problem_of(module))

    def of_b(self, inputs: Mapping[str, Tensor], *, gradients: bool = False) -> Outputs:
        """Return what B computes."""
        return self._run(self.module, inputs, gradients=gradients)

    def loss(self, inputs: Mapping[str, Tensor], of_b: Outputs) -> Tensor:
        """Return how far the student is from B, with gradients."""
        return self.targets.loss(of_b, self._run(self.student, inputs, gradients=True))

    def agreement(self, inputs: Mapping[str, Tensor]) -> float:
        """Return the agreement between the student and B."""
        return self.targets.agreement(self.of_b(inputs), self._run(self.student, inputs, gradients=False))

    def _run(self, module: nn.Module, inputs: Mapping[str, Tensor], *, gradients: bool) -> Outputs:
        if self.same_class:
            outputs = run_model(module, self.family, inputs, double=False, gradients=gradients)
            return with_similarities(outputs)
        with _recorded(_by_name(module, Naming(self.family, live=True)), self.features) as found:
            run_model(module, self.family, inputs, double=False, gradients=gradients)
        return found


def problem_of(module: nn.Module) -> str | None:
    """Return the kind of task that a module's configuration names."""
    return getattr(getattr(module, "config", None), "problem_type", None)


def _by_name(module: nn.Module, naming: Naming) -> dict[str, nn.Module]:
    return {naming.canonical(name): part for name, part in module.named_modules() if name}


@contextmanager
def _recorded(modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Within the block, record the outputs of these modules."""
    found: dict[str, Tensor] = {}

    def keep(name: str, given: list[Tensor], output: Any) -> None:
        found[name] = _first_tensor(output)

    with on_module_calls({name: modules[name] for name in names}, keep):
        yield found


def _feature_modules(
    b: Model, module: nn.Module, student: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return the modules of both whose outputs are outputs of B, or inputs of B's heads."""
    naming = Naming(b.family, live=True)
    ours, theirs = _by_name(module, naming), _by_name(student, naming)
    heads = {name.rpartition(".")[0] for name in b.architecture.heads}
    made: dict[int, str] = {}
    wanted: list[Tensor] = []
    alive: list[Tensor] = []  # so that no other tensor gets their place in memory

    def keep(name: str, given: list[Tensor], output: Any) -> None:
        if name in heads:
            wanted.extend(given[:1])
        elif name in theirs and isinstance(first := _first_tensor(output, None), Tensor):
            alive.append(first)
            made[_place(first)] = name

    with on_module_calls(ours, keep):
        outputs = run_model(module, b.family, inputs, double=False)
    wanted += [one for one in outputs.values() if one.ndim >= 2]
    places = [_place(one) for one in wanted]
    found = tuple(dict.fromkeys(made[place] for place in places if place in made))
    return found or tuple(made.values())[-1:]


def _first_tensor(output: Any, *missing: Any) -> Any:
    """Return the tensor that a module put out, or the first of several."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((one for one in values if isinstance(one, Tensor)), *missing)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
