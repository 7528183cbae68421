"""The sections of a page, a function each, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import HeadPolicy
from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.report.charts import Curve, Rows, bars, draw_heat_map, drawn_panels, lines
from transfusion.report.formats import Data, Equivalence, Evaluation, FewShotCurve, Prediction, Sweep
from transfusion.report.measures import AxisQuality, HeadPanel, Quality, TensorGroup
from transfusion.report.parts import (
    RATES,
    Facts,
    Figure,
    Part,
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
from transfusion.report.results import Inputs, Result, recorded
from transfusion.runtime.resources import format_bytes
from transfusion.transport.adapters.drift import describe_adapter_drift
from transfusion.transport.alpha import Alpha
from transfusion.transport.refinement.settings import BASE, describe_refinement

NOTABLE = 0.25
"""The least end of the scale for cosines, so that tiny cosines look tiny."""

# ── the run and its advice ───────────────────────────────────────────────────────────────────


def what_was_moved(metadata: Mapping[str, Any]) -> Section:
    """List the inputs, the settings and the numbers of tensors."""
    pi, shift, tuned = metadata["alignment"], metadata.get("output_shift") or {}, metadata["finetuned"]
    inputs = [("fine-tune", one) for one in tuned]
    inputs += [("its base, A", metadata["base"]), ("the new base, B", metadata["onto"])]
    rows = [(what, f"{one['name']} · {one['fingerprint'][:12]}") for what, one in inputs]
    rows.append(("π", f"{pi['method']}, seed {pi['seed']} · {pi['blake3'][:12]}"))
    rows.append(("axes", ", ".join(f"{key} {pi[key]}" for key in ("residual", "inner", "heads"))))
    rows.append(("α", str(Alpha.of(metadata["alpha"]))))
    if metadata.get("how"):
        rows.append(("combined by", f"{metadata['how']}, of {len(tuned)} fine-tunes"))
    counts = {
        "moved": metadata.get("moved", 0),
        "unchanged from B": metadata.get("unchanged"),
        "copied from the fine-tune": len(metadata.get("carried", ())),
        "of B dropped": len(metadata.get("dropped", ())),
        "new tokens": metadata.get("new_tokens"),
    }
    told = [f"{count} {what}" for what, count in counts.items() if count or what == "moved"]
    rows.append(("tensors", ", ".join(told)))
    if shift.get("direction") is not None:
        how = f"cosine {number(shift['direction'])}, {number(shift.get('size'))} times as large"
        rows.append(("change of B's outputs, compared with A's", f"{how}, on {shift.get('probes', '')}"))
    if drift := metadata.get("drift"):
        rows.append(("B's own change", "; ".join(describe_adapter_drift(drift))))
    if text := describe_refinement(metadata.get("refinement")):
        rows.append(("refinement", text))
    if recorded(metadata, "vocabulary", "moved"):
        rows.append(("vocabularies", describe_vocabulary(metadata["vocabulary"])))
    what = "an adapter" if metadata["kind"] == "adapter" else "a model"
    refined = metadata.get("refinement")
    start = "B" if refined and refined["start"] == BASE else "B + α·π(τ)"
    lead = f"{start}{', refined' if refined else ''}, written as {what} that loads wherever B does."
    return Section("moved", "Moved", "What was moved", lead, [Facts(rows)])


def advice(info: Mapping[str, Any], objective: Sequence[float]) -> Section:
    """Show the verdict on π, and the numbers that it rests on."""
    parts: list[Part] = [f"{capital(info['text'])}."]
    if "margins" in info:
        parts += [_objective(info, objective), _margins(info["margins"])]
    elif {"found", "identity", "null"} <= info.keys():
        keys = (("found", "found"), ("nothing moved", "identity"), ("null", "null"))
        values: Rows = [(name, [info[key]]) for name, key in keys]
        on = f"On {info['probes']}, which were not used to find π." if info.get("probes") else ""
        title = "How much of B is predicted from A"
        parts.append(bars("predicted", title, values, ["share"], percent, exact=tenths, top=1, caption=on))
    if ways := info.get("predicted_by"):
        rows: Rows = [(way, [share]) for way, share in ways.items()]
        why = f"{info['chosen']} was chosen: the simplest method that predicts B about as well as any."
        shares, title = ["share predicted"], "Methods compared"
        parts.append(
            bars("ways", title, rows, shares, percent, first="method", exact=tenths, top=1, caption=why)
        )
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
    return bars("objective", "The objective", rows, ["objective"], number, caption=caption)


def _margins(margins: Mapping[str, Mapping[str, float | None]]) -> Figure:
    names = {axis_name(kind): one for kind, one in margins.items()}
    exact = [
        (name, *(number(one[key]) for key in ("found", "null", "beyond")), percent(one["home"]))
        for name, one in names.items()
    ]
    return bars(
        "margins",
        "Found, compared with the null",
        [(name, [one["found"], one["null"]]) for name, one in names.items()],
        ["found"],
        number,
        tick="null",
        top=1,
        table=Table(["kind of axis", "found", "null", "standard deviations above", "in place"], exact),
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
        draw = partial(draw_heat_map, f"Blocks of {stack}", [(stack, matrix)], path)
        table = Table(["block of B", "gets the change of A's", "share predicted"], rows)
        caption = (
            "How much of what a block of B writes is predicted by what a block of A writes, on held-out"
            " inputs. Framed: the blocks that correspond. The change of a block that has several partners is"
            " divided among them, and the changes of several blocks are added."
        )
        figures.append(Figure(f"blocks-{stack}", f"Blocks of {stack}", draw, table, caption))
    lead = "A and B have different shapes. Which block of A became which block of B?"
    return Section("blocks", "Blocks", "Blocks that correspond", lead, figures)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────


def evaluations(inputs: Inputs) -> Section:
    """Show the scores and gains of models."""
    parts = [_evaluation(inputs, *one) for one in _numbered("scores", inputs.of("evaluate"))]
    lead = "Task: what the fine-tune was trained for. Support: what B could do before."
    return Section("evaluation", "Evaluation", "Evaluation", lead, parts)


def _evaluation(inputs: Inputs, id: str, result: Result, _: list[Part]) -> Figure:
    info: Evaluation = result.info
    head, metrics = ["model"], {what: data.metric for what, data in info.data().items()}
    for what, metric in metrics.items():
        head += [f"{what}, {metric}", f"gain, {gain_unit(metric)}"]
    series = list(metrics) if len(set(metrics.values())) == 1 else ["task"]
    exact, drawn = list[list[str]](), list[tuple[str, list[float | None]]]()
    for one in info.models:
        exact.append([short(one.model)])
        for what, metric in metrics.items():
            score, sure = one.of(what), (one.gain_interval or {}).get(what)
            cells = [measured(score.value if score else None, metric), gained(one.gain_of(what), metric)]
            cells[0] += f" ({between(score.interval, metric, measured)})" if score and score.interval else ""
            cells[1] += f" ({between(sure, metric, gained)})" if sure else ""
            exact[-1] += cells
        scores = [one.of(what) for what in series]
        drawn.append((short(one.model), [score.value if score else None for score in scores]))
    metric, own = info.task.metric, inputs.own_row(info)
    caption = f"{_about_others(result)} Task: {_about(info.task)}.".lstrip()
    caption += f" Support: {_about(info.support)}." if info.support else ""
    caption += f" Gains are over {short(info.against)}." if info.against else ""
    if any(one.task.interval for one in info.models):
        caption += " In brackets: 95 % confidence intervals."
    strong = next((place for place, one in enumerate(info.models) if one is own), None)
    return bars(
        id,
        f"{capital(metric)} of each model{_which(inputs.of('evaluate'), result)}",
        drawn,
        series,
        partial(measured, metric=metric),
        top=1 if metric in RATES else None,
        caption=caption,
        table=Table(head, exact, strong=strong),
        opened=True,
    )


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


def _numbered(id: str, results: Sequence[Result]) -> Iterator[tuple[str, Result, list[Part]]]:
    """Yield an id for each result, and a line on its models, if there are several or it is about others."""
    for place, one in enumerate(results, 1):
        text = _about_others(one) or (f"About {one.subject}." if len(results) > 1 else "")
        yield id if len(results) == 1 else f"{id}-{place}", one, [text] if text else []


# ── π, layer by layer and head by head ───────────────────────────────────────────────────────


def layers(quality: Quality) -> Section:
    """Draw the quality by layer: all kinds of axes together, and each with its comparisons."""
    compared = (("nothing moved", "identity", 1), ("null", "null", 2))

    def figure(id: str, title: str, curves: list[Curve], axes: Iterable[AxisQuality]) -> Figure:
        rows = [(one.id, number(one.found), number(one.identity), number(one.null)) for one in axes]
        table = Table(["axis", "found", "nothing moved", "null"], rows)
        y, say = quality.name, two_digits
        return lines(id, title, curves, "layer", y, say, whole_x=True, zero=True, table=table)

    every = [Curve(axis_name(kind), _points(axes, "found")) for kind, axes in quality.kinds().items()]
    every += [Curve(name, _means(quality.axes, what), quiet) for name, what, quiet in compared]
    tabs = [("All", figure("layers-all", "All kinds of axes", every, quality.axes))]
    for kind, axes in quality.kinds().items():
        curves = [Curve("found", _points(axes, "found"))]
        curves += [Curve(name, _points(axes, what), quiet) for name, what, quiet in compared]
        title = capital(axis_name(kind))
        tabs.append((title, figure(f"layers-{kind}", title, curves, axes)))
    parts = [Tabs("layers", "Kind of axis", tabs)]
    return Section("layers", "Layers", "Alignment, layer by layer", quality.about, parts)


def _points(axes: Iterable[AxisQuality], what: str) -> list[tuple[float, float]]:
    return [(axis.layer, getattr(axis, what)) for axis in axes]


def _means(axes: Iterable[AxisQuality], what: str) -> list[tuple[float, float]]:
    """Return the mean over all axes of each layer."""
    points = _points(axes, what)
    return [(layer, fmean(y for x, y in points if x == layer)) for layer in sorted({x for x, _ in points})]


def heads(panels: Sequence[HeadPanel], pi: Alignment) -> Section:
    """Show which head of A becomes which head of B."""
    matrices = [(one.title, one.shares) for one in panels]
    moves = [(one.title, *move) for one in panels for move in one.strongest()]
    caption = (
        "Rows are heads of B, columns heads of A. The stronger the colour, the larger the share of A's head."
    )
    if left := len(panels) - len(drawn_panels(matrices)):
        caption += f" {left} of {len(panels)} panels are not drawn; the table has the numbers of all."
    if pi.provenance.policy.heads is HeadPolicy.FLAT:
        lead = (
            "This π mixes units of different heads: a square is the share of a head's energy that comes from"
            f" a head of A. Without any correspondence, all squares would be"
            f" {percent(1 / len(panels[0].shares))}."
        )
    else:
        stay = fmean(to == source for _, to, source, _ in moves)
        lead = f"Heads move as a whole. {percent(stay)} of them stay in place."
    rows = [(title, str(to), str(source), percent(share)) for title, to, source, share in moves]
    table = Table(["", "head of B", "mostly from A's", "share"], rows)
    draw = partial(draw_heat_map, "Which head of A becomes which head of B", matrices, ())
    return Section("heads", "Heads", "Heads", lead, [Figure("heads", "Heads", draw, table, caption)])


def task_vector(groups: Sequence[TensorGroup], quality: Quality | None, ceiling: str | None) -> Section:
    """Show which parts of the model changed, how well these match in B, and how B's own fine-tune differs."""
    shares = {one.role: one.sums["square"] / sum(each.sums["square"] for each in groups) for one in groups}
    matches = {one.role: [one.mean("found"), one.mean("null")] for one in groups}
    rows: Rows = [(role, [share]) for role, share in shares.items()]
    exact = [
        (one.role, str(one.sums["tensors"]), tenths(shares[one.role]), *map(number, matches[one.role]))
        for one in groups
    ]
    table = Table(["part", "tensors", "share of ‖τ‖²", "match in B", "null"], exact)
    caption = "The share of ‖τ‖² in each part of the model."
    parts: list[Part] = [
        bars("tau", "Where τ is", rows, ["share of ‖τ‖²"], tenths, table=table, caption=caption)
    ]
    by_part = partial(bars, say=two_digits, first="part")
    matched = [(role, values) for role, values in matches.items() if values[0]]
    if quality is not None and matched:
        caption = (
            f"Measured without data: the mean {quality.name} of each tensor's axes, weighted by the tensor's"
            " share of ‖τ‖². At the null, π moves τ to arbitrary units. Far above the null, π moves τ to the"
            " right units; an evaluation shows the effect."
        )
        title, series = "How well the changed units match in B", ["match in B"]
        parts.append(by_part("arriving", title, matched, series, tick="null", top=1, caption=caption))
    cosines = [(one.role, [one.cosine("moved"), one.cosine("unmoved")]) for one in groups]
    if compared := [row for row in cosines if row[1][1] is not None]:
        caption = (
            f"Cosines with {short(ceiling)} − B. Two fine-tunes of one task differ even from the same base,"
            " so a small cosine is no failure. The gain of π is the difference from τ as it is."
        )
        title, series = "Compared with B's own fine-tune", ["π(τ)", "τ as it is"]
        parts.append(by_part("ceiling", title, compared, series, top=NOTABLE, caption=caption))
    lead = f"Most of the change is in {listed(one.role for one in groups[:2])}." if len(groups) > 1 else ""
    return Section("tau", "Task vector", "The task vector, by part of the model", lead, parts)


# ── α, barrier and verification ──────────────────────────────────────────────────────────────


def sweeps(inputs: Inputs) -> Section:
    """Show the scores at every α, on the task and on the support."""
    parts: list[Part] = []
    for id, result, about in _numbered("sweep", inputs.of("sweep")):
        info: Sweep = result.info
        tabs = [(capital(what), _swept(info, what, f"{id}-{what}")) for what in info.data()]
        best = list[tuple[str, str, str, str]]()
        for curve in info.curves:
            at, metric = curve.at_best, info.task.metric
            gain = at.gain_of("task") or 0.0
            better = gain > 0 if metric in RATES else gain < 0
            alpha = brief(curve.best) + ("" if better else ", no better than B")
            support = gained(at.gain_of("support"), info.support.metric) if info.support else "–"
            best.append((curve.label, alpha, gained(gain, metric), support))
        head = ["", "best α", "gain on the task", "gain on the support"]
        parts += [*about, Tabs(id, "Measured on", tabs)]
        parts.append(Table(head, best, "At the α that is best for the task"))
    return Section("alpha", "α", "Choosing α", "B + α·π(τ) for several α. At α = 0 it is B.", parts)


def _swept(info: Sweep, what: str, id: str) -> Figure:
    data, start = info.data()[what], info.at_zero.of(what)
    metric, curves, rows = data.metric, list[Curve](), list[tuple[str, str, str, str]]()
    for one in info.curves:
        points = [(point, score.value) for point in one.points if (score := point.of(what)) is not None]
        drawn = [(point.alpha, value) for point, value in points if point.alpha or not start]
        begin = [(0.0, start.value)] if start else []
        curves.append(Curve(one.label, [*begin, *drawn], 0 if one.method else 1))
        for point, value in points:
            gain = gained(point.gain_of(what), metric)
            rows.append((one.label, brief(point.alpha), measured(value, metric), gain))
    table = Table(["", "α", metric, f"gain, {gain_unit(metric)}"], rows)
    say, scale, on = (
        partial(measured, metric=metric),
        percent if metric in RATES else brief,
        f"{_about(data)}.",
    )
    return lines(id, capital(what), curves, "α", metric, say, scale=scale, caption=on, table=table)


def fewshots(inputs: Inputs) -> Section:
    """Show the α that few-shot learning found, and the gains."""
    parts: list[Part] = []
    for id, result, about in _numbered("fewshot", inputs.of("fewshot")):
        info, metric = result.info, result.info.task.metric
        rows = [("B", measured(info.zero.value, metric), "–", "–", "–")]
        for one in info.curves:
            plain = measured(one.plain.value, metric), gained(one.gain.get("plain"), metric)
            learned = measured(one.learned.value, metric), gained(one.gain.get("learned"), metric)
            rows.append((one.label, *plain, *learned))
        shots = f"{info.shots} examples of each class chose one α for every part of the model"
        parts += [*about, f"{shots}; measured on {_about(info.task)}."]
        parts.append(Table(["", "α = 1", "gain", "α learned", "gain"], rows))
        learned_by = [one for one in info.curves if one.coefficients]
        tabs = [(one.label, _coefficients(one, f"{id}-{i}")) for i, one in enumerate(learned_by)]
        parts += [Tabs(id, "Task vector", tabs)] if len(tabs) > 1 else [figure for _, figure in tabs]
        if curves := [Curve(one.label, list(enumerate(one.losses))) for one in info.curves if one.losses[1:]]:
            title = "While α was learned"
            parts.append(lines(f"{id}-losses", title, curves, "epoch", "loss", brief, whole_x=True))
    return Section("fewshot", "Few-shot", "α learned from a few examples", "", parts)


def _coefficients(curve: FewShotCurve, id: str) -> Figure:
    """Draw α by part of the model: as bars, or as a line if there are many."""
    info = {"outside blocks" if name == "default" else name: v for name, v in curve.coefficients.items()}
    title = f"Learned α: {curve.label}"
    table = Table(["part", "α"], [(name, number(value)) for name, value in info.items()])
    if len(info) > 24:
        drawn = [Curve("α", list(enumerate(info.values())))]
        x = "part, in the order of the numbers"
        return lines(id, title, drawn, x, "α", brief, whole_x=True, table=table)
    rows: Rows = [(name if len(name) <= 28 else f"…{name[-27:]}", [value]) for name, value in info.items()]
    return bars(id, title, rows, ["α"], two_digits, table=table)


def barriers(inputs: Inputs) -> Section:
    """Show the loss between π(A) and B."""
    parts: list[Part] = []
    for id, result, _ in _numbered("barrier", inputs.of("barrier")):
        info, tabs = result.info, list[tuple[str, Figure]]()
        for what, say in (("loss", brief), ("accuracy", percent)):
            points = [[(point.alpha, getattr(point, what)) for point in one.points] for one in info.curves]
            curves = [
                Curve(one.label, some, 0 if one.method else 1)
                for one, some in zip(info.curves, points, strict=True)
            ]
            name = capital(what)
            tabs.append((name, lines(f"{id}-{what}", name, curves, "α, from π(A) to B", what, say)))
        unfaithful = "π(A) does not compute the same as A"
        heights = [(one.label, number(one.height), "" if one.faithful else unfaithful) for one in info.curves]
        on = f"On {info.examples} examples of {short(info.data)}, {info.question}."
        parts += [other] if (other := _about_others(result)) else []
        parts += [Tabs(id, "Measured", tabs), Table(["", "barrier", ""], heights, on)]
    lead = (
        "The loss of (1 − α)·π(A) + α·B. The barrier is the largest rise above the straight line between the"
        " ends."
    )
    return Section("barrier", "Barrier", "The barrier between π(A) and B", lead, parts)


def proofs(inputs: Inputs) -> Section:
    """Show the results of `verify`."""
    parts = [Facts(_proof(inputs, result.info)) for result in inputs.of("verify")]
    lead = "Measured by running the models in their own library."
    return Section("proof", "Proof", "Verification", lead, parts)


def _proof(inputs: Inputs, info: Any) -> list[tuple[str, str]]:
    about = ("about", _proven(inputs, info))
    if isinstance(info, Equivalence):
        verdict = "computes the same as A" if info.equal else "does not compute the same as A"
        difference = f"{info.difference:.2g} over {', '.join(info.outputs)}, in float64"
        rows = [about, ("π(A)", verdict), ("largest difference", difference)]
        rows += [("allowed", f"{info.tolerance:.2g}")] if info.tolerance is not None else []
        return rows + ([("why", info.reason)] if info.reason else [])
    if isinstance(info, Prediction):
        share = f"predicts {percent(info.found)} of B's activations from A's"
        beside = f"{percent(info.identity)} with nothing moved, {percent(info.null)} in the null"
        return [about, ("π", share), ("compared with", beside), ("inputs", info.probes)]
    passed = sum(check.passed for check in info.checks)
    return [("table", f"{passed} of {len(info.checks)} checks passed")]


def _proven(inputs: Inputs, info: Any) -> str:
    """Name the π of a proof: this run's, or another by its file and digest."""
    of, digest = f" and {short(info.a)}" if info.a else "", info.alignment.blake3
    if digest is None:
        return f"a π without a recorded digest{of}"
    if digest == inputs.digest:
        return f"this run's π{of}"
    name = short(info.via) if info.via else "a π"
    return f"{name} ({info.alignment.method}, {digest[:12]}…){of}"


RESULTS = {"sweep": sweeps, "fewshot": fewshots, "barrier": barriers, "verify": proofs}
"""The sections after those about π, by the verb whose results they show."""

# ── time ────────────────────────────────────────────────────────────────────────────────────


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
    chart = bars("time", "Time", times, ["seconds"], seconds, table=table, opened=True)
    parts: list[Part] = [chart, Facts([("machine", where), ("with", versions)])]
    return Section("time", "Time", "Time and memory", "", parts)
