"""How sweep and fewshot look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from transfusion.cli.views import counted

_LESS_IS_BETTER = ("loss", "perplexity")


def of_sweep(result: Mapping[str, Any]) -> RenderableType:
    """Every α with what it gains over B, curve by curve; the best on the task stands out."""
    curves = result["curves"]
    parts = [part for part in ("task", "support") if result[part] is not None]
    table = Table()
    table.add_column("\nα", justify="right")
    for curve in curves:
        for place, part in enumerate(parts):
            table.add_column(Text(f"{curve['label'] if place == 0 else ''}\n{part}"), justify="right")
            table.add_column("\ngain", justify="right")
    zero = result["at_zero"]
    first = [curve["points"][0] for curve in curves]
    begins = first[0]["alpha"] == 0
    info = begins and all(point[part]["value"] == zero[part]["value"] for point in first for part in parts)
    empty = [cell for part in parts for cell in (_value(zero[part], result[part]["metric"]), "")]
    table.add_row("B" if begins and not info else "0", *(empty * len(curves)), style="dim")
    for row in zip(*(curve["points"][info:] for curve in curves), strict=True):
        cells: list[Text] = []
        for curve, point in zip(curves, row, strict=True):
            style = "bold" if point["alpha"] == curve["best"] else ""
            for part in parts:
                metric = result[part]["metric"]
                cells += [Text(_value(point[part], metric), style=style), _gain(point["gain"][part], metric)]
        table.add_row(f"{row[0]['alpha']:.3g}", *cells)
    best = ", ".join(f"{curve['label']} {_best(curve, result['task']['metric'])}" for curve in curves)
    lines = [*(_about(part, result[part]) for part in parts), f"Best α on the task: {best}."]
    return Group(table, Text("\n".join(lines), style="dim"))


def _best(curve: Mapping[str, Any], metric: str) -> str:
    """The best α, if it gains anything."""
    gain = next(point["gain"]["task"] for point in curve["points"] if point["alpha"] == curve["best"])
    better = gain < 0 if metric in _LESS_IS_BETTER else gain > 0
    return f"{curve['best']:.3g}" if better else "– (none is better than B)"


def of_fewshot(result: Mapping[str, Any]) -> RenderableType:
    """B, every line with α = 1 and with what was learned, and the coefficients."""
    metric = result["task"]["metric"]
    table = Table()
    for column in ("", metric if metric in _LESS_IS_BETTER else f"{metric} in %", "gain", "α by layer"):
        table.add_column(column, justify="right" if column and "α" not in column else "left")
    table.add_row("B as it is", _value(result["zero"], metric), "", "", style="dim")
    for curve in result["curves"]:
        what = f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ"
        learned = _coefficients(curve["coefficients"])
        for how, alphas in (("plain", "1"), ("learned", learned)):
            gain = _gain(curve["gain"][how], metric)
            table.add_row(f"{what}, {_HOW[how]}", _value(curve[how], metric), gain, alphas)
    training = result["training"]
    lines = [
        f"Learned from {counted(training['examples'])} of {training['data']}, {result['shots']} shots, seed"
        f" {result['seed']}.",
        _about("test", result["task"]) + f" They are {training['test']}.",
    ]
    return Group(table, Text("\n".join(lines), style="dim"))


def _coefficients(info: Mapping[str, float]) -> str:
    """Those of the layers in their order; what lies outside of them is said to."""
    layers = " ".join(f"{value:.2f}" for pattern, value in info.items() if pattern != _OUTSIDE)
    if _OUTSIDE not in info:
        return layers
    return f"{layers}{', ' * bool(layers)}outside blocks {info[_OUTSIDE]:.2f}"


_OUTSIDE = "default"
_HOW = {"plain": "α = 1", "learned": "α learned"}


def _about(part: str, data: Mapping[str, Any]) -> str:
    metric = data["metric"]
    how = "less is better, gains are plain differences" if metric in _LESS_IS_BETTER else "gains in points"
    return (
        f"{part.capitalize()}: {metric} ({data['question']}) on {counted(data['examples'])} of"
        f" {data['data']}; {how}."
    )


def _value(score: Mapping[str, Any], metric: str) -> str:
    return f"{score['value']:.4f}" if metric in _LESS_IS_BETTER else f"{100 * score['value']:.1f}"


def _gain(value: float, metric: str) -> Text:
    less, least = metric in _LESS_IS_BETTER, 0.0005 if metric in _LESS_IS_BETTER else 0.05
    if abs(value) < least:
        return Text(f"{value:+.3f}" if less else f"{value:+.1f}", style="dim")
    return Text(f"{value:+.3f}" if less else f"{value:+.1f}", style="green" if (value < 0) == less else "red")
