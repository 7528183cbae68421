"""The figures of `barrier`, `sweep` and `fewshot` as files, and the look of all figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, LINE, AXIS = "#333333", "#e3e3e3", "#bbbbbb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b04a8b", "#b8860b", "#111111")
"""Distinguishable with every kind of colour vision."""
MARKS = ("o", "s", "^", "D", "v", "P")
PLAIN = {"color": "#777777", "linestyle": (0, (4, 2)), "marker": "", "zorder": 2}
"""The look of a curve without π."""
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "transfusion",
    "text.parse_math": False,
    "pdf.fonttype": 42,
}
_BARE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@contextmanager
def figure_file(path: Path, format: str, size: tuple[float, float]) -> Iterator[Any]:
    """Open an empty figure, and write it to a file at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, format=format, dpi=160, metadata=_BARE.get(format))


def styles_of(methods: Iterable[str | None]) -> list[dict[str, Any]]:
    """Return a colour and a mark for each curve; curves without π are grey and lie behind."""
    styles: list[dict[str, Any]] = []
    number = 0
    for method in methods:
        drawn = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKS[number % len(MARKS)],
            "linestyle": "-" if number < len(COLOURS) else ":",
            "zorder": 3,
        }
        styles.append({"linewidth": 1.8, "markersize": 4.5, **(drawn if method else PLAIN)})
        number += bool(method)
    return styles


def frame(axes: Any, title: str) -> None:
    """Give axes a title and faint horizontal lines, and hide the rest."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.margins(y=0.12)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(AXIS)


def key(
    figure: Any, lines: list[Any], labels: list[str], title: str = "", columns: int | None = None
) -> None:
    """Name the curves, each in its own colour: to the right of the axes or, in columns, above them."""
    made = figure.legend(
        lines,
        labels,
        loc="outside right upper" if columns is None else "outside upper left",
        ncols=columns or 1,
        title=title or None,
        title_fontsize=9,
        fontsize=10,
        labelcolor="linecolor",
        frameon=False,
        labelspacing=0.9,
        handlelength=2.6,
        alignment="left",
    )
    made.get_title().set_color(INK)


def signed(value: float, digits: str = ".3g") -> str:
    """Format a gain with its sign."""
    return f"{value:+{digits}}".replace("-", "−") if value else "0"


def shorten(text: str, length: int) -> str:
    """Cut a text to a length, with an ellipsis for the rest."""
    return text if len(text) <= length else f"{text[: max(1, length - 1)].rstrip(' ·')}…"


def data_name(data: str) -> str:
    """The name of the data in few words: of a path, the last part."""
    return shorten(data.rstrip("/").rpartition("/")[2] or data, 48)


_OUTSIDE = "default"
_LESS_IS_BETTER = ("loss", "perplexity")
_GAP = 0.6
"""The space between two stacks of layers."""


def draw_barriers(result: Mapping[str, Any], path: Path, format: str) -> None:
    """Draw loss and accuracy against α, a panel each, with one curve per π."""
    curves = result["curves"]
    with figure_file(path, format, (11.2, 4.2)) as figure:
        left, right = figure.subplots(1, 2)
        styles = styles_of(curve["method"] for curve in curves)
        for curve, style in zip(curves, styles, strict=True):
            alphas = [point["alpha"] for point in curve["points"]]
            left.plot(alphas, [point["loss"] for point in curve["points"]], **style)
            right.plot(alphas, [100 * point["accuracy"] for point in curve["points"]], **style)
        _barrier_frame(left, "Loss")
        _barrier_frame(right, f"Accuracy in % ({result['question']})")
        _barrier_key(figure, left.get_lines(), curves)


def _barrier_key(figure: Any, lines: list[Any], curves: Sequence[Mapping[str, Any]]) -> None:
    """Add the key: the highest barrier first, curves that do not start at A's loss last."""
    entries = sorted(
        zip(lines, curves, strict=True), key=lambda entry: (not entry[1]["faithful"], -entry[1]["height"])
    )
    title = "Barrier: how far the loss\nrises above the straight\nline between its ends"
    if not all(curve["faithful"] for curve in curves):
        title += "\n(* π(A) does not compute\nwhat A computes)"
    labels = [f"{one['label']}  {one['height']:.2f}{'' if one['faithful'] else '*'}" for _, one in entries]
    key(figure, [line for line, _ in entries], labels, title)


def _barrier_frame(axes: Any, title: str) -> None:
    frame(axes, title)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["π(A)\nα = 0", "0.25", "0.5", "0.75", "B\nα = 1"])


def draw_sweep(metadata: Mapping[str, Any], path: Path, format: str) -> None:
    """Draw gains over B against α: the task above, the support below, with one curve per π.

    ``metadata`` is the result of `Sweep.metadata`.
    """
    parts = [part for part in ("task", "support") if metadata[part] is not None]
    curves = metadata["curves"]
    styles = styles_of(curve["method"] for curve in curves)
    with figure_file(path, format, (6.4, 1.2 + 2.2 * len(parts))) as figure:
        panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            lines = [_gains(axes, curve, part, style) for curve, style in zip(curves, styles, strict=True)]
            _sweep_frame(axes, metadata, part)
        panels[-1].set_xlabel("α (ring: the best on the task)")
        figure.align_ylabels()
        key(figure, lines, [_curve_label(curve) for curve in curves], columns=min(3, len(curves)))


def _curve_label(curve: Mapping[str, Any]) -> str:
    return f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ, naive"


def _gains(axes: Any, curve: Mapping[str, Any], part: str, style: dict[str, Any]) -> Any:
    points = curve["points"]
    alphas = [point["alpha"] for point in points]
    (line,) = axes.plot(alphas, [point["gain"][part] for point in points], **style)
    best = next(point for point in points if point["alpha"] == curve["best"])
    axes.plot(
        [best["alpha"]],
        [best["gain"][part]],
        marker="o",
        markersize=10,
        markerfacecolor="none",
        markeredgecolor=style["color"],
        markeredgewidth=1.3,
        zorder=4,
    )
    return line


def _sweep_frame(axes: Any, metadata: Mapping[str, Any], part: str) -> None:
    about, zero = metadata[part], metadata["at_zero"][part]
    metric, less = about["metric"], about["metric"] in _LESS_IS_BETTER
    own = f"{zero['value']:.3g}" if less else f"{100 * zero['value']:.1f} %"
    frame(axes, f"{part.capitalize()}: {data_name(about['data'])} (B: {metric} {own})")
    axes.set_ylabel(f"Change of the {metric}\n(less is better)" if less else "Gain over B in points")
    axes.axhline(0, color=INK, linewidth=0.9, zorder=1)
    axes.axvline(1, color=LINE, linewidth=0.9, zorder=1)
    alphas = [point["alpha"] for curve in metadata["curves"] for point in curve["points"]]
    room = 0.02 * (max(alphas) or 1)
    axes.set_xlim(-room, max(alphas) + room)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, place: signed(round(value, 9)))


def draw_fewshot(metadata: Mapping[str, Any], path: Path, format: str) -> None:
    """Draw α against the layer, one curve per method. ``metadata`` is the result of `FewShot.metadata`."""
    curves = metadata["curves"]
    stacks = _stacks(dict.fromkeys(pattern for curve in curves for pattern in curve["coefficients"]))
    places = _positions(stacks)
    styles = styles_of(curve["method"] for curve in curves)
    width = min(12.0, max(6.4, 2.4 + 0.32 * len(places)))
    with figure_file(path, format, (width, 4.0)) as figure:
        axes = figure.subplots()
        lines = [
            _coefficients(axes, curve["coefficients"], stacks, places, style)
            for curve, style in zip(curves, styles, strict=True)
        ]
        training = metadata["training"]
        frame(axes, f"Learned from {training['examples']} examples of {data_name(training['data'])}")
        axes.set_ylabel("α of the layer")
        axes.axhline(1, color=AXIS, linewidth=1.2, zorder=1)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.set_xticks(list(places.values()), [_layer_number(pattern) for pattern in places])
        for name, patterns in stacks.items():
            middle = sum(places[pattern] for pattern in patterns) / len(patterns)
            _text_below(axes, middle, name or "outside\nblocks", -20 if name else -6)
        metric = metadata["task"]["metric"]
        what = f"Change of the {metric}" if metric in _LESS_IS_BETTER else "Points over B"
        title = f"{what} on the test: with α = 1 → with the learned α"
        key(figure, lines, [_fewshot_label(curve, metric) for curve in curves], title, columns=2)


def _text_below(axes: Any, place: float, text: str, depth: int) -> None:
    """Write a text below the axis."""
    axes.annotate(
        text,
        (place, 0),
        xycoords=("data", "axes fraction"),
        xytext=(0, depth),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=9,
    )


def _stacks(patterns: Mapping[str, None]) -> dict[str, list[str]]:
    """Group the layers by the name of their stack, in order; what lies outside of blocks comes first."""
    stacks: dict[str, list[str]] = {}
    order = sorted(
        patterns, key=lambda one: (one != _OUTSIDE, _stack_name(one), int(_layer_number(one) or 0))
    )
    for pattern in order:
        stacks.setdefault(_stack_name(pattern), []).append(pattern)
    return stacks


def _stack_name(pattern: str) -> str:
    return "" if pattern == _OUTSIDE else pattern.removesuffix(".*").rpartition(".")[0] or "layer"


def _layer_number(pattern: str) -> str:
    return "" if pattern == _OUTSIDE else pattern.removesuffix(".*").rpartition(".")[2]


def _positions(stacks: Mapping[str, list[str]]) -> dict[str, float]:
    places: dict[str, float] = {}
    here = 0.0
    for patterns in stacks.values():
        for pattern in patterns:
            places[pattern] = here
            here += 1
        here += _GAP
    return places


def _coefficients(
    axes: Any,
    coefficients: Mapping[str, float],
    stacks: Mapping[str, list[str]],
    places: Mapping[str, float],
    style: dict[str, Any],
) -> Any:
    """Draw a line for each stack, with a mark for each layer."""
    marked = {**style, "marker": style["marker"] or "o"}
    drawn: list[Any] = []
    for patterns in stacks.values():
        there = [pattern for pattern in patterns if pattern in coefficients]
        drawn += axes.plot(
            [places[pattern] for pattern in there], [coefficients[pattern] for pattern in there], **marked
        )
    return drawn[0]


def _fewshot_label(curve: Mapping[str, Any], metric: str) -> str:
    """The name of a curve, and its gains on the test."""
    digits = ".3f" if metric in _LESS_IS_BETTER else ".1f"
    plain, learned = (signed(curve["gain"][how], digits) for how in ("plain", "learned"))
    return f"{_curve_label(curve)}: {plain} → {learned}"
