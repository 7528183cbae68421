"""A QLoRA's base: quantised weights, as bitsandbytes and GPTQ store them, read without their libraries."""

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
from transfusion.files.gptq import gptq_weights
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


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of whole numbers, side by side in words of 32 bits along the last dimension, as GPTQ packs them."""
    per, (rows, count) = 32 // bits, numbers.shape
    filled = torch.zeros(rows, -(-count // per) * per, dtype=torch.int64)
    filled[:, :count] = numbers
    found = (filled.reshape(rows, -1, per) << torch.arange(0, 32, bits)).sum(2)
    return torch.where(found < 2**31, found, found - 2**32).to(torch.int32)


def gptq(
    codes: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    bits: int,
    *,
    old: bool,
) -> dict[str, torch.Tensor]:
    """Numbers (outputs, inputs) with a zero and a scale for every output and group, as GPTQ stores them."""
    packed = words(zeros.T, bits)
    if old:  # a word at a time
        packed = packed - (2**32 - 1) // (2**bits - 1)
    return {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": packed,
        "scales": scales.T.half().contiguous(),
        "g_idx": groups.int(),
    }


def by_gptq(weight: torch.Tensor, *, old: bool, bits: int = 4) -> dict[str, torch.Tensor]:
    """A weight in groups of six inputs, which are not neighbours."""
    groups = 5 * torch.arange(weight.shape[1]) % 6
    by_group = [weight[:, groups == one].float() for one in range(6)]
    low = torch.stack([one.amin(1) for one in by_group], 1).clamp(max=0)
    scales = ((torch.stack([one.amax(1) for one in by_group], 1) - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    return gptq(codes.long(), zeros.long(), scales, groups, bits, old=old)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 6, "desc_act": True, "sym": False}
KINDS = {
    "bitsandbytes": (partial(four_bits, nested=False), {"quant_method": "bitsandbytes"}),
    "bitsandbytes, nested": (partial(four_bits, nested=True), {"quant_method": "bitsandbytes"}),
    "GPTQ": (partial(by_gptq, old=True), GPTQ),
    "GPTQ, newer": (partial(by_gptq, old=False), {**GPTQ, "checkpoint_format": "gptq_v2"}),
}
"""How the linear layers in blocks are stored, and what the configuration says."""


def quantised(folder: Path, onto: Path, kind: str = "bitsandbytes, nested") -> Path:
    """A model whose linear layers in blocks are quantised."""
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    found: dict[str, torch.Tensor] = {}
    store, config["quantization_config"] = KINDS[kind]
    for name, value in tensors.items():
        parts = store(value) if "_proj" in name else {"": value}
        place = name.removesuffix("weight").rstrip(".") if "g_idx" in parts else name
        found |= {f"{place}.{end}".rstrip("."): one.contiguous() for end, one in parts.items()}
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


BY_GPTQMODEL = {2: ("03660d5c", "7437b7ff"), 4: ("d70422c5", "3aab4ff5"), 8: ("4987a0ba", "de8fabec")}
"""By number of bits: how the hashes of what gptqmodel 7.7 stores begin, in the older format and the newer."""
COMPUTED = {2: "d16b4f4e", 4: "f0a0cb24", 8: "f5de3a6f"}
"""And those of the weights that it computes with."""


def begin_of_hash(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in tensors)).hexdigest()[:8]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("bits", BY_GPTQMODEL)
def test_gptq_is_read_as_gptqmodel_computes_it(bits, old):
    i, j, k = torch.arange(64), torch.arange(32)[:, None], torch.arange(4)
    codes, zeros = (7 * i + 3 * j) % 2**bits, (5 * k + j) % 2**bits
    parts = gptq(codes, zeros, (1 + j % 4) / 64 + k / 1024, 5 * i % 64 // 16, bits, old=old)
    assert begin_of_hash(parts["qweight"], parts["qzeros"]) == BY_GPTQMODEL[bits][not old]
    stored = Checkpoint.of({f"m.{name}": one for name, one in parts.items()})
    (weight,) = gptq_weights(stored, {"checkpoint_format": "gptq" if old else "gptq_v2"}).values()
    assert begin_of_hash(weight.read(stored)) == COMPUTED[bits]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_a_quantised_base_moves_by_what_that_base_computes(kind, made, tmp_path):
    a = quantised(made("llama"), tmp_path / "a", kind)
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
    assert heard.notes[0] == f"note: {a}: quantised, read as the numbers that it computes with"
    magnitude = next(key for key in by_four if "magnitude" in key)
    assert all(torch.equal(value, by_plain[key]) for key, value in by_four.items())
    assert not torch.equal(by_four[magnitude], by_original[magnitude]), "that base has other norms"


@pytest.mark.parametrize(("kind", "within"), [("bitsandbytes", 1e-6), ("GPTQ", 2e-2)])
def test_a_quantised_base_is_written_as_the_numbers_that_it_computes_with(kind, within, made, tmp_path):
    """Those of GPTQ are of 16 bits, to which the pairs that are rotated are rounded."""
    a = quantised(made("llama"), tmp_path / "a", kind)
    b = apply(align(a, a, method="random", residual="tied", seed=1), a).save(tmp_path / "b")
    assert "quantization_config" not in json.loads((b / "config.json").read_text())
    ids = {"input_ids": torch.arange(12)[None]}
    outputs = [LiveModel.of(Model.open(one)).module(**ids).logits for one in (a, b)]
    assert torch.allclose(*outputs, atol=within)


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


Q = KEY.removesuffix("weight")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("qzeros", None, "q_proj has no qzeros beside its qweight"),
        ("qzeros", torch.zeros(6, 1, dtype=torch.int32), "sizes that do not fit each other"),
        ("qweight", torch.zeros(7, 48, dtype=torch.int32), "numbers of other than 2, 4 or 8 bits"),
        ("qweight", torch.zeros(5, 48, dtype=torch.int16), "words of other than 32 bits"),
        ("scales", torch.zeros(6, 48, dtype=torch.int32), "does not have the tensors of a linear layer"),
        ("g_idx", torch.full((36,), 6, dtype=torch.int32), "groups that are not there"),
        ("g_idx", torch.full((36,), -1, dtype=torch.int32), "groups that are not there"),
    ],
)
def test_parts_of_gptq_that_do_not_fit_are_refused(key, value, why, made, tmp_path):
    folder = quantised(made("llama"), tmp_path / "model", "GPTQ")
    tensors = load_file(folder / "model.safetensors")
    assert (Q + key) in tensors
    if value is None:
        del tensors[Q + key]
    else:
        tensors[Q + key] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=why):
        Model.open(folder).read(KEY.removeprefix("model."))


def test_another_way_to_pack_gptq_is_refused(made, tmp_path):
    folder = quantised(made("llama"), tmp_path / "model", "GPTQ")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "marlin"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="GPTQ as 'marlin' packs it is not known"):
        Model.open(folder)
