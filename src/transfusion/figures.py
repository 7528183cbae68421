"""Figures, drawn on the side: no window, no global state of the drawing library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transfusion.interpolation import Barrier
from transfusion.live import library

_INK, _FAINT = "#333333", "#d9d9d9"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by everybody, in colour and in grey (Okabe and Ito)."""
_MARKS = ("o", "s", "^", "D", "v", "P")
_PLAIN = "#7f7f7f"
"""The colour of the way without π, behind all others."""
_STYLE = {
    "font.size": 10,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "transfusion",
}


def matplotlib() -> Any:
    """The drawing library, or a hint how to install it."""
    return library("matplotlib", extra="plots")


def draw_barriers(curves: Mapping[str, Barrier], path: Path, format: str) -> None:
    """Loss and accuracy against α, a panel each, one curve per way."""
    rc_context = matplotlib().rc_context
    figure_class = library("matplotlib.figure", extra="plots").Figure
    with rc_context(_STYLE):
        figure = figure_class(figsize=(9.6, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        styles = _styles(curves)
        for label, curve in curves.items():
            alphas = [point.alpha for point in curve.points]
            left.plot(alphas, [point.loss for point in curve.points], **styles[label])
            right.plot(alphas, [100 * point.accuracy for point in curve.points], **styles[label])
        _frame(left, "loss")
        _frame(right, "accuracy in %")
        _label_ends(left, curves, styles)
        one = next(iter(curves.values()))
        figure.suptitle(
            f"(1 − α)·π(A) + α·B   on {one.examples:,} examples ({one.question})",
            x=0.01,
            ha="left",
            fontsize=10,
            color=_INK,
        )
        bare = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
        figure.savefig(path, format=format, dpi=160, metadata=bare)


def _styles(curves: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a mark per curve; what has no π is grey and behind."""
    styles: dict[str, dict[str, Any]] = {}
    return styles


def _frame(axes: Any, name: str) -> None:
    axes.set_title(name, loc="left", fontsize=10, color=_INK)


def _label_ends(axes: Any, curves: Mapping[str, Barrier], styles: Mapping[str, Any]) -> None:
    pass


def _apart(places: Sequence[float], gap: float) -> list[float]:
    return list(places)
