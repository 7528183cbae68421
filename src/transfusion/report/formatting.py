"""Formats of numbers and names on the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

KINDS = {
    "x": "stream before attention",
    "y": "stream before the MLP",
    "stream": "residual stream",
    "head": "attention heads",
    "group": "groups of heads",
    "rep": "heads within a group",
    "qk": "queries and keys",
    "vo": "values",
    "ffn": "MLP neurons",
    "expert": "experts",
    "cross_head": "heads of cross-attention",
    "cross_qk": "queries and keys of cross-attention",
    "cross_vo": "values of cross-attention",
}
"""Names of common axes on the page."""
RATES = ("accuracy", "matthews", "f1")
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


def layer_of(id: str) -> int | None:
    """Return the number of the block of an axis or a tensor, if it has one."""
    found = _NUMBER.search(id)
    return int(found[1]) if found else None


def kind_of(id: str) -> str:
    """Return an axis without its block: ``layer.3.head`` is ``head``, ``encoder.3.qk`` is ``encoder.qk``."""
    stack, _, axis = id.rpartition(".")
    stack = re.sub(r"\.?\d+$", "", stack)
    return axis if stack in ("", "layer") else f"{stack}.{axis}"


def axis_name(kind: str) -> str:
    """Return the name of a kind of axis on the page."""
    stack, _, axis = kind.rpartition(".")
    words = KINDS.get(axis, axis)
    return f"{words} ({stack})" if stack else words


def short(name: object) -> str:
    """Return the last part of a path or hub id."""
    return str(name).rstrip("/").rsplit("/", 1)[-1]


def number(value: float | None) -> str:
    """Format a number."""
    if value is None:
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:.3f}".replace("-", "−") if abs(value) < 100 else f"{value:,.1f}".replace("-", "−")


def brief(value: float) -> str:
    """Format a number with three digits, as on a scale."""
    return f"{round(value, 10) + 0.0:.3g}".replace("-", "−")


def percent(value: float | None, digits: int = 0) -> str:
    """Format a share in percent."""
    if value is None:
        return "–"
    return f"{round(100 * value, digits) + 0.0:.{digits}f} %".replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    """Format a difference with its sign."""
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def measured(value: float | None, metric: str) -> str:
    """Format a score: rates in percent, losses as numbers."""
    return percent(value, 1) if metric in RATES else number(value)


def gained(value: float | None, metric: str) -> str:
    """Format a gain: in points for rates, as a number for losses."""
    return signed(value, 1) if metric in RATES else signed(value, 3)


def between(interval: Sequence[float], metric: str, shown: Callable[[float, str], str]) -> str:
    """Format a confidence interval of a score or a gain."""
    return " to ".join(shown(bound, metric) for bound in interval)


def gain_unit(metric: str) -> str:
    """Return the unit of a metric's gains."""
    return "points" if metric in RATES else f"{metric}, less is better"


def seconds(value: float) -> str:
    """Format a time."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def numbered(id: str, results: Sequence[object], place: int) -> str:
    """Return an id with a number, if there are several results."""
    return id if len(results) == 1 else f"{id}-{place + 1}"


def listed(items: Iterable[str]) -> str:
    """Join items as in "A, B and C"."""
    *rest, last = list(items) or [""]
    return f"{', '.join(rest)} and {last}" if rest else last
