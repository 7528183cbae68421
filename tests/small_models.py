"""Tiny random models of every family: what the files in ``cases`` list."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module

import pytest

import cases
from cases.first import BERT, GPT2, LLAMA, VIT
from making import Case, finetuned, transformers_model

CASES = {
    case.name: case
    for module in pkgutil.iter_modules(cases.__path__)
    for case in import_module(f"cases.{module.name}").CASES
}

FIRST = {case.family: name for name, case in reversed(CASES.items())}
"""The first case of every family."""

OFTEN = frozenset(
    [
        "albert",
        "bert",
        "clip",
        "flux",
        "gpt2",
        "llama",
        "open_clip",
        "phi3",
        "qwen2_moe",
        "siglip-vision",
        "t5",
        "timm-vit",
        "vit",
        "wav2vec2",
    ]
)
"""Families, one of each sort: where a proof was seen in all of them, the others are for the slow run."""

PRINCIPAL = ("vit-classifier", "clip", "open_clip", "bert-pretraining", "gpt2", "llama", "mistral-tied")
"""One case per family, for tests that take longer."""


def often(asked: Iterable[object], fast: Iterable[object]) -> list[object]:
    """Parameters of a test, of which only some are for every run: the others repeat their proof."""
    kept = list(fast)
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks[one in kept]) for one in asked
    ]


__all__ = [
    "BERT",
    "CASES",
    "FIRST",
    "GPT2",
    "LLAMA",
    "OFTEN",
    "PRINCIPAL",
    "VIT",
    "Case",
    "finetuned",
    "often",
    "transformers_model",
]
