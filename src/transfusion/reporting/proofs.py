"""The sections about what running the models has shown, and what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfusion.reporting.belonging import mark
from transfusion.reporting.charts import Bars, Curve, Lines
from transfusion.reporting.parts import Facts, Figure, Part, Prose, Section, Table, Tabs
from transfusion.reporting.reading import Material, Result, about
from transfusion.reporting.words import brief, number, numbered, percent, seconds, short, size


def barriers(material: Material, results: list[Result]) -> Section:
    """The loss on the way from π(A) to B."""
    parts: list[Part] = []
    for place, result in enumerate(results):
        told, id = result.told, numbered("barrier", results, place)
        tabs = []
        for what, say in (("loss", brief), ("accuracy", percent)):
            curves = [
                Curve(
                    one["label"],
                    [(point["alpha"], point[what]) for point in one["points"]],
                    0 if one.get("method") else 1,
                )
                for one in told["curves"]
            ]
            rows = [
                (one["label"], brief(point["alpha"]), number(point["loss"]), percent(point["accuracy"], 1))
                for one in told["curves"]
                for point in one["points"]
            ]
            chart = Lines(curves, "α, from π(A) to B", what, f"{what} between π(A) and B", say, say)
            figure = Figure(
                f"{id}-{what}", what[:1].upper() + what[1:], chart, Table(["", "α", "loss", "accuracy"], rows)
            )
            tabs.append((what[:1].upper() + what[1:], figure))
        heights = [
            (
                one["label"],
                number(one["height"]),
                "" if one["faithful"] else "π(A) does not compute what A computes",
            )
            for one in told["curves"]
        ]
        on = f"{told['examples']} examples of {short(told['data'])}, {told['question']}"
        parts += [Prose(other)] if (other := mark(material, result)) else []
        parts += [Tabs(id, "Measured", tabs), Table(["", "barrier", ""], heights, f"On {on}.")]
    lead = (
        "The loss of (1 − α)·π(A) + α·B. The barrier is how far it rises above the straight line between its"
        " ends."
    )
    return Section("barrier", "The barrier between π(A) and B", lead, parts, "Barrier")


def proofs(material: Material, results: list[Result]) -> Section:
    """What running the models has shown."""
    parts: list[Part] = []
    for result in results:
        told, of = result.told, ("about", _about(material, result))
        if "equal" in told:
            verdict = "computes what A computes" if told["equal"] else "does not compute what A computes"
            rows = [
                of,
                ("π(A)", verdict),
                (
                    "largest difference",
                    f"{told['difference']:.2g} over {', '.join(told['outputs'])}, in float64",
                ),
            ]
            rows += [("allowed", f"{told['tolerance']:.2g}")] if "tolerance" in told else []
            rows += [("why", told["reason"])] if told.get("reason") else []
            parts.append(Facts(rows))
        elif "checks" in told:
            passed = sum(bool(check["passed"]) for check in told["checks"])
            parts.append(Facts([("table", f"{passed} of {len(told['checks'])} checks passed")]))
        else:
            share = f"{percent(told['found'])} of B's activations are predicted from A's"
            beside = f"{percent(told['identity'])} with nothing moved, {percent(told['null'])} by chance"
            seen = ("shown", str(told.get("probes", "")))
            parts.append(Facts([of, ("π", share), ("beside", beside), seen]))
    return Section("proof", "Proof by running", "Both models through their own library.", parts, "Proof")


def _about(material: Material, result: Result) -> str:
    """Which π a proof is about: this run's, or one that is told by its name."""
    told, digest = result.told, about(result)
    of = f" and {short(told['a'])}" if told.get("a") else ""
    if digest is None:
        return f"a π that the result does not tell the digest of{of}"
    if digest == material.digest:
        return f"this run's π{of}"
    name = short(told["via"]) if told.get("via") else "a π"
    return f"{name} ({told['alignment'].get('method', 'method unknown')}, {digest[:12]}…){of}"


def time_and_memory(told: Sequence[tuple[str, Mapping[str, Any]]]) -> Section | None:
    """What every step took."""
    steps = [(verb, run) for verb, run in told if run]
    if not steps:
        return None
    bars = [(verb, [float(run["seconds"])]) for verb, run in steps]
    machine = steps[-1][1]["machine"]
    rows = [(verb, seconds(run["seconds"]), size(run["memory"])) for verb, run in steps]
    cores = ", ".join(_counted(machine[f"{what}s"], what) for what in ("core", "thread"))
    where = f"{machine['processor']}, {cores}, {machine['system']}"
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    table = Table(["step", "time", "most memory"], rows)
    chart = Bars(bars, ["seconds"], "Time of each step", seconds)
    parts: list[Part] = [
        Figure("time", "Time", chart, table, opened=True),
        Facts([("machine", where), ("with", versions)]),
    ]
    return Section("time", "Time and memory", "", parts, "Time")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
