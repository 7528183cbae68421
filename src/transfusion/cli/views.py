"""Results as tables and trees for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def barrier(result: Mapping[str, Any]) -> RenderableType:
    """Show loss and accuracy of every curve, α by α, and the height of each barrier."""
    curves = result["curves"]
    table = Table(show_footer=True)
    table.add_column("α", "barrier", justify="right")
    for curve in curves:
        mark = "" if curve["faithful"] else "*"
        table.add_column(Text(f"{curve['label']}\nloss"), f"{curve['height']:.4f}{mark}", justify="right")
        table.add_column("\n%", justify="right")
    for row in zip(*(curve["points"] for curve in curves), strict=True):
        cells = [f"{point['loss']:.4f} {100 * point['accuracy']:.1f}".split() for point in row]
        table.add_row(f"{row[0]['alpha']:.3g}", *(cell for pair in cells for cell in pair))
    lines = [
        f"Loss and accuracy in % ({result['question']}) of (1 − α)·π(A) + α·B on"
        f" {counted(result['examples'])} of {result['data']}.",
        "Barrier: how far the loss rises above the straight line between its ends.",
    ]
    if treated := [f"{curve['label']}: {curve['shortcuts']}" for curve in curves if curve["rotated"]]:
        lines.append(f"Shortcuts that carry P_out·P_inᵀ at α = 0: {'; '.join(treated)}.")
    if not all(curve["faithful"] for curve in curves):
        lines.append(
            f"* π(A) does not compute what A computes (loss {curves[0]['loss_of_a']:.4f}): the way begins"
            " elsewhere."
        )
    return Group(table, Text("\n".join(lines), style="dim"))


def evaluation(result: Mapping[str, Any]) -> RenderableType:
    """Show models row by row: the task, the support, and the gains over the reference."""
    shown = [part for part in ("task", "support") if result[part]]
    table = Table()
    table.add_column("model")
    for part in shown:
        table.add_column(f"{part}\n{_metric_name(result[part]['metric'])}", justify="right")
        if result["against"]:
            table.add_column("\ngain", justify="right")
    for row in result["models"]:
        cells: list[str | Text] = [Text(row["model"])]
        for part in shown:
            metric = result[part]["metric"]
            bounds = [_metric_value(metric, one, 1) for one in row[part].get("interval") or ()]
            score = Text(_metric_value(metric, row[part]["value"]))
            cells.append(score.append("\n" + "–".join(bounds), style="dim") if bounds else score)
            if result["against"]:
                itself = row["model"] == result["against"]
                interval = (row.get("gain_interval") or {}).get(part)
                cells.append(Text("") if itself else _gain(metric, row["gain"][part], interval))
        table.add_row(*cells)
    lines = [_about(part, result[part]) for part in shown]
    falling = [result[part]["metric"] in FALLING for part in shown]
    if result["against"]:
        points = "" if all(falling) else ", in points for rates"
        lines.append(f"Gains are over {result['against']}{points}.")
    lines.append("Below each number: its 95 % confidence interval, over examples.")
    if result["against"] and any(falling):
        lines.append("Of a loss and a perplexity less is better, and a negative gain is the good one.")
    return Group(table, Text("\n".join(lines), style="dim"))


FALLING = ("loss", "perplexity")
"""Metrics where less is better."""


def _metric_name(metric: str) -> str:
    return metric if metric in FALLING else f"{metric} %"


def _metric_value(metric: str, value: float, digits: int = 2) -> str:
    return f"{value:.4f}" if metric in FALLING else f"{100 * value:.{digits}f}"


def _gain(metric: str, gain: float, interval: list[float] | None) -> Text:
    """Return a gain with its sign and interval: green if better, red if worse, neither if it may be 0."""
    text = Text(f"{gain:+.4f}" if metric in FALLING else f"{gain:+.2f}")
    low, high = interval or (gain, gain)
    if low <= 0 <= high:
        text.stylize("dim")
    else:
        text.stylize("green" if (gain > 0) != (metric in FALLING) else "red")
    if interval:
        bounds = [f"{one:+.4f}" if metric in FALLING else f"{one:+.1f}" for one in interval]
        text.append("\n" + " to ".join(bounds), style="dim")
    return text


def _about(part: str, info: dict[str, Any]) -> str:
    classes = f" of {info['classes']}" if info["classes"] else ""
    count = counted(info["examples"])
    return f"{part.capitalize()}: {info['question']}{classes}, on {count} of {info['data']}."


def counted(examples: int) -> str:
    """Return a number of examples, in the singular or plural."""
    return "1 example" if examples == 1 else f"{examples} examples"


# ── sweep and fewshot ─────────────────────────────────────────────────────────────────────────


def sweep(result: Mapping[str, Any]) -> RenderableType:
    """Show the gains over B for every α, curve by curve; the best on the task is bold."""
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
    empty = [cell for part in parts for cell in (_score(zero[part], result[part]["metric"]), "")]
    table.add_row("B" if begins and not info else "0", *(empty * len(curves)), style="dim")
    for row in zip(*(curve["points"][info:] for curve in curves), strict=True):
        cells: list[Text] = []
        for curve, point in zip(curves, row, strict=True):
            style = "bold" if point["alpha"] == curve["best"] else ""
            for part in parts:
                metric = result[part]["metric"]
                cells += [
                    Text(_score(point[part], metric), style=style),
                    _small_gain(point["gain"][part], metric),
                ]
        table.add_row(f"{row[0]['alpha']:.3g}", *cells)
    best = ", ".join(f"{curve['label']} {_best(curve, result['task']['metric'])}" for curve in curves)
    lines = [*(_measured_on(part, result[part]) for part in parts), f"Best α on the task: {best}."]
    return Group(table, Text("\n".join(lines), style="dim"))


def _best(curve: Mapping[str, Any], metric: str) -> str:
    """Return the best α, if it gains anything."""
    gain = next(point["gain"]["task"] for point in curve["points"] if point["alpha"] == curve["best"])
    better = gain < 0 if metric in FALLING else gain > 0
    return f"{curve['best']:.3g}" if better else "– (none is better than B)"


def fewshot(result: Mapping[str, Any]) -> RenderableType:
    """Show B, every curve with α = 1 and with the learned coefficients, and the coefficients."""
    metric = result["task"]["metric"]
    table = Table()
    for column in ("", metric if metric in FALLING else f"{metric} in %", "gain", "α by layer"):
        table.add_column(column, justify="right" if column and "α" not in column else "left")
    table.add_row("B as it is", _score(result["zero"], metric), "", "", style="dim")
    for curve in result["curves"]:
        what = f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ"
        learned = _coefficients(curve["coefficients"])
        for how, alphas in (("plain", "1"), ("learned", learned)):
            gain = _small_gain(curve["gain"][how], metric)
            table.add_row(f"{what}, {_HOW[how]}", _score(curve[how], metric), gain, alphas)
    training = result["training"]
    lines = [
        f"Learned from {counted(training['examples'])} of {training['data']}, {result['shots']} shots, seed"
        f" {result['seed']}.",
        _measured_on("test", result["task"]) + f" They are {training['test']}.",
    ]
    return Group(table, Text("\n".join(lines), style="dim"))


def _coefficients(info: Mapping[str, float]) -> str:
    """Return the coefficients of the layers in their order, then the one outside of blocks."""
    layers = " ".join(f"{value:.2f}" for pattern, value in info.items() if pattern != _OUTSIDE)
    if _OUTSIDE not in info:
        return layers
    return f"{layers}{', ' * bool(layers)}outside blocks {info[_OUTSIDE]:.2f}"


_OUTSIDE = "default"
_HOW = {"plain": "α = 1", "learned": "α learned"}


def _measured_on(part: str, data: Mapping[str, Any]) -> str:
    metric = data["metric"]
    how = "less is better, gains are plain differences" if metric in FALLING else "gains in points"
    return (
        f"{part.capitalize()}: {metric} ({data['question']}) on {counted(data['examples'])} of"
        f" {data['data']}; {how}."
    )


def _score(score: Mapping[str, Any], metric: str) -> str:
    return f"{score['value']:.4f}" if metric in FALLING else f"{100 * score['value']:.1f}"


def _small_gain(value: float, metric: str) -> Text:
    less, least = metric in FALLING, 0.0005 if metric in FALLING else 0.05
    if abs(value) < least:
        return Text(f"{value:+.3f}" if less else f"{value:+.1f}", style="dim")
    return Text(f"{value:+.3f}" if less else f"{value:+.1f}", style="green" if (value < 0) == less else "red")
