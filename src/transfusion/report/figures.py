"""The figures of `barrier`, `sweep` and `fewshot` as files, drawn with the charts of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from transfusion.report.charts import GRID, MUTED, STYLE, Curve, plot_curves, shorten
from transfusion.report.parts import RATES, gained, measured

_BARE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
_OUTSIDE = "default"

Points = Sequence[tuple[float, float]]


@contextmanager
def figure_file(path: Path | IO[bytes], format: str, size: tuple[float, float]) -> Iterator[Any]:
    """Open an empty figure, and write it to a file at the end."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, format=format, dpi=160, metadata=_BARE.get(format))


def draw_barriers(result: Mapping[str, Any], path: Path | IO[bytes], format: str) -> None:
    """Draw loss and accuracy against α, a panel each, with one curve per π; the key has the barriers."""
    curves = result["curves"]
    panels = {"loss": "loss", "accuracy": f"accuracy ({result['question']})"}
    labels = [f"{one['label']}: {one['height']:.2f}{'' if one['faithful'] else ' *'}" for one in curves]
    title = "Barrier: the rise of the loss above the straight line between its ends"
    if not all(curve["faithful"] for curve in curves):
        title += " (* π(A) does not compute what A computes)"
    with figure_file(path, format, (11.2, 4.6)) as figure:
        for axes, (what, name) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            points = [[(one["alpha"], one[what]) for one in curve["points"]] for curve in curves]
            signs = _draw_lines(axes, curves, points, "α, from π(A) to B", name)
        _add_key(figure, signs, labels, title)


def draw_sweep(result: Mapping[str, Any], path: Path | IO[bytes], format: str) -> None:
    """Draw gains over B against α: the task above, the support below, with one curve per π."""
    curves = result["curves"]
    parts = [part for part in ("task", "support") if result[part] is not None]
    with figure_file(path, format, (6.4, 1.2 + 2.4 * len(parts))) as figure:
        panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            x = "α (ring: the best on the task)" if part == parts[-1] else ""
            metric = result[part]["metric"]
            own = f"B: {metric} {measured(result['at_zero'][part]['value'], metric)}"
            unit = "points" if metric in RATES else f"{metric}, less is better"
            name = f"{part.capitalize()}: {_data_name(result[part]['data'])} ({own}), gain in {unit}"
            points = [[(one["alpha"], one["gain"][part]) for one in curve["points"]] for curve in curves]
            signs = _draw_lines(axes, curves, points, x, name)
            axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
            for curve, sign, some in zip(curves, signs, points, strict=True):
                best = [point for point in some if point[0] == curve["best"]]
                axes.plot(*zip(*best, strict=True), "o", ms=13, mfc="none", mec=sign.get_color(), zorder=4)
        _add_key(figure, signs, map(_curve_label, curves))


def draw_fewshot(result: Mapping[str, Any], path: Path | IO[bytes], format: str) -> None:
    """Draw α against the layer, one curve per method."""
    curves, training, metric = result["curves"], result["training"], result["task"]["metric"]
    patterns = {pattern for curve in curves for pattern in curve["coefficients"]}
    layers = sorted(patterns - {_OUTSIDE}, key=lambda one: (_stack_of(one), int(_number_of(one))))
    layers = [*(patterns & {_OUTSIDE}), *layers]
    places = {pattern: place for place, pattern in enumerate(layers)}
    points = [[(places[key], v) for key, v in curve["coefficients"].items()] for curve in curves]
    labels = []
    for one in curves:
        plain, learned = (gained(one["gain"][how], metric) for how in ("plain", "learned"))
        labels.append(f"{_curve_label(one)}: {plain} → {learned}")
    with figure_file(path, format, (min(12.0, max(6.4, 2.4 + 0.32 * len(layers))), 4.4)) as figure:
        axes = figure.subplots()
        what = f"Learned from {training['examples']} examples of {_data_name(training['data'])}: α"
        ordered = [sorted(some) for some in points]
        signs = _draw_lines(axes, curves, ordered, "layer", what)
        axes.axhline(1, color=GRID, linewidth=1.2, zorder=1)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        firsts = {_stack_of(pattern): pattern for pattern in reversed(layers)}
        ticks = [
            f"{_number_of(one)}\n{_stack_of(one)}" if one in firsts.values() else _number_of(one)
            for one in layers
        ]
        axes.set_xticks(list(places.values()), ticks)
        unit = "points over B" if metric in RATES else f"change of the {metric}"
        _add_key(figure, signs, labels, f"Test, {unit}: with α = 1 → with the learned α")


def _draw_lines(
    axes: Any, curves: Sequence[Mapping[str, Any]], points: Sequence[Points], x: str, y: str
) -> list[Any]:
    """Draw a curve per π, in grey without π; return the signs for the key."""
    drawn = [
        Curve(one["label"], some, 0 if one["method"] else 1) for one, some in zip(curves, points, strict=True)
    ]
    return plot_curves(axes, drawn, x, y)[1]


def _add_key(figure: Any, signs: list[Any], labels: Iterable[str], title: str = "") -> None:
    figure.legend(signs, list(labels), loc="outside upper left", title=title or None, alignment="left")


def _curve_label(curve: Mapping[str, Any]) -> str:
    return f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ, naive"


def _data_name(data: str) -> str:
    return shorten(data.rstrip("/").rpartition("/")[2] or data, 48)


def _stack_of(pattern: str) -> str:
    """Return the stack of a layer's pattern; ``encoder.layer.3.*`` is of ``encoder.layer``."""
    return "" if pattern == _OUTSIDE else pattern.removesuffix(".*").rpartition(".")[0] or "layer"


def _number_of(pattern: str) -> str:
    return "outside" if pattern == _OUTSIDE else pattern.removesuffix(".*").rpartition(".")[2]
