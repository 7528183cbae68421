"""α from outputs: compare how the fine-tune shifts A's outputs with how the moved fine-tune shifts B's.

Both shifts are measured on probes, so neither labels nor data are needed. They are compared in B's basis:
π moves the shift of A's outputs along the axes that π moves.
"""

from __future__ import annotations

import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.errors import ArchitectureError, LibraryError, SettingError, UselessResultError
from transfusion.model.model import Model
from transfusion.running.building import build, skeleton
from transfusion.running.live_model import WHOLE, HowToRun, RunningModel
from transfusion.running.probes import calibration_probes, synthetic_probes
from transfusion.running.probes.pairs import InputTranslation, SameInputs
from transfusion.running.probes.probed_model import Probes
from transfusion.runtime.progress import phase
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.alpha import AUTO, Alpha, AlphaArgument
from transfusion.transport.output import Output


@dataclass(frozen=True)
class RunnableFinetune:
    """A model, or what computes one."""

    made: Model | Output
    resources: Resources = LOCAL

    def module(self) -> nn.Module:
        """Build the whole module in memory, in float32."""
        if isinstance(self.made, Model):
            return build(self.made, torch.float32)
        return nn.Module.float(self.made.module()).eval()  # libraries warn in methods of their own

    def model(self, folder: Path) -> Model:
        """Return the model in files, to be run unit by unit; one that is computed is written to a folder."""
        if isinstance(self.made, Model):
            return self.made
        return Model.open(self.made.save(folder, resources=self.resources))


class MovedModel(ABC):
    """The moved fine-tune, which can be run with any α."""

    module: nn.Module
    """Its module; without weights, if it runs unit by unit."""

    @abstractmethod
    def at(self, alpha: float) -> AbstractContextManager[RunningModel]:
        """Within the block, run the model with this α."""


class WholeMove(MovedModel):
    """The whole module in memory, with B's weights and their change."""

    def __init__(self, module: nn.Module, b: Model, how: HowToRun) -> None:
        self.module, self.b, self.how = nn.Module.to(module, how.device), b, how
        naming = Naming(b.family, live=True)
        places = {naming.canonical(name): parameter for name, parameter in module.named_parameters()}
        self.ends: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        """For every parameter that B has too, B's value and the change that α = 1 adds."""
        for name, own in nn.Module.to(build(b, torch.float32), how.device).named_parameters():
            parameter = places.get(naming.canonical(name))
            if parameter is not None and parameter.shape == own.shape:
                self.ends[parameter] = own.data, parameter.data - own.data

    @contextmanager
    def at(self, alpha: float) -> Iterator[RunningModel]:
        for parameter, (start, change) in self.ends.items():
            parameter.data = start + alpha * change
        yield RunningModel(self.module, self.b.family, self.how.workers, self.how.device)


class StreamedMove(MovedModel):
    """Both models in files: every unit is read from both, and combined, when it runs."""

    def __init__(self, moved: Model, b: Model, how: HowToRun) -> None:
        self.moved, self.b, self.how = moved, b, how
        self.module = skeleton(moved)

    def at(self, alpha: float) -> AbstractContextManager[RunningModel]:
        def read(name: str) -> Tensor:
            whole = self.moved.read(name).float()
            if name not in self.b.names or self.b.info(name).shape != self.moved.info(name).shape:
                return whole
            own = self.b.read(name).float()
            return own + alpha * (whole - own)

        return self.how.opened(self.moved, read)


PROBES = 64
COPIES = 3
"""Models in memory at a time, if they are held whole: B, the change, and B with a part of the change."""
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
LARGEST = 2**26
"""The most numbers of an output on all probes; of larger ones, only some places are kept."""
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
        tuned: Callable[[], RunnableFinetune],
        moved: Callable[[], RunnableFinetune],
        *,
        expected: Callable[[Outputs], Outputs],
        translated: Callable[[nn.Module, nn.Module], InputTranslation] = lambda a, b: SameInputs(),
        calibrate: Path | None = None,
        seed: int = 0,
        how: HowToRun = WHOLE,
    ) -> None:
        """``tuned`` returns the fine-tune of A, ``moved`` the moved fine-tune on B with α = 1.

        ``expected`` rewrites outputs of A as those of B, and ``translated`` returns what does so with inputs.
        """
        self.vocabulary, self.how = a.vocabulary, how
        how.require_room(b, COPIES)
        with how.opened(a) as running:
            wanted = (a, running.module, PROBES, seed)
            self.probes: Probes = (
                calibration_probes(calibrate, *wanted) if calibrate else synthetic_probes(*wanted)
            )
            before = self._run(running, self.probes.batches)
            module = running.module if not how.by_unit else skeleton(a)
        del running
        after = self._outputs_of(tuned(), a)
        both = {name for name, one in after.items() if name in before and one.shape == before[name].shape}
        change = {name: value - before[name] if name in both else value for name, value in after.items()}
        self.new = frozenset(after.keys() - both)
        """Outputs of a task head that only the fine-tune has: A has no values to subtract."""
        self.wanted: Outputs = expected(change)
        self.b = b
        arriving = moved()
        self.moved: MovedModel = (
            StreamedMove(arriving.model(self._folder / "moved"), b, how)
            if how.by_unit
            else WholeMove(arriving.module(), b, how)
        )
        translation = translated(module, self.moved.module)
        self.batches = [translation(inputs) for inputs in self.probes.batches]
        del module
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
        with self.moved.at(alpha) as running:
            return self._run(running, self.batches)

    @cached_property
    def _folder(self) -> Path:
        """A folder for models that are computed and then run unit by unit; it goes with the search."""
        made = mkdtemp()
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return Path(made)

    def _outputs_of(self, tuned: RunnableFinetune, a: Model) -> dict[str, Tensor]:
        """Return the outputs of the fine-tune of A."""
        if not self.how.by_unit:
            running = RunningModel(tuned.module(), a.family, self.how.workers)
            return self._run(running, self.probes.batches)
        with self.how.opened(tuned.model(self._folder / "tuned")) as running:
            return self._run(running, self.probes.batches)

    def _run(self, running: RunningModel, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return all outputs on all probes, concatenated over the batches."""
        found: dict[int, Outputs] = {}

        def run(number: int) -> None:
            outputs: Outputs = running.outputs(batches[number])
            if self.vocabulary is not None:
                outputs = self.vocabulary.shared_logits(outputs)
            found[number] = {name: _thinned(one, len(batches)) for name, one in outputs.items()}
            advance("batches of probes, to choose α")

        with phase("choosing α", len(batches)) as advance:
            running.each(run, len(batches))
        parts = [found[number] for number in range(len(batches))]
        sizes = [len(next(iter(inputs.values()))) for inputs in batches]
        return {
            name: torch.cat([part[name].float() for part in parts])
            for name, first in parts[0].items()
            if first.ndim >= 2
            and all(len(part[name]) == size for part, size in zip(parts, sizes, strict=True))
            and len({part[name].shape[1:] for part in parts}) == 1
        }


def _thinned(value: Tensor, batches: int) -> Tensor:
    """Return an output; of a very large one, such as logits of a vocabulary, the values at some places."""
    if value.ndim < 3 or value.numel() * batches <= LARGEST:
        return value
    step = -(-value.numel() * batches // LARGEST)
    return value[:, ::step].clone()


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return float((one * other).sum() / lengths.clamp(min=1e-30))


def _ratio(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one) / torch.linalg.vector_norm(other).clamp(min=1e-30))


@dataclass(frozen=True)
class ChosenAlpha:
    """An α, and what was measured in B's outputs."""

    alpha: AlphaArgument | None
    output_shift: dict[str, Any]


@dataclass(frozen=True)
class AlphaChooser:
    """Chooses α, or refuses to."""

    rotates: bool
    """Whether π has maps from activations, whose errors are spread over all units."""
    least_direction: float = UNRELATED
    """The cosine between the changes of B's and A's outputs below which none is chosen, but refused."""
    must_measure: bool = False
    """Whether an α is chosen only if the change of B's outputs can be measured."""

    def choose(
        self,
        asked: AlphaArgument | None,
        keep_support: float | None,
        search: Callable[[], AlphaSearch],
        *,
        force_unrelated: bool = False,
        refinable: bool = True,
    ) -> ChosenAlpha:
        """Choose α by running models on probes.

        Where models cannot be run, and there is no ``keep_support``, the weights alone decide. An α that was
        not asked for is lowered where it would do harm, or refused unless ``force_unrelated``.
        ``refinable`` says whether a refinement could be asked for instead.
        """
        self._require_sensible(asked, keep_support)
        try:
            alpha_search = search()
        except (ArchitectureError, LibraryError) as error:
            if keep_support is not None or (self.must_measure and not force_unrelated):
                raise
            return ChosenAlpha(asked, {"not_tried": str(error)})
        info: dict[str, Any] = {"probes": alpha_search.probes.about}
        whole = alpha_search.best() if asked == AUTO else alpha_search.at(Alpha.of(asked or 1.0).default)
        found, ours = whole, self.rotates and asked in (AUTO, None)
        if ours:
            found = alpha_search.harmless(whole, RELATED if asked == AUTO else SAME)
        if found.alpha < whole.alpha:
            info["lowered"] = whole.as_dict()
        if keep_support is not None:
            found = alpha_search.within(keep_support, found.alpha)
        if ours and found.direction < self.least_direction and not force_unrelated:
            raise UselessResultError(
                f"with this π, B's outputs would not move as A's did (cosine {found.direction:.2f}):"
                " the fine-tune would not arrive, and B would lose some of what it can do",
                hint=("add `refine`, which starts from B then; or " if refinable else "")
                + "give a number for `alpha`, and measure; or insist with `force_unrelated`",
            )
        return ChosenAlpha(round(found.alpha, 4), {**found.as_dict(), **info})

    @staticmethod
    def _require_sensible(asked: AlphaArgument | None, keep_support: float | None) -> None:
        if keep_support is not None and not 0 < float(keep_support) < float("inf"):
            raise SettingError(
                f"`keep_support` = {keep_support}: it must be a number above 0",
                hint="give the share of their own spread that B's outputs may move by, such as 0.2",
            )
        if asked not in (AUTO, None) and Alpha.of(asked).patterns:
            raise SettingError("`keep_support`: α was given for every layer", hint="give one number, or auto")
