"""The preset ``transfusion`` is the paper's method: an independent textbook of it finds the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from textbook import Textbook
from transfusion.alignment.maps import Map
from transfusion.matching.align import align

HEADS, LAYERS = 4, 3
SMALL = {"hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SMALL |= {"intermediate_size": 96, "image_size": 24, "patch_size": 8}


def drawn(folder, seed):
    """A ViT without a pooler, as its library initialises it."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(seed)
    ViTModel(ViTConfig(**SMALL), add_pooling_layer=False).save_pretrained(folder)
    return folder


def units(heads: Map, inner: Map) -> np.ndarray:
    """The permutation of all units of all heads that a map of heads and one within each amount to."""
    return (heads.index[0][:, None] * inner.size + inner.index).reshape(-1)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_papers_preset_finds_what_a_textbook_finds(seed, tmp_path):
    a, b = drawn(tmp_path / "a", 2 * seed), drawn(tmp_path / "b", 2 * seed + 1)
    book = Textbook.open(a, b, HEADS)
    book.run()
    pi = align(a, b, method="transfusion", advice=False)
    expected = {f"layer.{i}.x": book.x[i] for i in range(LAYERS + 1)}
    expected |= {f"layer.{i}.y": book.y[i] for i in range(LAYERS)}
    expected |= {f"layer.{i}.ffn": book.ffn[i] for i in range(LAYERS)}
    for id, index in expected.items():
        assert np.array_equal(pi.maps[id].index[0], index.numpy()), id
    for layer in range(LAYERS):
        found = units(pi.maps[f"layer.{layer}.head"], pi.maps[f"layer.{layer}.qk"])
        assert np.array_equal(found, book.attention[layer].numpy()), layer
    assert len(pi.maps) == len(expected) + 2 * LAYERS, "no axis is left out of the comparison"
    assert len(book.trace) > 3
    assert pi.provenance.objective == pytest.approx(book.trace, rel=1e-5)
