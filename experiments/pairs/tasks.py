"""All pairs of bases, and the tasks that one of each pair learns."""

from __future__ import annotations

from typing import Any

from experiments.pairs.berts import LARGER_TEXT, TEXT
from experiments.pairs.gpts import LANGUAGE, LARGER_LANGUAGE
from experiments.pairs.minilm import MINILM
from experiments.pairs.pair import Pair
from experiments.pairs.vits import CIFAR, LARGER, MNIST, SUCCESSORS

PAIRS: dict[str, Pair[Any]] = {
    pair.name: pair
    for pair in (MNIST, CIFAR, TEXT, SUCCESSORS, LARGER, LARGER_TEXT, LANGUAGE, LARGER_LANGUAGE, MINILM)
}
APART = (MNIST.name, CIFAR.name, TEXT.name)
"""The pairs whose bases were trained apart."""
SHAPES = (LARGER.name, LARGER_TEXT.name, LARGER_LANGUAGE.name, MINILM.name)
"""The pairs whose bases have different shapes."""
