"""Tiny random models of every family: what the files in ``cases`` list."""

from __future__ import annotations

import pkgutil
from importlib import import_module

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

PRINCIPAL = ("vit-classifier", "clip", "open_clip", "bert-pretraining", "gpt2", "llama", "mistral-tied")
"""One case per family, for tests that take longer."""

__all__ = [
    "BERT",
    "CASES",
    "FIRST",
    "GPT2",
    "LLAMA",
    "PRINCIPAL",
    "VIT",
    "Case",
    "finetuned",
    "transformers_model",
]
