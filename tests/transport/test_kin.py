"""From Flux.1 onto Chroma, which was trained on from it: what both have moves, and the rest is told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases.diffusion import CHROMA, SEEING, WAN, case
from making import Case
from small_models import CASES
from tests.transport.test_lora_formats import (
    FORMATS,
    changes_of,
    header_of,
    outputs_with,
    weights_of,
    write_lora,
)
from transfusion.errors import AdapterError, MismatchError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.transport.apply import apply
from transfusion.transport.transport import merge, transport

MODULATION = "lora_unet_final_layer_adaLN_modulation_1"


def trained_on(first: Path, second: Case, root: Path) -> tuple[Path, Path]:
    """A model with the weights of another where both have them, and the same in another order."""
    related, ours = second.save(root / "related", 2), weights_of(first)
    file = next(related.glob("*.safetensors"))
    theirs = {
        name: ours[name] if name in ours and ours[name].shape == one.shape else one
        for name, one in load_file(file).items()
    }
    save_file(theirs, file, {"format": "pt"})
    move = align(related, related, method="random", residual="tied", seed=3)
    return related, apply(move, related).save(root / "shuffled")


@pytest.fixture(scope="module")
def kin(made, tmp_path_factory) -> tuple[Path, Path, Path]:
    """A Flux, a Chroma with the same weights where both have them, and that Chroma in another order."""
    flux = made("flux-schnell")
    return flux, *trained_on(flux, CASES["chroma"], tmp_path_factory.mktemp("kin"))


def with_lora_of_diffusers(folder: Path, file: Path) -> dict[str, Tensor]:
    """What Chroma computes with a LoRA that diffusers loaded."""
    from diffusers import ChromaPipeline

    model = Model.open(folder)
    module = LiveModel.of(model).module.float()
    state, alphas, metadata = ChromaPipeline.lora_state_dict(
        file, return_alphas=True, return_lora_metadata=True
    )
    ChromaPipeline.load_lora_into_transformer(state, alphas, module, metadata=metadata)
    return run_model(module.double(), model.family, random_inputs(model.family, model.config))


def test_the_order_of_chroma_is_found_by_what_both_have(kin):
    flux, chroma, shuffled = kin
    planted = align(chroma, chroma, method="random", residual="tied", seed=3)
    found = align(flux, shuffled, residual="tied")
    assert found.provenance.family == "flux"
    assert found.provenance.advice["verdict"] == "alignable"
    assert {id: map_ for id, map_ in planted.maps.items() if "guidance" not in id} == found.maps


@pytest.mark.parametrize("format", FORMATS)
def test_a_lora_of_flux_does_on_chroma_what_it_would_have_done_there(format, kin, tmp_path):
    """Every format comes out under its own names; a file with parts that Chroma lacks, without them."""
    flux, chroma, shuffled = kin
    naming = FORMATS[format]
    lora, moved = (
        write_lora(tmp_path / "lora.safetensors", naming, flux, "flux"),
        tmp_path / "moved.safetensors",
    )
    parts = "drop" if naming.authors else "refuse"
    transport(lora, base=flux, onto=shuffled, other_parts=parts, output=moved)
    was, now = load_file(lora), load_file(moved)
    lost = {key for key in was if "adaLN" in key}
    assert {key: one.shape for key, one in now.items()} == {
        key: one.shape for key, one in was.items() if key not in lost
    }
    wanted = outputs_with(chroma, changes_of(lora, naming, chroma, "chroma"))
    found = outputs_with(shuffled, changes_of(moved, naming, shuffled, "chroma"))
    assert largest_difference(wanted, found) < 1e-9
    unmoved = outputs_with(shuffled, changes_of(lora, naming, shuffled, "chroma"))
    assert largest_difference(wanted, unmoved) > 1e-3


def test_diffusers_loads_it_onto_chroma(kin, tmp_path):
    flux, chroma, shuffled = kin
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["diffusers"], flux, "flux")
    transport(lora, base=flux, onto=shuffled, output=tmp_path / "moved.safetensors")
    wanted = with_lora_of_diffusers(chroma, lora)
    assert largest_difference(wanted, with_lora_of_diffusers(shuffled, tmp_path / "moved.safetensors")) < 1e-5
    assert largest_difference(wanted, outputs_with(chroma)) > 1e-3


def test_parts_that_chroma_lacks_are_refused_by_name_or_left_out(kin, tmp_path, cli):
    flux, _, shuffled = kin
    header = {"ss_base_model_version": "flux1", "ss_network_dim": "3"}
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], flux, "flux", header)
    with pytest.raises(
        AdapterError, match=rf"1 of 7 modules .* a chroma, does not have in that shape: {MODULATION}"
    ) as why:
        transport(lora, base=flux, onto=shuffled)
    assert why.value.hint == '`other_parts="drop"` leaves them out'
    moved = tmp_path / "moved.safetensors"
    arguments = ("transport", lora, "--base", flux, "--onto", shuffled, "--other-parts", "drop", "-o", moved)
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert "is a flux and" in err
    assert "tensors of A have a counterpart in B" in err
    assert f"not moved, because B has no counterpart: {MODULATION}" in out
    kept = header_of(moved)
    assert "ss_base_model_version" not in kept, "it is for another model now"
    assert kept["ss_network_dim"] == "3"


def test_a_lora_on_what_chroma_lacks_alone_is_refused(kin, tmp_path):
    flux, _, shuffled = kin
    stem = "transformer.transformer_blocks.0.norm1.linear"
    tensors = {f"{stem}.lora_A.weight": torch.ones(2, 30), f"{stem}.lora_B.weight": torch.ones(180, 2)}
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(AdapterError, match="a chroma, has none of the modules that it changes"):
        transport(tmp_path / "lora.safetensors", base=flux, onto=shuffled, other_parts="drop")


def test_two_loras_become_one_on_chroma(kin, tmp_path):
    flux, _, shuffled = kin
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], flux, "flux")
    places = {"base": flux, "onto": shuffled, "via": align(flux, shuffled), "other_parts": "drop"}
    one, both = (
        transport(lora, **places).state_dict(),
        merge([lora, lora], weights=[0.5, 0.5], **places).state_dict(),
    )
    assert one.keys() == both.keys()


def test_alpha_is_told_by_the_weights(kin, tmp_path):
    flux, _, shuffled = kin
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["diffusers"], flux, "flux")
    moved = transport(lora, base=flux, onto=shuffled, alpha="auto")
    assert "have different inputs" in moved.metadata()["output_shift"]["not_tried"]
    assert moved.metadata()["drift"]["strength"] > 0


def test_whole_models_stay_in_their_family(kin, tmp_path):
    flux, _, shuffled = kin
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["diffusers"], flux, "flux")
    for tuned, choices in ((flux, {}), (lora, {"full": True}), (lora, {"refine": True})):
        with pytest.raises(MismatchError, match="adapters move between them, and no whole models") as why:
            transport(tuned, base=flux, onto=shuffled, **choices)
        assert "as a LoRA" in why.value.hint
    with pytest.raises(MismatchError, match="is a flux and"):
        Pair.open(flux, shuffled)  # as verbs do that draw a line from A to B


def test_a_refinement_that_would_be_refused_is_not_proposed(kin, made, tmp_path, cli):
    flux = kin[0]
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["diffusers"], flux, "flux")
    code, _, err = cli(
        *("transport", lora, "--base", flux, "--onto", made("chroma", 2)),
        *("-o", tmp_path / "moved.safetensors"),
    )
    assert code == 4
    assert err.splitlines()[-1] == "hint: --force-unrelated writes the permutation nevertheless."


def test_a_chroma_of_another_size_is_refused(kin, made):
    narrow = case("chroma-narrow", "chroma", "ChromaTransformer2DModel", CHROMA, num_attention_heads=2)
    with pytest.raises(MismatchError, match=r"of shapes \(30, 7\) and \(20, 7\)") as why:
        align(kin[0], made(narrow))
    assert "must have one size" in why.value.hint


@pytest.mark.parametrize("name", ["wan-vace", "wan-animate"])
def test_a_lora_of_wan_moves_onto_its_kin(name, made, tmp_path):
    """Also where their videos have another number of channels, so that the patches are not compared."""
    patches = [1, 3, 2] if name == "wan-animate" else WAN["patch_size"]
    wan = made(case(f"base-of-{name}", "wan", "WanTransformer3DModel", WAN, **SEEING, patch_size=patches))
    more = SEEING if name == "wan-vace" else {}
    other = replace(CASES[name], make=partial(CASES[name].make, **more))
    related, shuffled = trained_on(wan, other, tmp_path)
    naming = FORMATS["ComfyUI"]
    lora, moved = (
        write_lora(tmp_path / "lora.safetensors", naming, wan, "wan"),
        tmp_path / "moved.safetensors",
    )
    transport(lora, base=wan, onto=shuffled, output=moved)
    assert load_file(moved).keys() == load_file(lora).keys()
    wanted = outputs_with(related, changes_of(lora, naming, related, "wan"))
    found = outputs_with(shuffled, changes_of(moved, naming, shuffled, "wan"))
    assert largest_difference(wanted, found) < 1e-9
    unmoved = outputs_with(shuffled, changes_of(lora, naming, shuffled, "wan"))
    assert largest_difference(wanted, unmoved) > 1e-3


def test_flux_and_krea_2_are_no_kin(made):
    """They differ in shape, and no stream that a time step scales may be rotated: nothing else is promised."""
    with pytest.raises(MismatchError, match="is a flux and .* a krea2") as why:
        align(made("flux-schnell"), made("krea2"))
    assert why.value.hint == "both bases must have the same architecture"


def test_a_lora_on_the_patches_of_another_video_is_refused(made, tmp_path):
    wan = made(case("base-of-animate", "wan", "WanTransformer3DModel", WAN, **SEEING, patch_size=[1, 3, 2]))
    stem, shape = "diffusion_model.patch_embedding", (5, 1, 3, 2)
    tensors = {
        f"{stem}.lora_A.weight": torch.ones(2, *shape),
        f"{stem}.lora_B.weight": torch.ones(30, 2, 1, 1, 1),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(AdapterError, match="a wan_animate, does not have in that shape: .*patch_embedding"):
        transport(tmp_path / "lora.safetensors", base=wan, onto=made("wan-animate"), method="naive")
