"""α from outputs: compare how the fine-tune shifts A's outputs with how the moved fine-tune shifts B's.

Both shifts are measured on probes, so neither labels nor data are needed. They are compared in B's basis:
π moves the shift of A's outputs along the axes that π moves.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import ArchitectureError, LibraryError, SettingError, UselessResultError
from transfusion.model.model import Model
from transfusion.running.building import skeleton
from transfusion.running.probes import make_probes
from transfusion.running.probes.pairs import RunningPair
from transfusion.running.probes.probed_model import ProbedModel, Probes
from transfusion.running.streaming import WHOLE, RunConfig, RunningModel
from transfusion.runtime.progress import phase
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.alpha import AUTO, Alpha, AlphaArgument
from transfusion.transport.output import Output

PROBES = 64
COPIES = 3
"""Models in memory at a time, if they are held whole: B, the moved fine-tune, and one between them."""
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
UNRELATED, UNRELATED_SHAPES = 0.05, 0.2
"""Below this direction, B's shift has nothing to do with A's; between shapes, less than this brought next to
nothing on measured pairs and cost B some points of its support."""
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
        pair: RunningPair,
        tuned: Callable[[], Model | Output],
        moved: Callable[[], Model | Output],
        *,
        calibrate: Path | None = None,
        seed: int = 0,
        run_config: RunConfig = WHOLE,
        resources: Resources = LOCAL,
    ) -> None:
        """``tuned`` returns the fine-tune of A, ``moved`` the moved fine-tune on B with α = 1."""
        a, b = pair.a, pair.b
        self.b, self.shared = b, pair.shared
        self.run_config, self.resources = run_config, resources
        run_config.require_room(b, COPIES)
        with run_config.opened(a) as running:
            self.probes: Probes = make_probes(ProbedModel(a, running.module), PROBES, seed, calibrate)
            before = self._run(running, self.probes.batches)
        del running
        with run_config.opened(self._model(tuned(), "tuned")) as running:
            after = self._run(running, self.probes.batches)
        del running
        both = {name for name, one in after.items() if name in before and one.shape == before[name].shape}
        change = {name: value - before[name] if name in both else value for name, value in after.items()}
        self.new = frozenset(after.keys() - both)
        """Outputs of a task head that only the fine-tune has: A has no values to subtract."""
        self.wanted: Outputs = pair.outputs(a.architecture, change)
        self.moved = self._model(moved(), "moved")
        translation = pair.inputs(skeleton(a), skeleton(self.moved))
        self.batches = [translation(inputs) for inputs in self.probes.batches]
        self.before = self._at(0.0)
        if not self._comparable(self.before):
            raise ArchitectureError(
                f"{a.label} and {b.label} have no outputs that could be compared",
                hint="give a number for `alpha`, and measure",
            )

    def _model(self, made: Model | Output, name: str) -> Model:
        """Return a fine-tune as a model: an output in memory, or in files to be run layer by layer."""
        if isinstance(made, Model):
            return made
        if not self.run_config.by_layer:
            return made.model()
        return Model.open(made.save(self._folder / name, resources=self.resources))

    @cached_property
    def _folder(self) -> Path:
        """A folder for outputs that run layer by layer; it goes with the search."""
        made = mkdtemp()
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return Path(made)

    def at(self, alpha: float) -> OutputShift:
        """Measure the shift of B's outputs with this α."""
        now = self._at(alpha)
        got = {name: value if name in self.new else value - self.before[name] for name, value in now.items()}
        both = self._comparable(got)
        reaches = [
            _ratio(value - self.before[name], self.before[name] - self.before[name].mean(0, keepdim=True))
            for name, value in now.items()
        ]
        return OutputShift(
            alpha,
            fmean([_cosine(self.wanted[name], got[name]) for name in both] or [0.0]),
            fmean([_ratio(got[name], self.wanted[name]) for name in both] or [0.0]),
            max(reaches, default=0.0),
        )

    def _comparable(self, found: Outputs) -> list[str]:
        return [name for name, one in self.wanted.items() if name in found and found[name].shape == one.shape]

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

    def _at(self, alpha: float) -> dict[str, Tensor]:
        """Return the outputs of B + α·(moved − B)."""
        between = partial(_read_between, self.b, self.moved, alpha)
        with self.run_config.opened(self.moved, between) as running:
            return self._run(running, self.batches)

    def _run(self, running: RunningModel, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return all outputs on all probes, concatenated over the batches."""
        found: dict[int, Outputs] = {}

        def run(number: int) -> None:
            outputs = self.shared(running.outputs(batches[number]))
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


def _read_between(b: Model, moved: Model, alpha: float, name: str) -> Tensor:
    """Return B + α·(moved − B) of one tensor; as it is, if B has none like it."""
    whole = moved.read(name).float()
    if name not in b.names or b.info(name).shape != moved.info(name).shape:
        return whole
    own = b.read(name).float()
    return own + alpha * (whole - own)


def _thinned(value: Tensor, batches: int) -> Tensor:
    """Return an output; of a very large one, such as logits of a vocabulary, the values at some places."""
    if value.ndim < 3 or value.numel() * batches <= LARGEST:
        return value
    step = -(-value.numel() * batches // LARGEST)
    return value[:, ::step].clone()


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return float((one * other).sum() / lengths.clamp(min=1e-30))


def _ratio(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one) / torch.linalg.vector_norm(other).clamp(min=1e-30))


def measured_alpha(
    asked: AlphaArgument | None,
    keep_support: float | None,
    search: Callable[[], AlphaSearch],
    *,
    rotates: bool,
    other_shape: bool = False,
    force_unrelated: bool = False,
    refinable: bool = True,
) -> tuple[AlphaArgument | None, dict[str, Any]]:
    """Choose α by running models on probes; also return what was measured in B's outputs.

    Where models cannot be run, the weights alone decide: but not for ``keep_support``, nor between shapes.
    An α that was not asked for is lowered where it would do harm, and refused unless ``force_unrelated``, if
    π ``rotates``: the errors of maps from activations are spread over all units.
    ``refinable`` says whether a refinement could be asked for instead.
    """
    if keep_support is not None and not 0 < float(keep_support) < float("inf"):
        raise SettingError(
            f"`keep_support` = {keep_support}: it must be a number above 0",
            hint="give the share of their own spread that B's outputs may move by, such as 0.2",
        )
    if asked not in (AUTO, None) and Alpha.of(asked).patterns:
        raise SettingError("`keep_support`: α was given for every layer", hint="give one number, or auto")
    try:
        alpha_search = search()
    except (ArchitectureError, LibraryError) as error:
        if keep_support is not None or (other_shape and not force_unrelated):
            raise
        return asked, {"not_tried": str(error)}
    info: dict[str, Any] = {"probes": alpha_search.probes.about}
    whole = alpha_search.best() if asked == AUTO else alpha_search.at(Alpha.of(asked or 1.0).default)
    found, ours = whole, (rotates or other_shape) and asked in (AUTO, None)
    if ours:
        found = alpha_search.harmless(whole, RELATED if asked == AUTO else SAME)
    if found.alpha < whole.alpha:
        info["lowered"] = whole.as_dict()
    if keep_support is not None:
        found = alpha_search.within(keep_support, found.alpha)
    least = UNRELATED_SHAPES if other_shape else UNRELATED
    if ours and found.direction < least and not force_unrelated:
        refine = "add `refine`, which trains it to answer like the fine-tune; or " if refinable else ""
        raise UselessResultError(
            f"nothing was written: with this π, B's outputs on {info['probes']} would change in another"
            f" direction than A's did (cosine {found.direction:.2f}; 1 is the same, 0 is unrelated): nothing"
            " shows that the fine-tune arrives",
            hint=refine + "give inputs of your own with `calibrate`; or a number for `alpha`, and measure; or"
            " insist with `force_unrelated`",
        )
    return round(found.alpha, 4), {**found.as_dict(), **info}
