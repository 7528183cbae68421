"""Few shots drawn: the coefficient that every layer was given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfusion.figures.style import AXIS, frame, key, sheet, styles_of

_OUTSIDE = "default"
_GAP = 0.8
"""Between one stack of layers and the next."""


def draw_fewshot(story: Mapping[str, Any], path: Path, format: str) -> None:
    """α against the layer, one curve per way; ``story`` is what `FewShot.story` gives, or a file of it."""
    curves = story["curves"]
    stacks = _stacks(dict.fromkeys(pattern for curve in curves for pattern in curve["coefficients"]))
    places = _places(stacks)
    styles = styles_of(curve["method"] for curve in curves)
    width = min(12.0, 5.2 + 0.3 * len(places))
    with sheet(path, format, (width, 3.6)) as figure:
        axes = figure.subplots()
        lines = [
            _curve(axes, curve["coefficients"], stacks, places, style)
            for curve, style in zip(curves, styles, strict=True)
        ]
        every = story["training"]["examples"]
        frame(axes, f"α learned for every layer from {every} examples, {story['shots']} shots a class")
        axes.axhline(1, color=AXIS, linewidth=0.9, zorder=1)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.set_xticks(list(places.values()), [_number(pattern) for pattern in places])
        for name, patterns in stacks.items():
            middle = sum(places[pattern] for pattern in patterns) / len(patterns)
            axes.annotate(
                name or "the rest",
                (middle, 0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -20 if name else -8),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=9,
            )
        labels = [_told(curve, story["task"]["metric"]) for curve in curves]
        key(figure, lines, labels, "On the test, over B:\nwith α = 1 → with these α")


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


def _told(curve: Mapping[str, Any], metric: str) -> str:
    name = f"α·π(τ)  {curve['label']}" if curve["method"] else "α·τ  naive"
    unit = "" if metric in ("loss", "perplexity") else " points"
    digits = ".3f" if metric in ("loss", "perplexity") else ".1f"
    plain, learned = curve["gain"]["plain"], curve["gain"]["learned"]
    return f"{name}\n{plain:+{digits}} → {learned:+{digits}}{unit}"
