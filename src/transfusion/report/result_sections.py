"""The sections of `evaluate`, `sweep` and `fewshot`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transfusion.errors import DataError
from transfusion.report.charts.page_charts import BarChart, ChartCurve, LineChart
from transfusion.report.formatting import (
    RATES,
    between,
    brief,
    gain_unit,
    gained,
    measured,
    number,
    numbered,
    percent,
    short,
)
from transfusion.report.page_parts import PageFigure, PageSection, PageTable, Part, Prose, Tabs
from transfusion.report.proof_sections import barriers, proofs
from transfusion.report.report_inputs import ReportInputs, Result
from transfusion.report.result_matching import mark, own_row, subject, target


def from_results(inputs: ReportInputs) -> list[PageSection]:
    """Make a section of each verb that has results. Refuse a result that cannot be read, by its file."""
    made: list[tuple[str, Callable[[ReportInputs, list[Result]], PageSection]]] = [
        ("evaluate", evaluation),
        ("sweep", sweeps),
        ("fewshot", fewshot),
        ("barrier", barriers),
        ("verify", proofs),
    ]
    found: list[PageSection] = []
    for verb, make in made:
        results = inputs.of(verb)
        for result in results:  # each alone first, to name the file of an error
            try:
                make(inputs, [result])
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise DataError(
                    f"{result.path}: not a result of {verb} as this version writes it"
                    f" ({type(error).__name__}: {error})",
                    hint=f"make it again with 'transfusion {verb}'",
                ) from error
        if results:
            found.append(make(inputs, results))
    return found


def _say(metric: str) -> Callable[[float], str]:
    return lambda value: measured(value, metric)


def _scale(metric: str) -> Callable[[float], str]:
    return percent if metric in RATES else brief


def _about(data: Mapping[str, Any]) -> str:
    classes = f", {data['classes']} classes" if data.get("classes") else ""
    return f"{data['examples']} examples of {short(data['data'])} ({data['question']}{classes})"


def evaluation(inputs: ReportInputs, results: list[Result]) -> PageSection:
    """Show the scores and gains of models."""
    parts: list[Part] = []
    for place, result in enumerate(results):
        info = result.info
        task, support = info["task"], info.get("support")
        metrics = {"task": task["metric"], **({"support": support["metric"]} if support else {})}
        rows, bars = [], []
        for one in info["models"]:
            gains = one.get("gain") or {}
            row, values = [short(one["model"])], []
            for what, metric in metrics.items():
                score, gain_interval = one[what], (one.get("gain_interval") or {}).get(what)
                row.append(_bounded(score["value"], score.get("interval"), metric, measured))
                row.append(_bounded(gains.get(what), gain_interval, metric, gained))
                values.append(float(one[what]["value"]))
            rows.append(row)
            bars.append((short(one["model"]), values))
        head = ["model"]
        for what, metric in metrics.items():
            head += [f"{what}, {metric}", f"gain, {gain_unit(metric)}"]
        alike = len(set(metrics.values())) == 1
        series = list(metrics) if alike else ["task"]
        drawn = [(name, values[: len(series)]) for name, values in bars]
        against = f" Gains are over {short(info['against'])}." if info.get("against") else ""
        if any(one["task"].get("interval") for one in info["models"]):
            against += " In brackets: 95 % confidence intervals."
        on = f" Support: {_about(support)}." if support else ""
        rate = task["metric"] in RATES
        chart = BarChart(drawn, series, "Scores by model", _say(task["metric"]), top=1 if rate else None)
        title = f"{task['metric'][:1].upper()}{task['metric'][1:]} of each model{_which(results, result)}"
        other = mark(inputs, result)
        note = f"{other}{' ' * bool(other)}Task: {_about(task)}.{on}{against}"
        table = PageTable(head, rows, strong=_mine(inputs, info["models"]))
        parts.append(PageFigure(numbered("scores", results, place), title, chart, table, note, opened=True))
    return PageSection(
        "evaluation",
        "Evaluation",
        "Task: what the fine-tune was trained for. Support: what B could do before.",
        parts,
        "Evaluation",
    )


def _bounded(
    value: float | None, interval: Sequence[float] | None, metric: str, shown: Callable[..., str]
) -> str:
    """Format a score or a gain, with its confidence interval in brackets if there is one."""
    return shown(value, metric) + (f" ({between(interval, metric, shown)})" if interval else "")


def _which(results: Sequence[Result], result: Result) -> str:
    """Name one of several results by its B, or by its file if that is not unique."""
    if len(results) == 1:
        return ""
    names = [short(target(one)) for one in results]
    name = short(target(result))
    return f" onto {name}" if name and names.count(name) == 1 else f", {result.path.name}"


def _marked(inputs: ReportInputs, results: Sequence[Result], result: Result) -> list[Part]:
    """Return a line that names the models of a result, if there are several or it is about others."""
    if other := mark(inputs, result):
        return [Prose(other)]
    return [Prose(f"About {subject(result)}.")] if len(results) > 1 else []


def _mine(inputs: ReportInputs, models: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of this run's output among the models."""
    own = own_row(inputs, {"models": models}) if inputs.metadata is not None else None
    return next((place for place, one in enumerate(models) if one is own), None)


def sweeps(inputs: ReportInputs, results: list[Result]) -> PageSection:
    """Show the scores at every α, on the task and on the support."""
    parts: list[Part] = []
    for place, result in enumerate(results):
        info = result.info
        tabs = [
            (what[:1].upper() + what[1:], _swept(info, what, f"{numbered('sweep', results, place)}-{what}"))
            for what in ("task", "support")
            if info.get(what)
        ]
        parts += _marked(inputs, results, result)
        parts.append(Tabs(numbered("sweep", results, place), "Measured on", tabs))
        best = [(one["label"], _best(one, info), *_at(one, one["best"], info)) for one in info["curves"]]
        head = ["", "best α", "gain on the task", "gain on the support"]
        parts.append(PageTable(head, best, "At the α that is best for the task"))
    return PageSection("alpha", "Choosing α", "B + α·π(τ) for several α. At α = 0 it is B.", parts, "α")


def _best(curve: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """Return the best α, with a note if it is no better than B."""
    point = min(curve["points"], key=lambda one: abs(one["alpha"] - curve["best"]))
    gain = point["gain"]["task"]
    better = gain > 0 if info["task"]["metric"] in RATES else gain < 0
    return brief(curve["best"]) if better else f"{brief(curve['best'])}, no better than B"


def _at(curve: Mapping[str, Any], alpha: float, info: Mapping[str, Any]) -> tuple[str, str]:
    point = min(curve["points"], key=lambda one: abs(one["alpha"] - alpha))
    support = info.get("support")
    return (
        gained(point["gain"]["task"], info["task"]["metric"]),
        gained(point["gain"].get("support"), support["metric"]) if support else "–",
    )


def _swept(info: Mapping[str, Any], what: str, id: str) -> PageFigure:
    metric = info[what]["metric"]
    start = info["at_zero"][what]["value"]
    curves = [
        ChartCurve(
            one["label"],
            [
                (0.0, start),
                *((point["alpha"], point[what]["value"]) for point in one["points"] if point["alpha"]),
            ],
            0 if one.get("method") else 1,
        )
        for one in info["curves"]
    ]
    rows = [
        (
            one["label"],
            brief(point["alpha"]),
            measured(point[what]["value"], metric),
            gained(point["gain"][what], metric),
        )
        for one in info["curves"]
        for point in one["points"]
    ]
    chart = LineChart(curves, "α", metric, f"{metric} on the {what} against α", _say(metric), _scale(metric))
    head = ["", "α", metric, f"gain, {gain_unit(metric)}"]
    return PageFigure(
        id, f"{what[:1].upper()}{what[1:]}", chart, PageTable(head, rows), f"{_about(info[what])}."
    )


def fewshot(inputs: ReportInputs, results: list[Result]) -> PageSection:
    """Show the α that few-shot learning found, and the gains."""
    parts: list[Part] = []
    for place, result in enumerate(results):
        info = result.info
        metric = info["task"]["metric"]
        rows = [("B", measured(info["zero"]["value"], metric), "–", "–", "–")]
        for one in info["curves"]:
            plain, learned = one["plain"]["value"], one["learned"]["value"]
            rows.append(
                (
                    one["label"],
                    measured(plain, metric),
                    gained(one["gain"]["plain"], metric),
                    measured(learned, metric),
                    gained(one["gain"]["learned"], metric),
                )
            )
        head = ["", "α = 1", "gain", "α learned", "gain"]
        parts += _marked(inputs, results, result)
        shots = f"{info['shots']} examples of each class chose one α for every part of the model"
        parts += [Prose(f"{shots}; measured on {_about(info['task'])}."), PageTable(head, rows)]
        id = numbered("fewshot", results, place)
        tabs = [
            (one["label"], _coefficients(one, f"{id}-{number}"))
            for number, one in enumerate(info["curves"])
            if one["coefficients"]
        ]
        parts += [Tabs(id, "Task vector", tabs)] if len(tabs) > 1 else [figure for _, figure in tabs]
        parts += _learning(info["curves"], f"{id}-losses")
    return PageSection("fewshot", "α learned from a few examples", "", parts, "Few-shot")


def _learning(curves: Sequence[Mapping[str, Any]], id: str) -> list[Part]:
    """Draw the loss while α was learned."""
    drawn = [
        ChartCurve(one["label"], list(enumerate(one["losses"]))) for one in curves if len(one["losses"]) > 1
    ]
    if not drawn:
        return []
    rows = [(one.label, str(epoch), brief(loss)) for one in drawn for epoch, loss in one.points]
    chart = LineChart(drawn, "epoch", "loss", "Loss while α was learned", brief, brief, whole_x=True)
    return [PageFigure(id, "While α was learned", chart, PageTable(["", "epoch", "loss"], rows))]


def _coefficients(curve: Mapping[str, Any], id: str) -> PageFigure:
    info = {name: float(value) for name, value in curve["coefficients"].items()}
    info = {_OUTSIDE.get(name, name): value for name, value in info.items()}
    rows = [(name, number(value)) for name, value in info.items()]
    chart: Callable[[float], str]
    if len(info) > 24:
        points = list(enumerate(info.values()))
        chart = LineChart(
            [ChartCurve("α", points)], "part, in the order of the numbers", "α", "Learned α", whole_x=True
        )
    else:
        drawn = [(_pattern(name), [value]) for name, value in info.items()]
        chart = BarChart(drawn, ["α"], "Learned α by part of the model", lambda value: f"{value:.2f}")
    return PageFigure(id, f"Learned α: {curve['label']}", chart, PageTable(["part", "α"], rows))


_OUTSIDE = {"default": "outside blocks"}
"""Names in a file of α, and their names on the page."""


def _pattern(name: str) -> str:
    return name if len(name) <= 28 else f"…{name[-27:]}"
