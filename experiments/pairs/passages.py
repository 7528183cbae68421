"""Passages of film reviews as questions: what can be asked of texts that come with a verdict."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from experiments.pairs import data
from experiments.pairs.data import shuffled

WORDS, TESTS = 24, 4000
"""Of a passage; and reviews that nobody is trained on."""
LITTLE = frozenset(
    [
        *("a", "an", "and", "are", "as", "at", "but", "by", "for", "in", "is"),
        *("it", "of", "on", "or", "that", "the", "this", "to", "was", "with"),
    ]
)
DROPPED = 0.6
"""The part of the little words that is left out, where some are."""
Asked = tuple[str, int]
"""A text, and the number of its class."""


@dataclass(frozen=True)
class Review:
    """Words, and whether they praise."""

    words: tuple[str, ...]
    praise: int


@cache
def part(which: str) -> tuple[Review, ...]:
    """Of all reviews that are long enough: ``test``, or the half that base ``a`` or ``b`` sees."""
    entries, order = data.entries(), shuffled(50_000).tolist()
    half = (len(order) - TESTS) // 2
    first, last = {
        "test": (0, TESTS),
        "a": (TESTS, TESTS + half),
        "b": (TESTS + half, len(order)),
    }[which]
    found = (Review(tuple(entries[n]["t"].split()), int(entries[n]["s"])) for n in order[first:last])
    return tuple(review for review in found if len(review.words) >= 4 * WORDS)


def verdict(review: Review, other: Review, chance: random.Random) -> Asked:
    """Does the review praise the film, by its end?"""
    return " ".join(review.words[-WORDS:]), review.praise


def ending(review: Review, other: Review, chance: random.Random) -> Asked:
    """Is this the end of the review, or its beginning?"""
    label = chance.randrange(2)
    return " ".join(review.words[-WORDS:] if label else review.words[:WORDS]), label


def grammar(review: Review, other: Review, chance: random.Random) -> Asked:
    """Are all the little words there?"""
    label = chance.randrange(2)
    start = chance.randrange(len(review.words) - 2 * WORDS)
    said = [word for word in review.words[start:] if label or not _gone(word, chance)]
    return " ".join(said[:WORDS]), label


def _gone(word: str, chance: random.Random) -> bool:
    return word.lower() in LITTLE and chance.random() < DROPPED


def copy(review: Review, other: Review, chance: random.Random) -> Asked:
    """Does the second half say the same as the first, with some words left out?"""
    half, label = WORDS // 2, chance.randrange(2)
    start = chance.randrange(len(review.words) - WORDS)
    first = review.words[start : start + half]
    said = first if label else other.words[start % WORDS :][:half]
    rest = [word for word in said if chance.random() < 0.7]
    return " ".join((*first, "|", *rest)), label


KINDS: dict[str, Callable[[Review, Review, random.Random], Asked]] = {
    one.__name__: one for one in (verdict, ending, grammar, copy)
}


def asked(kind: str, which: str, count: int, seed: int = 0) -> tuple[list[str], list[int]]:
    """So many texts of a kind with their classes, always the same for a seed."""
    chance, reviews = random.Random(seed), part(which)
    texts, labels = [], []
    for number in range(count):
        review, other = reviews[number % len(reviews)], chance.choice(reviews)
        text, label = KINDS[kind](review, other, chance)
        texts.append(text)
        labels.append(label)
    return texts, labels
