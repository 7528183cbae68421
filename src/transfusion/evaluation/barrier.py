"""The barrier: the loss on the straight line from π(A) to B (linear mode connectivity).

Two models lie in one basin if the loss on the straight line between them is not much above that of its ends.
A good π brings A into the basin of B, so the barrier measures an alignment without a fine-tune (Section 4.2
of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment, require_one_shape
from transfusion.architecture.architecture import Architecture
from transfusion.errors import AlignmentError, MismatchError, SettingError, listing
from transfusion.evaluation.line import Line, Via, given_alignments, labels_of
from transfusion.evaluation.settings import BarrierSettings
from transfusion.evaluation.task import DataReference, EvaluationData
from transfusion.model.model import Model, Reference
from transfusion.model.pair import Pair, compare_vocabularies, require_same_shape
from transfusion.report.figures import draw_barriers
from transfusion.report.result_files import ResultFiles
from transfusion.running.live_model import LiveModel
from transfusion.runtime.engines import as_precision
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.settings import verb

VANILLA = "vanilla"
POINTS = 11
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
        match self:
            case Shortcuts.INTERPOLATED:
                return 1.0 - alpha
            case Shortcuts.PLAIN:
                return 0.0
            case Shortcuts.ROUNDED:
                return 1.0 if alpha < 0.5 else 0.0


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
    a: str
    b: str
    data: str
    examples: int
    question: str
    dtype: str

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
        return {
            "height": self.height,
            "summit": self.summit.alpha,
            "faithful": self.faithful,
            **asdict(self),
        }


def one_barrier(
    a: Model | Reference,
    b: Model | Reference,
    *,
    via: Via | None,
    data: DataReference,
    points: int | Sequence[float] = POINTS,
    shortcuts: Shortcuts | str | None = None,
    batch: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    on_point: Callable[[BarrierPoint], None] = lambda point: None,
) -> Barrier:
    """Measure (1 − α)·π(A) + α·B for α from 0 to 1.

    Args:
        a: A: a folder, a hub id, a module or a `Model`.
        b: B, of the same architecture.
        via: π: a file or an `Alignment`. None measures the line from A as it is.
        data: Labelled examples: a path, a hub id, or an `EvaluationData` with further settings.
        points: The number of values of α, or the values.
        shortcuts: What residual connections carry: ``interpolated``, ``plain`` or ``rounded``. Without it,
            interpolated, unless π was made for plain ones.
        batch: Examples per forward pass. Without it, as many as fit into memory.
        dtype: ``torch.float32`` or ``torch.float64``.
        on_point: Called with every point that was measured.

    """
    alphas = _alphas(points)
    dtype = as_precision(dtype)
    alignment = None if via is None else require_one_shape(via)
    chosen = _shortcuts(shortcuts, alignment)
    a, b = (model if isinstance(model, Model) else Model.open(model) for model in (a, b))
    _require_one_vocabulary(a, b)
    require_same_shape(a, b)
    if alignment is not None:
        alignment.require_for(a.architecture.under(alignment.provenance.policy))
        alignment.require_between(source=a, target=b)
        a = a.under(alignment.provenance.policy)
        if chosen is Shortcuts.ROUNDED:
            _require_permutations(alignment, a.architecture)
    asked = EvaluationData.of(data)
    line = _line(a, b, asked, alignment, dtype)
    evaluator = asked.evaluator(a, line.live, batch=batch)
    loss_of_a = evaluator.measure().loss
    measured: list[BarrierPoint] = []
    for alpha in alphas:
        carried = alignment and line.live.rotated_shortcuts(alignment, chosen.share(alpha))
        with line.at(alpha), carried or nullcontext():
            score = evaluator.measure()
        measured.append(BarrierPoint(alpha, score.loss, score.accuracy or 0.0))
        on_point(measured[-1])
    metadata = alignment.provenance if alignment is not None else None
    return Barrier(
        points=tuple(measured),
        method=metadata.method if metadata else None,
        residual=str(metadata.policy.residual) if metadata else None,
        shortcuts=chosen,
        rotated=len(alignment.broken_shortcuts(a.architecture.shortcuts)) if alignment is not None else 0,
        loss_of_a=loss_of_a,
        a=a.label,
        b=b.label,
        data=evaluator.batch_source.label,
        examples=len(evaluator),
        question=evaluator.question,
        dtype=str(dtype).removeprefix("torch."),
    )


@dataclass(frozen=True)
class Barriers:
    """The barriers of several alignments, by label."""

    curves: Mapping[str, Barrier]
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The result as it is written to files, with the record of its run."""

    def metadata(self) -> dict[str, Any]:
        """Return all curves as plain data; what they have in common stands once."""
        return curves_metadata(self.curves)


@verb(BarrierSettings)
def barrier(settings: BarrierSettings) -> Barriers:
    """Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, for one π or several, and draw it.

    >>> found = transfusion.barrier("models/a", "models/b", via="pi.safetensors", data="data.safetensors")
    >>> {label: len(curve.points) for label, curve in found.curves.items()}
    {'vanilla': 11, 'guarded': 11}
    >>> found.curves["guarded"].height < 1e-5  # π(A) equals B here
    True
    """
    record, points = RunRecord("barrier"), settings.points
    paths = given_alignments(settings.via)
    if not paths and not settings.vanilla:
        raise SettingError("`vanilla=False` without `via` leaves nothing to measure", hint="give a file of π")
    asked, dtype = settings.task, as_precision(settings.dtype)
    read = (settings.a, settings.b, *asked.files, *paths)
    files = ResultFiles.checked(settings.output, force=settings.force, inputs=read, draw=draw_barriers)
    pair = Pair.open(settings.a, settings.b, progress=settings.progress)
    ways: list[Alignment | None] = [None] if settings.vanilla else []
    ways += [require_one_shape(one) for one in paths]
    curves: dict[str, Barrier] = {}
    total = len(_alphas(points)) * len(ways)
    with settings.resources.in_process(), settings.progress.bar(total, "building the models") as advance:
        for label, pi in zip(labels_of(ways, VANILLA), ways, strict=True):

            def on_point(point: BarrierPoint, label: str = label) -> None:
                advance(f"{label} · α = {point.alpha:.3g} · loss {point.loss:.4g}")

            curves[label] = one_barrier(
                pair.a,
                pair.b,
                via=pi,
                data=asked,
                points=points,
                shortcuts=settings.shortcuts,
                batch=settings.batch,
                dtype=dtype,
                on_point=on_point,
            )
    return files.finish(Barriers(curves), record)


def curves_metadata(curves: Mapping[str, Barrier]) -> dict[str, Any]:
    """Join several curves between the same models to one result; common fields occur once."""
    info = {label: curve.metadata() for label, curve in curves.items()}
    common = ("a", "b", "data", "examples", "question", "dtype")
    first = next(iter(info.values()))
    return {
        **{key: first[key] for key in common},
        "curves": [
            {"label": label, **{key: value for key, value in metadata.items() if key not in common}}
            for label, metadata in info.items()
        ],
    }


def _line(a: Model, b: Model, data: EvaluationData, alignment: Alignment | None, dtype: torch.dtype) -> Line:
    """Return the line from π(A) to B, in the live A."""
    live, other = data.live(a, dtype), data.live(b, dtype)
    first = {name: parameter.data for name, parameter in live.module.named_parameters()}
    last = {name: parameter.data for name, parameter in other.module.named_parameters()}
    _require_same_module(live, other, (a.label, b.label), first, last)
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


def _alphas(points: int | Sequence[float]) -> list[float]:
    if isinstance(points, int):
        if points < 2:
            raise SettingError(f"points = {points}: the two ends are needed", hint="give 2 or more")
        return [number / (points - 1) for number in range(points)]
    alphas = [float(alpha) for alpha in points]
    rising = all(first < second for first, second in pairwise(alphas))
    if not rising or not all(map(isfinite, alphas)) or len(alphas) < 2 or alphas[0] != 0 or alphas[-1] != 1:
        raise SettingError(
            f"points = {listing(alphas)}: not a line from 0 to 1",
            hint="list values of α that begin with 0, rise, and end with 1",
        )
    return alphas


def _shortcuts(asked: Shortcuts | str | None, alignment: Alignment | None) -> Shortcuts:
    if asked is None:
        made_for_plain = alignment is not None and bool(alignment.provenance.options.get("plain_shortcuts"))
        return Shortcuts.PLAIN if made_for_plain else Shortcuts.INTERPOLATED
    try:
        return Shortcuts(asked)
    except ValueError:
        raise SettingError(
            f"shortcuts = {asked!r} is not a choice", hint=f"choose one of {', '.join(Shortcuts)}"
        ) from None


def _require_permutations(alignment: Alignment, architecture: Architecture) -> None:
    """Refuse to round shortcuts between maps that are not permutations."""
    ends = {
        end for cut in alignment.broken_shortcuts(architecture.shortcuts) for end in (cut.source, cut.target)
    }
    soft = [
        f"{id} ({map_.kind})"
        for id in sorted(ends)
        if (map_ := alignment.maps.get(id)) is not None and not map_.permutes
    ]
    if soft:
        raise AlignmentError(
            f"shortcuts can be rounded between permutations only, and this π has other maps on the stream:"
            f" {listing(soft, 4)}",
            hint="choose interpolated or plain shortcuts",
        )


def _require_same_module(
    a: LiveModel, b: LiveModel, labels: tuple[str, str], first: dict[str, Tensor], last: dict[str, Tensor]
) -> None:
    """Refuse two models that cannot be interpolated: other classes, other task heads."""
    kinds = type(a.module).__name__, type(b.module).__name__
    if kinds[0] != kinds[1]:
        raise MismatchError(
            f"{labels[0]} is a {kinds[0]} and {labels[1]} a {kinds[1]}",
            hint="both need the same task head, trained on the same classes",
        )
    differing = [
        name
        for name in {**first, **last}
        if name not in first or name not in last or first[name].shape != last[name].shape
    ]
    if differing:
        raise MismatchError(
            f"{labels[0]} and {labels[1]} have task heads of other shapes: {listing(differing)}",
            hint="both need the same task head, trained on the same classes",
        )
