"""The figure of a barrier: loss and accuracy between π(A) and B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transfusion.reporting.figures.figure_style import frame, key, sheet, styles_of


def draw_barriers(result: Mapping[str, Any], path: Path, format: str) -> None:
    """Draw loss and accuracy against α, a panel each, one curve per π."""
    curves = result["curves"]
    with sheet(path, format, (11.2, 4.2)) as figure:
        left, right = figure.subplots(1, 2)
        styles = styles_of(curve["method"] for curve in curves)
        for curve, style in zip(curves, styles, strict=True):
            alphas = [point["alpha"] for point in curve["points"]]
            left.plot(alphas, [point["loss"] for point in curve["points"]], **style)
            right.plot(alphas, [100 * point["accuracy"] for point in curve["points"]], **style)
        _frame(left, "Loss")
        _frame(right, f"Accuracy in % ({result['question']})")
        _key(figure, left.get_lines(), curves)


def _key(figure: Any, lines: list[Any], curves: Sequence[Mapping[str, Any]]) -> None:
    """Add the key: the highest barrier first, curves that do not start at A's loss last."""
    entries = sorted(
        zip(lines, curves, strict=True), key=lambda entry: (not entry[1]["faithful"], -entry[1]["height"])
    )
    title = "Barrier: how far the loss\nrises above the straight\nline between its ends"
    if not all(curve["faithful"] for curve in curves):
        title += "\n(* π(A) does not compute\nwhat A computes)"
    labels = [f"{one['label']}  {one['height']:.2f}{'' if one['faithful'] else '*'}" for _, one in entries]
    key(figure, [line for line, _ in entries], labels, title)


def _frame(axes: Any, title: str) -> None:
    frame(axes, title)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["π(A)\nα = 0", "0.25", "0.5", "0.75", "B\nα = 1"])
