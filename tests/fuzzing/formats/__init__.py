"""The formats of files from outside, each with its cases: ``made`` by hand, and ``mutant``, random changes."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from fuzzing.cases import MUTANTS, Case
from fuzzing.formats import (
    adapters,
    alphas,
    configurations,
    examples,
    indexes,
    loras,
    pis,
    records,
    results,
    weights,
    witnesses,
)

FORMATS: dict[str, ModuleType] = {
    "safetensors": weights,
    "index": indexes,
    "config": configurations,
    "adapter": adapters,
    "lora": loras,
    "pi": pis,
    "alpha": alphas,
    "metadata": records,
    "result": results,
    "data": examples,
}


WITNESS = "witness"
"""Faults on purpose: no format, and in no list."""


@cache
def cases(format: str) -> list[Case]:
    """All cases of a format, by their numbers."""
    module = witnesses if format == WITNESS else FORMATS[format]
    made = [Case(format, number, *one) for number, one in enumerate(module.made())]
    return made + [Case(format, MUTANTS + n, "a random change", module.mutant) for n in range(module.COUNT)]


def case(format: str, number: int) -> Case:
    """One case."""
    return next(one for one in cases(format) if one.number == number)
