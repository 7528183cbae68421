"""Sizes of axes on both sides of every threshold, and sizes of numbers: what is compared stays finite.

An axis of up to `EXACT` units is compared in float64 and a larger one in float32, so that a fused projection
may be on the other side than its parts. Every draw runs `auto`, which searches by weights and by activations.
"""

from __future__ import annotations

import shutil
from math import isfinite
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from
from safetensors.torch import load_file, save_file

from cases.vision import timm_vit
from making import Case, case
from transfusion.alignment.alignment import Alignment
from transfusion.errors import AlignmentError, DataError
from transfusion.matching.align import align
from transfusion.running.activations import EXACT
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport
from transfusion.verification.verify import predict

HEADS = 4
THIRD = EXACT // 3 // 8 * 8
WIDTHS = (24, THIRD, THIRD + 8, EXACT, EXACT + 8)
"""Of models whose fused projections, streams and neurons are on the same or on different sides."""


def gpt2(width: int, neurons: int) -> Case:
    sizes = {"n_embd": width, "n_inner": neurons, "n_head": HEADS, "n_layer": 1, "n_positions": 48}
    return case(f"gpt2-{width}-{neurons}", "gpt2", "GPT2Model", "GPT2Config", {**sizes, "vocab_size": 60})


def timm(width: int, neurons: int) -> Case:
    sizes = {"embed_dim": width, "mlp_ratio": neurons / width, "num_heads": HEADS, "depth": 1}
    return timm_vit(f"timm-{width}-{neurons}", **sizes, img_size=16, patch_size=8)


def vit(width: int, neurons: int) -> Case:
    sizes = {"hidden_size": width, "intermediate_size": neurons, "num_attention_heads": HEADS}
    places = {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    return case(f"vit-{width}-{neurons}", "vit", "ViTModel", "ViTConfig", {**sizes, **places})


def llama(width: int, neurons: int) -> Case:
    sizes = {"hidden_size": width, "intermediate_size": neurons, "num_attention_heads": HEADS}
    others = {"num_key_value_heads": HEADS // 2, "num_hidden_layers": 1, "vocab_size": 60}
    return case(f"llama-{width}-{neurons}", "llama", "LlamaModel", "LlamaConfig", {**sizes, **others})


KINDS = {one.__name__: one for one in (gpt2, timm, vit, llama)}
widths = sampled_from(WIDTHS)
neurons = sampled_from((40, EXACT, EXACT + 8))


def saved(root: Path, case: Case, seed: int = 1) -> Path:
    place = root / f"{case.name}-{seed}"
    return place if place.exists() else case.save(place, seed)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sizes")


@settings(max_examples=1)
@example("gpt2", THIRD + 8, 40)
@example("timm", EXACT, 40)
@example("llama", EXACT + 8, EXACT)
@given(sampled_from(sorted(KINDS)), widths, neurons)
def test_planted_permutation_is_found_at_every_size(root: Path, kind: str, width: int, neurons: int) -> None:
    a = saved(root, KINDS[kind](width, neurons))
    planted = align(a, a, method="random", residual="tied", seed=3, advice=False)
    b = root / f"{a.name}-shuffled"
    if not b.exists():
        apply(planted, a).save(b)
    for method in ("guarded", "functional"):
        assert predict(a, b, via=align(a, b, method=method, advice=False)).mean.found > 0.99


@settings(max_examples=1)
@example("gpt2", (24, 40), (THIRD + 8, EXACT + 8))
@example("vit", (32, 40), (1024, 40))
@example("llama", (EXACT + 8, EXACT), (24, 40))
@given(sampled_from(sorted(KINDS)), st.tuples(widths, neurons), st.tuples(widths, neurons))
def test_models_of_different_sizes_are_aligned_at_every_size(
    root: Path, kind: str, of_a: tuple[int, int], of_b: tuple[int, int]
) -> None:
    a, b = saved(root, KINDS[kind](*of_a)), saved(root, KINDS[kind](*of_b), 2)
    pi = align(a, b, method="functional", force_unrelated=True)
    seen = predict(a, b, via=pi)
    assert seen.axes.keys() <= pi.maps.keys()
    assert seen.axes
    assert all(isfinite(one.found) for one in seen.axes.values())


def scaled(source: Path, place: Path, factor: float, named: str = "") -> Path:
    """The same model with all tensors, or some of them, multiplied."""
    shutil.copytree(source, place)
    tensors = load_file(place / "model.safetensors")
    changed = {name: one * factor if named in name else one for name, one in tensors.items()}
    save_file(changed, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.mark.parametrize("kind", ["vit", "gpt2"])
def test_weights_too_large_to_compare_are_refused_by_name(kind: str, root: Path, tmp_path: Path) -> None:
    a = saved(root, KINDS[kind](24, 40))
    huge = scaled(saved(root, KINDS[kind](24, 40), 2), tmp_path / "huge", 1e30)
    with pytest.raises(
        AlignmentError, match=r"huge: the activations of \S+ reach (inf|nan|.e\+\d+), which is too"
    ):
        align(a, huge, method="functional")
    tried = align(a, huge, goes_on=True).provenance.advice
    assert tried["chosen"] == "permutation"
    assert "which is too large to compare" in tried["not_tried"]["functional"]


def test_a_model_of_zeros_is_refused_and_a_branch_of_zeros_is_not(root: Path, tmp_path: Path) -> None:
    a, b = saved(root, vit(24, 40)), saved(root, vit(24, 40), 2)
    with pytest.raises(AlignmentError, match="zeros: all activations are zero"):
        align(a, scaled(b, tmp_path / "zeros", 0), method="functional")
    for name in ("attention.output", "attention.attention.value", "intermediate", "layernorm_before"):
        silent = scaled(b, tmp_path / name, 0, name)
        found = align(a, silent, method="functional")
        assert all(isfinite(one) for one in (found.provenance.advice["found"], *_scales(found))), name


def _scales(found: Alignment) -> list[float]:
    maps = [one for one in found.maps.values() if one.rotates]
    return [float(value) for one in maps for value in (*one.produced, *one.read)]


@pytest.mark.parametrize(
    "how",
    [
        {"method": "functional"},
        {"alpha": "auto", "force_unrelated": True},
        {"refine": True, "refine_steps": 2},
    ],
)
def test_calibration_with_huge_numbers_is_refused(how: dict, root: Path, tmp_path: Path) -> None:
    a, b = saved(root, vit(24, 40)), saved(root, vit(24, 40), 2)
    save_file({"pixel_values": torch.full((16, 3, 16, 16), 1e38)}, tmp_path / "own.safetensors")
    with pytest.raises(DataError, match="pixel_values has numbers beyond 1e\\+15"):
        transport(
            saved(root, vit(24, 40), 3),
            base=a,
            onto=b,
            trust_base=True,
            calibrate=tmp_path / "own.safetensors",
            **how,
        )
