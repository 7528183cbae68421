"""Natural images: crops of photographs from installed libraries, drawn afresh, and mixtures of images."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from transfusion.errors import LibraryError
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes import photographs as module
from transfusion.running.probes.images import generated_images, natural_images, synthetic_images
from transfusion.running.probes.photographs import (
    PHOTOGRAPHS,
    SIDE,
    has_photographs,
    mixed,
    photograph_crops,
    photographs,
)
from transfusion.running.probes.probed_model import ProbedModel

SHAPE = (3, 32, 32)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def without(monkeypatch):
    """Make libraries missing, as if they were not installed."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        photographs.cache_clear()

    yield hide
    monkeypatch.undo()
    photographs.cache_clear()


# ── photographs ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_every_photograph_is_installed_and_its_licence_is_free_and_names_an_author(name):
    assert module._file(name) is not None
    assert re.fullmatch(r"(CC0|public domain|no known copyright restrictions), \w.+", PHOTOGRAPHS[name])


def test_photographs_are_small_and_show_something():
    found = photographs()
    assert len(found) == len(PHOTOGRAPHS)
    for one in found:
        assert one.dtype == torch.uint8
        assert one.shape[0] == 3
        assert min(one.shape[1:]) <= SIDE
        assert one.float().std() > 5


def test_no_library_is_imported_for_its_photographs():
    code = (
        "import sys; from transfusion.running.probes.photographs import photographs; assert photographs();"
        "print({'skimage', 'sklearn', 'matplotlib', 'pooch'} & sys.modules.keys())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"


@pytest.mark.parametrize("name", ["skimage", "PIL"])
def test_without_pillow_or_scikit_image_the_extra_is_named(name, without):
    without(name)
    assert not has_photographs()
    with pytest.raises(LibraryError, match=re.escape("transfusion-rebasin[images]")):
        photograph_crops(SHAPE, 2, seeded(0))


def test_photographs_of_libraries_that_are_missing_are_left_out(without, monkeypatch):
    monkeypatch.setitem(PHOTOGRAPHS, "skimage/data/of_another_version.png", "CC0, nobody")
    without("matplotlib")
    assert has_photographs()
    assert len(photographs()) == sum(not name.startswith("matplotlib/") for name in PHOTOGRAPHS) - 1


def test_models_of_colour_images_are_shown_photographs_and_others_shapes(made, without):
    plain = ProbedModel(Model.open(made("vit-classifier")), build(Model.open(made("vit-classifier"))))
    subject = replace(plain, natural=True)
    shapes, both = (synthetic_images(one, 6, 1)[0]["pixel_values"] for one in (plain, subject))
    assert not torch.equal(shapes, both)
    assert "photographs" in synthetic_images(subject, 6, 1)[1]
    without("skimage")
    assert torch.equal(synthetic_images(subject, 6, 1)[0]["pixel_values"], shapes)


# ── crops ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "shape", [(3, 32, 32), (1, 28, 28), (3, 24, 60), (1, 60, 24), (2, 16, 16), (4, 16, 16), (3, 1, 1)]
)
@pytest.mark.parametrize("count", [0, 1, 12])
def test_crops_have_the_shape_and_values_between_0_and_1(shape, count):
    crops = photograph_crops(shape, count, seeded(0))
    assert crops.shape == (count, *shape)
    assert crops.dtype == torch.float32
    assert crops.isfinite().all()
    assert ((crops >= 0) & (crops <= 1)).all()


def test_crops_show_something():
    deviations = photograph_crops(SHAPE, 256, seeded(0)).flatten(1).std(1)
    assert deviations.quantile(0.05) > 0.05
    assert deviations.quantile(0.9) > 0.2


def test_crops_follow_the_generator_and_are_drawn_afresh():
    generator = seeded(0)
    first, second = photograph_crops(SHAPE, 8, generator), photograph_crops(SHAPE, 8, generator)
    assert torch.equal(first, photograph_crops(SHAPE, 8, seeded(0)))
    for one in first:
        assert (one - second).abs().mean((1, 2, 3)).min() > 0.01


def test_crops_are_small_patches_and_whole_photographs(monkeypatch):
    stripes = (torch.arange(384) // 12 % 2 * 255).to(torch.uint8).expand(3, 384, 384)
    monkeypatch.setattr(module, "photographs", lambda: (stripes,))
    crops = photograph_crops((1, 96, 96), 200, seeded(0))
    edges = [
        (above.diff(dim=side) != 0).sum() / 96 for crop in crops for above in (crop > 0.5,) for side in (1, 2)
    ]
    edges = torch.stack(edges).reshape(-1, 2).amax(1)
    assert edges.min() < 6
    assert edges.max() > 25
    across = torch.stack([crop.std(1).mean() > crop.std(2).mean() for crop in crops])
    assert 0.04 < across.float().mean() < 0.25, "some are turned"


def test_a_patch_lies_within_its_photograph():
    rows, columns = torch.meshgrid(torch.arange(50), torch.arange(80), indexing="ij")
    image = torch.stack([rows, columns, columns])
    for place in torch.rand(50, 4, generator=seeded(0)).tolist():
        patch = module._piece(image, 2.0, *place)
        _, height, width = patch.shape
        assert 6 <= height <= 50
        assert 1.2 < height / width < 3.2
        top, left = patch[:2, 0, 0].tolist()
        assert torch.equal(patch, image[:, top : top + height, left : left + width])
    assert module._piece(image, 50 / 80, 1, 0.5, 0, 0).shape == image.shape


def test_grey_photographs_are_tinted_and_one_channel_is_their_mean_colour(monkeypatch):
    brick = next(one for one in photographs() if torch.equal(one[0], one[1]))
    monkeypatch.setattr(module, "photographs", lambda: (brick,))
    red, green, blue = photograph_crops(SHAPE, 32, seeded(0)).mean((2, 3)).unbind(1)
    assert ((red - green).abs() + (green - blue).abs()).median() > 0.02
    four = photograph_crops((4, 32, 32), 32, seeded(0))
    assert torch.equal(four[:, 0], four[:, 3])


def test_natural_images_are_shapes_and_crops_by_turns():
    images = natural_images(SHAPE, 7, 1)
    assert images.shape == (7, *SHAPE)
    assert torch.equal(images[::2], generated_images(SHAPE, 4, 1))
    assert torch.equal(images, natural_images(SHAPE, 7, 1))
    assert not torch.equal(images[1::2], natural_images(SHAPE, 7, 2)[1::2])
    assert torch.equal(natural_images(SHAPE, 1, 1), generated_images(SHAPE, 1, 1))


# ── mixtures ─────────────────────────────────────────────────────────────────────────────────


def test_a_third_of_the_images_each_stays_is_cut_and_is_blended():
    numbers = torch.arange(600.0) - 300
    images = numbers[:, None, None, None].expand(-1, 3, 20, 30)
    kinds = {"stays": 0, "cut": 0, "blended": 0}
    for number, one in zip(numbers, mixed(images, seeded(0)), strict=True):
        values = one.unique()
        if len(values) == 1:
            kinds["stays" if values == number else "blended"] += 1
            continue
        kinds["cut"] += 1
        (other,) = values[values != number]
        assert other in numbers
        inside = (one == other).all(0)
        rows, columns = inside.any(1).sum(), inside.any(0).sum()
        assert inside.sum() == rows * columns, "a rectangle"
        assert 4 <= rows <= 16
        assert 6 <= columns <= 24
    assert all(150 < found < 250 for found in kinds.values()), kinds
    assert torch.equal(images[:, 0, 0, 0], numbers), "the given images stay"


def test_mixtures_follow_the_generator_and_keep_the_type():
    images = torch.randn(16, 1, 8, 8, generator=seeded(1))
    assert torch.equal(mixed(images, seeded(0)), mixed(images, seeded(0)))
    assert not torch.equal(mixed(images, seeded(0)), mixed(images, seeded(2)))
    assert mixed(images.half(), seeded(0)).dtype == torch.float16
    torch.testing.assert_close(mixed(images[:1], seeded(0)), images[:1], msg="a single one has no other")
