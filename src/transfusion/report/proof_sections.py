"""The sections of `barrier` and `verify`, and of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfusion.report.charts.page_charts import BarChart, ChartCurve, LineChart
from transfusion.report.formatting import brief, number, numbered, percent, seconds, short, size
from transfusion.report.page_parts import Facts, PageFigure, PageSection, PageTable, Part, Prose, Tabs
from transfusion.report.report_inputs import ReportInputs, Result, about
from transfusion.report.result_matching import mark


def barriers(inputs: ReportInputs, results: list[Result]) -> PageSection:
    """Show the loss between π(A) and B."""
    parts: list[Part] = []
    for place, result in enumerate(results):
        info, id = result.info, numbered("barrier", results, place)
        tabs = []
        for what, say in (("loss", brief), ("accuracy", percent)):
            curves = [
                ChartCurve(
                    one["label"],
                    [(point["alpha"], point[what]) for point in one["points"]],
                    0 if one.get("method") else 1,
                )
                for one in info["curves"]
            ]
            rows = [
                (one["label"], brief(point["alpha"]), number(point["loss"]), percent(point["accuracy"], 1))
                for one in info["curves"]
                for point in one["points"]
            ]
            chart = LineChart(curves, "α, from π(A) to B", what, f"{what} between π(A) and B", say, say)
            figure = PageFigure(
                f"{id}-{what}",
                what[:1].upper() + what[1:],
                chart,
                PageTable(["", "α", "loss", "accuracy"], rows),
            )
            tabs.append((what[:1].upper() + what[1:], figure))
        heights = [
            (
                one["label"],
                number(one["height"]),
                "" if one["faithful"] else "π(A) does not compute the same as A",
            )
            for one in info["curves"]
        ]
        on = f"{info['examples']} examples of {short(info['data'])}, {info['question']}"
        parts += [Prose(other)] if (other := mark(inputs, result)) else []
        parts += [Tabs(id, "Measured", tabs), PageTable(["", "barrier", ""], heights, f"On {on}.")]
    lead = (
        "The loss of (1 − α)·π(A) + α·B. The barrier is the largest rise above the straight line between the"
        " ends."
    )
    return PageSection("barrier", "The barrier between π(A) and B", lead, parts, "Barrier")


def proofs(inputs: ReportInputs, results: list[Result]) -> PageSection:
    """Show the results of `verify`."""
    parts: list[Part] = []
    for result in results:
        info, of = result.info, ("about", _about(inputs, result))
        if "equal" in info:
            verdict = "computes the same as A" if info["equal"] else "does not compute the same as A"
            rows = [
                of,
                ("π(A)", verdict),
                (
                    "largest difference",
                    f"{info['difference']:.2g} over {', '.join(info['outputs'])}, in float64",
                ),
            ]
            rows += [("allowed", f"{info['tolerance']:.2g}")] if "tolerance" in info else []
            rows += [("why", info["reason"])] if info.get("reason") else []
            parts.append(Facts(rows))
        elif "checks" in info:
            passed = sum(bool(check["passed"]) for check in info["checks"])
            parts.append(Facts([("table", f"{passed} of {len(info['checks'])} checks passed")]))
        else:
            share = f"predicts {percent(info['found'])} of B's activations from A's"
            beside = f"{percent(info['identity'])} with nothing moved, {percent(info['null'])} in the null"
            seen = ("inputs", str(info.get("probes", "")))
            parts.append(Facts([of, ("π", share), ("compared with", beside), seen]))
    return PageSection(
        "proof", "Verification", "Measured by running the models in their own library.", parts, "Proof"
    )


def _about(inputs: ReportInputs, result: Result) -> str:
    """Name the π of a result: this run's, or another by its file and digest."""
    info, digest = result.info, about(result)
    of = f" and {short(info['a'])}" if info.get("a") else ""
    if digest is None:
        return f"a π without a recorded digest{of}"
    if digest == inputs.digest:
        return f"this run's π{of}"
    name = short(info["via"]) if info.get("via") else "a π"
    return f"{name} ({info['alignment'].get('method', 'method unknown')}, {digest[:12]}…){of}"


def time_and_memory(info: Sequence[tuple[str, Mapping[str, Any]]]) -> PageSection | None:
    """Show the time and memory of every step."""
    steps = [(verb, run) for verb, run in info if run]
    if not steps:
        return None
    bars = [(verb, [float(run["seconds"])]) for verb, run in steps]
    machine = steps[-1][1]["machine"]
    rows = [(verb, seconds(run["seconds"]), size(run["memory"])) for verb, run in steps]
    cores = ", ".join(_counted(machine[f"{what}s"], what) for what in ("core", "thread"))
    where = f"{machine['processor']}, {cores}, {machine['system']}"
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    table = PageTable(["step", "time", "most memory"], rows)
    chart = BarChart(bars, ["seconds"], "Time of each step", seconds)
    parts: list[Part] = [
        PageFigure("time", "Time", chart, table, opened=True),
        Facts([("machine", where), ("with", versions)]),
    ]
    return PageSection("time", "Time and memory", "", parts, "Time")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
