"""A language model of your own, and its table for TransFusion.

The model is a pre-norm transformer with a scale on each MLP branch and with names that no library uses.
Certify the table on the model with

    transfusion verify --architecture examples/tiny_talker.py --model TinyTalker
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.families import read_families

# ── the model ────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.ask_and_answer = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.volume = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.ask_and_answer(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.volume * self.narrow(torch.relu(self.widen(self.between(x))))


class TinyTalker(nn.Module):
    def __init__(self, words: int, length: int, width: int, heads: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(blocks))
        self.after = nn.LayerNorm(width)
        self.speak = nn.Linear(width, words)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.speak(self.after(x))
        return logits


# ── the table ────────────────────────────────────────────────────────────────────────────────

TABLE = """
family tiny_talker
library mine
models tiny_talker
ignores model_type
axis head
axis qk in head
axis vo in head
axis ffn
fixed vocab: token ids select its rows
fixed position per stack: positions select its rows
stack layer blocks
sizes x = width, head = heads, ffn = hidden
words.weight                  vocab -> x@first
places                        position x@first
blocks.{}.before.*            scale x
blocks.{}.ask_and_answer.*    [(head qk)|(head qk)|(head vo)] <- x
blocks.{}.gather.*            y <- (head vo)
blocks.{}.between.*           scale y
blocks.{}.widen.*             ffn <- y
blocks.{}.narrow.*            x@next <- ffn
blocks.{}.volume              scale x@next
after.*                       scale x@last
speak.*                       vocab <- x@last
skip blocks.{}.before    x -> y        blocks.{}.gather
skip blocks.{}.between   y -> x@next   blocks.{}
draw input_ids = Draw((length,), low=0, high=words, whole=True)
"""

# All sizes differ, so that a mistake in the table cannot go unnoticed.
EXAMPLE = {"words": 31, "length": 7, "width": 24, "heads": 4, "hidden": 20, "blocks": 3}


def build(config: Mapping[str, Any]) -> TinyTalker:
    """Return the module of a config.json, for the verbs that run a model."""
    return TinyTalker(**{name: config[name] for name in EXAMPLE})


FAMILIES = read_families(TABLE, __file__, build=build)
