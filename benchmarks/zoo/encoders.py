"""Trials of text encoders that others trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from transfusion_demo import reviews
from zoo.models import MODELS
from zoo.trials import BETWEEN_SHAPES, Measure, Trial, Way, trained

LENGTH = 64
"""Tokens of a review."""
SHOWN, TESTED = 2400, 1000
"""Reviews to learn from, and to test on."""
STEPS, BATCH = 100, 16
REFINING = 80
"""Steps of the refinement: each takes ten seconds of a core."""


@cache
def sentiment() -> tuple[dict[str, Tensor], Tensor]:
    """Return reviews as tokens of MiniLM, whose vocabulary both encoders have, and their labels."""
    rows = reviews.load(SHOWN + TESTED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS["minilm"].folder())
    tokens = tokenizer(
        [text for text, _ in rows],
        truncation=True,
        padding="max_length",
        max_length=LENGTH,
        return_tensors="pt",
    )
    return dict(tokens), torch.tensor([label for _, label in rows])


def _learn_sentiment(base: Path, to: Path) -> None:
    """Fine-tune an encoder with a head of its own."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    tokens, labels = sentiment()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    model.train()
    for step in range(STEPS):
        some = torch.randint(SHOWN, (BATCH,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * min((step + 1) / 15, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        loss = model(**{name: one[some] for name, one in tokens.items()}, labels=labels[some]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(MODELS["minilm"].folder()).save_pretrained(to)


@torch.no_grad()
def accuracy_of_sentiment(model: nn.Module) -> float:
    """Return the share of test reviews whose sentiment a classifier tells."""
    tokens, labels = sentiment()
    right = 0
    for start in range(SHOWN, SHOWN + TESTED, 50):
        some = slice(start, start + 50)
        logits = model(**{name: one[some] for name, one in tokens.items()}).logits
        right += int((logits.argmax(-1) == labels[some]).sum())
    return right / TESTED


@torch.no_grad()
def neighbours(model: nn.Module) -> float:
    """Return how often the nearest neighbour of half a passage, by embeddings, is its other half.

    This is what sentence encoders are for: the support.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS["minilm"].folder())
    texts = [text.split()[:80] for text, _ in reviews.load(300, seed=5)]
    halves = [[" ".join(words[start::2][:40]) for words in texts] for start in (0, 1)]
    encoder: Any = model.base_model if hasattr(model, "base_model") else model
    both = []
    for half in halves:
        parts = []
        for start in range(0, len(half), 50):
            tokens = tokenizer(half[start : start + 50], padding=True, return_tensors="pt")
            states, there = encoder(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
            parts.append(nn.functional.normalize((states * there).sum(1) / there.sum(1)))
        both.append(torch.cat(parts))
    similar = both[0] @ both[1].T  # (first halves, second halves)
    return float((similar.argmax(1) == torch.arange(len(similar))).float().mean())


def _sentiment(a: str, b: str) -> Mapping[str, Way]:
    base, onto = (MODELS[one].folder() for one in (a, b))
    tuned = trained(f"{a}-sentiment", lambda to: _learn_sentiment(base, to))
    ceiling = trained(f"{b}-sentiment", lambda to: _learn_sentiment(onto, to))
    best = transformers.AutoModelForSequenceClassification.from_pretrained(ceiling).eval()
    return Measure(
        tuned,
        base,
        onto,
        accuracy_of_sentiment,
        accuracy_of_sentiment(best),
        neighbours,
        options={"force_unrelated": True},
        ways={**BETWEEN_SHAPES, "refined": {**BETWEEN_SHAPES["refined"], "refine_steps": REFINING}},
    ).all()


TRIALS = (
    Trial(
        "sentiment",
        "all-MiniLM-L6 (6 × 384)",
        "paraphrase-MiniLM-L3 (3 × 384)",
        "sentiment of film reviews with a head of its own; ours",
        "apart; other depth",
        f"accuracy on {TESTED} reviews; support: nearest neighbours of half passages; {REFINING} steps",
        {"functional": 0.0, "refined": 0.8},
        lambda: _sentiment("minilm", "paraphrase"),
    ),
)
