"""LoRA files of image and video models: the fine-tune denoises, and the LoRA on B learns to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from cases.diffusion import CASES as DENOISERS
from small_models import CASES, often
from tests.transport.test_adapter import train_adapter
from tests.transport.test_answers import ALONE, LAUNCH
from tests.transport.test_lora_formats import (
    FORMATS,
    MODULES,
    changes_of,
    drawn,
    header_of,
    outputs_with,
    write_lora,
)
from tests.transport.test_refinement import Interrupted
from transfusion import ask, transport
from transfusion.errors import (
    AdapterError,
    ArchitectureError,
    CheckpointError,
    DataError,
    MismatchError,
    SettingError,
)
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.live_model import largest_difference
from transfusion.running.probes import noised
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.running.probes.noised import Denoiser, Mixing
from transfusion.transport.adapters.factoring import without_adapter
from transfusion.transport.adapters.in_place import adapter_in, with_adapter_in_place
from transfusion.transport.adapters.lora_file import open_adapter
from transfusion.transport.plan import TransportPlan
from transfusion.transport.refinement import denoised, room
from transfusion.transport.refinement import inputs as refinement_inputs
from transfusion.transport.refinement.denoised import AskedDenoiser, ask_denoiser

LOADERS = {
    "flux": ("FluxPipeline", "transformer"),
    "unet-xl": ("StableDiffusionXLPipeline", "unet"),
    "wan-plain": ("WanPipeline", "transformer"),
}
"""The pipelines that load LoRA files, and the parts of them that denoise."""
RANK, STEPS = 4, 48
DRIFT = {"flux": 0.6, "unet-xl": 0.3, "wan-plain": 1.0}
"""How far B moved from A: answers of deep models with random weights differ sooner."""
IN_PLACE = [("kohya", "flux"), ("ComfyUI", "sd3")]
FEW = {
    "noised": {"SIDE": 2, "WORDS": 4, "FRAMES": 1, "STEPS": 3},
    "denoised": {"EXAMPLES": 8, "HELD_OUT": 4, "TIMES": 4},
}


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """Small images and few of them, so that the runs are short."""
    for module, few in ((noised, FEW["noised"]), (denoised, FEW["denoised"])):
        for name, value in few.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def given(made, aligned, tmp_path_factory):
    """Return the parameters of a transport onto a stranger, of a LoRA on all linear layers."""
    done: dict[str, dict[str, Any]] = {}

    def of(case: str) -> dict[str, Any]:
        if case not in done:
            a, b = made(case), made(case, 2)
            lora = write_lora_on_all(tmp_path_factory.mktemp("lora") / "lora.safetensors", case)
            pi = aligned(a, b, method="naive")
            done[case] = {"finetuned": lora, "base": a, "onto": b, "via": pi}
        return done[case]

    return of


def write_lora_on_all(file: Path, case: str) -> Path:
    """Write a LoRA in the names of diffusers, with factors that do something."""
    tensors = {}
    layers = [(name, one) for name, one in CASES[case].make().named_modules() if isinstance(one, nn.Linear)]
    for number, (name, one) in enumerate(layers):
        stem = f"{LOADERS[case][1]}.{name}"
        tensors[f"{stem}.lora_A.weight"] = drawn(RANK, one.in_features, seed=number)
        tensors[f"{stem}.lora_B.weight"] = drawn(one.out_features, RANK, seed=1000 + number) / 2
    save_file(tensors, file, {"format": "pt", "ss_network_dim": str(RANK)})
    return file


def with_lora(case: str, folder: Path, file: Path | None) -> Denoiser:
    """A model with a LoRA that diffusers' own pipeline loads."""
    import diffusers

    model = Model.open(folder)
    module = build(model, torch.float32)
    if file is not None:
        pipeline, part = getattr(diffusers, LOADERS[case][0]), LOADERS[case][1]
        state, *alphas = (
            pipeline.lora_state_dict(file) if part == "unet" else (pipeline.lora_state_dict(file),)
        )
        load = getattr(pipeline, f"load_lora_into_{part}")
        load(state, *(alphas or ([None] if case == "flux" else [])), module)
    return Denoiser(model, module)


def apart(asked: AskedDenoiser, denoiser: Denoiser) -> float:
    """How far a model's answers are from the wanted ones, as a share of their spread."""
    known = asked.held_out
    found = denoiser.run(known.inputs(denoiser, torch.arange(len(known.times))))
    return float((found - known.answers).square().mean() / known.spread)


@pytest.mark.parametrize("case", often(LOADERS, ["flux", "wan-plain"]))
def test_a_refined_file_denoises_more_like_the_fine_tune(case, given, tmp_path):
    """On latents that the fine-tune makes of another seed, as diffusers loads the files."""
    asked, of = {**given(case), "force_unrelated": True}, tmp_path / "out.safetensors"
    transport(**asked, output=tmp_path / "plain.safetensors")
    moved = transport(**asked, refine=True, refine_steps=STEPS, refine_keep=0.0, output=of)
    record = moved.metadata()["refinement"]
    assert record["measure"] == "cosine"
    assert 0 < record["steps"] <= STEPS
    assert record["divergence"][1] < record["divergence"][0]
    was, now = load_file(asked["finetuned"]), load_file(of)
    assert {key: (one.shape, one.dtype) for key, one in was.items()} == {
        key: (one.shape, one.dtype) for key, one in now.items()
    }
    header = header_of(of)
    assert header["ss_network_dim"] == str(RANK)
    assert json.loads(header["transfusion.json"])["refinement"] == json.loads(json.dumps(record))
    others = ask_denoiser(with_lora(case, asked["base"], asked["finetuned"]), {}, seed=77)
    files = {"B": None, "moved": tmp_path / "plain.safetensors", "refined": of}
    found = {name: apart(others, with_lora(case, asked["onto"], file)) for name, file in files.items()}
    assert found["refined"] < 0.97 * min(found["B"], found["moved"]), found


@pytest.mark.parametrize("case", often(LOADERS, ["wan-plain"]))
def test_on_a_base_that_has_drifted_the_answers_agree_more(case, made, given, aligned, tmp_path, monkeypatch):
    """B has A's units in A's places, and other values: the moved LoRA changes answers in part as on A."""
    for name, value in {"EXAMPLES": 16, "TIMES": 8}.items():
        monkeypatch.setattr(denoised, name, value)
    module = CASES[case].build(1)
    with torch.no_grad():
        for number, one in enumerate(module.parameters()):
            one += DRIFT[case] * one.std().nan_to_num(0.1) * drawn(*one.shape, seed=number)
    a, b = made(case), CASES[case].store(module, tmp_path / "b")
    asked = {
        "finetuned": given(case)["finetuned"],
        "base": a,
        "onto": b,
        "via": aligned(a, b, method="naive"),
    }
    record = transport(**asked, refine=True, refine_steps=80).metadata()["refinement"]
    assert record["start"] == "moved"
    assert record["measure"] == "change"
    assert record["settings"]["keep"] == 0
    assert record["before"]["synthetic"] > 0.1
    assert record["after"]["synthetic"] > record["before"]["synthetic"] + 0.01, record
    assert record["divergence"][1] < 0.97 * record["divergence"][0]


@pytest.mark.parametrize("format", ["kohya", "ComfyUI"])
def test_an_exact_move_stays_exact(format, shuffled, aligned, tmp_path):
    """B is A in another order: nothing is left to learn. Joined weights and halves, which PEFT lacks."""
    a, b = shuffled("flux")
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS[format], a, "flux")
    given = {"finetuned": lora, "base": a, "onto": b, "via": aligned(a, b)}
    moved = transport(**given, refine=True, refine_steps=10, output=tmp_path / "out.safetensors")
    record = moved.metadata()["refinement"]
    assert record["start"] == "moved"
    assert record["before"]["synthetic"] > 0.9999
    assert max(record["divergence"]) < 1e-4, "what float16 takes from the answers"
    plain, refined = transport(**given).state_dict(), load_file(tmp_path / "out.safetensors")
    assert plain.keys() == refined.keys()
    assert all(torch.equal(refined[key], one) for key, one in plain.items() if key.endswith("alpha"))
    assert all(torch.allclose(refined[key], one, atol=0.02) for key, one in plain.items())


def test_layers_may_compute_their_activations_again(given, tmp_path, monkeypatch):
    """Where not even one latent fits into the memory; the steps are the same."""
    asked = {**given("wan-plain"), "refine": True, "refine_steps": 2, "force_unrelated": True}
    transport(**asked, output=tmp_path / "first.safetensors")
    for name in ("SHARE", "FLOOR"):
        monkeypatch.setattr(room, name, 0)
    again: list[int] = []
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        torch.utils.checkpoint, "checkpoint", lambda *a, **k: again.append(1) or checkpoint(*a, **k)
    )
    transport(**asked, output=tmp_path / "second.safetensors")
    assert again
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("first", "second"))
    assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first | second)


def test_an_interrupted_refinement_goes_on_to_the_same_bits(given, tmp_path):
    asked = {**given("wan-plain"), "refine": True, "refine_steps": 6, "force_unrelated": True}
    transport(**asked, output=tmp_path / "whole.safetensors")
    with pytest.raises(KeyboardInterrupt):
        transport(**asked, output=tmp_path / "out.safetensors", progress=Interrupted(4))
    assert not (tmp_path / "out.safetensors").exists()

    class Silent(Interrupted):
        """Refuses to ask again."""

        def bar(self, total=None, text=""):
            assert text != "asking about latents"
            return super().bar(total, text)

    transport(**asked, output=tmp_path / "out.safetensors", progress=Silent(-1))
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(first[key], second[key]) for key in first | second)


def test_a_file_of_answers_gives_the_same_lora(given, cli, tmp_path):
    asked, file = given("wan-plain"), tmp_path / "answers.safetensors"
    code, out, err = cli("ask", asked["finetuned"], "--base", asked["base"], "-o", file)
    assert code == 0, err
    assert f"answered 32 noised latents; written to {file}" in " ".join(out.split())
    how = {"refine": True, "refine_steps": 4, "force_unrelated": True}
    transport(**asked, **how, output=tmp_path / "at-once.safetensors")
    asked["via"].save(pi := tmp_path / "pi.safetensors")
    code, out, err = cli(
        *("transport", asked["finetuned"], "--onto", asked["onto"], "--via", pi),
        *("--answers", file, "--refine", "--refine-steps", 4, "--force-unrelated"),
        *("-o", tmp_path / "out.safetensors"),
    )
    assert code == 0, err
    assert "cosine with the fine-tune's outputs" in " ".join(out.split())
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("at-once", "out"))
    assert all(torch.equal(first[key], second[key]) for key in first | second)
    places = {name: asked[name] for name in ("finetuned", "base", "onto")}
    again = transport(repeat=tmp_path / "at-once.safetensors", via=pi, **places)
    assert all(torch.equal(first[key], one) for key, one in again.state_dict().items())


def test_nothing_useless_is_written(given, aligned, tmp_path, cli):
    """B is A already, and the LoRA changes nothing: no answer can come nearer."""
    asked = given("wan-plain")
    a, lora, pi = asked["base"], tmp_path / "lora.safetensors", tmp_path / "pi.safetensors"
    was = load_file(asked["finetuned"])
    save_file({key: 0 * one if "lora_B" in key else one for key, one in was.items()}, lora, {"format": "pt"})
    aligned(a, a, method="naive").save(pi)
    out = tmp_path / "out.safetensors"
    how = ("transport", lora, "--base", a, "--onto", a, "--via", pi, "--refine", "--refine-steps", 2)
    code, _, err = cli(*how, "-o", out)
    assert code == 4
    assert "nothing was written: the refinement brought nothing" in " ".join(err.split())
    assert not out.exists()
    code, _, err = cli(*how, "-o", out, "--force-unrelated")
    assert code == 0, err
    assert all(torch.equal(one, 0 * one) for key, one in load_file(out).items() if "lora_B" in key)


def test_what_cannot_be_refined_is_refused(given, made, tmp_path):
    asked = {**given("wan-plain"), "refine": True}
    with pytest.raises(SettingError, match="keeps its own rank"):
        transport(**asked, refine_rank=8)
    with pytest.raises(SettingError, match="asked about latents that it makes"):
        transport(**asked, calibrate=tmp_path)
    with pytest.raises(SettingError, match="no language model and no adapter"):
        ask(made("flux", 2), base=made("flux"), output=tmp_path / "answers.safetensors")
    for other in ("flux", "wan"):
        with pytest.raises(AdapterError, match="cannot be moved to a model of another shape") as refused:
            transport(asked["finetuned"], base=asked["base"], onto=made(other), refine=True)
        assert "\n" not in refused.value.message


def test_answers_of_another_kind_or_size_are_refused(given, tmp_path, monkeypatch):
    asked, file = given("wan-plain"), tmp_path / "answers.safetensors"
    ask(asked["finetuned"], base=asked["base"], output=file)
    how = {**asked, "refine": True, "answers": file}
    monkeypatch.setattr(noised, "WORDS", 6)
    with pytest.raises(MismatchError, match=r"other sizes .* encoder_hidden_states \(\[4, 11\], \[6, 11\]\)"):
        transport(**how)
    save_file(dict(list(load_file(file).items())[1:]), file, header_of(file))
    with pytest.raises(DataError, match="the answers do not fit the inputs"):
        transport(**how)
    save_file(load_file(file), file, {"answers": json.dumps({"format": "transfusion answers 1"})})
    with pytest.raises(DataError, match="another kind of model"):
        transport(**how)


@pytest.mark.parametrize(
    ("format", "model"), often([(one, name) for one in ("kohya", "ComfyUI") for name in MODULES], IN_PLACE)
)
def test_in_place_a_file_changes_what_it_says(format, model, made, tmp_path):
    """By hand: joined weights, and halves in another order. All its tensors can be trained."""
    base, naming = Model.open(made(model)), FORMATS[format]
    lora = write_lora(tmp_path / "lora.safetensors", naming, made(model), model)
    moved = TransportPlan.planned(base, base).adapter(open_adapter(lora), trust_base=True)
    student = with_adapter_in_place(build(base), moved)
    inputs = random_inputs(base.family, base.config)
    found = run_model(student, base.family, inputs, gradients=True)
    wanted = outputs_with(made(model), changes_of(lora, naming, made(model), model))
    assert all((found[name] - one).abs().max() < 1e-4 for name, one in wanted.items())
    sum(one.square().sum() for one in found.values()).backward()
    trained = {name for name, one in student.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * len(MODULES[model])
    assert all(student.get_parameter(name).grad.abs().max() > 0 for name in trained)
    with without_adapter(student):
        plain = run_model(student, base.family, inputs)
    assert largest_difference(plain, outputs_with(made(model))) < 1e-9


# ── other kinds, files and models ────────────────────────────────────────────────────────────


def test_an_adapter_of_peft_is_refined_too(made, aligned, tmp_path):
    """With trained norms of rows, which scale weights of B, and a module that is trained as a whole."""
    a, b = made("wan-plain"), made("wan-plain", 2)
    train_adapter(
        a, tmp_path / "lora", ["to_q", "to_v", "net.2"], use_dora=True, modules_to_save=["proj_out"]
    )
    how = {"via": aligned(a, b, method="naive"), "refine": True, "refine_steps": 8, "force_unrelated": True}
    moved = transport(tmp_path / "lora", base=a, onto=b, **how, output=tmp_path / "out")
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < before
    was, now = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("lora", "out"))
    assert was.keys() == now.keys()
    plain = transport(tmp_path / "lora", base=a, onto=b, via=how["via"]).state_dict()
    assert not any(torch.equal(now[key], one) for key, one in plain.items() if "proj_out" in key)
    module = peft.PeftModel.from_pretrained(build(Model.open(b), torch.float32), tmp_path / "out")
    loaded = Denoiser(Model.open(b), module.eval().get_base_model())
    in_place = with_adapter_in_place(build(Model.open(b), torch.float32), moved.moved_adapter)
    adapter_in(in_place).load_state_dict(
        {adapter_in(in_place).names[key]: one for key, one in moved.state_dict().items()}, strict=False
    )
    known = ask_denoiser(Denoiser(Model.open(b), in_place), {}, seed=3).held_out
    found = loaded.run(known.inputs(loaded, torch.arange(len(known.times)))).detach()
    assert torch.allclose(found, known.answers.float(), atol=1e-2, rtol=1e-2), "as in PEFT's own formulas"


def test_parts_of_a_file_for_other_models_are_kept(given, tmp_path):
    asked, file = given("wan-plain"), tmp_path / "lora.safetensors"
    other = {f"text_encoder.shared.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
    save_file(load_file(asked["finetuned"]) | other, file, {"format": "pt"})
    how = {**asked, "finetuned": file, "refine": True, "refine_steps": 2, "force_unrelated": True}
    with pytest.raises(AdapterError, match="others for other models"):
        transport(**how)
    kept = transport(**how, other_parts="keep", output=tmp_path / "out.safetensors").state_dict()
    assert all(torch.equal(kept[key], one) for key, one in other.items())
    assert kept.keys() == load_file(file).keys()


TEXTS = {
    "llama": ("text_encoder.", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]),
    "clip": (
        "text_encoder.",
        [f"text_model.encoder.layers.{n}.mlp.{m}" for n in "01" for m in ("fc1", "fc2")],
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_file_for_a_text_encoder_is_refined_as_such_models_are(case, made, aligned, tmp_path, monkeypatch):
    for name, value in {"HELD_OUT": 16, "LEAST_HELD_OUT": 8, "WRITTEN": 32, "POOL": 32}.items():
        monkeypatch.setattr(refinement_inputs, name, value)
    for name in ("INVERTED", "INVERSION_STEPS"):
        monkeypatch.setattr(refinement_inputs, name, 4)
    a, b = made(case), made(case, 2)
    (prefix, modules), tensors = TEXTS[case], {}
    for number, name in enumerate(modules):
        rows, columns = Model.open(a).info(f"{name.removeprefix('model.')}.weight").shape
        tensors[f"{prefix}{name}.lora_A.weight"] = drawn(RANK, columns, seed=number)
        tensors[f"{prefix}{name}.lora_B.weight"] = drawn(rows, RANK, seed=100 + number)
    save_file(tensors, tmp_path / "lora.safetensors", {"format": "pt"})
    pi = aligned(a, b, method="naive")
    given = {"finetuned": tmp_path / "lora.safetensors", "base": a, "onto": b, "via": pi}
    plain = transport(**given).state_dict()
    how = {"refine": True, "refine_steps": 10, "refine_keep": 0.0, "force_unrelated": True}
    refined = transport(**given, **how, output=tmp_path / "out.safetensors").state_dict()
    assert refined.keys() == plain.keys() == tensors.keys()
    assert any(not torch.equal(refined[key], one) for key, one in plain.items())


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_with_twice_the_batch(given, tmp_path):
    asked, pi = given("wan-plain"), tmp_path / "pi.safetensors"
    asked["via"].save(pi)
    lines = ["from transfusion.cli import main", "from transfusion.running.probes import noised"]
    lines += ["from transfusion.transport.refinement import denoised"]
    lines += [f"{module}.{name} = {value}" for module, few in FEW.items() for name, value in few.items()]
    (tmp_path / "run.py").write_text("\n".join([*lines, "main()"]))
    words = ["transport", asked["finetuned"], "--base", asked["base"], "--onto", asked["onto"], "--via", pi]
    words += ["--refine", "--refine-steps", 4, "--force-unrelated", "--json"]

    def run(*start: str, batch: int, out: Path) -> str:
        every = [*start, tmp_path / "run.py", *words, "--refine-batch", batch, "-o", out]
        done = subprocess.run(
            [*map(str, every)], capture_output=True, text=True, check=False, env={**os.environ, **ALONE}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, batch=4, out=tmp_path / "one.safetensors")
    printed = run(*LAUNCH, batch=2, out=tmp_path / "two.safetensors")
    assert printed.count('"written"') == 1, "one process speaks and writes"
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first | second)


# ── the inputs ───────────────────────────────────────────────────────────────────────────────


OTHERS = ("krea2", "ltx2", "z-image-omni")
"""Denoisers with several texts or latents: their tables name none of them."""
ASKED = [one.name for one in DENOISERS if not one.name.startswith(OTHERS)]


@pytest.mark.parametrize("case", OTHERS)
def test_a_denoiser_of_several_latents_or_texts_is_not_asked(case, made):
    assert not noised.is_denoiser(Model.open(made(case)))


@pytest.mark.parametrize("case", often(ASKED, ["sd3", "z-image", "pixart"]))
def test_every_denoiser_can_be_asked(case, made):
    model = Model.open(made(case))
    denoiser = Denoiser(model, build(model, torch.float32))
    asked = ask_denoiser(denoiser, {}, seed=0)
    for group, count in ((asked.learned, 8), (asked.held_out, 4)):
        assert len(group.times) == len(group.latents) == len(group.answers) == 4 * count
        assert group.answers.isfinite().all()
        assert 0.5 < float(group.latents.float().std()) < noised.LARGEST
        assert sorted(set(group.examples.tolist())) == [*range(count)]
        again = denoiser.run(group.inputs(denoiser, torch.arange(3)))
        assert torch.allclose(again, group.answers[:3].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("predicts", ["flow", "to image", "epsilon", "v_prediction", "sample"])
def test_what_was_mixed_is_found_again(predicts):
    left = None if predicts in ("flow", "to image") else torch.linspace(0.999, 0.01, 50)
    mixing = Mixing(predicts if left is not None else "flow", predicts == "to image", left)
    image, noise = torch.randn(2, 6, 3, 4).unbind()
    times = mixing.exact(torch.rand(6))
    kept, noisy = mixing.shares(times, image)
    mixture = kept * image + noisy * noise
    found = {
        "flow": noise - image,
        "to image": image - noise,
        "epsilon": noise,
        "v_prediction": kept * noise - noisy * image,
        "sample": image,
    }[predicts]
    for wanted, one in zip((image, noise), mixing.split(mixture, found, times), strict=True):
        assert torch.allclose(wanted, one, atol=1e-3)


@pytest.fixture
def pipeline(made, tmp_path) -> Path:
    """A UNet as a pipeline keeps it, beside a scheduler and a text encoder of its width."""
    root = tmp_path / "pipeline"
    shutil.copytree(made("unet"), root / "unet")
    width = Model.open(made("unet")).config["cross_attention_dim"]
    settings = {"hidden_size": width, "num_attention_heads": 1, "intermediate_size": 7}
    config = transformers.CLIPTextConfig(vocab_size=40, num_hidden_layers=1, **settings)
    transformers.CLIPTextModel(config).save_pretrained(root / "text_encoder")
    (root / "scheduler").mkdir()
    (root / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    return root


def scheduler(root: Path, **settings: Any) -> None:
    (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))


def test_texts_are_rows_of_the_encoder_beside(pipeline, made):
    model = Model.open(pipeline)
    denoiser = Denoiser(model, build(model, torch.float32))
    rows = load_file(next((pipeline / "text_encoder").glob("*.safetensors")))
    table = next(one for name, one in rows.items() if name.endswith("token_embedding.weight"))
    table = table / table.square().mean().sqrt()
    drawn, _ = denoiser.examples(3, 0)
    texts = drawn["encoder_hidden_states"]  # (examples, words, width)
    assert (torch.cdist(texts.flatten(0, 1), table).min(1).values < 1e-2).all()
    assert "texts of the encoder's vocabulary" in denoiser.about
    next((pipeline / "text_encoder").glob("*.safetensors")).unlink()
    assert Denoiser(model, denoiser.module).vocabulary is None
    alone = Model.open(made("unet"))
    assert "noise for texts" in Denoiser(alone, build(alone, torch.float32)).about


def test_the_scheduler_beside_decides(pipeline):
    """The shares of noise are those of the library's own scheduler."""
    import diffusers

    plain = diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    assert torch.allclose(Mixing.of(Model.open(pipeline)).left, plain.alphas_cumprod, atol=1e-5)
    for schedule in ("linear", "scaled_linear"):
        said = {"beta_start": 0.001, "beta_end": 0.03, "beta_schedule": schedule, "num_train_timesteps": 100}
        scheduler(pipeline, **said, prediction_type="v_prediction", clip_sample=False)
        mixing = Mixing.of(Model.open(pipeline))
        assert torch.allclose(mixing.left, diffusers.DDIMScheduler(**said).alphas_cumprod, atol=1e-5)
        assert mixing.predicts == "v_prediction"
    for odd, text in (({"beta_schedule": "odd"}, "odd noise"), ({"beta_end": 2.0}, "to 2 in 1000 steps")):
        scheduler(pipeline, **odd)
        with pytest.raises(ArchitectureError, match=text):
            Mixing.of(Model.open(pipeline))
    scheduler(pipeline, num_train_timesteps="many")
    with pytest.raises(CheckpointError, match="num_train_timesteps"):
        Mixing.of(Model.open(pipeline))
