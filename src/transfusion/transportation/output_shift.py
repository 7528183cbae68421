"""α from outputs: compare how the fine-tune shifts A's outputs with how the moved fine-tune shifts B's.

Both shifts are measured on probes, so neither labels nor data are needed. They are compared in B's basis:
π moves the shift of A's outputs along the axes that π moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.data.probes import calibration_probes, synthetic_probes
from transfusion.data.probes.input_translation import InputTranslation, SameInputs
from transfusion.data.probes.probed_model import Probes
from transfusion.data.probes.random_inputs import run_model
from transfusion.errors import ArchitectureError
from transfusion.live.building import build
from transfusion.model.model import Model

PROBES = 64
TRIED = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""The values of α to try."""
NEARLY = 0.998
"""An α above 1 must reach this share of the best direction."""
WORTH_IT = 1.1
"""The best direction must be this many times that of α = 1 to justify another α."""
DOUBTFUL = 0.3
"""If α = 1 has a direction below this, larger values are not used: B's shift may be unrelated to A's."""
SAME = 0.8
"""From this direction on, B changes as A did, and a default α is never lowered."""
RELATED = 0.5
"""From this direction on, an α that was chosen by the outputs is not lowered."""
FARTHEST = 0.6
"""Below these directions, how far B's outputs may move, as a share of their own spread."""
UNRELATED = 0.05
"""Below this direction, B's shift has nothing to do with A's."""
NO_FURTHER = 1.01
"""The largest size of B's shift relative to A's, with room for rounding."""
HALVINGS = 7
"""Bisection steps for α under a bound: accurate to a hundredth."""

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class OutputShift:
    """The shift of B's outputs at one α, compared with the shift of A's outputs."""

    alpha: float
    direction: float
    """The cosine between the two shifts: 1 is the same direction, 0 is unrelated."""
    size: float
    """The norm of B's shift divided by that of A's."""
    reach: float
    """The norm of B's shift divided by the spread of B's outputs over the probes."""

    def as_dict(self) -> dict[str, float]:
        """Return plain data, for the run record."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


class AlphaSearch:
    """Measure the shift of B's outputs on probes for several α, before anything is written."""

    def __init__(
        self,
        a: Model,
        b: Model,
        tuned: Callable[[], nn.Module],
        moved: Callable[[], nn.Module],
        *,
        expected: Callable[[Outputs], Outputs],
        translated: Callable[[nn.Module, nn.Module], InputTranslation] = lambda a, b: SameInputs(),
        calibrate: Path | None = None,
        seed: int = 0,
    ) -> None:
        """``tuned`` builds the fine-tune of A, ``moved`` the moved fine-tune on B with α = 1.

        ``expected`` rewrites outputs of A as those of B, and ``translated`` returns what does so with inputs.
        """
        self.vocabulary = a.vocabulary
        module = build(a, torch.float32)
        wanted = (a, module, PROBES, seed)
        self.probes: Probes = (
            calibration_probes(calibrate, *wanted) if calibrate else synthetic_probes(*wanted)
        )
        before, after = self._run(module, a, self.probes.batches), self._run(tuned(), a, self.probes.batches)
        both = {name for name, one in after.items() if name in before and one.shape == before[name].shape}
        change = {name: value - before[name] if name in both else value for name, value in after.items()}
        self.new = frozenset(after.keys() - both)
        """Outputs of a task head that only the fine-tune has: A has no values to subtract."""
        self.wanted: Outputs = expected(change)
        self.b, self.moved = b, moved().float().eval()
        translation = translated(module, self.moved)
        self.batches = [translation(inputs) for inputs in self.probes.batches]
        del module
        self.ends = _ends(self.moved, b)
        self.before = self._at(0.0)
        if not any(
            name in self.before and _alike(self.before[name], one) for name, one in self.wanted.items()
        ):
            raise ArchitectureError(
                f"{a.label} and {b.label} have no outputs that could be compared",
                hint="give a number for `alpha`, and measure",
            )

    def at(self, alpha: float) -> OutputShift:
        """Measure the shift of B's outputs with this α."""
        now = self._at(alpha)
        got = {name: value if name in self.new else value - self.before[name] for name, value in now.items()}
        both = [name for name in self.wanted if name in got and _alike(got[name], self.wanted[name])]
        return OutputShift(
            alpha,
            fmean([_cosine(self.wanted[name], got[name]) for name in both] or [0.0]),
            fmean([_ratio(got[name], self.wanted[name]) for name in both] or [0.0]),
            max((self._reach(name, value) for name, value in now.items()), default=0.0),
        )

    def best(self) -> OutputShift:
        """Return the shift at the best α: 1, or more if that clearly brings the direction of B's shift closer
        to that of A's. B's shift is never larger than A's.
        """
        tried = [self.at(alpha) for alpha in TRIED]
        fitting = [one for one in tried if one.size <= NO_FURTHER] or tried[:1]
        whole = max((one for one in fitting if one.alpha <= 1), key=lambda one: one.alpha)
        best = max(one.direction for one in fitting)
        if whole.direction < DOUBTFUL or best < WORTH_IT * whole.direction:
            return whole
        good = (one for one in fitting if one.direction >= NEARLY * best)
        return max([whole, *good], key=lambda one: one.alpha)

    def harmless(self, asked: OutputShift, direction: float = SAME) -> OutputShift:
        """Return the shift at the largest α, up to the one asked for, that is not expected to do harm.

        From this direction on B may move as far as it does; otherwise only by a part of its own spread.
        """
        return asked if asked.direction >= direction else self.within(FARTHEST, asked.alpha)

    def within(self, bound: float, alpha: float) -> OutputShift:
        """Return the shift at the largest α, up to the given one, whose reach is within the bound."""
        if (asked := self.at(alpha)).reach <= bound:
            return asked
        low, high = self.at(0.0), alpha
        for _ in range(HALVINGS):
            middle = self.at((low.alpha + high) / 2)
            if middle.reach <= bound:
                low = middle
            else:
                high = middle.alpha
        return low

    def _reach(self, name: str, now: Tensor) -> float:
        before = self.before[name]
        own = before - before.mean(dim=0, keepdim=True)
        return _ratio(now - before, own)

    def _at(self, alpha: float) -> dict[str, Tensor]:
        for parameter, (start, change) in self.ends.items():
            parameter.data = start + alpha * change
        return self._run(self.moved, self.b, self.batches)

    def _run(self, module: nn.Module, model: Model, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return all outputs on all probes, concatenated over the batches."""
        parts: list[Outputs] = [run_model(module, model.family, inputs, double=False) for inputs in batches]
        if self.vocabulary is not None:
            parts = [self.vocabulary.shared_logits(part) for part in parts]
        sizes = [len(next(iter(inputs.values()))) for inputs in batches]
        return {
            name: torch.cat([part[name].float() for part in parts])
            for name, first in parts[0].items()
            if first.ndim >= 2
            and all(len(part[name]) == size for part, size in zip(parts, sizes, strict=True))
            and len({part[name].shape[1:] for part in parts}) == 1
        }


def _ends(moved: nn.Module, b: Model) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
    """Return, for every parameter that B has too, B's value and the change that α = 1 adds."""
    naming = Naming(b.family, live=True)
    places = {naming.canonical(name): parameter for name, parameter in moved.named_parameters()}
    found: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
    for name, own in build(b, torch.float32).named_parameters():
        parameter = places.get(naming.canonical(name))
        if parameter is not None and parameter.shape == own.shape:
            found[parameter] = own.data, parameter.data - own.data
    return found


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return float((one * other).sum() / lengths.clamp(min=1e-30))


def _ratio(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one) / torch.linalg.vector_norm(other).clamp(min=1e-30))
