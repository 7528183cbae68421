"""Files in the names of a model's authors: read, moved and written without conversion."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases.diffusion import (
    ANIMATE,
    CHROMA,
    FLUX,
    FLUX2,
    HUNYUAN15,
    KREA2,
    LTX2,
    QWEN21,
    SD3,
    UNET,
    WAN,
    XL,
    Z_IMAGE,
    case,
)
from small_models import CASES, finetuned, often
from transfusion.architecture.naming import OriginalNames, depth, split_rows, without_part
from transfusion.errors import ArchitectureError
from transfusion.families import all_families, functions, unet
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport

SIXTEEN = {"attention_head_dim": 16, "axes_dims_rope": [4, 6, 6]}
HEADS = {"attention_head_dim": 128, "num_attention_heads": 2, "num_layers": 2}
Z_IMAGE_ORIGINAL = {
    **Z_IMAGE,
    **{"dim": 96, "n_heads": 3, "axes_dims": [8, 12, 12], "siglip_feat_dim": 9},
}
UNET_ORIGINAL = {
    "block_out_channels": [32, 64, 32, 32],
    "layers_per_block": 2,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
    "cross_attention_dim": 768,
    "norm_num_groups": 32,
    "attention_head_dim": 8,
}
ORIGINAL = {
    one.family: one
    for one in (
        case(
            "flux-original", "flux", "FluxTransformer2DModel", {**FLUX, **HEADS}, axes_dims_rope=[16, 56, 56]
        ),
        case(
            "chroma-original",
            "chroma",
            "ChromaTransformer2DModel",
            {**CHROMA, **HEADS},
            axes_dims_rope=[16, 56, 56],
        ),
        case("flux2-original", "flux2", "Flux2Transformer2DModel", FLUX2),
        case("krea2-original", "krea2", "Krea2Transformer2DModel", {**KREA2, **SIXTEEN}),
        case(
            "qwen21-original",
            "qwen_image21",
            "QwenImage21Transformer2DModel",
            {**QWEN21, "attention_head_dim": 32, "axes_dims_rope": [4, 14, 14]},
        ),
        case(
            "vace-original",
            "wan_vace",
            "WanVACETransformer3DModel",
            {**WAN, **HEADS},
            vace_layers=[0],
            vace_in_channels=6,
        ),
        case(
            "animate-original",
            "wan_animate",
            "WanAnimateTransformer3DModel",
            {**ANIMATE, **HEADS},
            image_dim=9,
            added_kv_proj_dim=256,
        ),
        case(
            "hunyuan15-original",
            "hunyuan_video15",
            "HunyuanVideo15Transformer3DModel",
            {**HUNYUAN15, "attention_head_dim": 32, "rope_axes_dim": [4, 14, 14]},
        ),
        case("ltx2-original", "ltx2", "LTX2VideoTransformer3DModel", LTX2),
        case("wan-original", "wan", "WanTransformer3DModel", {**WAN, **HEADS}),
        case(
            "sd3-original", "sd3", "SD3Transformer2DModel", SD3, qk_norm="rms_norm", dual_attention_layers=[0]
        ),
        case("unet-original", "unet", "UNet2DConditionModel", {**UNET, **UNET_ORIGINAL}),
        case("z-image-original", "z_image", "ZImageTransformer2DModel", Z_IMAGE_ORIGINAL),
    )
}
"""A model of every family whose authors have names of their own, with heads of the published size."""
CONVERTERS = {
    "wan": "convert_wan_transformer_to_diffusers",
    "sd3": "convert_sd3_transformer_checkpoint_to_diffusers",
    "z_image": "convert_z_image_transformer_checkpoint_to_diffusers",
}
"""The library's own converters, where these take any size."""
FAST = ["flux"]


def in_original_names(folder: Path, file: Path, prefix: str = "") -> Path:
    """Write a model of diffusers under the names of its authors: the first ones, if there are several."""
    model = Model.open(folder)
    left = load_file(next(folder.glob("*.safetensors")))
    last = str(depth(left, "transformer_blocks.{}.") - 1)
    stored, named = {prefix + name: one for name, one in left.items()}, set[str]()
    for pattern, module in OriginalNames(model.family).modules.items():
        for block in range(8):
            for ending in ("", ".weight", ".bias"):
                parts = [_numbered(part, block, last) + ending for part in module.parts]
                if "{last}" not in pattern and named & set(parts):
                    continue
                if all(_whole(part) in left for part in parts) and _numbered_so(pattern, parts[0], left):
                    named.update(parts)
                    for part in parts:
                        stored.pop(prefix + _whole(part), None)
                    name = prefix + _numbered(pattern, block, last) + ending
                    stored[name] = torch.cat([_part(left, part) for part in parts])
    save_file(stored, file)
    if model.family.from_shapes is None:  # the shapes leave something open
        shutil.copy(folder / "config.json", file.parent)
    return file


def _numbered_so(pattern: str, ours: str, left: dict[str, Tensor]) -> bool:
    """Whether the convolution that ends a block of a UNet has the number 2, after an attention, or 1."""
    attends = ours.partition(".upsamplers")[0] + ".attentions.0.norm.weight" in left
    return "upsamplers" not in ours or pattern.endswith("2.conv" if attends else "1.conv")


def _whole(name: str) -> str:
    """The tensor that holds a part, or a member of a stack."""
    return re.sub(r"#\d+", "", without_part(name)[0])


def _numbered(text: str, block: int, last: str) -> str:
    return text.replace("{}", str(block)).replace("{last}", last)


def _part(tensors: dict[str, Tensor], name: str) -> Tensor:
    if member := re.fullmatch(r"(.+)#(\d+)", name):
        return tensors[member[1]][int(member[2])]
    whole, part = without_part(name)
    return tensors[whole] if part is None else tensors[whole].chunk(2)[part]


def test_every_list_of_names_is_tested():
    assert {family.name for family in all_families() if family.original} == set(ORIGINAL)


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """As if models of these small sizes had been published: their heads are then known."""
    monkeypatch.setitem(functions.PUBLISHED["wan"], 256, 2)
    monkeypatch.setitem(unet.HEADS, (32, 64, 32, 32, 768), 8)
    monkeypatch.setitem(unet.HEADS, (64, 128, 128, 64), [1, 2, 2])


def test_a_configuration_tells_the_heads_of_a_file_in_original_names(made, tmp_path, monkeypatch):
    monkeypatch.delitem(functions.PUBLISHED["wan"], 256)
    folder = made(ORIGINAL["wan"])
    file = in_original_names(folder, tmp_path / "one.safetensors")
    with pytest.raises(ArchitectureError, match="heads, at width 256, does not follow from the shapes"):
        Model.open(file)
    told, known = Model.open(file, config=folder / "config.json"), Model.open(folder)
    assert told.architecture.digest() == known.architecture.digest()


@pytest.mark.parametrize("family", often(ORIGINAL, FAST))
def test_a_file_in_original_names_is_the_same_model(family: str, made, tmp_path):
    folder = made(ORIGINAL[family])
    file = in_original_names(folder, tmp_path / "one.safetensors", "model.diffusion_model.")
    theirs, ours = Model.open(file), Model.open(folder)
    assert set(theirs.names) == set(ours.names)
    for name in ours.names:
        assert torch.equal(theirs.read(name), ours.read(name)), name
    assert theirs.architecture.digest() == ours.architecture.digest()
    one, other = LiveModel.of(theirs), LiveModel.of(ours)
    assert largest_difference(one.outputs(), other.outputs()) == 0


@pytest.mark.parametrize("family", often(ORIGINAL, FAST))
def test_a_fine_tune_moves_between_the_two_kinds_of_names(family: str, made, tmp_path):
    case = ORIGINAL[family]
    folders = made(case), made(case, seed=2), finetuned(case, made(case), tmp_path / "tuned")
    files = [
        in_original_names(folder, tmp_path / f"{number}.safetensors") for number, folder in enumerate(folders)
    ]
    pi = align(folders[0], folders[1], method="random", advice=False)
    expected = transport(folders[2], base=folders[0], onto=folders[1], via=pi).state_dict()
    into_ours = transport(files[2], base=files[0], onto=folders[1], via=pi).state_dict()
    assert all(torch.equal(into_ours[name], expected[name]) for name in expected)
    moved = transport(folders[2], base=folders[0], onto=files[1], via=pi).save(tmp_path / "out.safetensors")
    written, before = load_file(moved), load_file(files[1])
    assert {name: one.shape for name, one in written.items()} == {
        name: one.shape for name, one in before.items()
    }
    back = Model.open(moved)
    assert all(torch.equal(back.read(name), expected[name]) for name in expected)


XL_ORIGINAL = {
    **UNET_ORIGINAL,
    **XL,
    "block_out_channels": [64, 128, 128],
    "cross_attention_dim": 64,
    "attention_head_dim": [1, 2, 2],
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 6 * 256 + 10,
}


WHOLE = {
    "1.5": ORIGINAL["unet"],
    "xl": case("unet-xl-original", "unet", "UNet2DConditionModel", {**UNET, **XL_ORIGINAL}),
}


@pytest.mark.parametrize("version", often(WHOLE, ["1.5"]))
def test_a_whole_file_of_stable_diffusion_is_read_and_written(version: str, made, tmp_path):
    """With its VAE and its text encoder, which stay; the library's converter finds the same UNet in it."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    folder = made(WHOLE[version])
    file = in_original_names(folder, tmp_path / "one.safetensors", "model.diffusion_model.")
    others = {
        "first_stage_model.conv.weight": torch.ones(3, 2),
        "alphas": torch.tensor(7),
        "model_ema.n": torch.ones(1),
    }
    save_file({**load_file(file), **others}, file)
    theirs, ours = Model.open(file), Model.open(folder)
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.architecture.digest() == ours.architecture.digest()
    converted = convert_ldm_unet_checkpoint(load_file(file), ours.config)
    assert set(converted) == set(ours.names)
    assert all(torch.equal(converted[name], ours.read(name)) for name in converted)
    pi = align(file, file, method="random", residual="tied", advice=False)
    moved = apply(pi, file)
    written = load_file(moved.save(tmp_path / "out.safetensors"))
    assert {name: one.shape for name, one in written.items()} == {
        name: one.shape for name, one in load_file(file).items()
    }
    assert all(torch.equal(written[name], one) for name, one in others.items())
    assert all(torch.equal(written[name], one) for name, one in moved.state_dict().items())


@pytest.mark.parametrize("family", CONVERTERS)
def test_the_library_translates_the_names_in_the_same_way(family: str, made, tmp_path):
    from diffusers.loaders import single_file_utils

    folder = made(ORIGINAL[family])
    stored = load_file(in_original_names(folder, tmp_path / "one.safetensors"))
    theirs = getattr(single_file_utils, CONVERTERS[family])(dict(stored))
    ours = load_file(next(folder.glob("*.safetensors")))
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_the_library_translates_the_names_of_flux_in_the_same_way():
    """Its converter takes the published width only, so the tensors here have few columns, or are views."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    names, width = OriginalNames(next(f for f in all_families() if f.name == "flux")), 3072
    stored: dict[str, Tensor] = {}
    first = list({module.parts: pattern for pattern, module in reversed(names.modules.items())}.values())
    for pattern in first:  # and not those of another program
        for ending in ("",) if pattern.endswith("scale") else (".weight", ".bias"):
            rows, columns = (7 * width, width) if "linear1" in pattern else (12, 1)
            values = torch.arange(rows, dtype=torch.int16) + 50 * len(stored)
            one = values.unsqueeze(1).expand(rows, columns) if ending == ".weight" else values
            stored[pattern.replace("{}", "0") + ending] = one
    shapes = {name: tuple(one.shape) for name, one in stored.items()}
    theirs = convert_flux_transformer_checkpoint_to_diffusers(dict(stored))
    known = 0
    for name, one in stored.items():
        for ours, rows in split_rows(names, name, shapes) or ():
            whole, part = without_part(ours)
            found = theirs[whole] if part is None else theirs[whole].chunk(2)[part]
            assert torch.equal(found, one if rows is None else one[rows]), ours
            known += 1
    assert known == len(theirs) + 2, "every tensor, and two halves of two"


def test_a_tensor_under_two_names_is_refused(made, tmp_path):
    file = in_original_names(made(ORIGINAL["flux"]), tmp_path / "one.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "model.diffusion_model.img_in.bias": tensors["img_in.bias"].clone()}, file)
    with pytest.raises(ArchitectureError, match="are two names of one tensor"):
        Model.open(file)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("single_blocks.0.linear1.weight", (30, 256)),
        ("double_blocks.0.img_attn.qkv.weight", (31, 256)),
        ("double_blocks.0.img_attn.qkv.weight", (0, 256)),
        ("double_blocks.0.txt_attn.qkv.bias", ()),
    ],
)
def test_a_tensor_that_cannot_be_divided_is_refused(name, shape, made, tmp_path):
    file = in_original_names(made(ORIGINAL["flux"]), tmp_path / "one.safetensors")
    save_file({**load_file(file), name: torch.zeros(shape)}, file)
    rows = shape[0] if shape else 0
    with pytest.raises(ArchitectureError, match=f"{name} has {rows} rows, which cannot be divided among"):
        Model.open(file)


def test_a_norm_without_units_is_refused(made, tmp_path):
    file = in_original_names(made(ORIGINAL["flux"]), tmp_path / "one.safetensors")
    norm = "double_blocks.0.img_attn.norm.query_norm.scale"
    save_file({**load_file(file), norm: torch.zeros(0)}, file)
    with pytest.raises(ArchitectureError, match="do not have the names and shapes of a flux"):
        Model.open(file)


def test_deepseek_v4_is_read_in_its_authors_names(tmp_path):
    """Which transformers keeps in part when it writes."""
    folder = CASES["deepseek_v4"].save(tmp_path / "model", 1)
    ours = Model.open(folder)
    wanted = LiveModel.of(ours).outputs()
    stored = load_file(folder / "model.safetensors")
    theirs = {
        name.removeprefix("model.")
        .replace("embed_tokens.", "embed.")
        .replace("hc_head.hc_", "hc_head_")
        .replace("attn.norm.", "attn.kv_norm."): tensor
        for name, tensor in stored.items()
    }
    assert {"embed.weight", "head.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} <= theirs.keys()
    save_file(theirs, folder / "model.safetensors", {"format": "pt"})
    model = Model.open(folder)
    assert model.architecture.tensors == ours.architecture.tensors
    assert largest_difference(wanted, LiveModel.of(model).outputs()) == 0
