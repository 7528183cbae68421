"""The sections about π: what was moved, the advice, layer by layer, heads, and where τ lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.report.change_shares import TensorGroup
from transfusion.report.charts.map_charts import HeatMap
from transfusion.report.charts.page_charts import BarChart, ChartCurve, LineChart
from transfusion.report.formatting import axis_name, listed, number, percent, short
from transfusion.report.head_panels import Panel
from transfusion.report.page_parts import Facts, PageFigure, PageSection, PageTable, Part, Prose, Tabs
from transfusion.report.unit_quality import AxisQuality, Qualities
from transfusion.transport.adapters.adapter_drift import describe_adapter_drift
from transfusion.transport.alpha import Alpha
from transfusion.transport.refinement.refinement_settings import describe_refinement

NOTABLE = 0.25
"""The least end of the scale for cosines, so that tiny cosines look tiny."""


def what_was_moved(metadata: Mapping[str, Any]) -> PageSection:
    """List the inputs, the settings and the numbers of tensors."""
    pi = metadata["alignment"]
    rows = [("fine-tune", _input(one)) for one in metadata["finetuned"]]
    rows += [("its base, A", _input(metadata["base"])), ("the new base, B", _input(metadata["onto"]))]
    rows.append(("π", f"{pi['method']}, seed {pi.get('seed', 0)} · {str(pi.get('blake3', ''))[:12]}"))
    policy = [f"{key} {pi[key]}" for key in ("residual", "inner", "heads") if key in pi]
    rows.append(("axes", ", ".join(policy)))
    rows.append(("α", str(Alpha.of(metadata["alpha"])) if metadata.get("alpha") is not None else "1"))
    if metadata.get("how"):
        rows.append(("combined by", f"{metadata['how']}, of {len(metadata['finetuned'])} fine-tunes"))
    rows.append(("tensors", _tensors(metadata)))
    if (output_shift := metadata.get("output_shift") or {}).get("direction") is not None:
        info = f"cosine {number(output_shift['direction'])}, {number(output_shift['size'])} times as large"
        rows.append(("change of B's outputs, compared with A's", f"{info}, on {output_shift['probes']}"))
    if drift := metadata.get("drift"):
        rows.append(("B's own change", "; ".join(describe_adapter_drift(drift))))
    if text := describe_refinement(metadata.get("refinement")):
        rows.append(("refinement", text))
    if (vocabulary := metadata.get("vocabulary") or {}).get("moved"):
        rows.append(("vocabularies", describe_vocabulary(vocabulary)))
    what = "an adapter" if metadata.get("kind") == "adapter" else "a model"
    refined = ", refined," if "refinement" in metadata else ","
    lead = f"B + α·π(τ){refined} written as {what} that loads wherever B does."
    return PageSection("moved", "What was moved", lead, [Facts(rows)], "Moved")


def _input(info: Mapping[str, Any]) -> str:
    return f"{info['name']} · {info['fingerprint'][:12]}"


def _tensors(metadata: Mapping[str, Any]) -> str:
    parts = [f"{metadata.get('moved', 0)} moved"]
    parts += [f"{metadata['unchanged']} unchanged from B"] if metadata.get("unchanged") else []
    for key, words in (("carried", "copied from the fine-tune"), ("dropped", "of B dropped")):
        parts += [f"{len(metadata[key])} {words}"] if metadata.get(key) else []
    parts += [f"{metadata['new_tokens']} new tokens"] if metadata.get("new_tokens") else []
    return ", ".join(parts)


def advice(info: Mapping[str, Any], objective: tuple[float, ...]) -> PageSection:
    """Show the verdict and its numbers."""
    text = str(info["text"])
    parts: list[Part] = [Prose(f"{text[:1].upper()}{text[1:]}.")]
    if "margins" in info:
        parts += [_objective(info, objective), _margins(info["margins"])]
    elif {"found", "identity", "null"} <= info.keys():
        parts.append(_predicted(info))
    ways = info.get("predicted_by")
    if ways:
        rows = [(way, [share]) for way, share in ways.items()]
        parts.append(
            PageFigure(
                "ways",
                "Methods compared",
                BarChart(
                    rows, ["share predicted"], "Share of B's activations predicted, by method", percent, top=1
                ),
                PageTable(
                    ["method", "share predicted"], [(way, percent(share, 1)) for way, share in ways.items()]
                ),
                f"{info['chosen']} was chosen: the simplest method that predicts B about as well as any.",
            )
        )
    return PageSection("advice", f"Advice: {info['verdict']}", "Can you rely on this π?", parts, "Advice")


def blocks(info: Mapping[str, Any]) -> PageSection:
    """Show which blocks of A and B correspond, and how well each predicts each."""
    figures: list[Part] = []
    for stack, quality in info["blocks"].items():
        path = [(j, i) for i, j in info["paths"][stack]]
        matrix = np.clip(np.asarray(quality, dtype=float).T, 0, 1)
        partners = {j: [i for to, i in path if to == j] for j in range(len(matrix))}
        rows = [
            (str(j), ", ".join(map(str, ours)), percent(float(max(matrix[j][i] for i in ours))))
            for j, ours in partners.items()
        ]
        figures.append(
            PageFigure(
                f"blocks-{stack}",
                f"Blocks of {stack}",
                HeatMap([(stack, matrix)], f"Blocks of {stack}: B's in rows, A's in columns", framed=path),
                PageTable(["block of B", "gets the change of A's", "share predicted"], rows),
                "How much of what a block of B writes is predicted by what a block of A writes, on held-out"
                " inputs. Framed: the blocks that correspond. The change of a block that has several"
                " partners is divided among them, and the changes of several blocks are added.",
            )
        )
    lead = "A and B have different shapes. Which block of A became which block of B?"
    return PageSection("blocks", "Blocks that correspond", lead, figures, "Blocks")


def _objective(info: Mapping[str, Any], objective: tuple[float, ...]) -> PageFigure:
    rows = [("nothing moved", [float(info["identity"])]), ("found", [float(info["found"])])]
    table = [(name, number(values[0])) for name, values in rows]
    swept = f" It was found in {len(objective) - 1} sweeps." if len(objective) > 1 else ""
    share = info.get("share")
    null = (
        f" On a scale from the null (the same search between unrelated models) to a perfect match, the search"
        f" reached {percent(share)}."
        if share is not None
        else ""
    )
    return PageFigure(
        "objective",
        "The objective",
        BarChart(
            [(name, values) for name, values in rows],
            ["objective"],
            "The objective found, and with nothing moved",
            number,
        ),
        PageTable(["", "objective"], table),
        f"The inner product of π(A) and B over all weights.{null}{swept}",
    )


def _margins(margins: Mapping[str, Mapping[str, float | None]]) -> PageFigure:
    rows = [(axis_name(kind), [one["found"], one["null"]]) for kind, one in margins.items()]
    table = [
        (
            axis_name(kind),
            number(one["found"]),
            number(one["null"]),
            number(one["beyond"]),
            percent(one["home"]),
        )
        for kind, one in margins.items()
    ]
    return PageFigure(
        "margins",
        "Found, compared with the null",
        BarChart(
            rows, ["found"], "Correlation found for each kind of axis, and in the null", number, "null", top=1
        ),
        PageTable(["kind of axis", "found", "null", "standard deviations above", "in place"], table),
        "Correlations between π(A) and B, the mean over all layers. 1 is a perfect match. The null is the"
        " correlation that the same search finds between unrelated models.",
    )


def _predicted(info: Mapping[str, Any]) -> PageFigure:
    rows = [("found", info["found"]), ("nothing moved", info["identity"]), ("null", info["null"])]
    return PageFigure(
        "predicted",
        "How much of B is predicted from A",
        BarChart(
            [(name, [value]) for name, value in rows],
            ["share"],
            "Share of B's activations predicted",
            percent,
            top=1,
        ),
        PageTable(["", "share of B's activations"], [(name, percent(value, 1)) for name, value in rows]),
        f"On {info['probes']}, which were not used to find π." if info.get("probes") else "",
    )


def by_layer(quality: Qualities) -> PageSection:
    """Draw the quality by layer: all kinds of axes together, and each with its comparisons."""
    kinds = quality.kinds()
    means = {
        "nothing moved": _mean(quality.axes, "identity"),
        "null": _mean(quality.axes, "null"),
    }
    every = [ChartCurve(axis_name(kind), _points(axes, "found")) for kind, axes in kinds.items()]
    every += [ChartCurve(name, points, quiet) for quiet, (name, points) in enumerate(means.items(), 1)]
    rows = [(axis.id, number(axis.found), number(axis.identity), number(axis.null)) for axis in quality.axes]
    head = ["axis", "found", "nothing moved", "null"]
    tabs = [
        ("All", PageFigure("layers-all", "All kinds of axes", _lines(every, quality), PageTable(head, rows)))
    ]
    for kind, axes in kinds.items():
        curves = [
            ChartCurve("found", _points(axes, "found")),
            ChartCurve("nothing moved", _points(axes, "identity"), 1),
            ChartCurve("null", _points(axes, "null"), 2),
        ]
        some = [row for row, axis in zip(rows, quality.axes, strict=True) if axis.kind == kind]
        words = axis_name(kind)
        title = f"{words[:1].upper()}{words[1:]}"
        tabs.append(
            (title, PageFigure(f"layers-{kind}", title, _lines(curves, quality), PageTable(head, some)))
        )
    return PageSection(
        "layers", "Alignment, layer by layer", quality.about, [Tabs("layers", "Kind of axis", tabs)], "Layers"
    )


def _lines(curves: list[ChartCurve], quality: Qualities) -> LineChart:
    return LineChart(
        curves, "layer", quality.name, f"{quality.name} by layer", _two, _two, whole_x=True, zero=True
    )


def _two(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _points(axes: list[AxisQuality], what: str) -> list[tuple[float, float]]:
    return [(axis.layer, getattr(axis, what)) for axis in axes]


def _mean(axes: tuple[AxisQuality, ...], what: str) -> list[tuple[float, float]]:
    layers: dict[int, list[float]] = {}
    for axis in axes:
        layers.setdefault(axis.layer, []).append(getattr(axis, what))
    return [(layer, sum(values) / len(values)) for layer, values in sorted(layers.items())]


def heads(panels: list[Panel], flat: bool) -> PageSection:
    """Show which head of A becomes which head of B."""
    chart = HeatMap([(one.title, one.shares) for one in panels], "Which head of A becomes which head of B")
    rows = [
        (one.title, str(to), str(source), percent(share, 0))
        for one in panels
        for to, source, share in one.strongest()
    ]
    stay = sum(one.stays for one in panels) / len(panels)
    left, even = len(panels) - len(chart.shown()), percent(1 / len(panels[0].shares))
    caption = (
        "Rows are heads of B, columns heads of A. The stronger the colour, the larger the share of A's head."
    )
    if left:
        caption += f" {left} of {len(panels)} panels are not drawn; the table has the numbers of all."
    lead = (
        "This π mixes units of different heads: a square is the share of a head's energy that comes from a"
        f" head of A. Without any correspondence, all squares would be {even}."
        if flat
        else f"Heads move as a whole. {percent(stay)} of them stay in place."
    )
    figure = PageFigure(
        "heads", "Heads", chart, PageTable(["", "head of B", "mostly from A's", "share"], rows), caption
    )
    return PageSection("heads", "Heads", lead, [figure], "Heads")


def task_vector(groups: list[TensorGroup], quality: Qualities | None, ceiling: str | None) -> PageSection:
    """Show which parts of the model changed, and how well these parts match in B."""
    total = sum(group.square for group in groups)
    shares = [(group.role, [group.square / total]) for group in groups]
    table = [
        (
            group.role,
            str(group.tensors),
            percent(group.square / total, 1),
            number(group.found),
            number(group.null),
        )
        for group in groups
    ]
    parts: list[Part] = [
        PageFigure(
            "tau",
            "Where τ is",
            BarChart(
                shares, ["share of ‖τ‖²"], "Share of the squared task vector by part of the model", _tenths
            ),
            PageTable(["part", "tensors", "share of ‖τ‖²", "match in B", "null"], table),
            "The share of ‖τ‖² in each part of the model.",
        )
    ]
    parts += list(_arriving(groups, quality)) + list(_compared(groups, ceiling))
    largest = listed(group.role for group in groups[:2])
    lead = f"Most of the change is in {largest}." if len(groups) > 1 else ""
    return PageSection("tau", "The task vector, by part of the model", lead, parts, "Task vector")


def _arriving(groups: list[TensorGroup], quality: Qualities | None) -> Iterator[Part]:
    known = [group for group in groups if group.found is not None]
    if quality is None or not known:
        return
    rows = [(group.role, [group.found, group.null]) for group in known]
    yield PageFigure(
        "arriving",
        "How well the changed units match in B",
        BarChart(rows, ["match in B"], "Quality of the axes of each part", _two, "null", top=1),
        PageTable(["part", "match in B", "null"], [(g.role, number(g.found), number(g.null)) for g in known]),
        f"Measured without data: the mean {quality.name} of each tensor's axes, weighted by the tensor's"
        " share of ‖τ‖². At the null, π moves τ to arbitrary units. Far above the null, π moves τ to the"
        " right units; an evaluation shows the effect.",
    )


def _compared(groups: list[TensorGroup], ceiling: str | None) -> Iterator[Part]:
    known = [group for group in groups if group.unmoved is not None]
    if not known:
        return
    rows = [(group.role, [group.moved, group.unmoved]) for group in known]
    label = "Cosine with the change of B fine-tuned itself"
    yield PageFigure(
        "ceiling",
        "Compared with B's own fine-tune",
        BarChart(rows, ["π(τ)", "τ as it is"], label, _two, top=NOTABLE),
        PageTable(
            ["part", "π(τ)", "τ as it is"], [(g.role, number(g.moved), number(g.unmoved)) for g in known]
        ),
        f"Cosines with {short(ceiling)} − B. Two fine-tunes of one task differ even from the same base, so a"
        " small cosine is no failure. The gain of π is the difference from τ as it is.",
    )


def _tenths(value: float) -> str:
    return percent(value, 1)
