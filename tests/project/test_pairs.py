"""Pairs of bases for the benchmark: what of them can be checked without training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from experiments.pairs import data, gpts, minilm
from experiments.pairs.data import END, PAD, START
from experiments.pairs.gpts import LANGUAGE, LARGER_LANGUAGE, plain, telegram, transcript
from experiments.pairs.minilm import MINILM
from experiments.pairs.tasks import PAIRS, SHAPES

REVIEW = "The end of THIS film is a joke. I've seen it, and laughed!"


@pytest.fixture
def reviews(monkeypatch, tmp_path):
    """Fifty thousand short reviews, and a cache of their own."""
    entries = [{"t": f"Film {n % 7} is good, and it is long.", "s": n % 2} for n in range(50_000)]
    for module in (data, gpts):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(data, "entries", lambda: entries)
    monkeypatch.setattr(gpts, "TAUGHT", 100)
    gpts.tokenizer.cache_clear()
    yield entries
    gpts.tokenizer.cache_clear()


def test_styles_keep_the_words():
    assert plain(REVIEW) == REVIEW
    assert telegram(REVIEW) == "end film joke. I've seen it, laughed!"
    assert transcript(REVIEW) == "the end of this film is a joke ive seen it and laughed"


@pytest.mark.parametrize("task", [task.name for task in LANGUAGE.tasks])
def test_every_task_of_a_language_pair_has_a_style_of_its_own(task):
    assert gpts.STYLES[task](REVIEW) != REVIEW


def test_parts_of_a_language_pair_are_rows_of_different_reviews(reviews):
    for number, entry in enumerate(reviews):
        entry["t"] = f"Film {number} is good."
    small = replace(LANGUAGE, lessons=40, tests=40, config=LANGUAGE.config | {"vocab_size": 300})
    said = {which: small.rows(which, "plain") for which in ("test", "a", "b")}
    films = {
        which: {word for word in small._tokenizer.decode(rows.flatten()).split() if word.isdigit()}
        for which, rows in said.items()
    }
    assert all(rows.shape[1] == 64 for rows in said.values())
    assert len(films["a"]) > 30
    assert not films["a"] & films["b"]
    assert not (films["a"] | films["b"]) & films["test"]


def test_a_language_model_is_judged_by_the_tokens_that_it_foresees(reviews):
    small = replace(LANGUAGE, lessons=40, tests=40, config=LANGUAGE.config | {"vocab_size": 300})
    rows = small.rows("test", "telegram")

    class Knowing(torch.nn.Module):
        """Foresees every second token of every row."""

        def forward(self, input_ids):
            after = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
            after[:, 1::2] = 299
            return transformers.modeling_outputs.CausalLMOutput(
                logits=torch.nn.functional.one_hot(after, 300).float()
            )

    assert not (rows == 299).any()
    assert small.accuracy(Knowing(), small.tasks[0]) == pytest.approx(100 * 32 / 63)


def test_a_larger_language_model_has_the_fine_tunes_of_the_smaller_pair(monkeypatch, tmp_path):
    asked = []
    new_base = lambda self, which, seed: asked.append((self.name, which))  # noqa: E731
    monkeypatch.setattr(gpts.LanguagePair, "new_base", new_base)
    monkeypatch.setattr("experiments.pairs.pair.kept", lambda key, make: make() or tmp_path)
    LARGER_LANGUAGE.base("a", 0)
    LARGER_LANGUAGE.base("b", 0)
    assert asked == [("language", "a"), ("larger-language", "b")]


def test_passages_for_minilm_have_its_own_marks(monkeypatch):
    class Splitter:
        cls_token_id, sep_token_id = 101, 102

    monkeypatch.setattr(minilm, "splitter", Splitter)
    marked = MINILM._marked(torch.tensor([[START, 2005, 7, END, PAD]]))
    assert marked.tolist() == [[101, 2005, 7, 102, PAD]]


def test_the_support_of_minilm_is_what_it_says_itself(monkeypatch):
    class Encoder(torch.nn.Module):
        """States that are the embeddings of tokens, times a factor for each unit."""

        def __init__(self, factors):
            super().__init__()
            self.table = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0)) * factors

        def forward(self, ids, attention_mask):
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.table[ids])

    words = torch.randint(2000, 3000, (4000,), generator=torch.Generator().manual_seed(1))
    texts = data.Texts(words, torch.arange(100) * 40, torch.full((100,), 40), torch.arange(100) % 2)
    monkeypatch.setattr(minilm, "reviews", lambda first, count: texts)
    monkeypatch.setattr(minilm, "splitter", lambda: type("S", (), {"cls_token_id": 101, "sep_token_id": 102}))
    pair = replace(MINILM, tests=100)
    b = Encoder(torch.ones(8))
    assert pair.support(b, b, pair.tasks[0]) == 100
    assert pair.support(Encoder(-torch.ones(8)), b, pair.tasks[0]) < 10


def test_pairs_of_different_shapes_are_pairs():
    assert set(SHAPES) <= PAIRS.keys()
