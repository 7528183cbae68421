"""A language model of one's own, and the table that makes TransFusion understand it.

The model is somebody's: a pre-norm transformer with a scale on each branch. The table is what they would
write for it. Certify the one on the other with

    transfusion verify --architecture examples/tiny_talker.py --model TinyTalker
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, fixed

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

ROWS = """
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
"""

SHORTCUTS = """
blocks.{}.before    x -> y        blocks.{}.gather
blocks.{}.between   y -> x@next   blocks.{}
"""

AXES = (
    Axis("head"),
    Axis("qk", within="head"),
    Axis("vo", within="head"),
    Axis("ffn"),
    fixed("vocab", "token ids select its rows"),
    fixed("position", "positions select its rows", scope="stack"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    sizes = {"x": config["width"], "head": config["heads"], "ffn": config["hidden"]}
    return Table(stacks=(Stack("layer", config["blocks"], ROWS, AXES, sizes, SHORTCUTS),))


def probes(config: Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(0, config["words"], (3, config["length"]), generator=generator)}


FAMILIES = (
    Family(
        name="tiny_talker",
        library="mine",
        table=table,
        model_types=("tiny_talker",),
        probes=probes,
        known_keys=frozenset({"model_type", "words", "length", "width", "heads", "hidden", "blocks"}),
    ),
)

# All sizes differ, so that no coincidence can hide a mistake.
EXAMPLE = {"words": 31, "length": 7, "width": 24, "heads": 4, "hidden": 20, "blocks": 3}
