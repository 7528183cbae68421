"""Few shots drawn: the coefficient that every layer was given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfusion.reporting.figures.figure_style import AXIS, frame, key, named, sheet, signed, styles_of

_OUTSIDE = "default"
_LESS_IS_BETTER = ("loss", "perplexity")
_GAP = 0.6
"""Between one stack of layers and the next."""


def draw_fewshot(metadata: Mapping[str, Any], path: Path, format: str) -> None:
    """Draw α against the layer, one curve per method. ``metadata`` is the result of `FewShot.metadata`."""
    curves = metadata["curves"]
    stacks = _stacks(dict.fromkeys(pattern for curve in curves for pattern in curve["coefficients"]))
    places = _places(stacks)
    styles = styles_of(curve["method"] for curve in curves)
    width = min(12.0, max(6.4, 2.4 + 0.32 * len(places)))
    with sheet(path, format, (width, 4.0)) as figure:
        axes = figure.subplots()
        lines = [
            _curve(axes, curve["coefficients"], stacks, places, style)
            for curve, style in zip(curves, styles, strict=True)
        ]
        training = metadata["training"]
        frame(axes, f"Learned from {training['examples']} examples of {named(training['data'])}")
        axes.set_ylabel("α of the layer")
        axes.axhline(1, color=AXIS, linewidth=1.2, zorder=1)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.set_xticks(list(places.values()), [_number(pattern) for pattern in places])
        for name, patterns in stacks.items():
            middle = sum(places[pattern] for pattern in patterns) / len(patterns)
            _under(axes, middle, name or "outside\nblocks", -20 if name else -6)
        metric = metadata["task"]["metric"]
        what = f"Change of the {metric}" if metric in _LESS_IS_BETTER else "Points over B"
        title = f"{what} on the test: with α = 1 → with the learned α"
        key(figure, lines, [_info(curve, metric) for curve in curves], title, columns=2)


def _under(axes: Any, place: float, text: str, depth: int) -> None:
    """A text below the axis."""
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
    """The layers of one name together, in their order; the rest first."""
    stacks: dict[str, list[str]] = {}
    for pattern in sorted(patterns, key=lambda one: (one != _OUTSIDE, _name(one), int(_number(one) or 0))):
        stacks.setdefault(_name(pattern), []).append(pattern)
    return stacks


def _name(pattern: str) -> str:
    return "" if pattern == _OUTSIDE else pattern.removesuffix(".*").rpartition(".")[0] or "layer"


def _number(pattern: str) -> str:
    return "" if pattern == _OUTSIDE else pattern.removesuffix(".*").rpartition(".")[2]


def _places(stacks: Mapping[str, list[str]]) -> dict[str, float]:
    places: dict[str, float] = {}
    here = 0.0
    for patterns in stacks.values():
        for pattern in patterns:
            places[pattern] = here
            here += 1
        here += _GAP
    return places


def _curve(
    axes: Any,
    coefficients: Mapping[str, float],
    stacks: Mapping[str, list[str]],
    places: Mapping[str, float],
    style: dict[str, Any],
) -> Any:
    """One line for each stack, with a mark for each layer."""
    marked = {**style, "marker": style["marker"] or "o"}
    drawn: list[Any] = []
    for patterns in stacks.values():
        there = [pattern for pattern in patterns if pattern in coefficients]
        drawn += axes.plot(
            [places[pattern] for pattern in there], [coefficients[pattern] for pattern in there], **marked
        )
    return drawn[0]


def _info(curve: Mapping[str, Any], metric: str) -> str:
    """What a curve is, and what it is worth on the test."""
    digits = ".3f" if metric in _LESS_IS_BETTER else ".1f"
    plain, learned = (signed(curve["gain"][how], digits) for how in ("plain", "learned"))
    name = f"B + α·π(τ), {curve['label']}" if curve["method"] else "B + α·τ, naive"
    return f"{name}: {plain} → {learned}"
