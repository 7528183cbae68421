"""What a training is told of its lessons, whether models answer at every step or were asked before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.transport.refinement.settings import RefinementSettings


class Agreement(NamedTuple):
    """How near a student is to the fine-tune on held-out inputs."""

    share: float
    """The share of equal answers, or a cosine."""
    divergence: float
    """The loss."""


class Lessons(Protocol):
    """The fine-tune's answers to learn, and those of B to keep."""

    settings: RefinementSettings
    checked: str
    """The kind of held-out inputs that the steps are judged by."""

    @property
    def judges(self) -> Sequence[str]:
        """The kinds of held-out inputs that starts and ways back are judged by."""

    @property
    def kinds(self) -> Collection[str]:
        """All kinds of held-out inputs."""

    @property
    def about(self) -> Sequence[str]:
        """Descriptions of the inputs."""

    @property
    def measures(self) -> str:
        """What agreement means: ``"answers"``, the share of equal answers, ``"cosine"`` or ``"change"``."""

    @property
    def pace(self) -> str:
        """How fast the training gets through its inputs, if they are texts."""

    @property
    def saves(self) -> bool:
        """Whether this process writes the state of the training; others read it."""

    def measure(self, student: nn.Module, kind: str) -> Agreement:
        """Compare a student with the fine-tune on held-out inputs."""

    def add_gradients(self, student: nn.Module, step: int, keep: float) -> float:
        """Add the gradients of one step's loss, in which B's answers weigh ``keep``; return the loss."""

    def agreement_with_b(self, student: nn.Module) -> float:
        """Return the agreement between a student and B."""

    def values_of_b(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return B's values of the trained parameters; parameters that B lacks are skipped."""

    def file(self, name: str) -> Path | None:
        """Return a file for what an interrupted run keeps, if anything is kept."""


def is_second_factor(name: str) -> bool:
    """Whether a parameter is the factor of a LoRA that is zero where the LoRA changes nothing."""
    return "lora_B" in name or "lora_embedding_B" in name


def values_in(
    own: Mapping[str, Tensor], naming: Naming, trained: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return B's values of trained parameters, of its values by canonical name."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        base = own.get(naming.canonical(name))
        if is_second_factor(name):
            found[name] = parameter.new_zeros(parameter.shape)
        elif base is not None and base.shape == parameter.shape:
            found[name] = base
    return found
