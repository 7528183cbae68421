"""The sections of a page, a function each, in the order of the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import HeadPolicy
from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.report.charts import BarChart, ChartCurve, HeatMap, LineChart
from transfusion.report.measures import AxisQuality, HeadPanel, Quality, TensorGroup
from transfusion.report.parts import (
    RATES,
    Command,
    Facts,
    Figure,
    Part,
    Prose,
    Section,
    Table,
    Tabs,
    axis_name,
    between,
    brief,
    capital,
    gain_unit,
    gained,
    listed,
    measured,
    number,
    percent,
    seconds,
    short,
    tenths,
    two_digits,
)
from transfusion.report.results import (
    Barrier,
    Data,
    Equivalence,
    Evaluation,
    FewShot,
    FewShotCurve,
    Inputs,
    Prediction,
    Result,
    Sweep,
    SweepCurve,
    recorded,
)
from transfusion.runtime.resources import format_bytes
from transfusion.transport.adapters.drift import describe_adapter_drift
from transfusion.transport.alpha import Alpha
from transfusion.transport.record import FILE
from transfusion.transport.refinement.settings import describe_refinement

NOTABLE = 0.25
"""The least end of the scale for cosines, so that tiny cosines look tiny."""
Rows = Sequence[tuple[str, Sequence[float | None]]]


def bars(
    id: str,
    title: str,
    rows: Rows,
    series: Sequence[str],
    say: Callable[[float], str],
    *,
    label: str = "",
    first: str = "",
    exact: Callable[[float | None], str] = number,
    tick: str = "",
    top: float | None = None,
    caption: str = "",
    table: Table | None = None,
    opened: bool = False,
) -> Figure:
    """Draw rows of values as bars, with the same values as a table.

    ``say`` formats values in the chart, ``exact`` in the table. ``label`` is read aloud. ``tick`` is the name
    of a last series that is drawn as a tick, ``top`` the end of the scale.
    """
    columns = [first, *series, *([tick] if tick else [])]
    table = table or Table(columns, [(name, *map(exact, values)) for name, values in rows])
    chart = BarChart(rows, series, label or title, say, tick, top)
    return Figure(id, title, chart, table, caption, opened)


def lines(
    id: str,
    title: str,
    curves: Sequence[ChartCurve],
    x: str,
    y: str,
    say: Callable[[float], str],
    *,
    label: str = "",
    scale: Callable[[float], str] | None = None,
    whole_x: bool = False,
    zero: bool = False,
    caption: str = "",
    table: Table | None = None,
) -> Figure:
    """Draw curves, with the same values as a table. ``scale`` formats values on the scale."""
    rows = [(one.label, brief(at), say(value)) for one in curves for at, value in one.points]
    chart = LineChart(curves, x, y, label or title, say, scale or say, whole_x, zero)
    return Figure(id, title, chart, table or Table(["", x, y], rows), caption)


# ── the run and its advice ───────────────────────────────────────────────────────────────────


def what_was_moved(metadata: Mapping[str, Any]) -> Section:
    """List the inputs, the settings and the numbers of tensors."""

    def named(info: Mapping[str, Any]) -> str:
        return f"{info['name']} · {info['fingerprint'][:12]}"

    pi = metadata["alignment"]
    rows = [("fine-tune", named(one)) for one in metadata["finetuned"]]
    rows += [("its base, A", named(metadata["base"])), ("the new base, B", named(metadata["onto"]))]
    rows.append(("π", f"{pi['method']}, seed {pi['seed']} · {pi['blake3'][:12]}"))
    rows.append(("axes", ", ".join(f"{key} {pi[key]}" for key in ("residual", "inner", "heads"))))
    rows.append(("α", str(Alpha.of(metadata["alpha"]))))
    if metadata.get("how"):
        rows.append(("combined by", f"{metadata['how']}, of {len(metadata['finetuned'])} fine-tunes"))
    rows.append(("tensors", _tensors(metadata)))
    if (shift := metadata.get("output_shift") or {}).get("direction") is not None:
        how = f"cosine {number(shift['direction'])}, {number(shift.get('size'))} times as large"
        rows.append(("change of B's outputs, compared with A's", f"{how}, on {shift.get('probes', '')}"))
    if drift := metadata.get("drift"):
        rows.append(("B's own change", "; ".join(describe_adapter_drift(drift))))
    if text := describe_refinement(metadata.get("refinement")):
        rows.append(("refinement", text))
    if recorded(metadata, "vocabulary", "moved"):
        rows.append(("vocabularies", describe_vocabulary(metadata["vocabulary"])))
    what = "an adapter" if metadata["kind"] == "adapter" else "a model"
    refined = ", refined," if "refinement" in metadata else ","
    lead = f"B + α·π(τ){refined} written as {what} that loads wherever B does."
    return Section("moved", "Moved", "What was moved", lead, [Facts(rows)])


def _tensors(metadata: Mapping[str, Any]) -> str:
    parts = [f"{metadata.get('moved', 0)} moved"]
    parts += [f"{metadata['unchanged']} unchanged from B"] if metadata.get("unchanged") else []
    for key, words in (("carried", "copied from the fine-tune"), ("dropped", "of B dropped")):
        parts += [f"{len(metadata[key])} {words}"] if metadata.get(key) else []
    parts += [f"{metadata['new_tokens']} new tokens"] if metadata.get("new_tokens") else []
    return ", ".join(parts)


def advice(info: Mapping[str, Any], objective: Sequence[float]) -> Section:
    """Show the verdict on π, and the numbers that it rests on."""
    parts: list[Part] = [Prose(f"{capital(info['text'])}.")]
    if "margins" in info:
        parts += [_objective(info, objective), _margins(info["margins"])]
    elif {"found", "identity", "null"} <= info.keys():
        rows = [("found", "found"), ("nothing moved", "identity"), ("null", "null")]
        values: Rows = [(name, [info[key]]) for name, key in rows]
        label = "Share of B's activations predicted"
        on = f"On {info['probes']}, which were not used to find π." if info.get("probes") else ""
        title = "How much of B is predicted from A"
        parts.append(
            bars("predicted", title, values, ["share"], percent, label=label, exact=tenths, top=1, caption=on)
        )
    if ways := info.get("predicted_by"):
        rows_of_ways: Rows = [(way, [share]) for way, share in ways.items()]
        why = f"{info['chosen']} was chosen: the simplest method that predicts B about as well as any."
        label = "Share of B's activations predicted, by method"
        parts.append(
            bars(
                "ways", "Methods compared", rows_of_ways, ["share predicted"], percent,
                label=label, first="method", exact=tenths, top=1, caption=why,
            )
        )  # fmt: skip
    return Section("advice", "Advice", f"Advice: {info['verdict']}", "Can you rely on this π?", parts)


def _objective(info: Mapping[str, Any], objective: Sequence[float]) -> Figure:
    rows: Rows = [("nothing moved", [float(info["identity"])]), ("found", [float(info["found"])])]
    caption = "The inner product of π(A) and B over all weights."
    if (share := info.get("share")) is not None:
        caption += (
            " On a scale from the null (the same search between unrelated models) to a perfect match, the"
            f" search reached {percent(share)}."
        )
    caption += f" It was found in {len(objective) - 1} sweeps." if len(objective) > 1 else ""
    label = "The objective found, and with nothing moved"
    return bars("objective", "The objective", rows, ["objective"], number, label=label, caption=caption)


def _margins(margins: Mapping[str, Mapping[str, float | None]]) -> Figure:
    names = {axis_name(kind): one for kind, one in margins.items()}
    table = [
        (name, number(one["found"]), number(one["null"]), number(one["beyond"]), percent(one["home"]))
        for name, one in names.items()
    ]
    return bars(
        "margins",
        "Found, compared with the null",
        [(name, [one["found"], one["null"]]) for name, one in names.items()],
        ["found"],
        number,
        label="Correlation found for each kind of axis, and in the null",
        tick="null",
        top=1,
        table=Table(["kind of axis", "found", "null", "standard deviations above", "in place"], table),
        caption="Correlations between π(A) and B, the mean over all layers. 1 is a perfect match. The null is"
        " the correlation that the same search finds between unrelated models.",
    )


def blocks(info: Mapping[str, Any]) -> Section:
    """Show which blocks of A and B correspond, if they have different shapes."""
    figures: list[Part] = []
    for stack, quality in info["blocks"].items():
        path = [(j, i) for i, j in info["paths"][stack]]
        matrix = np.clip(np.asarray(quality, dtype=float).T, 0, 1)  # (blocks of B, blocks of A)
        partners = {j: [i for to, i in path if to == j] for j in range(len(matrix))}
        rows = [
            (str(j), ", ".join(map(str, ours)), percent(float(max(matrix[j][i] for i in ours))))
            for j, ours in partners.items()
        ]
        figures.append(
            Figure(
                f"blocks-{stack}",
                f"Blocks of {stack}",
                HeatMap([(stack, matrix)], f"Blocks of {stack}: B's in rows, A's in columns", framed=path),
                Table(["block of B", "gets the change of A's", "share predicted"], rows),
                "How much of what a block of B writes is predicted by what a block of A writes, on held-out"
                " inputs. Framed: the blocks that correspond. The change of a block that has several"
                " partners is divided among them, and the changes of several blocks are added.",
            )
        )
    lead = "A and B have different shapes. Which block of A became which block of B?"
    return Section("blocks", "Blocks", "Blocks that correspond", lead, figures)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────


def evaluations(inputs: Inputs) -> Section:
    """Show the scores and gains of models."""
    results = inputs.of("evaluate")
    parts = [_evaluation(inputs, results, place) for place in range(len(results))]
    lead = "Task: what the fine-tune was trained for. Support: what B could do before."
    return Section("evaluation", "Evaluation", "Evaluation", lead, parts)


def _evaluation(inputs: Inputs, results: Sequence[Result], place: int) -> Figure:
    result = results[place]
    info: Evaluation = result.info
    metrics = {what: data.metric for what, data in info.data().items()}
    head, rows, drawn = ["model"], list[list[str]](), list[tuple[str, list[float | None]]]()
    for what, metric in metrics.items():
        head += [f"{what}, {metric}", f"gain, {gain_unit(metric)}"]
    series = list(metrics) if len(set(metrics.values())) == 1 else ["task"]
    for one in info.models:
        row = [short(one.model)]
        for what, metric in metrics.items():
            score = one.of(what)
            value, interval = (score.value, score.interval) if score else (None, None)
            row.append(_bounded(value, interval, metric, measured))
            row.append(_bounded(one.gain_of(what), (one.gain_interval or {}).get(what), metric, gained))
        rows.append(row)
        scores = [one.of(what) for what in series]
        drawn.append((short(one.model), [score.value if score else None for score in scores]))
    metric = info.task.metric
    caption = f"{_about_others(result)} Task: {_about(info.task)}.".lstrip()
    caption += f" Support: {_about(info.support)}." if info.support else ""
    caption += f" Gains are over {short(info.against)}." if info.against else ""
    if any(one.task.interval for one in info.models):
        caption += " In brackets: 95 % confidence intervals."
    own = inputs.own_row(info)
    strong = next((place for place, one in enumerate(info.models) if one is own), None)
    return bars(
        numbered("scores", results, place),
        f"{capital(metric)} of each model{_which(results, result)}",
        drawn,
        series,
        lambda value: measured(value, metric),
        label="Scores by model",
        top=1 if metric in RATES else None,
        caption=caption,
        table=Table(head, rows, strong=strong),
        opened=True,
    )


def _bounded(
    value: float | None, interval: Sequence[float] | None, metric: str, shown: Callable[..., str]
) -> str:
    """Format a score or a gain, with its confidence interval in brackets if there is one."""
    return shown(value, metric) + (f" ({between(interval, metric, shown)})" if interval else "")


def _about(data: Data) -> str:
    classes = f", {data.classes} classes" if data.classes else ""
    return f"{data.examples} examples of {short(data.data)} ({data.question}{classes})"


def _about_others(result: Result) -> str:
    return "" if result.own else f"About other models: {result.subject}."


def _which(results: Sequence[Result], result: Result) -> str:
    """Name one of several results by its B, or by its file if that is not unique."""
    if len(results) == 1:
        return ""
    name = short(result.target)
    unique = [short(one.target) for one in results].count(name) == 1
    return f" onto {name}" if name and unique else f", {result.path.name}"


def _introduced(results: Sequence[Result], result: Result) -> list[Part]:
    """Return a line that names the models of a result, if there are several or it is about others."""
    text = _about_others(result) or (f"About {result.subject}." if len(results) > 1 else "")
    return [Prose(text)] if text else []


def numbered(id: str, results: Sequence[object], place: int) -> str:
    """Return an id with a number, if there are several results."""
    return id if len(results) == 1 else f"{id}-{place + 1}"


# ── π, layer by layer and head by head ───────────────────────────────────────────────────────


def layers(quality: Quality) -> Section:
    """Draw the quality by layer: all kinds of axes together, and each with its comparisons."""
    kinds = quality.kinds()
    compared = (("nothing moved", "identity", 1), ("null", "null", 2))

    def figure(id: str, title: str, curves: list[ChartCurve], axes: Iterable[AxisQuality]) -> Figure:
        rows = [(one.id, number(one.found), number(one.identity), number(one.null)) for one in axes]
        return lines(
            id, title, curves, "layer", quality.name, two_digits, label=f"{quality.name} by layer",
            whole_x=True, zero=True, table=Table(["axis", "found", "nothing moved", "null"], rows),
        )  # fmt: skip

    every = [ChartCurve(axis_name(kind), _points(axes, "found")) for kind, axes in kinds.items()]
    every += [ChartCurve(name, _means(quality.axes, what), quiet) for name, what, quiet in compared]
    tabs = [("All", figure("layers-all", "All kinds of axes", every, quality.axes))]
    for kind, axes in kinds.items():
        curves = [ChartCurve("found", _points(axes, "found"))]
        curves += [ChartCurve(name, _points(axes, what), quiet) for name, what, quiet in compared]
        title = capital(axis_name(kind))
        tabs.append((title, figure(f"layers-{kind}", title, curves, axes)))
    parts = [Tabs("layers", "Kind of axis", tabs)]
    return Section("layers", "Layers", "Alignment, layer by layer", quality.about, parts)


def _points(axes: Iterable[AxisQuality], what: str) -> list[tuple[float, float]]:
    return [(axis.layer, getattr(axis, what)) for axis in axes]


def _means(axes: Iterable[AxisQuality], what: str) -> list[tuple[float, float]]:
    """Return the mean over all axes of each layer."""
    found: dict[float, list[float]] = {}
    for layer, value in _points(axes, what):
        found.setdefault(layer, []).append(value)
    return [(layer, sum(values) / len(values)) for layer, values in sorted(found.items())]


def heads(panels: Sequence[HeadPanel], pi: Alignment) -> Section:
    """Show which head of A becomes which head of B."""
    chart = HeatMap([(one.title, one.shares) for one in panels], "Which head of A becomes which head of B")
    moves = [(one.title, *move) for one in panels for move in one.strongest()]
    caption = (
        "Rows are heads of B, columns heads of A. The stronger the colour, the larger the share of A's head."
    )
    if left := len(panels) - len(chart.shown()):
        caption += f" {left} of {len(panels)} panels are not drawn; the table has the numbers of all."
    if pi.provenance.policy.heads is HeadPolicy.FLAT:
        lead = (
            "This π mixes units of different heads: a square is the share of a head's energy that comes from"
            f" a head of A. Without any correspondence, all squares would be"
            f" {percent(1 / len(panels[0].shares))}."
        )
    else:
        stay = sum(to == source for _, to, source, _ in moves) / len(moves)
        lead = f"Heads move as a whole. {percent(stay)} of them stay in place."
    rows = [(title, str(to), str(source), percent(share)) for title, to, source, share in moves]
    table = Table(["", "head of B", "mostly from A's", "share"], rows)
    return Section("heads", "Heads", "Heads", lead, [Figure("heads", "Heads", chart, table, caption)])


def task_vector(groups: Sequence[TensorGroup], quality: Quality | None, ceiling: str | None) -> Section:
    """Show which parts of the model changed, how well these match in B, and how B's own fine-tune differs."""
    total = sum(group.square for group in groups)
    table = [
        (one.role, str(one.tensors), tenths(one.square / total), number(one.mean("found")),
         number(one.mean("null")))
        for one in groups
    ]  # fmt: skip
    parts: list[Part] = [
        bars(
            "tau",
            "Where τ is",
            [(one.role, [one.square / total]) for one in groups],
            ["share of ‖τ‖²"],
            tenths,
            label="Share of the squared task vector by part of the model",
            table=Table(["part", "tensors", "share of ‖τ‖²", "match in B", "null"], table),
            caption="The share of ‖τ‖² in each part of the model.",
        )
    ]
    matched = [(one.role, [one.mean("found"), one.mean("null")]) for one in groups if one.mean("found")]
    if quality is not None and matched:
        parts.append(
            bars(
                "arriving",
                "How well the changed units match in B",
                matched,
                ["match in B"],
                two_digits,
                label="Quality of the axes of each part",
                first="part",
                tick="null",
                top=1,
                caption=f"Measured without data: the mean {quality.name} of each tensor's axes, weighted by"
                " the tensor's share of ‖τ‖². At the null, π moves τ to arbitrary units. Far above the null,"
                " π moves τ to the right units; an evaluation shows the effect.",
            )
        )
    cosines = [(one.role, [one.cosine("moved"), one.cosine("unmoved")]) for one in groups]
    if compared := [row for row in cosines if row[1][1] is not None]:
        parts.append(
            bars(
                "ceiling",
                "Compared with B's own fine-tune",
                compared,
                ["π(τ)", "τ as it is"],
                two_digits,
                label="Cosine with the change of B fine-tuned itself",
                first="part",
                top=NOTABLE,
                caption=f"Cosines with {short(ceiling)} − B. Two fine-tunes of one task differ even from the"
                " same base, so a small cosine is no failure. The gain of π is the difference from τ as it"
                " is.",
            )
        )
    lead = f"Most of the change is in {listed(one.role for one in groups[:2])}." if len(groups) > 1 else ""
    return Section("tau", "Task vector", "The task vector, by part of the model", lead, parts)


# ── α, barrier and verification ──────────────────────────────────────────────────────────────


def sweeps(inputs: Inputs) -> Section:
    """Show the scores at every α, on the task and on the support."""
    parts: list[Part] = []
    results = inputs.of("sweep")
    for place, result in enumerate(results):
        info: Sweep = result.info
        id = numbered("sweep", results, place)
        parts += _introduced(results, result)
        tabs = [(capital(what), _swept(info, what, f"{id}-{what}")) for what in info.data()]
        parts.append(Tabs(id, "Measured on", tabs))
        best = [(one.label, *_at_best(one, info)) for one in info.curves]
        head = ["", "best α", "gain on the task", "gain on the support"]
        parts.append(Table(head, best, "At the α that is best for the task"))
    return Section("alpha", "α", "Choosing α", "B + α·π(τ) for several α. At α = 0 it is B.", parts)


def _at_best(curve: SweepCurve, info: Sweep) -> tuple[str, str, str]:
    """Return the best α, with a note if it is no better than B, and the gains there."""
    point, metric = curve.at_best, info.task.metric
    gain = point.gain_of("task") or 0.0
    better = gain > 0 if metric in RATES else gain < 0
    support = gained(point.gain_of("support"), info.support.metric) if info.support else "–"
    return brief(curve.best) + ("" if better else ", no better than B"), gained(gain, metric), support


def _swept(info: Sweep, what: str, id: str) -> Figure:
    data = info.data()[what]
    metric, start = data.metric, info.at_zero.of(what)
    points = {
        one.label: [(point, score.value) for point in one.points if (score := point.of(what)) is not None]
        for one in info.curves
    }
    rows = [
        (label, brief(point.alpha), measured(value, metric), gained(point.gain_of(what), metric))
        for label, some in points.items()
        for point, value in some
    ]
    curves = [
        ChartCurve(
            one.label,
            [
                *([(0.0, start.value)] if start else []),
                *((point.alpha, value) for point, value in points[one.label] if point.alpha or not start),
            ],
            0 if one.method else 1,
        )
        for one in info.curves
    ]
    return lines(
        id,
        capital(what),
        curves,
        "α",
        metric,
        lambda value: measured(value, metric),
        label=f"{metric} on the {what} against α",
        scale=percent if metric in RATES else brief,
        caption=f"{_about(data)}.",
        table=Table(["", "α", metric, f"gain, {gain_unit(metric)}"], rows),
    )


def fewshots(inputs: Inputs) -> Section:
    """Show the α that few-shot learning found, and the gains."""
    parts: list[Part] = []
    results = inputs.of("fewshot")
    for place, result in enumerate(results):
        info: FewShot = result.info
        id, metric = numbered("fewshot", results, place), info.task.metric
        rows = [("B", measured(info.zero.value, metric), "–", "–", "–")]
        for one in info.curves:
            plain = measured(one.plain.value, metric), gained(one.gain.plain, metric)
            learned = measured(one.learned.value, metric), gained(one.gain.learned, metric)
            rows.append((one.label, *plain, *learned))
        shots = f"{info.shots} examples of each class chose one α for every part of the model"
        parts += _introduced(results, result)
        parts.append(Prose(f"{shots}; measured on {_about(info.task)}."))
        parts.append(Table(["", "α = 1", "gain", "α learned", "gain"], rows))
        learned_by = [one for one in info.curves if one.coefficients]
        tabs = [(one.label, _coefficients(one, f"{id}-{i}")) for i, one in enumerate(learned_by)]
        parts += [Tabs(id, "Task vector", tabs)] if len(tabs) > 1 else [figure for _, figure in tabs]
        curves = [
            ChartCurve(one.label, list(enumerate(one.losses))) for one in info.curves if len(one.losses) > 1
        ]
        if curves:
            title, label = "While α was learned", "Loss while α was learned"
            parts.append(
                lines(f"{id}-losses", title, curves, "epoch", "loss", brief, label=label, whole_x=True)
            )
    return Section("fewshot", "Few-shot", "α learned from a few examples", "", parts)


def _coefficients(curve: FewShotCurve, id: str) -> Figure:
    """Draw α by part of the model: as bars, or as a line if there are many."""
    info = {"outside blocks" if name == "default" else name: v for name, v in curve.coefficients.items()}
    title = f"Learned α: {curve.label}"
    table = Table(["part", "α"], [(name, number(value)) for name, value in info.items()])
    if len(info) > 24:
        drawn = [ChartCurve("α", list(enumerate(info.values())))]
        x = "part, in the order of the numbers"
        return lines(id, title, drawn, x, "α", brief, label="Learned α", whole_x=True, table=table)
    rows: Rows = [(name if len(name) <= 28 else f"…{name[-27:]}", [value]) for name, value in info.items()]
    return bars(id, title, rows, ["α"], two_digits, label="Learned α by part of the model", table=table)


def barriers(inputs: Inputs) -> Section:
    """Show the loss between π(A) and B."""
    parts: list[Part] = []
    results = inputs.of("barrier")
    for place, result in enumerate(results):
        info: Barrier = result.info
        id, tabs = numbered("barrier", results, place), []
        for what, say in (("loss", brief), ("accuracy", percent)):
            curves = [
                ChartCurve(
                    one.label,
                    [(point.alpha, getattr(point, what)) for point in one.points],
                    0 if one.method else 1,
                )
                for one in info.curves
            ]
            label = f"{what} between π(A) and B"
            figure = lines(f"{id}-{what}", capital(what), curves, "α, from π(A) to B", what, say, label=label)
            tabs.append((capital(what), figure))
        unfaithful = "π(A) does not compute the same as A"
        heights = [(one.label, number(one.height), "" if one.faithful else unfaithful) for one in info.curves]
        on = f"On {info.examples} examples of {short(info.data)}, {info.question}."
        parts += [Prose(other)] if (other := _about_others(result)) else []
        parts += [Tabs(id, "Measured", tabs), Table(["", "barrier", ""], heights, on)]
    lead = (
        "The loss of (1 − α)·π(A) + α·B. The barrier is the largest rise above the straight line between the"
        " ends."
    )
    return Section("barrier", "Barrier", "The barrier between π(A) and B", lead, parts)


def proofs(inputs: Inputs) -> Section:
    """Show the results of `verify`."""
    parts = [Facts(_proof(inputs, result.info)) for result in inputs.of("verify")]
    return Section(
        "proof", "Proof", "Verification", "Measured by running the models in their own library.", parts
    )


def _proof(inputs: Inputs, info: Any) -> list[tuple[str, str]]:
    of = ("about", _proven(inputs, info))
    if isinstance(info, Equivalence):
        verdict = "computes the same as A" if info.equal else "does not compute the same as A"
        difference = f"{info.difference:.2g} over {', '.join(info.outputs)}, in float64"
        rows = [of, ("π(A)", verdict), ("largest difference", difference)]
        rows += [("allowed", f"{info.tolerance:.2g}")] if info.tolerance is not None else []
        return rows + ([("why", info.reason)] if info.reason else [])
    if isinstance(info, Prediction):
        share = f"predicts {percent(info.found)} of B's activations from A's"
        beside = f"{percent(info.identity)} with nothing moved, {percent(info.null)} in the null"
        return [of, ("π", share), ("compared with", beside), ("inputs", info.probes)]
    passed = sum(check.passed for check in info.checks)
    return [("table", f"{passed} of {len(info.checks)} checks passed")]


def _proven(inputs: Inputs, info: Any) -> str:
    """Name the π of a proof: this run's, or another by its file and digest."""
    of = f" and {short(info.a)}" if info.a else ""
    if info.digest is None:
        return f"a π without a recorded digest{of}"
    if info.digest == inputs.digest:
        return f"this run's π{of}"
    name = short(info.via) if info.via else "a π"
    return f"{name} ({info.alignment.method}, {info.digest[:12]}…){of}"


RESULTS = {"sweep": sweeps, "fewshot": fewshots, "barrier": barriers, "verify": proofs}
"""The sections after those about π, by the verb whose results they show."""

# ── time and commands ────────────────────────────────────────────────────────────────────────


def time_and_memory(inputs: Inputs) -> Section | None:
    """Show the time and memory of every step: of π, of the transport and of the results."""
    found: list[tuple[str, Any]] = []
    if inputs.alignment is not None and not inputs.of("align"):
        found.append(("align", inputs.alignment.provenance.run))
    if inputs.metadata is not None:
        found.append((inputs.metadata["verb"], inputs.metadata.get("run")))
    found += [(one.verb, one.info.run) for one in inputs.results]
    steps = [(verb, run) for verb, run in found if run]
    if not steps:
        return None
    machine = steps[-1][1]["machine"]
    counts = [(machine[f"{what}s"], what) for what in ("core", "thread")]
    cores = ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts)
    where = f"{machine['processor']}, {cores}, {machine['system']}"
    versions = f"Python {machine['python']}, torch {machine['torch']}"
    rows = [(verb, seconds(run["seconds"]), format_bytes(run["memory"])) for verb, run in steps]
    times: Rows = [(verb, [float(run["seconds"])]) for verb, run in steps]
    table = Table(["step", "time", "most memory"], rows)
    chart = bars(
        "time", "Time", times, ["seconds"], seconds, label="Time of each step", table=table, opened=True
    )
    parts: list[Part] = [chart, Facts([("machine", where), ("with", versions)])]
    return Section("time", "Time", "Time and memory", "", parts)


def typed_commands(inputs: Inputs) -> Section | None:
    """Return all recorded commands, and the command that repeats the run."""
    metadata = inputs.metadata or {}
    typed = [(one.verb, one.info.command) for one in inputs.results]
    typed = [(metadata["verb"], metadata["command"]), *typed] if metadata else typed
    commands = [Command(text, verb) for verb, text in typed if text]
    lead = "As they were typed; absolute paths are shortened." if commands else ""
    if metadata and metadata.get("repeatable", True) and inputs.run.is_dir():
        again = f"transfusion {metadata['verb']} --from {FILE} -o ../again"
        commands.append(Command(again, "the same again, bit for bit, from the folder of this run"))
    return Section("commands", "Commands", "Commands", lead, commands) if commands else None


def missing_commands(
    inputs: Inputs, names: tuple[Sequence[str], str, str, str], shown: Collection[str]
) -> list[Command]:
    """Return a command for every section that has no data, with the names of this run."""
    finetuned, a, b, method = names

    def argument(name: object, placeholder: str) -> str:
        return shlex.quote(str(name)) if name else placeholder

    def output(name: str) -> str:
        return f"-o {shlex.quote(f'{inputs.folder}/{name}')}"

    run, model_a, model_b = shlex.quote(str(inputs.run)), argument(a, "A"), argument(b, "B")
    tuned = argument(finetuned[0] if finetuned else "", "FINETUNED")
    by = f"--via {argument(recorded(inputs.metadata, 'settings', 'via'), 'PI')}"
    pair = f"--base {model_a} --onto {model_b} {by}"
    commands = {
        "evaluation": (
            "scores on a task and on a support, which is what B could do before",
            f"evaluate {model_b} {run} --against {model_b} --data TASK --support DATA"
            f" {output('evaluate.json')}",
        ),
        "alpha": (
            "how task and support depend on α",
            f"sweep {tuned} {pair} --data TASK --support DATA {output('sweep.json')}",
        ),
        "fewshot": (
            "α for every part of the model, from a few examples",
            f"fewshot {tuned} {pair} --data TRAIN --test TEST -o alpha.json"
            f" --results {shlex.quote(f'{inputs.folder}/fewshot.json')}",
        ),
        "barrier": (
            "the loss between π(A) and B",
            f"barrier {model_a} {model_b} {by} --data FILE {output('barrier.json')}",
        ),
        "proof": (
            "whether π(A) computes the same as A, or how much of B it predicts",
            f"verify {model_a} {by} {output('verify.json')}",
        ),
    }
    found = [Command(f"transfusion {text}", what) for id, (what, text) in commands.items() if id not in shown]
    if inputs.alignment is None and a and b:
        how = f" --method {shlex.quote(method)}" if method and " " not in method else ""
        align = f"transfusion align {model_a} {model_b}{how} -o pi.safetensors"
        found.append(Command(f"{align} && transfusion report {run} --via pi.safetensors", "layers and heads"))
    if inputs.ceiling is None and "tau" in shown:
        what = "the share of the gap, and π(τ) compared with the change that B's own fine-tune made"
        found.append(Command(f"transfusion report {run} --ceiling B_FINETUNED", what))
    return found
