"""The barrier: the loss on the straight line from π(A) to B (linear mode connectivity).

Two models lie in one basin if the loss on the straight line between them is not much above that of its ends.
A good π brings A into the basin of B, so the barrier measures an alignment without a fine-tune (Section 4.2
of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from rich.console import RenderableType

from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.errors import AlignmentError, MismatchError, SettingError, listing
from transfusion.evaluation.line import Line, given_alignments, labels_of
from transfusion.evaluation.settings import BarrierSettings
from transfusion.evaluation.task import EvaluationData
from transfusion.model.model import Model
from transfusion.model.pair import Pair, compare_vocabularies, require_same_shape
from transfusion.report import views
from transfusion.report.figures import draw_barriers
from transfusion.report.result_files import Result, ResultFiles, as_svg, fields_of
from transfusion.runtime.engines import as_precision
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb

VANILLA = "vanilla"
FAITHFUL = 1e-4
"""The relative difference of the losses of π(A) and A that rounding may cause."""


class Shortcuts(StrEnum):
    """What residual connections carry where the stream has different maps before and after a branch."""

    INTERPOLATED = "interpolated"
    """(1 − α)·P_out P_inᵀ + α·I, as in the paper: interpolated like the weights."""
    PLAIN = "plain"
    """I everywhere: π(A) as plain weights, which do not compute the function of A."""
    ROUNDED = "rounded"
    """The permutation nearest to the interpolated matrix: P_out P_inᵀ for α < ½, I otherwise.

    The nearest permutation has the largest inner product. A row in which P_out P_inᵀ and I differ adds 1 − α
    for the first and α for the second; at α = ½ both are equally near, and I is taken.
    """

    def share(self, alpha: float) -> float:
        """Return the share of P_out P_inᵀ − I that is added to the identity."""
        if self is Shortcuts.ROUNDED:
            return 1.0 if alpha < 0.5 else 0.0
        return 1.0 - alpha if self is Shortcuts.INTERPOLATED else 0.0


@dataclass(frozen=True)
class BarrierPoint:
    """The loss and accuracy at one α."""

    alpha: float
    loss: float
    accuracy: float
    """From 0 to 1."""


@dataclass(frozen=True)
class Barrier:
    """The scores on the line from π(A) to B."""

    points: tuple[BarrierPoint, ...]
    method: str | None
    """The method of π; None without π."""
    residual: str | None
    shortcuts: Shortcuts
    rotated: int
    """The number of residual connections whose maps before and after the branch differ."""
    loss_of_a: float
    """The loss of A, which an exact π does not change."""

    @property
    def faithful(self) -> bool:
        """Whether π(A) has the loss of A; if not, the height says nothing about the line from A."""
        return abs(self.points[0].loss - self.loss_of_a) <= FAITHFUL * max(1.0, abs(self.loss_of_a))

    @property
    def summit(self) -> BarrierPoint:
        """The point whose loss is furthest above the straight line between the ends."""
        return max(self.points, key=self._above)

    @property
    def height(self) -> float:
        """The largest distance of the loss above the straight line between its ends."""
        return self._above(self.summit)

    def _above(self, point: BarrierPoint) -> float:
        first, last = self.points[0].loss, self.points[-1].loss
        return point.loss - ((1 - point.alpha) * first + point.alpha * last)

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        derived = {"height": self.height, "summit": self.summit.alpha, "faithful": self.faithful}
        return {**derived, **fields_of(self)}


@dataclass(frozen=True, repr=False)
class Barriers(Result):
    """The barriers of several alignments between two models."""

    a: str
    b: str
    data: str
    examples: int
    question: str
    dtype: str
    curves: Mapping[str, Barrier]
    """By label: ``vanilla``, or the method of π."""

    def __rich__(self) -> RenderableType:
        return views.barrier(self.written)

    def figure(self) -> bytes:
        """Return the figure as SVG."""
        return as_svg(draw_barriers, self)

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        curves = [{"label": label, **curve.metadata()} for label, curve in self.curves.items()]
        return {**fields_of(self), "curves": curves}


@verb(BarrierSettings)
def barrier(settings: BarrierSettings) -> Barriers:
    """Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, for one π or several, and draw it.

    >>> found = transfusion.barrier("models/a", "models/b", via="pi.safetensors", data="data.safetensors")
    >>> {label: len(curve.points) for label, curve in found.curves.items()}
    {'vanilla': 11, 'auto': 11}
    >>> found.curves["auto"].height < 1e-5  # π(A) equals B here
    True
    """
    record, count, paths = RunRecord("barrier"), settings.points, given_alignments(settings.via)
    if not paths and not settings.vanilla:
        raise SettingError("`vanilla=False` without `via` leaves nothing to measure", hint="give a file of π")
    if count < 2:
        raise SettingError(f"points = {count}: the two ends are needed", hint="give 2 or more")
    alphas = [number / (count - 1) for number in range(count)]
    asked, dtype = settings.task, as_precision(settings.dtype)
    read = (settings.a, settings.b, *asked.files, *paths)
    files = ResultFiles.checked(settings.output, force=settings.force, inputs=read, draw=draw_barriers)
    pair = Pair.open(settings.a, settings.b, progress=settings.progress)
    _require_one_vocabulary(pair.a, pair.b)
    require_same_shape(pair.a, pair.b)
    ways: list[Alignment | None] = [None] if settings.vanilla else []
    ways += [require_one_shape(one) for one in paths]
    curves: dict[str, Barrier] = {}
    with (
        settings.resources.in_process(),
        settings.progress.bar(count * len(ways), "building the models") as advance,
    ):
        for label, pi in zip(labels_of(ways, VANILLA), ways, strict=True):
            a, shortcuts = pair.a, _shortcuts(settings.shortcuts, pi)
            if pi is not None:
                a = _under(pi, pair, shortcuts)
            line = _line(a, pair.b, asked, pi, dtype, settings.resources.device)
            evaluator = asked.evaluator(a, line.live, batch=settings.batch)
            loss_of_a = evaluator.measure().loss
            points: list[BarrierPoint] = []
            for alpha in alphas:
                carried = pi and line.live.rotated_shortcuts(pi, shortcuts.share(alpha))
                with line.at(alpha), carried or nullcontext():
                    score = evaluator.measure()
                points.append(BarrierPoint(alpha, score.loss, score.accuracy or 0.0))
                advance(f"{label} · α = {alpha:.3g} · loss {score.loss:.4g}")
            curves[label] = Barrier(
                tuple(points),
                pi.provenance.method if pi else None,
                str(pi.provenance.policy.residual) if pi else None,
                shortcuts,
                len(pi.broken_shortcuts(a.architecture.shortcuts)) if pi else 0,
                loss_of_a,
            )
    about = evaluator.metadata()
    found = Barriers(
        pair.a.label,
        pair.b.label,
        about["data"],
        about["examples"],
        about["question"],
        str(dtype).removeprefix("torch."),
        curves,
    )
    return files.finish(found, record)


def _under(pi: Alignment, pair: Pair, shortcuts: Shortcuts) -> Model:
    """Return A under the policy of π; refuse a π of other models, or one that cannot be rounded."""
    policy = pi.provenance.policy
    pi.require_for(pair.a.architecture.under(policy))
    pi.require_between(source=pair.a, target=pair.b)
    a = pair.a.under(policy)
    cuts = pi.broken_shortcuts(a.architecture.shortcuts) if shortcuts is Shortcuts.ROUNDED else ()
    ends = sorted({end for cut in cuts for end in (cut.source, cut.target)} & pi.maps.keys())
    if soft := [f"{id} ({pi.maps[id].kind})" for id in ends if not pi.maps[id].permutes]:
        raise AlignmentError(
            f"shortcuts can be rounded between permutations only, and this π has other maps on the stream:"
            f" {listing(soft, 4)}",
            hint="choose interpolated or plain shortcuts",
        )
    return a


def _line(
    a: Model,
    b: Model,
    data: EvaluationData,
    alignment: Alignment | None,
    dtype: torch.dtype,
    device: str,
) -> Line:
    """Return the line from π(A) to B, in the live A; refuse other classes and other task heads."""
    live, other = (data.live(one, dtype, device) for one in (a, b))
    kinds = [type(one.module).__name__ for one in (live, other)]
    hint = "both need the same task head, trained on the same classes"
    if kinds[0] != kinds[1]:
        raise MismatchError(f"{a.label} is a {kinds[0]} and {b.label} a {kinds[1]}", hint=hint)
    first, last = (
        {name: parameter.data for name, parameter in one.module.named_parameters()} for one in (live, other)
    )
    shapes = [{name: tensor.shape for name, tensor in one.items()} for one in (first, last)]
    if differing := [name for name in {**first, **last} if shapes[0].get(name) != shapes[1].get(name)]:
        raise MismatchError(
            f"{a.label} and {b.label} have task heads of other shapes: {listing(differing)}", hint=hint
        )
    if alignment is not None:
        policy = alignment.provenance.policy  # the table of a task head from elsewhere has another one
        live = replace(live, architecture=live.architecture.under(policy))
        first |= live.parameters_under(alignment)
    return Line(live, first, last)


def _require_one_vocabulary(a: Model, b: Model) -> None:
    """Refuse two vocabularies: a model between the two would read tokens that it has half a row for."""
    found, _ = compare_vocabularies(a.original or a, b)
    if found is not None and not found.is_identity:
        raise MismatchError(
            f"{a.label} and {b.label} have different vocabularies: there are no models between them",
            hint="measure what arrives instead, with transport and evaluate",
        )


def _shortcuts(asked: Shortcuts | str | None, alignment: Alignment | None) -> Shortcuts:
    if asked is None:
        made_for_plain = alignment is not None and alignment.provenance.options.get("plain_shortcuts")
        return Shortcuts.PLAIN if made_for_plain else Shortcuts.INTERPOLATED
    try:
        return Shortcuts(asked)
    except ValueError:
        raise SettingError(
            f"shortcuts = {asked!r} is not a choice", hint=f"choose one of {', '.join(Shortcuts)}"
        ) from None
