"""The head of a page: title, verdict, main numbers and the picture of π."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.report.charts.map_charts import StrandChart
from transfusion.report.formatting import (
    RATES,
    axis_name,
    between,
    brief,
    gain_unit,
    gained,
    kind_of,
    layer_of,
    listed,
    measured,
    percent,
    short,
)
from transfusion.report.head_panels import shares_of
from transfusion.report.page_parts import Hero, Number, PageFigure, PageTable
from transfusion.report.report_inputs import ReportInputs
from transfusion.report.result_matching import model_location, own, own_row, targets
from transfusion.report.unit_quality import Qualities
from transfusion.transport.alpha import Alpha

_GOOD = ("alignable", "same lineage")
WELL_PREDICTED = 0.5
"""The share of B's activations from which on a prediction counts as good."""
TERMS = (
    ("task", "data of what the fine-tune was trained for"),
    ("support", "data of what B could do before, which B should still be able to do"),
    ("null", "the same measure where there is nothing to find; what is not above the null is chance"),
)


def hero(inputs: ReportInputs, info: Mapping[str, Any], quality: Qualities | None) -> Hero:
    """Make the head of a page from the inputs, the advice and the quality of the axes."""
    tuned, a, b, method = names(inputs)
    advice = dict(info)
    verdict = str(advice.get("verdict", "no advice"))
    if verdict == "predicted" and advice.get("found") is not None:
        verdict = f"{percent(advice['found'])} of B predicted"
    if tuned and b:
        title, moved = f"{listed(map(short, tuned))}, moved onto {short(b)}", True
    else:
        title, moved = (
            (f"From {short(a)} to {short(b)}" if a and b else f"Results in {short(inputs.run.resolve())}"),
            False,
        )
    stations = [("A", short(a), "the base that was fine-tuned")] if a else []
    stations += [("τ", listed(map(short, tuned)), "the change that the fine-tune made")] if tuned else []
    stations += [("π", method, "the method that matched units of A with B")] if method else []
    stations += [("B", short(b), "the new base")] if b else []
    refined = "refinement" in (inputs.metadata or {})
    how = "B + α·π(τ), refined on synthetic inputs" if refined else "without training: B + α·π(τ)"
    summary = f"A fine-tune of A, moved onto the new base B{',' * refined} {how}."
    summary = summary if moved else "Results in one place."
    numbers = [*_measured(inputs, b=b), *_without_data(inputs, quality)][:4]
    if inputs.metadata is None and len(several := targets(inputs)) > 1:
        numbers = []
        summary += (
            f" They are about several targets, {listed(map(short, several))}, so no main numbers are shown."
        )
    lost = _support_lost(numbers)
    mood = _mood(advice, lost)
    return Hero(
        title,
        summary,
        stations,
        verdict if advice else "",
        str(advice.get("text", "")),
        mood,
        numbers,
        strands(inputs.alignment),
        _next_steps(mood, advice, lost, inputs.metadata or {}),
        TERMS,
    )


def names(inputs: ReportInputs) -> tuple[list[str], str, str, str]:
    """Return the fine-tunes, A, B and the method, from the metadata, a result or π."""
    if (metadata := inputs.metadata) is not None:
        tuned = [str(one["name"]) for one in metadata["finetuned"]]
        return tuned, metadata["base"]["name"], metadata["onto"]["name"], metadata["alignment"]["method"]
    if len(targets(inputs)) > 1:
        return [], "", "", ""
    for result in (*inputs.of("sweep"), *inputs.of("fewshot")):
        if {"finetuned", "base", "onto"} <= result.info.keys():
            method = next((one["method"] for one in result.info["curves"] if one.get("method")), "")
            return [str(result.info["finetuned"])], str(result.info["base"]), str(result.info["onto"]), method
    if (pi := inputs.alignment) is not None:
        return [], pi.provenance.source, pi.provenance.target, pi.provenance.method
    for result in inputs.of("barrier"):
        return [], str(result.info.get("a", "")), str(result.info.get("b", "")), ""
    return [], "", "", ""


def _mood(advice: Mapping[str, Any], support_lost: bool) -> str:
    """Judge a result: ``good`` only if π is well founded and no loss of support was measured."""
    verdict, found = advice.get("verdict"), advice.get("found", 0.0)
    if verdict in _GOOD or (verdict == "predicted" and found >= WELL_PREDICTED):
        return "fair" if support_lost else "good"
    if verdict == "predicted" and found > advice.get("null", 0.0) + 0.1:
        return "fair"
    return "bad" if advice else ""


def _support_lost(numbers: Sequence[Number]) -> bool:
    return any(one.name.startswith("support") and one.mood == "bad" for one in numbers)


def _next_steps(
    mood: str, advice: Mapping[str, Any], support_lost: bool, metadata: Mapping[str, Any]
) -> list[str]:
    """Say what to try, if a result is not good: nothing that the run has done already."""
    if mood not in ("fair", "bad"):
        return []
    compared = (metadata.get("alignment") or {}).get("method") == "auto"
    tried = "alpha" in (metadata.get("output_shift") or {})
    steps = []
    refined = "refinement" in metadata
    if not refined:
        steps.append("transport with --refine, which asks the fine-tune itself on synthetic inputs")
    if not refined and not (compared and tried):
        steps.append("transport with --method auto --alpha auto, which compares the methods and chooses α")
    if advice.get("verdict") == "predicted":
        steps.append("give unlabelled inputs of your own with --calibrate")
    if support_lost and refined:
        steps.append("keep more of B with a larger weight, such as --keep-support 1")
    elif support_lost:
        steps.append("choose a smaller α: transfusion sweep shows what the support loses at each")
    else:
        steps.append("evaluate on the support as well (--support), before you rely on this model")
    return steps


def _better(gain: float, metric: str, interval: Sequence[float] | None) -> str:
    """Judge a gain: neither ``good`` nor ``bad`` if it is 0, or if its confidence interval includes 0."""
    low, high = interval or (gain, gain)
    if abs(gain) < 1e-9 or low <= 0 <= high:
        return ""
    return "good" if (gain > 0) == (metric in RATES) else "bad"


def _measured(inputs: ReportInputs, *, b: str) -> list[Number]:
    """Return the gains from an evaluation of this output, or else from a sweep."""
    for result in own(inputs, "evaluate"):
        info = result.info
        models = {model_location(one["model"]): one for one in info["models"]}
        row = own_row(inputs, info) if inputs.metadata is not None else _only_row(inputs, info)
        if row is not None:
            ceiling = models.get(model_location(inputs.ceiling)) if inputs.ceiling else None
            zero = models.get(model_location(b or info.get("against")))
            note = "" if inputs.metadata is not None else short(row["model"])
            return _gains(row, info, note) + _gap(row, zero, ceiling)
    for result in own(inputs, "sweep"):
        info = result.info
        curves = [one for one in info["curves"] if one.get("method")] or info["curves"]
        best = max(curves, key=lambda one: one["points"] and _gain_at_best(one, info["task"]["metric"]))
        point = min(best["points"], key=lambda one: abs(one["alpha"] - best["best"]))
        how = f"{best['label']}, α = {brief(point['alpha'])}, the best of the sweep, chosen on this data"
        return _gains(point, info, how)
    return []


def _only_row(inputs: ReportInputs, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the only model of an evaluation besides B and the ceiling, if there is one."""
    known = {model_location(one) for one in (info.get("against"), info.get("ceiling"), inputs.ceiling) if one}
    rows = [one for one in info["models"] if model_location(one["model"]) not in known and one.get("gain")]
    return rows[0] if len(rows) == 1 else None


def _gain_at_best(curve: Mapping[str, Any], metric: str) -> float:
    point = min(curve["points"], key=lambda one: abs(one["alpha"] - curve["best"]))
    gain = float(point["gain"]["task"])
    return gain if metric in RATES else -gain


def _gains(one: Mapping[str, Any], info: Mapping[str, Any], note: str) -> list[Number]:
    found: list[Number] = []
    for what in ("task", "support"):
        data = info.get(what)
        if not data or not one.get(what):
            continue
        metric, gain = data["metric"], (one.get("gain") or {}).get(what)
        score = measured(one[what]["value"], metric)
        if gain is None:
            found.append(Number(score, f"{metric} on the {what}", note))
        else:
            name = f"{what}, {gain_unit(metric)}"
            interval = (one.get("gain_interval") or {}).get(what)
            sure = f"95 %: {between(interval, metric, gained)}; " if interval else ""
            told = f"{sure}{note or f'{metric} {score}'}"
            found.append(Number(gained(gain, metric), name, told, _better(gain, metric, interval)))
    return found


def _gap(
    own: Mapping[str, Any],
    zero: Mapping[str, Any] | None,
    ceiling: Mapping[str, Any] | None,
) -> list[Number]:
    """Return the share of the gap between B and B fine-tuned itself."""
    if zero is None or ceiling is None:
        return []
    start, end, here = (one["task"]["value"] for one in (zero, ceiling, own))
    if abs(end - start) < 1e-9:
        return []
    note = f"from B to {short(ceiling['model'])}, on the task"
    return [Number(percent((here - start) / (end - start)), "of the gap", note)]


def _without_data(inputs: ReportInputs, quality: Qualities | None) -> list[Number]:
    found: list[Number] = []
    if quality is not None:
        mean = sum(axis.found for axis in quality.axes) / len(quality.axes)
        null = sum(axis.null for axis in quality.axes) / len(quality.axes)
        found.append(Number(f"{mean:.2f}", quality.title, f"the mean over axes; the null is {null:.2f}"))
    if (metadata := inputs.metadata) is not None:
        alpha = Alpha.of(metadata["alpha"]) if metadata.get("alpha") is not None else Alpha()
        value = f"{alpha.default:g}" if not alpha.patterns else "by layer"
        found.append(Number(str(metadata.get("moved", 0)), "tensors moved", ""))
        found.append(Number(value, "α", "the factor of τ"))
    return found


def strands(pi: Alignment | None) -> PageFigure | None:
    """Draw π for one axis from the middle of the model: neurons if they move, else the stream."""
    if pi is None:
        return None
    single = [id for id, map_ in pi.maps.items() if map_.blocks == 1 and not map_.is_identity()]
    for kind in ("ffn", "x", "stream", "head"):
        some = [id for id in single if kind_of(id).rsplit(".", 1)[-1] == kind]
        if some:
            return _threads(pi, some[len(some) // 2])
    return _threads(pi, single[len(single) // 2]) if single else None


def _threads(pi: Alignment, id: str) -> PageFigure:
    shares = shares_of(pi.maps[id])
    layer = layer_of(id)
    what = axis_name(kind_of(id)) + (f" of layer {layer}" if layer is not None else "")
    rows = [(str(to), str(int(row.argmax())), percent(float(row.max()))) for to, row in enumerate(shares)]
    table = PageTable(["unit of B", "mostly from A's", "share"], rows)
    where = f"which units of A become which units of B. This π moves {len(pi.maps)} axes."
    caption = f"{what[:1].upper()}{what[1:]}: {where}"
    return PageFigure(
        "strands", f"π, drawn: {what}", StrandChart(shares, ("A", "B"), caption), table, caption
    )
