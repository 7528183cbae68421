"""The sweep drawn: what B gains on the task and loses elsewhere, as more of the fine-tune is added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfusion.figures.style import AXIS, INK, frame, key, sheet, styles_of

_LESS_IS_BETTER = ("loss", "perplexity")


def draw_sweep(story: Mapping[str, Any], path: Path, format: str) -> None:
    """Gains over B against α: the task above, the support set below, one curve per way.

    ``story`` is what `Sweep.story` gives, or a file of it.
    """
    parts = [part for part in ("task", "support") if story[part] is not None]
    curves = story["curves"]
    styles = styles_of(curve["method"] for curve in curves)
    with sheet(path, format, (7.6, 1.5 + 2.3 * len(parts))) as figure:
        panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            lines = [_curve(axes, curve, part, style) for curve, style in zip(curves, styles, strict=True)]
            _frame(axes, story, part)
        panels[-1].set_xlabel("α, how much of the change is added to B", loc="left")
        labels = [f"{_sign(curve)}  {curve['label']}" if curve["method"] else _sign(curve) for curve in curves]
        key(figure, lines, labels, "The change that is added\n(ring: the best α on the task)")


def _sign(curve: Mapping[str, Any]) -> str:
    return "α·π(τ)" if curve["method"] else "α·τ  naive"


def _curve(axes: Any, curve: Mapping[str, Any], part: str, style: dict[str, Any]) -> Any:
    points = curve["points"]
    alphas = [point["alpha"] for point in points]
    (line,) = axes.plot(alphas, [point["gain"][part] for point in points], **style)
    best = next(point for point in points if point["alpha"] == curve["best"])
    axes.plot(
        [best["alpha"]],
        [best["gain"][part]],
        marker="o",
        markersize=10,
        markerfacecolor="none",
        markeredgecolor=style["color"],
        markeredgewidth=1.3,
        zorder=4,
    )
    return line


def _frame(axes: Any, story: Mapping[str, Any], part: str) -> None:
    about, zero = story[part], story["at_zero"][part]
    metric = about["metric"]
    if metric in _LESS_IS_BETTER:
        what = f"change of the {metric}, less is better; B has {zero['value']:.3g}"
    else:
        what = f"gain in points of {metric} over B, which has {100 * zero['value']:.1f} %"
    frame(axes, f"{part.capitalize()}: {Path(about['data']).name}, {what}")
    axes.axhline(0, color=INK, linewidth=0.9, zorder=1)
    axes.axvline(1, color=AXIS, linewidth=0.9, zorder=1)
    low = min(point["alpha"] for curve in story["curves"] for point in curve["points"])
    high = max(point["alpha"] for curve in story["curves"] for point in curve["points"])
    room = 0.02 * (high - low or 1)
    axes.set_xlim(min(0, low) - room, high + room)
    if metric not in _LESS_IS_BETTER:
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:+.3g}" if value else "0")
