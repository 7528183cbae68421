"""Pairs of language models: film reviews, and the same reviews in another style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from experiments.pairs import data
from experiments.pairs.berts import Encoder
from experiments.pairs.data import CACHE, REVIEWS, decoded, shuffled
from experiments.pairs.pair import OfAnother, Pair
from experiments.pairs.passages import LITTLE
from experiments.pairs.training import Recipe, fit
from transfusion.files.publishing import publish_file

END = "<|endoftext|>"
TAUGHT = 10_000
"""Reviews that the tokenizer is made from."""
JUDGED = 600
"""Rows of a style that a model is judged by."""


def plain(text: str) -> str:
    """The review as it is."""
    return text


def telegram(text: str) -> str:
    """The review without its little words."""
    return " ".join(word for word in text.split() if word.lower() not in LITTLE)


def transcript(text: str) -> str:
    """The review in small letters, without punctuation."""
    return " ".join("".join(one for one in text.lower() if one.isalnum() or one.isspace()).split())


STYLES: dict[str, Callable[[str], str]] = {one.__name__: one for one in (plain, telegram, transcript)}


@dataclass(frozen=True)
class StyleTask:
    """Go on with reviews in a style of their own."""

    group: ClassVar[str] = "other"

    name: str
    about: str
    tuning: Recipe


@cache
def tokenizer(vocabulary: int) -> Any:
    """Splits text into pieces of bytes, those that are most useful for the reviews."""
    place = CACHE / "data" / f"imdb-bytes-{vocabulary}.json"
    if not place.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END],
            show_progress=False,
        )
        made.train_from_iterator((entry["t"] for entry in data.entries()[:TAUGHT]), trainer)
        place.parent.mkdir(parents=True, exist_ok=True)
        publish_file(place, lambda staged: made.save(str(staged)), force=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(place), eos_token=END, pad_token=END)


@dataclass(frozen=True, kw_only=True)
class LanguagePair(Pair[StyleTask]):
    """GPT-2s that learned, each from its own reviews, to go on with a review."""

    lessons: int
    """Reviews that each of them learns from."""

    @property
    def _width(self) -> int:
        return int(self.config["n_positions"])

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer(self.config["vocab_size"])

    def rows(self, which: str, style: str) -> Tensor:
        """Reviews for A, for B or for tests in one style, one after the other, in rows of equal length."""
        vocabulary = self.config["vocab_size"]

        def read() -> dict[str, Tensor]:
            order, half = shuffled(50_000).tolist(), (50_000 - self.tests) // 2
            first, count = {
                "test": (0, self.tests),
                "a": (self.tests, self.lessons),
                "b": (self.tests + half, self.lessons),
            }[which]
            texts = [STYLES[style](data.entries()[n]["t"]) + END for n in order[first : first + count]]
            whole = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            return {"ids": torch.tensor([id for ids in whole for id in ids], dtype=torch.int32)}

        name = f"imdb-bytes-{vocabulary}-{self.tests}-{self.lessons}-{which}-{style}"
        ids = decoded(name, read)["ids"].long()
        return ids[: len(ids) // self._width * self._width].reshape(-1, self._width)

    def new_base(self, which: str, seed: int) -> Any:
        torch.manual_seed(own := self.seed_of(which, seed))
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**self.config))
        name = f"{self.name} {which}, seed {seed}"
        return self._taught(model, self.rows(which, plain.__name__), self.training, own, name)

    def new_tuned(self, base: Path, which: str, task: StyleTask, seed: int) -> Any:
        own, name = self.seed_of(which, seed) + 10, f"{self.name} {which} {task.name}, seed {seed}"
        return self._taught(self.load(base), self.rows(which, task.name), task.tuning, own, name)

    def _taught(self, model: Any, rows: Tensor, recipe: Recipe, seed: int, name: str) -> Encoder:
        def loss(generator: torch.Generator) -> Tensor:
            some = rows[torch.randint(len(rows), (recipe.batch,), generator=generator)]
            value: Tensor = model(input_ids=some, labels=some).loss
            return value

        return Encoder(fit(model, loss, recipe, seed=seed, name=name), self._tokenizer)

    def load(self, folder: Path) -> Any:
        return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()

    def untouched(self, b: Any, tuned: Any) -> Any:
        return b

    def accuracy(self, model: Any, task: StyleTask) -> float:
        """Percent of the tokens that are foreseen."""
        return self._foreseen(model, task.name)

    def support(self, model: Any, b: Any, task: StyleTask) -> float:
        return self._foreseen(model, plain.__name__)

    @torch.no_grad()
    def _foreseen(self, model: Any, style: str) -> float:
        right = [
            (model(input_ids=some).logits[:, :-1].argmax(-1) == some[:, 1:]).float().mean(1)
            for some in torch.split(self.rows("test", style)[:JUDGED], 64)
        ]
        return 100 * float(torch.cat(right).mean())

    def inputs(self, which: str, count: int) -> Mapping[str, Tensor]:
        return _given(self.rows(which, plain.__name__)[:count])

    def task_inputs(self, task: StyleTask, count: int) -> Mapping[str, Tensor]:
        return _given(self.rows("a", task.name)[:count])


def _given(rows: Tensor) -> Mapping[str, Tensor]:
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows)}


LANGUAGE = LanguagePair(
    name="language",
    about="IMDB reviews in 2 000 pieces of bytes; GPT-2 of 3 layers, width 96",
    packages=(REVIEWS,),
    lessons=6000,
    config={
        "vocab_size": 2000,
        "n_embd": 96,
        "n_layer": 3,
        "n_head": 3,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    training=Recipe(steps=1000, rate=3e-3, batch=32),
    tests=400,
    tasks=(
        StyleTask("telegram", "reviews without their little words", Recipe(100, 1e-3, 32)),
        StyleTask("transcript", "reviews in small letters, without punctuation", Recipe(100, 1e-3, 32)),
    ),
)


@dataclass(frozen=True, kw_only=True)
class OtherLanguageModel(OfAnother[StyleTask], LanguagePair):
    """A of another pair with its fine-tunes, and a B of another shape with the same tokenizer."""


LARGER_LANGUAGE = OtherLanguageModel(
    name="larger-language",
    about="as language, but B is a GPT-2 of 4 layers, width 128",
    origin=LANGUAGE,
    packages=LANGUAGE.packages,
    lessons=LANGUAGE.lessons,
    config=LANGUAGE.config | {"n_embd": 128, "n_layer": 4, "n_head": 4},
    training=Recipe(steps=600, rate=3e-3, batch=32),
    tests=LANGUAGE.tests,
    tasks=LANGUAGE.tasks,
)
