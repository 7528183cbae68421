"""LoRA files for image and video models: every format moves, and comes out as it was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import often
from transfusion.data.probes.random_inputs import random_inputs, run_model
from transfusion.live.live_model import LiveModel, largest_difference
from transfusion.model.model import Model
from transfusion.transportation.transport_run import transport

RANK, ALPHA = 3, 2.0
FLUX = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
    "double_blocks.1.txt_attn.qkv": [f"transformer_blocks.1.attn.add_{one}_proj" for one in "qkv"],
    "double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
    "double_blocks.1.txt_mlp.2": ["transformer_blocks.1.ff_context.net.2"],
    "single_blocks.2.linear1": [
        *(f"single_transformer_blocks.2.attn.to_{one}" for one in "qkv"),
        "single_transformer_blocks.2.proj_mlp",
    ],
    "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear[1]", "norm_out.linear[0]"],
}
WAN = {
    "blocks.0.self_attn.q": ["blocks.0.attn1.to_q"],
    "blocks.1.cross_attn.o": ["blocks.1.attn2.to_out.0"],
    "blocks.1.ffn.0": ["blocks.1.ffn.net.0.proj"],
    "time_projection.1": ["condition_embedder.time_proj"],
}
MODULES = {"flux": FLUX, "wan": WAN}
"""For every model, its authors' names of some modules, and the modules of diffusers that each of them is."""


@dataclass(frozen=True)
class Naming:
    """How a program names the two factors and the alpha of a module."""

    prefix: str
    down: str
    up: str
    alpha: str | None = ".alpha"
    underscored: bool = False
    authors: bool = True
    """Whether modules have the names that a model's authors gave them, or those of diffusers."""

    def stem(self, module: str) -> str:
        return self.prefix + (module.replace(".", "_") if self.underscored else module)

    def modules(self, model: str) -> dict[str, list[str]]:
        """Every module of a file, and those of diffusers that it stands for."""
        if self.authors:
            return MODULES[model]
        return {one: [one] for parts in MODULES[model].values() for one in parts if "[" not in one}


POINTS = (".lora_A.weight", ".lora_B.weight")
KOHYA = (".lora_down.weight", ".lora_up.weight")
FORMATS = {
    "kohya": Naming("lora_unet_", *KOHYA, underscored=True),
    "kohya, names of diffusers": Naming("lora_transformer_", *KOHYA, underscored=True, authors=False),
    "ComfyUI": Naming("diffusion_model.", *POINTS, alpha=None),
    "ComfyUI with alpha": Naming("model.diffusion_model.", *KOHYA),
    "without a prefix": Naming("", *POINTS, alpha=None),
    "diffusers": Naming("transformer.", *POINTS, alpha=None, authors=False),
    "diffusers, older": Naming("transformer.", ".lora.down.weight", ".lora.up.weight", authors=False),
    "diffusers, named": Naming(
        "transformer.", ".lora_A.default.weight", ".lora_B.default.weight", None, authors=False
    ),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


def height(weights: dict[str, Tensor], part: str) -> int:
    """The rows of a module, or of one of its two halves."""
    name, _, half = part.partition("[")
    return len(weights[f"{name}.weight"]) // (2 if half else 1)


def write_lora(file: Path, naming: Naming, base: Path, model: str, header: Any = None) -> Path:
    """Write a LoRA on some modules, with factors that do something."""
    weights, tensors = weights_of(base), dict[str, Tensor]()
    for number, (module, parts) in enumerate(naming.modules(model).items()):
        outputs = sum(height(weights, part) for part in parts)
        inputs = weights[f"{parts[0].partition('[')[0]}.weight"].shape[1]
        stem = naming.stem(module)
        tensors[stem + naming.down] = drawn(RANK, inputs, seed=number)
        tensors[stem + naming.up] = drawn(outputs, RANK, seed=100 + number)
        if naming.alpha:
            tensors[stem + naming.alpha] = torch.tensor(ALPHA)
    file.parent.mkdir(exist_ok=True, parents=True)
    save_file(tensors, file, header or {"format": "pt"})
    return file


def changes_of(file: Path, naming: Naming, base: Path, model: str) -> Iterator[tuple[str, Tensor]]:
    """The change of every weight of diffusers, computed by hand."""
    weights, tensors = weights_of(base), load_file(file)
    for module, parts in naming.modules(model).items():
        stem = naming.stem(module)
        scale = float(tensors[stem + naming.alpha]) / RANK if naming.alpha else 1.0
        product = scale * tensors[stem + naming.up].double() @ tensors[stem + naming.down].double()
        pieces = product.split([height(weights, part) for part in parts])
        if "[" in parts[0]:  # there, the two halves are in the other order
            parts, pieces = [parts[0].partition("[")[0]], (torch.cat([pieces[1], pieces[0]]),)
        yield from ((f"{part}.weight", piece) for part, piece in zip(parts, pieces, strict=True))


def outputs_with(folder: Path, changes: Any = ()) -> dict[str, Tensor]:
    """What a model of diffusers computes with some of its weights changed."""
    model = Model.open(folder)
    module = LiveModel.of(model).module.double()
    for name, change in changes:
        module.get_parameter(name).data += change
    return run_model(module, model.family, random_inputs(model.family, model.config))


def header_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


CASES = [*((name, "flux") for name in FORMATS), ("kohya", "wan"), ("ComfyUI", "wan")]


@pytest.mark.parametrize(("format", "model"), often(CASES, [*CASES[:3], ("ComfyUI", "wan")]))
def test_a_moved_lora_does_on_b_what_it_did_on_a(format, model, shuffled, aligned, tmp_path):
    a, b = shuffled(model)
    naming = FORMATS[format]
    lora = write_lora(tmp_path / "lora.safetensors", naming, a, model)
    moved = tmp_path / "moved.safetensors"
    transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)
    wanted = outputs_with(a, changes_of(lora, naming, a, model))
    assert largest_difference(wanted, outputs_with(b, changes_of(moved, naming, b, model))) < 1e-9
    assert largest_difference(wanted, outputs_with(b, changes_of(lora, naming, b, model))) > 1e-3
    was, now = load_file(lora), load_file(moved)
    assert {key: (one.shape, one.dtype) for key, one in was.items()} == {
        key: (one.shape, one.dtype) for key, one in now.items()
    }


def with_lora_of_diffusers(folder: Path, file: Path) -> dict[str, Tensor]:
    """What Flux computes with a LoRA that diffusers loaded."""
    from diffusers import FluxPipeline

    model = Model.open(folder)
    module = LiveModel.of(model).module.float()
    found = FluxPipeline.lora_state_dict(file, return_alphas=True, return_lora_metadata=True)
    state, alphas, metadata = found
    FluxPipeline.load_lora_into_transformer(state, alphas, module, metadata=metadata)
    return run_model(module.double(), model.family, random_inputs(model.family, model.config))


@pytest.fixture
def trained(shuffled, tmp_path) -> Path:
    """A folder as diffusers saves it, with PEFT's configuration in the header."""
    import peft
    from diffusers import FluxPipeline

    module = LiveModel.of(Model.open(shuffled("flux")[0])).module.float()
    targets = ["to_q", "add_v_proj", "proj_mlp", "proj_out"]
    module.add_adapter(peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, alpha_pattern={"to_q": 9}))
    for name, one in module.named_parameters():
        if "lora_" in name:
            one.data = drawn(*one.shape, seed=len(name))
    FluxPipeline.save_lora_weights(
        tmp_path / "trained",
        transformer_lora_layers=peft.get_peft_model_state_dict(module),
        transformer_lora_adapter_metadata=module.peft_config["default"].to_dict(),
    )
    return tmp_path / "trained"


def test_diffusers_loads_what_was_moved(trained, shuffled, aligned, tmp_path):
    a, b = shuffled("flux")
    transport(trained, base=a, onto=b, via=aligned(a, b), output=tmp_path / "moved")
    name = "pytorch_lora_weights.safetensors"
    wanted = with_lora_of_diffusers(a, trained / name)
    assert largest_difference(wanted, with_lora_of_diffusers(b, tmp_path / "moved" / name)) < 1e-5
    assert largest_difference(wanted, outputs_with(a)) > 1e-3
    merged = transport(trained, base=a, onto=b, via=aligned(a, b), full=True).save(tmp_path / "merged")
    assert largest_difference(wanted, outputs_with(merged)) < 1e-5
    assert {"transfusion.json", "README.md", name} == {one.name for one in (tmp_path / "moved").iterdir()}


def test_diffusers_loads_a_moved_lora_of_kohya(shuffled, aligned, tmp_path):
    """Of the modules that diffusers' own conversion supports in any size."""
    a, b = shuffled("flux")
    lora = write_lora(tmp_path / "all.safetensors", FORMATS["kohya"], a, "flux")
    double = {key: one for key, one in load_file(lora).items() if "double" in key}
    save_file(double, tmp_path / "lora.safetensors")
    moved = tmp_path / "moved.safetensors"
    transport(tmp_path / "lora.safetensors", base=a, onto=b, via=aligned(a, b), output=moved)
    wanted = with_lora_of_diffusers(a, tmp_path / "lora.safetensors")
    assert largest_difference(wanted, with_lora_of_diffusers(b, moved)) < 1e-5
    assert largest_difference(wanted, outputs_with(a)) > 1e-3


@pytest.mark.parametrize("format", often(list(FORMATS), ["kohya", "diffusers"]))
def test_without_a_move_nothing_changes(format, made, aligned, tmp_path):
    """The tensors bit for bit, and every entry of the header but hashes."""
    a = made("flux")
    header = {"ss_network_dim": "3", "ss_tag_frequency": '{"a": {"cat": 2}}', "sshs_model_hash": "0" * 64}
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS[format], a, "flux", header)
    moved = transport(lora, base=a, onto=a, via=aligned(a, a, method="naive"))
    moved.save(tmp_path / "again.safetensors")
    was, now = load_file(lora), load_file(tmp_path / "again.safetensors")
    assert was.keys() == now.keys()
    assert all(torch.equal(was[key], now[key]) and was[key].dtype == now[key].dtype for key in was)
    entries = header_of(tmp_path / "again.safetensors")
    assert {key for key in header if header[key] != entries[key]} == {"sshs_model_hash"}
    assert json.loads(entries.pop("transfusion.json"))["base"]["sha256"] == Model.open(a).digest
    assert entries.keys() == header.keys()
