"""The sweep drawn: what B gains on the task and loses elsewhere, as more of the fine-tune is added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfusion.reporting.figures.figure_style import INK, LINE, frame, key, named, sheet, signed, styles_of

_LESS_IS_BETTER = ("loss", "perplexity")


def draw_sweep(metadata: Mapping[str, Any], path: Path, format: str) -> None:
    """Gains over B against α: the task above, the support set below, one curve per way.

    ``metadata`` is what `Sweep.metadata` gives, or a file of it.
    """
    parts = [part for part in ("task", "support") if metadata[part] is not None]
    curves = metadata["curves"]
    styles = styles_of(curve["method"] for curve in curves)
    with sheet(path, format, (6.4, 1.2 + 2.2 * len(parts))) as figure:
        panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            lines = [_curve(axes, curve, part, style) for curve, style in zip(curves, styles, strict=True)]
            _frame(axes, metadata, part)
        panels[-1].set_xlabel("α (ring: the best on the task)")
        figure.align_ylabels()
        key(figure, lines, [_label(curve) for curve in curves], columns=min(3, len(curves)))


def _label(curve: Mapping[str, Any]) -> str:
    return f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ, naive"


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


def _frame(axes: Any, metadata: Mapping[str, Any], part: str) -> None:
    about, zero = metadata[part], metadata["at_zero"][part]
    metric, less = about["metric"], about["metric"] in _LESS_IS_BETTER
    own = f"{zero['value']:.3g}" if less else f"{100 * zero['value']:.1f} %"
    frame(axes, f"{part.capitalize()}: {named(about['data'])} (B: {metric} {own})")
    axes.set_ylabel(f"Change of the {metric}\n(less is better)" if less else "Gain over B in points")
    axes.axhline(0, color=INK, linewidth=0.9, zorder=1)
    axes.axvline(1, color=LINE, linewidth=0.9, zorder=1)
    alphas = [point["alpha"] for curve in metadata["curves"] for point in curve["points"]]
    room = 0.02 * (max(alphas) or 1)
    axes.set_xlim(-room, max(alphas) + room)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, place: signed(round(value, 9)))
