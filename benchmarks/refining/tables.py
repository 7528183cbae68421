"""The tables of the benchmark of refinement by answers, from measured.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PHASES = "ask", "learn"
SIZES = {"8 B in bfloat16": 16e9, "32 B in bfloat16": 64e9, "70 B in bfloat16": 140e9}
"""The bytes of bases that nobody could try here."""
AIM = 1.3, 0.6e9
"""The peak that was aimed at: so many times the weights, and so many bytes beside them."""


def memory(kept: Mapping[str, Any]) -> str:
    """Return the peaks of both phases beside one base's weights, and the time of a step beside PEFT's."""
    head = (
        "Llama, LoRA of rank 16",
        "one base, GB",
        "ask, GB",
        "learn, GB",
        "aim, GB",
        "PEFT, GB",
        "a step, PEFT = 1",
    )
    rows = []
    for name, one in kept["memory"].items():
        aim = AIM[0] * one["weights"] + AIM[1]
        sizes = (one["weights"], one["ask"]["peak"], one["learn"]["peak"], aim, one["peft"]["peak"])
        ratio = one["learn"]["step"] / one["peft"]["step"]
        rows.append((name, *(f"{size / 1e9:.2f}" for size in sizes), f"{ratio:.2f}"))
    return _table(head, rows)


def paper(kept: Mapping[str, Any]) -> str:
    """Return what models of other sizes would take: a line through the measured peaks, by their weights."""
    measured = list(kept["memory"].values())
    if len(measured) < 2:
        return ""  # two sizes make a line
    weights = np.array([[one["weights"], 1.0] for one in measured])
    lines = [np.linalg.lstsq(weights, [one[phase]["peak"] for one in measured])[0] for phase in PHASES]
    rows = []
    for name, size in SIZES.items():
        peaks = [slope * size + fixed for slope, fixed in lines]
        fits = "yes" if max(peaks) < 24e9 else "no", "yes" if max(peaks) < 80e9 else "no"
        rows.append((name, *(f"{one / 1e9:.0f}" for one in (size, *peaks)), *fits))
    head = ("LoRA of rank 16 on", "one base, GB", "ask, GB", "learn, GB", "one GPU of 24 GB", "of 80 GB")
    return _table(head, rows)


def quality(kept: Mapping[str, Any]) -> str:
    """Return the share of the gap that arrives, what it costs, and the time beside fine-tuning B."""
    head = ("seed", "B's tokenizer", "of the gap", "bits per byte of reviews", "time, fine-tuning B = 1")
    rows = []
    for seed, found in kept["quality"].items():
        for name in (name for name in ("same", "other") if name in found):
            one = found[name]
            ratio = (one["seconds"] + found["asking"]) / found[f"{name}, fine-tuning B"]
            cells = f"{one['share']:.0%}", f"{one['support']:+.3f}", f"{ratio:.1f}"
            rows.append((seed, "A's" if name == "same" else "another", *cells))
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["--:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, marks, *rows))
