"""A QLoRA's base: weights in four bits, as bitsandbytes stores them, read without it."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from transfusion.errors import CheckpointError, MismatchError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.quantised import FourBits
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.runtime.progress import Progress
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]  # fmt: skip
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]  # fmt: skip
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def four_bits(weight: torch.Tensor, *, nested: bool, block: int = 64) -> dict[str, torch.Tensor]:
    """A weight as bitsandbytes stores it, by the ends of its keys; the nearest of the values, block by block."""
    flat = weight.flatten().float()
    blocks = [flat[start : start + block] for start in range(0, len(flat), block)]
    scales = torch.stack([one.abs().max() for one in blocks])
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    found = {"quant_map": torch.tensor(NF4), "absmax": scales}
    if nested:
        offset = float(scales.mean())
        found["nested_quant_map"] = torch.linspace(-1, 1, 256)
        found["nested_absmax"] = (scales - offset).abs().max()[None]
        places = ((scales - offset) / found["nested_absmax"] + 1) * 127.5
        found["absmax"] = places.round().to(torch.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    nearest = [
        (one[:, None] / top - torch.tensor(NF4)).abs().argmin(1)
        for one, top in zip(blocks, scales, strict=True)
    ]
    numbers = torch.cat(nearest).to(torch.uint8)
    found[""] = (numbers[::2] << 4 | numbers[1::2])[:, None]
    text = json.dumps(state).encode()
    found["quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return found


def quantised(folder: Path, onto: Path, *, nested: bool = True) -> Path:
    """A model whose linear layers in blocks are in four bits."""
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        parts = four_bits(value, nested=nested) if "_proj" in name else {"": value}
        found |= {f"{name}.{end}".rstrip("."): one.contiguous() for end, one in parts.items()}
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return written(onto, found, config)


def written(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(folder: Path, key: str, value: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, key: value}, folder / "model.safetensors", {"format": "pt"})


KEY = "model.layers.0.self_attn.q_proj.weight"


def test_four_bits_are_read_as_bitsandbytes_computes_them():
    """Bytes that bitsandbytes 0.50 made of two rows of 64 numbers, and a hash of what it makes of them."""
    packed = "0000111111222223333344444555555666666666677777777777777777777777"
    packed += "7777777777777777777777888888888999999aaaaabbbbccccdddddeeeeeffff"
    table = torch.zeros(256)
    table[0], table[255] = -0.992968738079071, 1.0
    state = {
        "dtype": "float32",
        "blocksize": 64,
        "shape": [2, 64],
        "nested_blocksize": 256,
        "nested_offset": 0.625,
    }
    stored = Checkpoint.of(
        {
            "w": torch.tensor(list(bytes.fromhex(packed)), dtype=torch.uint8)[:, None],
            "w.absmax": torch.tensor([255, 0], dtype=torch.uint8),
            "w.nested_absmax": torch.tensor([0.375]),
            "w.nested_quant_map": table,
            "w.quant_map": torch.tensor(NF4),
        }
    )
    found = FourBits("w", state, nested=True).read(stored)
    assert found.flatten()[[0, 63, 100, 127]].tolist() == [
        -1.0,
        0.0,
        0.04065687954425812,
        0.25263673067092896,
    ]
    digest = hashlib.sha256(found.contiguous().numpy().tobytes()).hexdigest()
    assert digest == "664ef5aff1365df46b74dc5d75945e3d3a4219f47d35faade0ec1cb48be2d4b2"


class Heard(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("nested", [False, True])
def test_an_adapter_of_a_quantised_base_moves_by_what_that_base_computes(nested, made, tmp_path):
    a = quantised(made("llama"), tmp_path / "a", nested=nested)
    opened = Model.open(a)
    assert opened.is_quantised
    own = Model.open(made("llama")).read(KEY.removeprefix("model."))
    there = opened.read(KEY.removeprefix("model."))
    assert 0 < (there - own).abs().max() <= 0.16 * own.abs().max(), "half the widest step of the table"
    held = {name: opened.checkpoint.read(name).contiguous() for name in opened.checkpoint.tensors}
    config = json.loads((made("llama") / "config.json").read_text())
    plain = written(tmp_path / "plain", held, config)
    lora = peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    module = transformers.LlamaForCausalLM.from_pretrained(plain)
    peft.get_peft_model(module, lora).save_pretrained(tmp_path / "lora")
    heard = Heard()
    b = apply(align(plain, plain, method="random", residual="tied", seed=1), plain).save(tmp_path / "b")
    move = partial(transport, tmp_path / "lora", onto=b, method="guarded", residual="tied", progress=heard)
    by_four, by_plain, by_original = (move(base=one).state_dict() for one in (a, plain, made("llama")))
    assert heard.notes[0] == f"note: {a}: four bits, read as the numbers that it computes with"
    magnitude = next(key for key in by_four if "magnitude" in key)
    assert all(torch.equal(value, by_plain[key]) for key, value in by_four.items())
    assert not torch.equal(by_four[magnitude], by_original[magnitude]), "that base has other norms"


def test_a_quantised_base_is_written_as_the_numbers_that_it_computes_with(made, tmp_path):
    a = quantised(made("llama"), tmp_path / "a")
    b = apply(align(a, a, method="random", residual="tied", seed=1), a).save(tmp_path / "b")
    assert "quantization_config" not in json.loads((b / "config.json").read_text())
    ids = {"input_ids": torch.arange(12)[None]}
    outputs = [LiveModel.of(Model.open(one)).module(**ids).logits for one in (a, b)]
    assert torch.allclose(*outputs, atol=1e-6)


def test_a_quantised_fine_tune_is_refused(made, tmp_path):
    a = made("llama")
    with pytest.raises(MismatchError, match="is quantised: what it learned cannot be told"):
        transport(quantised(a, tmp_path / "tuned"), base=a, onto=a)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("absmax", torch.zeros(3, dtype=torch.uint8), r"absmax has 3 numbers instead of \d+"),
        ("quant_map", torch.zeros(15), "quant_map has 15 numbers instead of 16"),
        ("nested_quant_map", torch.zeros(2), "nested_quant_map has 2 numbers instead of 256"),
        ("quant_state.bitsandbytes__nf4", torch.zeros(5, dtype=torch.uint8), "not readable as JSON"),
        (
            "quant_state.bitsandbytes__nf4",
            torch.tensor(list(b"{}"), dtype=torch.uint8),
            "nf4: quant_type: field",
        ),
        ("quant_state.bitsandbytes__nf4", torch.zeros(5000, dtype=torch.uint8), "has 5000 bytes"),
    ],
)
def test_parts_that_do_not_fit_are_refused(key, value, why, made, tmp_path):
    folder = quantised(made("llama"), tmp_path / "model")
    changed(folder, f"{KEY}.{key}", value)
    with pytest.raises(CheckpointError, match=why):
        Model.open(folder)
