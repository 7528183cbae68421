"""Linear mode connectivity: the loss on the straight way from π(A) to B.

Two models lie in one basin if nothing on the straight line between them is much worse than its ends. A π
that untangles two models should take them into one, so the barrier in between measures an alignment with
no fine-tune at all (Section 4.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Permutation
from transfusion.architecture.architecture import Architecture
from transfusion.errors import AlignmentError, MismatchError, SettingError, listing
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.evaluation.model_comparison import Given
from transfusion.live.live_model import LiveModel
from transfusion.model.model import Model, Reference, require_same_shape
from transfusion.runtime.devices import as_precision

POINTS = 11
FAITHFUL = 1e-4
"""How much of its loss π(A) may differ from A by rounding alone."""


class Shortcuts(StrEnum):
    """What residual connections carry on the way, where the stream has other maps before than behind."""

    INTERPOLATED = "interpolated"
    """(1 − α)·P_out P_inᵀ + α·I, as the paper has it: like every weight, from A's to B's."""
    PLAIN = "plain"
    """I everywhere: π(A) as plain weights, which compute something else than A."""
    ROUNDED = "rounded"
    """The permutation nearest to the interpolated matrix: P_out P_inᵀ before the middle, I from there on.

    Nearest is the one with the largest inner product. A row in which P_out P_inᵀ and I differ gives 1 − α to
    the first and α to the second, whatever the other rows do; at α = ½ both are equally near, and so is
    every mixture of them, and we take I.
    """

    def share(self, alpha: float) -> float:
        """How much of P_out P_inᵀ − I is added to the identity."""
        match self:
            case Shortcuts.INTERPOLATED:
                return 1.0 - alpha
            case Shortcuts.PLAIN:
                return 0.0
            case Shortcuts.ROUNDED:
                return 1.0 if alpha < 0.5 else 0.0


@dataclass(frozen=True)
class BarrierPoint:
    """One model on the way, and how good it is."""

    alpha: float
    loss: float
    accuracy: float
    """The share of right answers, from 0 to 1."""


@dataclass(frozen=True)
class Barrier:
    """The way from π(A) to B, and what was measured on it."""

    points: tuple[BarrierPoint, ...]
    method: str | None
    """How π was found; none if nothing was moved."""
    residual: str | None
    shortcuts: Shortcuts
    rotated: int
    """Residual connections that the choice of shortcuts is about."""
    loss_of_a: float
    """The loss of A as it is, which an exact π does not change."""
    a: str
    b: str
    data: str
    examples: int
    question: str
    dtype: str

    @property
    def faithful(self) -> bool:
        """Whether the way begins at A's own loss; if not, its height is no measure of the way from A."""
        return abs(self.points[0].loss - self.loss_of_a) <= FAITHFUL * max(1.0, abs(self.loss_of_a))

    @property
    def summit(self) -> BarrierPoint:
        """Where the loss is furthest above the straight line between its ends."""
        return max(self.points, key=self._above)

    @property
    def height(self) -> float:
        """How far the loss rises above the straight line between its ends, at most."""
        return self._above(self.summit)

    def _above(self, point: BarrierPoint) -> float:
        first, last = self.points[0].loss, self.points[-1].loss
        return point.loss - ((1 - point.alpha) * first + point.alpha * last)

    def metadata(self) -> dict[str, Any]:
        """Everything, for a file or another program."""
        return {
            "height": self.height,
            "summit": self.summit.alpha,
            "faithful": self.faithful,
            **asdict(self),
        }


def barrier(
    a: Model | Reference,
    b: Model | Reference,
    *,
    via: Alignment | str | Path | None,
    data: Given,
    points: int | Sequence[float] = POINTS,
    shortcuts: Shortcuts | str | None = None,
    batch: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    on_point: Callable[[BarrierPoint], None] = lambda point: None,
) -> Barrier:
    """Loss and accuracy of (1 − α)·π(A) + α·B for α from 0 to 1; without π, of A and B as they are.

    ``points`` counts them, or lists the values of α. Without ``shortcuts`` they are interpolated, unless π
    was made for plain ones.

    >>> pi = transfusion.Alignment.load("pi.safetensors")
    >>> way = transfusion.barrier("models/a", "models/b", via=pi, data="data.safetensors", points=3)
    >>> [point.alpha for point in way.points]
    [0.0, 0.5, 1.0]
    >>> way.height < 1e-5  # π(A) and B are one model here, so nothing lies between them
    True
    """
    alphas = _alphas(points)
    dtype = as_precision(dtype)
    alignment = via if isinstance(via, Alignment | None) else Alignment.load(via)
    chosen = _shortcuts(shortcuts, alignment)
    a, b = (model if isinstance(model, Model) else Model.open(model) for model in (a, b))
    require_same_shape(a, b)
    if alignment is not None:
        alignment.require_for(a.architecture.under(alignment.provenance.policy))
        alignment.require_between(source=a, target=b)
        a = a.under(alignment.provenance.policy)
        if chosen is Shortcuts.ROUNDED:
            _require_permutations(alignment, a.architecture)
    asked = EvaluationData.of(data)
    way = _Way.between(a, b, asked, alignment, chosen, dtype)
    evaluator = asked.evaluator(a, way.live, dtype=dtype, batch=batch)
    loss_of_a = evaluator.measure().loss
    measured: list[BarrierPoint] = []
    for alpha in alphas:
        with way.at(alpha):
            score = evaluator.measure()
        measured.append(BarrierPoint(alpha, score.loss, score.accuracy or 0.0))
        on_point(measured[-1])
    metadata = alignment.provenance if alignment is not None else None
    return Barrier(
        points=tuple(measured),
        method=metadata.method if metadata else None,
        residual=str(metadata.policy.residual) if metadata else None,
        shortcuts=chosen,
        rotated=len(alignment.rotated(a.architecture.shortcuts)) if alignment is not None else 0,
        loss_of_a=loss_of_a,
        a=a.label,
        b=b.label,
        data=evaluator.batch_source.label,
        examples=len(evaluator),
        question=evaluator.question,
        dtype=str(dtype).removeprefix("torch."),
    )


def alignment_records(curves: Mapping[str, Barrier]) -> dict[str, Any]:
    """Several ways between the same models as one result; what they have in common is said once."""
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


@dataclass(frozen=True)
class _Way:
    """The live A, and the two ends between which its parameters are blended."""

    live: LiveModel
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    alignment: Alignment | None
    shortcuts: Shortcuts

    @classmethod
    def between(
        cls,
        a: Model,
        b: Model,
        data: EvaluationData,
        alignment: Alignment | None,
        shortcuts: Shortcuts,
        dtype: torch.dtype,
    ) -> _Way:
        live, other = data.live(a, dtype), data.live(b, dtype)
        if alignment is not None:  # a head that is borrowed does not know of it
            policy = alignment.provenance.policy
            live = replace(live, architecture=live.architecture.under(policy))
        first = {name: parameter.data for name, parameter in live.module.named_parameters()}
        last = {name: parameter.data for name, parameter in other.module.named_parameters()}
        _require_same_module(live, other, (a.label, b.label), first, last)
        if alignment is not None:
            first |= live.parameters_under(alignment)
        return cls(live, first, last, alignment, shortcuts)

    @contextmanager
    def at(self, alpha: float) -> Iterator[None]:
        """Within the block, the live model is the blend; its ends are exactly π(A) and B."""
        blend = {name: torch.lerp(self.first[name], self.last[name], alpha) for name in self.first}
        with self.live.holding(blend):
            if self.alignment is None:
                yield
            else:
                with self.live.turning(self.alignment, self.shortcuts.share(alpha)):
                    yield


def _alphas(points: int | Sequence[float]) -> list[float]:
    if isinstance(points, int):
        if points < 2:
            raise SettingError(f"points = {points}: the two ends are needed", hint="give 2 or more")
        return [number / (points - 1) for number in range(points)]
    alphas = [float(alpha) for alpha in points]
    rising = all(first < second for first, second in pairwise(alphas))
    if not rising or not all(map(isfinite, alphas)) or len(alphas) < 2 or alphas[0] != 0 or alphas[-1] != 1:
        raise SettingError(
            f"points = {listing(alphas)}: not a way from 0 to 1",
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
    """Only a product of permutations is the nearest permutation to itself."""
    ends = {end for cut in alignment.rotated(architecture.shortcuts) for end in (cut.source, cut.target)}
    soft = [
        f"{id} ({map_.kind})"
        for id in sorted(ends)
        if (map_ := alignment.maps.get(id)) is not None and not isinstance(map_, Permutation)
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
    """Refuse two models that no blend lies between: other classes, other heads."""
    kinds = type(a.module).__name__, type(b.module).__name__
    if kinds[0] != kinds[1]:
        raise MismatchError(
            f"{labels[0]} is a {kinds[0]} and {labels[1]} a {kinds[1]}",
            hint="both need the same head, trained on the same classes",
        )
    differing = [
        name
        for name in {**first, **last}
        if name not in first or name not in last or first[name].shape != last[name].shape
    ]
    if differing:
        raise MismatchError(
            f"{labels[0]} and {labels[1]} have heads of other shapes: {listing(differing)}",
            hint="both need the same head, trained on the same classes",
        )
