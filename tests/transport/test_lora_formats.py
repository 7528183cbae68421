"""LoRA files for image and video models: every format moves, and comes out as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from small_models import CASES as SMALL
from small_models import often
from transfusion.errors import (
    AdapterError,
    CheckpointError,
    MismatchError,
    OutputError,
    SettingError,
    UselessResultError,
)
from transfusion.matching.methods import INSIST, WITH_TRAINING
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.transport.output import Output
from transfusion.transport.transport import merge, transport

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
CHROMA = {name: parts for name, parts in FLUX.items() if "adaLN" not in name}
FLUX2 = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
    "double_blocks.1.txt_attn.qkv": [f"transformer_blocks.1.attn.add_{one}_proj" for one in "qkv"],
    "double_blocks.1.img_mlp.0": ["transformer_blocks.1.ff.linear_in"],
    "single_blocks.2.linear1": ["single_transformer_blocks.2.attn.to_qkv_mlp_proj"],
    "single_blocks.0.linear2": ["single_transformer_blocks.0.attn.to_out"],
    "double_stream_modulation_img.lin": ["double_stream_modulation_img.linear"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear[1]", "norm_out.linear[0]"],
}
KREA2 = {
    "blocks.0.attn.wq": ["transformer_blocks.0.attn.to_q"],
    "blocks.1.attn.gate": ["transformer_blocks.1.attn.to_gate"],
    "blocks.1.mlp.down": ["transformer_blocks.1.ff.down"],
    "txtfusion.refiner_blocks.1.attn.wo": ["text_fusion.refiner_blocks.1.attn.to_out.0"],
    "txtfusion.projector": ["text_fusion.projector"],
    "tproj.1": ["time_mod_proj"],
    "last.linear": ["final_layer.linear"],
}
WAN = {
    "blocks.0.self_attn.q": ["blocks.0.attn1.to_q"],
    "blocks.1.cross_attn.o": ["blocks.1.attn2.to_out.0"],
    "blocks.1.ffn.0": ["blocks.1.ffn.net.0.proj"],
    "time_projection.1": ["condition_embedder.time_proj"],
}
VACE = {
    **WAN,
    "vace_blocks.0.before_proj": ["vace_blocks.0.proj_in"],
    "vace_blocks.1.self_attn.q": ["vace_blocks.1.attn1.to_q"],
    "vace_blocks.0.ffn.2": ["vace_blocks.0.ffn.net.2"],
}
ANIMATE = {
    **WAN,
    "face_adapter.fuser_blocks.1.linear1_kv": ["face_adapter.1.to_k", "face_adapter.1.to_v"],
    "face_adapter.fuser_blocks.0.linear2": ["face_adapter.0.to_out"],
}
SD3 = {
    "joint_blocks.0.x_block.attn.qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
    "joint_blocks.2.context_block.adaLN_modulation.1": [
        f"transformer_blocks.2.norm1_context.linear[{half}]" for half in (1, 0)
    ],
}
QWEN = {
    name: [name] for name in ("transformer_blocks.0.attn.add_q_proj", "transformer_blocks.1.img_mlp.net.2")
}
QWEN21 = {
    "transformer_blocks.0.attn.to_v": ["transformer_blocks.0.attn.to_v"],
    "transformer_blocks.1.img_mlp.gate_up": [
        f"transformer_blocks.1.img_mlp.{one}" for one in ("gate_layer", "proj")
    ],
    "modulation.1": ["modulation.1"],
    "txt_in.out_layer": ["txt_in.out_layer"],
}
HUNYUAN15 = {
    "double_blocks.0.img_attn_qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
    "double_blocks.1.txt_attn_q": ["transformer_blocks.1.attn.add_q_proj"],
    "double_blocks.1.img_mlp.fc2": ["transformer_blocks.1.ff.net.2"],
    "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{one}_proj" for one in "qkv"],
    "double_blocks.0.img_mlp.0": ["transformer_blocks.0.ff.net.0.proj"],
    "txt_in.individual_token_refiner.blocks.1.self_attn_qkv": [
        f"context_embedder.token_refiner.refiner_blocks.1.attn.to_{one}" for one in "qkv"
    ],
    "final_layer.adaLN_modulation.1": ["norm_out.linear[1]", "norm_out.linear[0]"],
}
LTX2 = {
    "transformer_blocks.0.attn1.to_q": ["transformer_blocks.0.attn1.to_q"],
    "transformer_blocks.1.audio_attn2.to_v": ["transformer_blocks.1.audio_attn2.to_v"],
    "transformer_blocks.1.audio_to_video_attn.to_out.0": [
        "transformer_blocks.1.audio_to_video_attn.to_out.0"
    ],
    "transformer_blocks.0.ff.net.0.proj": ["transformer_blocks.0.ff.net.0.proj"],
    "patchify_proj": ["proj_in"],
    "audio_adaln_single.linear": ["audio_time_embed.linear"],
    "av_ca_a2v_gate_adaln_single.linear": ["av_cross_attn_video_a2v_gate.linear"],
}
Z_IMAGE = {
    "layers.0.attention.qkv": [f"layers.0.attention.to_{one}" for one in "qkv"],
    "noise_refiner.0.feed_forward.w2": ["noise_refiner.0.feed_forward.w2"],
}
UNET = {
    "input_blocks.1.1.transformer_blocks.0.attn1.to_q": [
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    ],
    "middle_block.1.transformer_blocks.0.attn2.to_k": [
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
    ],
    "middle_block.2.emb_layers.1": ["mid_block.resnets.1.time_emb_proj"],
    "output_blocks.3.1.transformer_blocks.0.ff.net.0.proj": [
        "up_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj"
    ],
}
MODULES = {
    "flux": FLUX,
    "chroma": CHROMA,
    "flux2": FLUX2,
    "krea2": KREA2,
    "unet": UNET,
    "wan": WAN,
    "wan-vace": VACE,
    "wan-animate": ANIMATE,
    "sd3": SD3,
    "qwen-image": QWEN,
    "qwen-image-2.1": QWEN21,
    "ltx2": LTX2,
    "hunyuan-video-1.5": HUNYUAN15,
    "z-image": Z_IMAGE,
}
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
    "kohya, two underscores": Naming("lora_unet__", *KOHYA, underscored=True),
    "ComfyUI": Naming("diffusion_model.", *POINTS, alpha=None),
    "ComfyUI with alpha": Naming("model.diffusion_model.", *KOHYA),
    "without a prefix": Naming("", *POINTS, alpha=None),
    "PEFT's names in one file": Naming("base_model.model.", *POINTS, alpha=None),
    "DiffSynth": Naming("", ".lora_A.default.weight", ".lora_B.default.weight", alpha=None, authors=False),
    "diffusers": Naming("transformer.", *POINTS, alpha=None, authors=False),
    "diffusers, older": Naming("transformer.", ".lora.down.weight", ".lora.up.weight", authors=False),
    "diffusers, wrapped by PEFT": Naming(
        "transformer.base_model.model.", ".lora.down.weight", ".lora.up.weight", None, authors=False
    ),
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


OF_ALL = ("kohya", "kohya, names of diffusers", "ComfyUI", "DiffSynth", "diffusers")
"""The formats that are tested with every model; what others differ in has nothing to do with the model."""
CASES = [
    *((name, "flux") for name in FORMATS),
    *((name, one) for one in MODULES for name in OF_ALL),
]
FAST = [
    *CASES[:3],
    *(("kohya", one) for one in ("chroma", "flux2", "krea2", "ltx2")),
    ("ComfyUI", "wan"),
    ("kohya", "sd3"),
]


@pytest.mark.parametrize(("format", "model"), often(dict.fromkeys(CASES), FAST))
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


DOWN = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
NAMED = (".lora_A.default.weight", ".lora_B.default.weight")
TRAINERS = {
    "sd-scripts": {
        "flux": {
            "lora_unet_double_blocks_0_img_attn_qkv": "double_blocks.0.img_attn.qkv",
            "lora_unet_single_blocks_2_linear1": "single_blocks.2.linear1",
        },
        "unet": {
            "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": DOWN,
            "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k": (
                "middle_block.1.transformer_blocks.0.attn2.to_k"
            ),
        },
    },
    "musubi-tuner": {
        "wan": {
            "lora_unet_blocks_0_self_attn_q": "blocks.0.self_attn.q",
            "lora_unet_blocks_1_ffn_0": "blocks.1.ffn.0",
        },
        "qwen-image": {
            "lora_unet_transformer_blocks_0_attn_add_q_proj": "transformer_blocks.0.attn.add_q_proj"
        },
        "hunyuan-video-1.5": {"lora_unet_double_blocks_0_img_attn_qkv": "double_blocks.0.img_attn_qkv"},
        "z-image": {"lora_unet_layers_0_attention_qkv": "layers.0.attention.qkv"},
    },
    "LyCORIS": {
        "flux": {
            "lycoris_single_transformer_blocks_0_attn_to_k": "single_transformer_blocks.0.attn.to_k",
            "lycoris_transformer_blocks_1_ff_context_net_2": "transformer_blocks.1.ff_context.net.2",
        },
        "unet": {"lycoris_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": DOWN},
    },
    "ai-toolkit": {
        "wan": {"diffusion_model.blocks.1.cross_attn.o": "blocks.1.cross_attn.o"},
        "qwen-image": {
            "diffusion_model.transformer_blocks.1.img_mlp.net.2": "transformer_blocks.1.img_mlp.net.2"
        },
        "z-image": {"diffusion_model.layers.0.attention.to_q": "layers.0.attention.to_q"},
        "flux2": {"diffusion_model.double_blocks.1.img_mlp.0": "double_blocks.1.img_mlp.0"},
        "flux": {"transformer.transformer_blocks.0.attn.to_out.0": "transformer_blocks.0.attn.to_out.0"},
    },
    "DiffSynth": {
        "flux": {
            "blocks.0.attn.a_to_qkv": "double_blocks.0.img_attn.qkv",
            "blocks.1.attn.b_to_qkv": "double_blocks.1.txt_attn.qkv",
            "blocks.0.attn.a_to_out": "double_blocks.0.img_attn.proj",
            "blocks.1.ff_b.2": "double_blocks.1.txt_mlp.2",
            "blocks.0.norm1_a.linear": "transformer_blocks.0.norm1.linear",
            "single_blocks.2.to_qkv_mlp": "single_blocks.2.linear1",
            "single_blocks.0.proj_out": "single_blocks.0.linear2",
            "single_blocks.0.norm.linear": "single_transformer_blocks.0.norm.linear",
            "final_norm_out.linear": "final_layer.adaLN_modulation.1",
        },
        "wan": {"blocks.0.self_attn.q": "blocks.0.self_attn.q"},
        "qwen-image": {"transformer_blocks.0.attn.add_q_proj": "transformer_blocks.0.attn.add_q_proj"},
    },
}
"""Names in files of these programs, and the module of each, in the names of its authors or of diffusers."""
ENDINGS = {"ai-toolkit": POINTS, "DiffSynth": NAMED}


@pytest.mark.parametrize(
    ("program", "model"),
    often([(one, model) for one in TRAINERS for model in TRAINERS[one]], [("DiffSynth", "flux")]),
)
def test_names_of_every_trainer_are_those_of_its_modules(program, model, shuffled, aligned, tmp_path):
    """What moves is what moves under the names of the formats above, and comes out under its own."""
    a, b = shuffled(model)
    weights, modules = weights_of(a), TRAINERS[program][model]
    down, up = ENDINGS.get(program, KOHYA)
    files: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for number, (stem, module) in enumerate(modules.items()):
        parts = MODULES[model].get(module, [module])
        inputs = weights[f"{parts[0].partition('[')[0]}.weight"].shape[1]
        outputs = sum(height(weights, part) for part in parts)
        for file, name, ends in zip(
            files, (stem, f"diffusion_model.{module}"), ((down, up), KOHYA), strict=True
        ):
            file[name + ends[0]] = drawn(RANK, inputs, seed=number)
            file[name + ends[1]] = drawn(outputs, RANK, seed=100 + number)
            if (down, up) == KOHYA:
                file[f"{name}.alpha"] = torch.tensor(ALPHA)
    moved = []
    for number, file in enumerate(files):
        save_file(file, tmp_path / f"{number}.safetensors")
        lora = tmp_path / f"{number}.safetensors"
        moved.append(transport(lora, base=a, onto=b, via=aligned(a, b)).state_dict())
    assert moved[0].keys() == files[0].keys()
    names = dict(zip(*files, strict=True))
    assert all(torch.equal(one, moved[1][names[key]]) for key, one in moved[0].items())
    assert any(not torch.equal(one, files[0][key]) for key, one in moved[0].items())


def test_where_units_are_not_found_again_a_refinement_is_named(made, tmp_path):
    """The stream of Flux cannot be rotated, so that only a refinement may bring more."""
    a, b = made("flux", 1), made("flux", 2)
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux")
    for method in ({}, {"method": "auto"}):  # with auto it is the program that decides, too
        with pytest.raises(UselessResultError, match="not alignable by permutation") as refused:
            transport(lora, base=a, onto=b, **method)
        assert refused.value.hint == f"{WITH_TRAINING} {INSIST}"


def test_a_file_whose_header_names_b_is_refused(made, tmp_path):
    """A and B were swapped. Only names can be compared, so that other names are no reason."""
    a, b = made("flux", 1), made("flux", 2)
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux")
    for name, refused in ((a.name, True), (f"{a.name}.safetensors", True), (b.name, False), ("x", False)):
        save_file(load_file(lora), lora, {"ss_sd_model_name": name})
        moving = partial(transport, lora, base=b, onto=a, method="naive")
        if refused:
            with pytest.raises(
                MismatchError, match=f"trained on {name}, and that is the model to move"
            ) as why:
                moving()
            assert "swapped" in str(why.value.hint)
            moving(trust_base=True)
        else:
            moving()


def with_alphas(lora: Path, alpha: Tensor, factor: float = 1.0) -> Path:
    """The same file with another alpha, and with all factors scaled."""
    was = load_file(lora)
    save_file(
        {key: alpha.clone() if key.endswith(".alpha") else factor * one for key, one in was.items()}, lora
    )
    return lora


def test_an_alpha_may_be_stored_in_eight_bits(shuffled, aligned, tmp_path):
    a, b = shuffled("flux")
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux")
    plain = transport(lora, base=a, onto=b, via=aligned(a, b), full=True).state_dict()
    with_alphas(lora, torch.tensor(ALPHA).to(torch.float8_e4m3fn))
    moved = tmp_path / "moved.safetensors"
    transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)
    assert {one.dtype for key, one in load_file(moved).items() if key.endswith("alpha")} == {
        torch.float8_e4m3fn
    }
    for name, tensor in transport(lora, base=a, onto=b, via=aligned(a, b), full=True).state_dict().items():
        assert torch.equal(tensor, plain[name])


def test_a_change_that_overflows_is_refused(shuffled, aligned, tmp_path):
    a, b = shuffled("flux")
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux")
    with_alphas(lora, torch.tensor(3e38), factor=1e20)
    asked = {"base": a, "onto": b, "via": aligned(a, b), "output": tmp_path / "moved.safetensors"}
    with pytest.raises(AdapterError, match="is too large to compute with: look at its alpha"):
        transport(lora, **asked)
    with pytest.raises(OutputError, match="has values that float32 cannot hold"):
        merge([lora, lora], **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["lora.safetensors"]


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
    names = {one.name for one in (tmp_path / "moved").iterdir()}
    assert names == {"transfusion.json", "transfusion", "README.md", name}


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
    assert json.loads(entries.pop("transfusion.json"))["base"]["fingerprint"] == Model.open(a).fingerprint
    assert entries == {key: text for key, text in header.items() if key != "sshs_model_hash"}


def test_a_moved_file_has_a_report_from_its_header(shuffled, aligned, tmp_path, cli):
    a, b = shuffled("flux")
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux")
    moved, page = tmp_path / "moved.safetensors", tmp_path / "report.html"
    transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)
    code, out, err = cli("report", moved, "-o", page)
    assert code == 0, err
    assert out.startswith(f"written to {page}: Moved")
    assert "lora.safetensors, moved onto" in page.read_text()
    code, _, err = cli("report", lora, "-o", tmp_path / "other.html")
    assert code == 1
    assert f"{lora}: it does not say how it was made" in err
    assert "a moved LoRA file" in err


# ── parts, kinds, strengths ──────────────────────────────────────────────────────────────────


@pytest.fixture
def kohya(made, tmp_path) -> Path:
    return write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], made("flux"), "flux")


def rewritten(file: Path, change: Callable[[dict[str, Tensor]], Any], name: str = "odd") -> Path:
    """A copy of a file with some of its tensors changed."""
    tensors = load_file(file)
    tensors = change(tensors) or tensors
    save_file(tensors, file.with_name(f"{name}.safetensors"), header_of(file))
    return file.with_name(f"{name}.safetensors")


def test_alpha_scales_the_second_factor_of_each_pair(kohya, made, aligned):
    a = made("flux")
    pi = aligned(a, a, method="random")
    whole, half = (transport(kohya, base=a, onto=a, via=pi, alpha=one).state_dict() for one in (1.0, 0.5))
    for key, value in whole.items():
        assert torch.equal(half[key], 0.5 * value if "lora_up" in key else value), key


def test_joined_weights_may_have_an_alpha_each(kohya, made, aligned):
    """One module of the file is four of diffusers."""
    a = made("flux")
    pi, per = aligned(a, a, method="naive"), {"single_transformer_blocks.2.attn.to_k.*": 0.0, "*": 1.0}
    was = load_file(kohya)
    now = transport(kohya, base=a, onto=a, via=pi, alpha=per).state_dict()
    key = "lora_unet_single_blocks_2_linear1.lora_up.weight"
    assert not now[key][30:60].any()
    assert torch.equal(now[key][:30], was[key][:30])
    assert torch.equal(now[key][60:], was[key][60:])


def test_joined_weights_of_merged_loras_may_have_an_alpha_each(kohya, made, aligned):
    """The LoRAs may have different ranks."""
    a = made("flux")

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: (one[:2] if "down" in key else one[:, :2] if "up" in key else one).contiguous()
            for key, one in tensors.items()
        }

    pi, per = aligned(a, a, method="naive"), {"single_transformer_blocks.2.attn.to_k.*": 0.0, "*": 1.0}
    now = merge([kohya, rewritten(kohya, cut, "cut")], base=a, onto=a, via=pi, alpha=per).state_dict()
    up = now["lora_unet_single_blocks_2_linear1.lora_up.weight"]
    assert up.shape[1] == RANK + 2
    assert not up[30:60].any()
    assert up[:30].all()


def add_others(tensors: dict[str, Tensor]) -> None:
    stem = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors |= {f"{stem}.lora_down.weight": torch.ones(2, 4), f"{stem}.lora_up.weight": torch.ones(8, 2)}


def test_parts_for_a_text_encoder_are_kept_or_dropped_if_asked(kohya, made, aligned, tmp_path):
    a = made("flux")
    lora, pi = rewritten(kohya, add_others), aligned(a, a, method="random")
    common = {"base": a, "onto": a, "via": pi}
    with pytest.raises(AdapterError, match="others for other models: 2 of text_encoder_1") as caught:
        transport(lora, **common).state_dict()
    assert 'other_parts="keep"' in str(caught.value.hint)
    plain = transport(kohya, **common).state_dict()
    dropping, keeping = (
        transport(lora, **common, other_parts=parts, output=tmp_path / f"{name}.safetensors")
        for parts, name in (("drop", "dropped"), ("keep", "kept"))
    )
    assert dropping.notes == ["tensors for other models are left out: 2 of text_encoder_1"]
    assert keeping.notes == ["tensors for other models are kept as they are: 2 of text_encoder_1"]
    dropped, kept = dropping.state_dict(), keeping.state_dict()
    assert dropped.keys() == plain.keys()
    assert kept.keys() == load_file(lora).keys()
    assert all(torch.equal(kept[key], one) for key, one in load_file(lora).items() if "lora_te1" in key)
    again = transport(repeat=tmp_path / "kept.safetensors", finetuned=lora, base=a, onto=a).state_dict()
    assert again.keys() == kept.keys()
    with pytest.raises(SettingError, match="no place for parts of another"):
        transport(lora, **common, other_parts="keep", full=True)
    with pytest.raises(SettingError, match="not a choice"):
        transport(lora, **common, other_parts="some")


def test_a_text_encoder_can_be_the_base(made, aligned, tmp_path):
    a = made("clip")
    width = Model.open(a).info("text_model.encoder.layers.0.self_attn.q_proj.weight").shape[0]
    stem = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    tensors = {
        f"{stem}.lora_down.weight": drawn(2, width, seed=1),
        f"{stem}.lora_up.weight": drawn(width, 2, seed=2),
        "lora_unet_img_in.lora_down.weight": torch.ones(2, 4),
        "lora_unet_img_in.lora_up.weight": torch.ones(4, 2),
        "lora_te2_encoder_block_0_layer_0_SelfAttention_q.lora_down.weight": torch.ones(2, 4),
        "lora_te2_encoder_block_0_layer_0_SelfAttention_q.lora_up.weight": torch.ones(4, 2),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    pi = aligned(a, a, method="random")
    lora = tmp_path / "lora.safetensors"
    moved = transport(lora, base=a, onto=a, via=pi, other_parts="keep").state_dict()
    changed = [key for key, one in tensors.items() if not torch.equal(moved[key], one)]
    assert changed == [f"{stem}.lora_down.weight", f"{stem}.lora_up.weight"]


DIFFERENCES = {
    "blocks.0.self_attn.q.diff": "blocks.0.attn1.to_q.weight",
    "blocks.0.self_attn.q.diff_b": "blocks.0.attn1.to_q.bias",
    "blocks.1.norm3.diff": "blocks.1.norm2.weight",
    "blocks.1.norm3.diff_b": "blocks.1.norm2.bias",
    "blocks.1.cross_attn.norm_k.diff": "blocks.1.attn2.norm_k.weight",
}


def test_whole_differences_move(shuffled, aligned, tmp_path):
    """As extracted LoRAs for Wan have them, beside their factors."""
    a, b = shuffled("wan")
    naming = FORMATS["ComfyUI"]
    weights, lora = weights_of(a), write_lora(tmp_path / "plain.safetensors", naming, a, "wan")
    del_q = {key: one for key, one in load_file(lora).items() if "self_attn" not in key}
    more = {
        f"diffusion_model.{key}": drawn(*weights[name].shape, seed=len(key))
        for key, name in DIFFERENCES.items()
    }
    save_file({**del_q, **more}, tmp_path / "lora.safetensors")
    lora, moved = tmp_path / "lora.safetensors", tmp_path / "moved.safetensors"
    transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)

    def changed(file: Path, folder: Path) -> dict[str, Tensor]:
        tensors = load_file(file)
        by_hand = [(name, tensors[f"diffusion_model.{key}"]) for key, name in DIFFERENCES.items()]
        factors = {key: one for key, one in WAN.items() if "self_attn" not in key}
        products = (
            (
                f"{part}.weight",
                tensors[f"diffusion_model.{key}{POINTS[1]}"] @ tensors[f"diffusion_model.{key}{POINTS[0]}"],
            )
            for key, (part,) in factors.items()
        )
        return outputs_with(folder, [*by_hand, *products])

    wanted = changed(lora, a)
    assert largest_difference(wanted, changed(moved, b)) < 1e-5
    merged = transport(lora, base=a, onto=b, via=aligned(a, b), full=True).save(tmp_path / "merged")
    assert largest_difference(wanted, outputs_with(merged)) < 1e-5
    assert largest_difference(wanted, changed(lora, b)) > 1e-3


def test_a_file_of_differences_alone_is_a_lora_file(shuffled, aligned, tmp_path):
    a, b = shuffled("wan")
    weights, lora = weights_of(a), tmp_path / "lora.safetensors"
    names = {f"diffusion_model.{key}": name for key, name in DIFFERENCES.items()}
    save_file({key: drawn(*weights[name].shape, seed=len(key)) for key, name in names.items()}, lora)
    moved = transport(lora, base=a, onto=b, via=aligned(a, b), output=tmp_path / "moved.safetensors")
    assert isinstance(moved, Output)

    def changed(file: Path, folder: Path) -> dict[str, Tensor]:
        tensors = load_file(file)
        return outputs_with(folder, [(name, tensors[key]) for key, name in names.items()])

    wanted = changed(lora, a)
    assert largest_difference(wanted, changed(tmp_path / "moved.safetensors", b)) < 1e-5
    assert largest_difference(wanted, changed(lora, b)) > 1e-3


def kind_of_module(kind: str, rows: int, columns: int) -> dict[str, Tensor]:
    """The tensors of a module, by ending."""
    if kind == "LoHa":
        return {
            ".hada_w1_a": drawn(rows, 2, seed=1),
            ".hada_w1_b": drawn(2, columns, seed=2),
            ".hada_w2_a": drawn(rows, 2, seed=3),
            ".hada_w2_b": drawn(2, columns, seed=4),
            ".alpha": torch.tensor(4.0),
        }
    return {
        ".lora_down.weight": drawn(2, columns, seed=1),
        ".lora_up.weight": drawn(rows, 2, seed=2),
        ".dora_scale": 1 + drawn(rows, 1, seed=3).abs(),
        ".alpha": torch.tensor(1.0),
    }


def change_by(kind: str, weight: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """The change of a weight, computed by hand."""
    one = {key: value.double() for key, value in parts.items()}
    if kind == "LoHa":
        return 2 * (one[".hada_w1_a"] @ one[".hada_w1_b"]) * (one[".hada_w2_a"] @ one[".hada_w2_b"])
    together = weight + 0.5 * one[".lora_up.weight"] @ one[".lora_down.weight"]
    return together * one[".dora_scale"] / together.norm(dim=1, keepdim=True) - weight


@pytest.mark.parametrize("kind", ["LoHa", "DoRA"])
def test_other_kinds_move_too(kind, shuffled, aligned, tmp_path):
    a, b = shuffled("flux")
    stem, rows = "lycoris_single_blocks_1_linear1", [30, 30, 30, 120]
    parts = kind_of_module(kind, sum(rows), 30)
    lora, moved = tmp_path / "lora.safetensors", tmp_path / "moved.safetensors"
    save_file({stem + ending: one for ending, one in parts.items()}, lora)
    transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)
    names = [f"single_transformer_blocks.1.{one}.weight" for one in ("attn.to_q", "attn.to_k", "attn.to_v")]
    names.append("single_transformer_blocks.1.proj_mlp.weight")

    def changed(file: Path, folder: Path) -> dict[str, Tensor]:
        weights, tensors = weights_of(folder), load_file(file)
        weight = torch.cat([weights[name].double() for name in names])
        change = change_by(kind, weight, {ending: tensors[stem + ending] for ending in parts})
        return outputs_with(folder, zip(names, change.split(rows), strict=True))

    wanted = changed(lora, a)
    assert largest_difference(wanted, changed(moved, b)) < 1e-5
    merged = transport(lora, base=a, onto=b, via=aligned(a, b), full=True).save(tmp_path / "merged")
    assert largest_difference(wanted, outputs_with(merged)) < 1e-5
    assert largest_difference(wanted, outputs_with(a)) > 1e-3


LOKR = {
    "one low": {".lokr_w1": (10, 5), ".lokr_w2_a": (21, 2), ".lokr_w2_b": (2, 6), ".alpha": ()},
    "both low": {
        ".lokr_w1_a": (10, 2),
        ".lokr_w1_b": (2, 5),
        ".lokr_w2_a": (21, 2),
        ".lokr_w2_b": (2, 6),
        ".alpha": (),
    },
    "both whole, whose alpha does nothing": {".lokr_w1": (10, 5), ".lokr_w2": (21, 6), ".alpha": ()},
}


@pytest.mark.parametrize("kind", LOKR)
@pytest.mark.parametrize(
    "stem", ["lycoris_single_blocks_1_linear1", "diffusion_model.single_blocks.1.linear1"]
)
def test_a_lokr_becomes_a_lora_of_its_format(kind, stem, shuffled, aligned, tmp_path):
    a, b = shuffled("flux")
    rows = [30, 30, 30, 120]
    parts = {
        end: drawn(*shape, seed=len(end)) if shape else torch.tensor(3.0) for end, shape in LOKR[kind].items()
    }
    lora, moved = tmp_path / "lora.safetensors", tmp_path / "moved.safetensors"
    header = {
        "ss_network_dim": "2",
        "ss_network_args": '{"algo": "lokr"}',
        "ss_network_module": "lycoris.kohya",
    }
    save_file({stem + ending: one for ending, one in parts.items()}, lora, header)
    done = transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)
    assert done.metadata()["converted_from"] == "LOKR"
    names = [f"single_transformer_blocks.1.{one}.weight" for one in ("attn.to_q", "attn.to_k", "attn.to_v")]
    names.append("single_transformer_blocks.1.proj_mlp.weight")

    def whole(name: str) -> Tensor:
        low = f".lokr_{name}_a" in parts
        return parts[f".lokr_{name}_a"] @ parts[f".lokr_{name}_b"] if low else parts[f".lokr_{name}"]

    def with_change(folder: Path, change: Tensor) -> dict[str, Tensor]:
        return outputs_with(folder, zip(names, change.double().split(rows), strict=True))

    scale = 1.0 if "whole" in kind else 3.0 / 2
    wanted = with_change(a, scale * torch.kron(whole("w1"), whole("w2")))
    now = load_file(moved)
    assert now.keys() == {stem + end for end in KOHYA}, "a plain LoRA without an alpha, whose scale is 1"
    found = with_change(b, now[stem + KOHYA[1]] @ now[stem + KOHYA[0]])
    assert largest_difference(wanted, found) < 1e-5
    assert header_of(moved)["ss_network_dim"] == str(len(now[stem + KOHYA[0]]))
    assert "ss_network_args" not in header_of(moved)
    merged = transport(lora, base=a, onto=b, via=aligned(a, b), full=True).save(tmp_path / "merged")
    assert largest_difference(wanted, outputs_with(merged)) < 1e-5


# ── several LoRAs ────────────────────────────────────────────────────────────────────────────


def test_two_loras_become_one_of_their_format(kohya, made, aligned, tmp_path):
    a = made("flux")
    naming, pi = FORMATS["kohya"], aligned(a, a, method="naive")
    other = rewritten(kohya, lambda tensors: {key: 0.7 * one for key, one in tensors.items()}, "other")
    merged = merge([kohya, other], base=a, onto=a, via=pi, output=tmp_path / "merged.safetensors")
    now = load_file(tmp_path / "merged.safetensors")
    assert merged.metadata()["rank"] == 2 * RANK
    assert {key: one.dtype for key, one in now.items()} == {k: v.dtype for k, v in load_file(kohya).items()}
    for stem in map(naming.stem, FLUX):
        assert float(now[stem + ".alpha"]) == 2 * RANK, "a scale of 1"
        both = sum(
            float(one[stem + ".alpha"]) / RANK * one[stem + naming.up] @ one[stem + naming.down]
            for one in map(load_file, (kohya, other))
        )
        assert torch.allclose(now[stem + naming.up] @ now[stem + naming.down], both, atol=1e-6)


def test_loras_of_several_formats_are_not_mixed(kohya, made, aligned, tmp_path):
    a = made("flux")
    other = write_lora(tmp_path / "other.safetensors", FORMATS["diffusers"], a, "flux")
    with pytest.raises(AdapterError, match="several formats cannot become one"):
        merge([kohya, other], base=a, onto=a, via=aligned(a, a, method="naive"))
    whole = merge([kohya, other], base=a, onto=a, via=aligned(a, a, method="naive"), full=True)
    changed = [*changes_of(kohya, FORMATS["kohya"], a, "flux")]
    changed += changes_of(other, FORMATS["diffusers"], a, "flux")
    assert largest_difference(outputs_with(whole.save(tmp_path / "whole")), outputs_with(a, changed)) < 1e-4


# ── repeating ────────────────────────────────────────────────────────────────────────────────


def test_a_moved_file_says_how_to_repeat_it(kohya, shuffled, aligned, tmp_path, monkeypatch):
    a, b = shuffled("flux")
    moved = tmp_path / "moved.safetensors"
    aligned(a, b).save(tmp_path / "pi.safetensors")
    transport(kohya, base=a, onto=b, via=tmp_path / "pi.safetensors", output=moved)
    text = header_of(moved)["transfusion.json"]
    assert str(tmp_path) not in text, "no path of this machine is passed on"
    again = tmp_path / "again.safetensors"
    places = {"finetuned": kohya, "base": a, "onto": b, "via": tmp_path / "pi.safetensors"}
    transport(repeat=moved, **places, output=again)
    was, now = load_file(moved), load_file(again)
    assert all(torch.equal(was[key], now[key]) for key in was)
    with pytest.raises(CheckpointError, match="does not say how it was made"):
        transport(repeat=kohya, **places)


def test_a_lora_that_was_moved_knows_its_new_base(kohya, shuffled, aligned, tmp_path):
    a, b = shuffled("flux")
    transport(kohya, base=a, onto=b, via=aligned(a, b), output=tmp_path / "moved.safetensors")
    with pytest.raises(MismatchError, match="was moved onto"):
        transport(tmp_path / "moved.safetensors", base=a, onto=b, via=aligned(a, b))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────

QKV = "lora_unet_double_blocks_0_img_attn_qkv"


def without(key: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: one for name, one in tensors.items() if name != key}


def odd(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


REFUSED = {
    "no up": (without(f"{QKV}.lora_up.weight"), "has lora_A without lora_B"),
    "no down": (without(f"{QKV}.lora_down.weight"), "has lora_B without lora_A"),
    "another rank": (odd(f"{QKV}.lora_up.weight", torch.ones(90, 5)), "has rank 3 in lora_A and 5 in lora_B"),
    "NaN": (odd(f"{QKV}.lora_up.weight", torch.full((90, 3), torch.nan)), "NaN or infinite values"),
    "a wrong shape": (odd(f"{QKV}.lora_up.weight", torch.ones(91, 3)), r"has shape \(91, 3\), and on this"),
    "a scalar": (odd(f"{QKV}.lora_up.weight", torch.tensor(1.0)), "cannot have on a weight"),
    "an alpha of two": (odd(f"{QKV}.alpha", torch.ones(2)), "alpha is one number"),
    "an infinite alpha": (odd(f"{QKV}.alpha", torch.tensor(torch.inf)), "NaN or infinite values"),
    "an alpha alone": (odd("lora_unet_img_in.alpha", torch.tensor(1.0)), "alpha without factors"),
    "an unknown ending": (odd(f"{QKV}.emb", torch.ones(2)), "that no format of a LoRA has: .*emb"),
    "an unknown module": (
        lambda t: t.update({"lora_unet_x.lora_up.weight": torch.ones(2, 2)}),
        "1 of 8 modules are not in .*, a flux: lora_unet_x",
    ),
    "two names of one part": (odd(f"{QKV}.lora_A.weight", torch.ones(3, 30)), "are the same part of"),
    "an empty factor": (odd(f"{QKV}.lora_up.weight", torch.ones(90, 0)), "is empty"),
    "another type": (odd(f"{QKV}.lora_up.weight", torch.ones(90, 3, dtype=torch.int8)), "stored as int8"),
    "LoKr alone": (odd("lora_unet_img_in.lokr_w1", torch.ones(2, 2)), "img_in has the parts w1 of a LoKr"),
    "a core": (odd(f"{QKV}.lokr_t2", torch.ones(2, 2)), "of kind LoKr, .* Tucker"),
    "Tucker": (odd(f"{QKV}.lora_mid.weight", torch.ones(2, 2)), "of kind LoCon, .* Tucker"),
    "OFT": (odd(f"{QKV}.oft_blocks", torch.ones(2, 2)), "of kind OFT, .* neighbouring units"),
    "XLabs": (
        odd("double_blocks.0.processor.qkv_lora1.down.weight", torch.ones(2, 2)),
        "XLabs' names of attention processors",
    ),
    "GLoRA": (odd(f"{QKV}.a1.weight", torch.ones(2, 2)), "of kind GLoRA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(case, kohya, made, aligned, tmp_path):
    change, message = REFUSED[case]
    a = made("flux")
    with pytest.raises((AdapterError, CheckpointError), match=message) as caught:
        transport(rewritten(kohya, change), base=a, onto=a, via=aligned(a, a, method="naive")).state_dict()
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_lora_for_another_model_is_named(kohya, made, aligned, tmp_path):
    wan = made("wan")
    with pytest.raises(AdapterError, match="7 of 7 modules are not in .*, a wan") as caught:
        transport(kohya, base=wan, onto=wan, via=aligned(wan, wan, method="naive")).state_dict()
    assert "those of flux" in str(caught.value.hint)


def test_a_base_that_the_header_contradicts_is_noted(made, aligned, tmp_path, cli):
    a = made("flux")
    header = {"ss_base_model_version": "sdxl_base_v1-0"}
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux", header)
    aligned(a, a, method="naive").save(tmp_path / "pi.safetensors")
    code, _, told = cli(
        *("transport", lora, "--base", a, "--onto", a, "--via", tmp_path / "pi.safetensors"),
        *("-o", tmp_path / "moved.safetensors"),
    )
    assert code == 0
    assert "trained on sdxl_base_v1-0 (ss_base_model_version)" in " ".join(told.split())


# ── inspect ──────────────────────────────────────────────────────────────────────────────────


def test_inspect_tells_what_a_lora_is_for(made, tmp_path, cli):
    header = {
        "ss_base_model_version": "flux1",
        "ss_tag_frequency": json.dumps({"10_cat": {"a cat": 5, "grass": 2}, "1_dog": {"grass": 4}}),
        "modelspec.trigger_phrase": "ohwx\x1b[2J cat",
    }
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], made("flux"), "flux", header)
    code, told, _ = cli("inspect", lora, "--json")
    about = json.loads(told)
    assert code == 0
    assert (about["format"], about["kinds"], about["fits"]) == ("kohya", ["LoRA"], ["flux"])
    assert about["trained_on"] == {"ss_base_model_version": "flux1"}
    assert about["tags"] == ["grass", "a cat"]
    assert about["training"] == {"trigger": "ohwx[2J cat"}
    assert (about["ranks"], about["alphas"]) == ({"3": 7}, {"2": 7})
    assert about["blocks"] == {"double_blocks": [0, 1], "single_blocks": [0, 2]}
    assert about["modules"]["double_blocks_*_img_attn_qkv"] == 1
    code, told, _ = cli("inspect", lora)
    assert code == 0
    assert "fits" in told
    assert "flux1 (ss_base_model_version)" in told


def test_inspect_of_a_large_lora_is_short(tmp_path, cli):
    """Stable Diffusion XL has 560 modules in its transformer blocks, and 11 kinds of them."""
    places = [*((f"input_blocks_{n}_1", 2) for n in (4, 5)), *((f"input_blocks_{n}_1", 10) for n in (7, 8))]
    places += [("middle_block_1", 10), *((f"output_blocks_{n}_1", 10) for n in range(3))]
    places += [(f"output_blocks_{n}_1", 2) for n in (3, 4, 5)]
    inner = [f"attn{n}_to_{one}" for n in (1, 2) for one in ("q", "k", "v", "out_0")]
    inner += ["ff_net_0_proj", "ff_net_2"]
    names = [
        f"{p}_transformer_blocks_{n}_{one}" for p, depth in places for n in range(depth) for one in inner
    ]
    names += [f"{place}_proj_in" for place, _ in places]
    tensors = {f"lora_unet_{name}.lora_down.weight": torch.ones(1, 2) for name in names}
    tensors |= {f"lora_unet_{name}.lora_up.weight": torch.ones(2, 1) for name in names}
    save_file(tensors, tmp_path / "lora.safetensors")
    about = json.loads(cli("inspect", tmp_path / "lora.safetensors", "--json")[1])
    assert about["kinds_of_modules"] == {**dict.fromkeys(inner, 70), "proj_in": 11}
    assert sum(about["modules"].values()) == len(names)
    assert len(cli("inspect", tmp_path / "lora.safetensors")[1].splitlines()) < 30


TEXT_READER = "down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"


@pytest.mark.parametrize(("width", "name"), [(768, "1"), (1024, "2"), (2048, "XL")])
def test_inspect_tells_the_u_nets_apart(width, name, tmp_path, cli):
    tensors = {f"lora_unet_{TEXT_READER}.lora_down.weight": torch.ones(4, width)}
    tensors |= {f"lora_unet_{TEXT_READER}.lora_up.weight": torch.ones(320, 4)}
    save_file(tensors, tmp_path / "lora.safetensors")
    about = json.loads(cli("inspect", tmp_path / "lora.safetensors", "--json")[1])
    assert about["fits"] == [f"Stable Diffusion {name}"]


@pytest.mark.parametrize("format", often([*FORMATS], ["ComfyUI", "diffusers"]))
def test_the_family_is_recognised_in_every_format(format, made, tmp_path):
    from transfusion.report.inspect import inspect

    for model in MODULES:
        lora = write_lora(tmp_path / f"{model}.safetensors", FORMATS[format], made(model), model)
        assert SMALL[model].family in inspect(lora)["fits"]
        assert inspect(lora)["refused"] is None
    flux = tmp_path / "flux.safetensors"  # no module in it is of one of them alone
    assert inspect(flux)["fits"] == (["flux", "flux2"] if FORMATS[format].authors else ["flux", "chroma"])
    save_file(load_file(flux), flux, {"ss_base_model_version": "flux1"})
    assert inspect(flux)["fits"] == ["flux"]


# ── the header of diffusers ──────────────────────────────────────────────────────────────────

ODD_CONFIGURATIONS = {
    "{": "not readable as JSON",
    "[]": "a JSON object was expected",
    '{"transformer.lora_alpha": "x"}': "lora_adapter_metadata in its header",
    '{"transformer.use_dora": true}': "says that it is a DoRA",
    '{"transformer.init_lora_weights": "pissa"}': "initialised by 'pissa'",
    '{"transformer.layer_replication": [[0, 2]]}': "unknown settings: layer_replication",
}


@pytest.mark.parametrize("text", ODD_CONFIGURATIONS)
def test_a_configuration_in_the_header_is_checked(text, made, aligned, tmp_path):
    a, header = made("flux"), {"lora_adapter_metadata": text}
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["diffusers"], a, "flux", header)
    with pytest.raises((AdapterError, CheckpointError), match=ODD_CONFIGURATIONS[text]):
        transport(lora, base=a, onto=a, via=aligned(a, a, method="naive"))


def test_a_lora_on_a_convolution_moves(shuffled, aligned, tmp_path):
    """As LoCon has them: the first factor is a convolution, the second one of single pixels."""
    a, b = shuffled("unet")
    names = ["down_blocks.0.resnets.0.conv1.weight", "mid_block.attentions.0.proj_in.weight"]
    weights, tensors = weights_of(a), dict[str, Tensor]()
    stems = {name: f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}" for name in names}
    for name, stem in stems.items():
        rows, *inputs = weights[name].shape
        tensors[f"{stem}.lora_down.weight"] = drawn(RANK, *inputs, seed=rows)
        tensors[f"{stem}.lora_up.weight"] = drawn(rows, RANK, 1, 1, seed=rows + 1)
    lora, moved = tmp_path / "lora.safetensors", tmp_path / "moved.safetensors"
    save_file(tensors, lora)
    transport(lora, base=a, onto=b, via=aligned(a, b), output=moved)

    def changed(file: Path, folder: Path) -> dict[str, Tensor]:
        found = load_file(file)
        changes = []
        for name, stem in stems.items():
            up, down = (found[f"{stem}.lora_{one}.weight"].double() for one in ("up", "down"))
            changes.append((name, (up.flatten(1) @ down.flatten(1)).reshape(weights[name].shape)))
        return outputs_with(folder, changes)

    wanted = changed(lora, a)
    assert largest_difference(wanted, changed(moved, b)) < 1e-6
    assert largest_difference(wanted, changed(lora, b)) > 1e-3
    merged = transport(lora, base=a, onto=b, via=aligned(a, b), full=True).save(tmp_path / "merged")
    assert largest_difference(wanted, outputs_with(merged)) < 1e-4


def test_a_name_that_may_be_two_modules_is_refused(kohya, made, aligned, monkeypatch):
    from transfusion.transport.adapters.places import Place, Places

    a, known = made("flux"), {}
    for name in ("double_blocks.0.img.attn_qkv", "double_blocks.0.img_attn.qkv"):
        known[name] = (Place(f"{name}.weight"),)
    monkeypatch.setattr(Places, "_known", known)
    with pytest.raises(AdapterError, match=r"img_attn_qkv may be double_blocks.0.img.attn_qkv, double_bl"):
        transport(kohya, base=a, onto=a, via=aligned(a, a, method="naive")).state_dict()


def test_a_model_that_holds_a_lora_is_no_lora():
    from transfusion.files.lora_keys import is_lora

    factors = [f"blocks.{i}.q.lora_{one}.weight" for i in range(3) for one in "AB"]
    assert is_lora(factors)
    assert not is_lora([*factors, *(f"blocks.{i}.{one}.weight" for i in range(3) for one in "qkvo")])
