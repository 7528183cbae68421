"""Images of signs: the letters and symbols of installed fonts, for models of one channel."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from making import case
from transfusion.errors import LibraryError
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes.images import generated_images, synthetic_images
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.signs import SIDE, SIGNS, has_signs, images_of_signs, signs

SHAPE = (1, 28, 28)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_sign_is_drawn_inside_its_frame_and_none_is_a_digit():
    found = signs()
    assert found.shape[1:] == (1, SIDE, SIDE)
    assert found.dtype == torch.uint8
    assert len(found) > 5 * len(SIGNS), "most fonts have most signs"
    inside = found[:, 0, 1:-1, 1:-1].flatten(1).sum(1) / found.flatten(1).sum(1)
    assert (inside > 0.99).float().mean() > 0.95


def test_no_sign_has_a_digit_in_it(monkeypatch):
    from PIL import ImageDraw

    drawn, draw = set(), ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda self, at, text, **how: (drawn.add(text), draw(self, at, text, **how)),
    )
    signs.cache_clear()
    signs()
    assert {"A", "ß", "Ж", "∞"} <= drawn
    assert not drawn & set("0123456789²³¹¼½¾")


@pytest.mark.parametrize("shape", [SHAPE, (1, 24, 60), (1, 60, 24), (2, 16, 16), (1, 1, 1)])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_images_have_the_shape_and_values_between_0_and_1(shape, count):
    images = images_of_signs(shape, count, seeded(0))
    assert images.shape == (count, *shape)
    assert images.isfinite().all()
    assert ((images >= 0) & (images <= 1)).all()


def test_images_show_something_and_are_drawn_afresh():
    generator = seeded(0)
    first, second = images_of_signs(SHAPE, 256, generator), images_of_signs(SHAPE, 256, generator)
    assert first.flatten(1).std(1).quantile(0.5) > 0.1
    assert not torch.equal(first, second)
    assert torch.equal(first, images_of_signs(SHAPE, 256, seeded(0)))
    corners = first[:, 0, 0, 0]
    assert (corners == 0).float().mean() > 0.2, "white on black"
    assert (corners == 1).float().mean() > 0.1, "black on white"


def test_models_of_one_channel_are_shown_signs_and_others_shapes(tmp_path, monkeypatch):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    grey = case(
        "grey",
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        sizes,
        image_size=8,
        patch_size=4,
        num_channels=1,
    )
    model = Model.open(grey.save(tmp_path / "grey", 0))
    plain = ProbedModel(model, build(model))
    subject = replace(plain, natural=True)
    shapes, both = (synthetic_images(one, 6, 1)[0]["pixel_values"] for one in (plain, subject))
    assert torch.equal(both[::2], synthetic_images(plain, 3, 1)[0]["pixel_values"])
    assert not torch.equal(shapes, both)
    assert "signs" in synthetic_images(subject, 6, 1)[1]
    monkeypatch.setitem(sys.modules, "PIL", None)
    signs.cache_clear()
    assert not has_signs()
    assert torch.equal(synthetic_images(subject, 6, 1)[0]["pixel_values"], shapes)
    with pytest.raises(LibraryError, match=r"transfusion-rebasin\[images\]"):
        images_of_signs(SHAPE, 2, seeded(0))
    assert generated_images(SHAPE, 2, 0).shape == (2, *SHAPE)
