"""Checkpoints: every way of storing a model, and every way in which that can be wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfusion.errors import CheckpointError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.references import resolve
from transfusion.model.model import Model
from transfusion.transport.adapters.adapter import Adapter


@pytest.fixture
def sharded(made, tmp_path) -> Path:
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(made("llama"))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A copy of a model's folder, to be damaged."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in made("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def same_content(first: Checkpoint, second: Checkpoint) -> bool:
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(first.read(name), second.read(name)) for name in first.tensors
    )


# ── ways of storing ──────────────────────────────────────────────────────────────────────────


def test_folder_file_shards_and_pickles_hold_the_same_model(made, sharded, tmp_path):
    whole = Checkpoint.open(made("llama"))
    assert whole.config_name == "config.json"
    state = load_file(made("llama") / "model.safetensors")
    torch.save(state, tmp_path / "weights.pt")
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "training.ckpt")
    torch.save({"dims": {"n_mels": 80}, "model_state_dict": state}, tmp_path / "whisper.pt")
    torch.save({"extra_state": {"epoch": 3}, "model": state}, tmp_path / "fairseq.pt")
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for reference in (
        sharded,
        made("llama") / "model.safetensors",
        tmp_path / "weights.pt",
        tmp_path / "whisper.pt",
        tmp_path / "fairseq.pt",
        tmp_path / "training.ckpt",
        tmp_path / "old.bin",
    ):
        assert same_content(whole, Checkpoint.open(reference)), reference


def test_opening_reads_no_weights(made, monkeypatch):
    def no_reading(*args: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "read", no_reading)
    model = Model.open(made("llama"))
    assert model.checkpoint.parameters > 1000


def test_wrappers_around_names_do_not_matter(made, tmp_path):
    state = load_file(made("llama") / "model.safetensors")
    save_file({f"module._orig_mod.{n}": v for n, v in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made("llama") / "config.json").read_text())
    assert Model.open(tmp_path).fingerprint == Model.open(made("llama")).fingerprint


def test_an_existing_path_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("reference", "repo", "revision"),
    [("org/name", "org/name", None), ("org/name@v2.1", "org/name", "v2.1"), ("gpt2", "gpt2", None)],
)
def test_a_hub_id_is_fetched_with_its_revision(reference, repo, revision, made, monkeypatch):
    calls = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        calls.append((repo_id, revision, tuple(allow_patterns)))
        return str(made("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert Checkpoint.open(reference).label == reference
    assert calls[0][:2] == (repo, revision)
    assert "*.safetensors" in calls[0][2]
    assert len(calls) == 1, "with safetensors there, no pickles are fetched"


def test_pickles_are_fetched_only_where_there_is_nothing_better(made, tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        calls.append(tuple(allow_patterns))
        if "*.bin" in allow_patterns:
            torch.save(load_file(made("llama") / "model.safetensors"), tmp_path / "pytorch_model.bin")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert Checkpoint.open("org/old").files[0].name == "pytorch_model.bin"
    assert len(calls) == 2


def test_a_hub_id_that_cannot_be_had_says_so():
    with pytest.raises(
        CheckpointError, match="org/none: no such file or folder here, and the hub could not"
    ) as caught:
        Checkpoint.open("org/none")
    assert "local path" in str(caught.value.hint)


def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(CheckpointError, match=r"\./models/none: no such file or folder"):
        Checkpoint.open("./models/none")


# ── what can be wrong ────────────────────────────────────────────────────────────────────────


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no weights in this folder"):
        Checkpoint.open(tmp_path)


def test_a_gguf_is_to_be_dequantised(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for reference in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError) as refused:
            Checkpoint.open(reference)
        assert "GgufConfig(dequantize=True)" in (refused.value.hint or "")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a kind of file that holds weights"):
        Checkpoint.open(tmp_path / "notes.txt")


def test_a_file_without_tensors(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensors in it"):
        Checkpoint.open(tmp_path)


def test_a_truncated_file(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: not a complete safetensors file"
    ) as caught:
        Checkpoint.open(copy)
    assert "truncated" in str(caught.value.hint)


def test_a_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name}: not a complete safetensors file"):
        Checkpoint.open(sharded)


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"names 1 shard\(s\) that do not exist: {shard.name}"):
        Checkpoint.open(sharded)


def test_an_index_that_names_an_absent_tensor(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.ghost"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"1 tensor\(s\) that their shard does not hold: model\.layers\.9\.ghost"
    ):
        Checkpoint.open(sharded)


def test_a_shard_with_more_than_the_index_names(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"1 tensor\(s\) that the index does not name: model\.norm\.weight"
    ):
        Checkpoint.open(sharded)


def test_a_pickle_with_numbers_for_names(tmp_path):
    torch.save({1: torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="a dictionary of tensors was expected"):
        Checkpoint.open(tmp_path / "model.pt")


def test_a_config_of_another_name_is_the_config(made, tmp_path):
    (tmp_path / "settings.json").write_text((made("llama") / "config.json").read_text())
    checkpoint = Checkpoint.open(made("llama") / "model.safetensors", config=tmp_path / "settings.json")
    assert checkpoint.config_name == "config.json"


def test_an_index_without_a_map(sharded):
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it has no weight_map"):
        Checkpoint.open(sharded)


def test_shards_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="shards without an index"):
        Checkpoint.open(sharded)


def test_several_candidates(tmp_path):
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"several files with weights \(one\.safetensors, two\.safetensors\)"
    ):
        Checkpoint.open(tmp_path)


def test_a_pickle_that_would_execute_code(tmp_path):
    class Malice:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Malice()}))
    torch.save({"weight": Malice()}, tmp_path / "zipped.pt")
    for name in ("pytorch_model.bin", "zipped.pt"):
        with pytest.raises(CheckpointError, match=f"{name}: this pickle holds more than tensors") as caught:
            Checkpoint.open(tmp_path / name)
        assert "safetensors" in str(caught.value.hint)
    assert not (tmp_path / "executed").exists()


def test_a_truncated_pickle(tmp_path):
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"model\.pt: not a complete checkpoint"):
        Checkpoint.open(tmp_path / "model.pt")


def test_a_pickle_of_something_else(tmp_path):
    torch.save({"weight": torch.zeros(1), "name": "x"}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="a dictionary of tensors was expected"):
        Checkpoint.open(tmp_path / "model.pt")


def test_a_config_that_is_no_json(copy):
    (copy / "config.json").write_text("{,}")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        Checkpoint.open(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(value, copy):
    state = load_file(copy / "model.safetensors")
    state["model.norm.weight"][3] = value
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight contains NaN or infinite values"):
        Model.open(copy).read("norm.weight")


def test_a_quantised_checkpoint_is_refused_by_its_method(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match=r"the checkpoint is quantised \(gptq\)"):
        Model.open(copy)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused_by_name(dtype, copy):
    state = load_file(copy / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].to(dtype)
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight \({name}\)"):
        Model.open(copy)


def test_scales_of_quantised_tensors_do_not_hide_that_they_are_quantised(copy):
    state = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state |= {name: state[name].to(torch.int8), f"{name}_scale": torch.tensor(0.1)}
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight \(int8\)"):
        Model.open(copy)


# ── nothing outside the folder ───────────────────────────────────────────────────────────────


def first_shard(sharded: Path, name: str) -> None:
    """Let the index name another file instead of the first shard."""
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = min(index["weight_map"].values())
    index["weight_map"] = {key: name if file == first else file for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))


def outside(sharded: Path) -> Path:
    """The first shard, moved out of the folder."""
    return shutil.move(min(sharded.glob("*.safetensors")), sharded.parent / "outside.safetensors")


@pytest.mark.parametrize("where", ["../outside.safetensors", "{}", "a/../../outside.safetensors"])
def test_an_index_that_leads_outside_the_folder_is_not_followed(where, sharded):
    first_shard(sharded, where.format(outside(sharded).resolve()))
    with pytest.raises(CheckpointError, match=r"leads outside .* and is not followed"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_that_leads_outside_the_folder_is_not_followed(name, copy, tmp_path):
    """Weights would be moved, and tokenizers copied beside the output."""
    (copy / "tokenizer.json").write_text("{}")
    target = shutil.move(copy / name, tmp_path / "elsewhere")
    (copy / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"{name}: the link leads outside"):
        Model.open(copy)


def test_an_adapter_with_a_link_that_leads_outside_is_refused(tmp_path):
    (tmp_path / "secret").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads outside"):
        Adapter.open(tmp_path / "adapter")


def test_the_links_of_a_hub_cache_are_followed(copy, tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(copy.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert Model.open(snapshot).family.name == "llama"
    shutil.copytree(snapshot, elsewhere := tmp_path / "models--org--other" / "snapshots" / "1", symlinks=True)
    for link in elsewhere.iterdir():
        target = snapshot.parent / "0123" / link.readlink()
        link.unlink()
        link.symlink_to(target)
    with pytest.raises(CheckpointError, match="leads outside"):  # other repositories may be private
        Model.open(elsewhere)


@pytest.mark.parametrize("name", ["model-00009.safetensors", "tokenizer.json"])
def test_a_pipe_in_the_folder_is_not_waited_for(name, sharded):
    os.mkfifo(sharded / name)
    if name.endswith(".safetensors"):
        first_shard(sharded, name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        Checkpoint.open(sharded)


def test_an_index_that_names_a_file_of_another_kind(sharded):
    first_shard(sharded, "config.json")
    with pytest.raises(
        CheckpointError, match="'config.json', which is not a kind of file that holds weights"
    ):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("value", [[], "text", {"x": 3}, {"x": None}, {"x": ["a.safetensors"]}, None])
def test_an_index_with_an_odd_map(value, sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint.open(sharded)


# ── tensors that stand in two shards ─────────────────────────────────────────────────────────


def copied(sharded: Path, change: float) -> tuple[str, Path, Path]:
    """A tensor of the first shard, copied into the last; gives its name and both files."""
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    name, tensor = next((name, one) for name, one in load_file(first).items() if one.ndim == 2)
    save_file({**load_file(last), name: tensor + change}, last, {"format": "pt"})
    return name, first, last


def test_of_two_equal_copies_the_one_that_the_index_names_is_read(sharded):
    name, first, _ = copied(sharded, 0)
    assert Checkpoint.open(sharded).tensors[name].file == first


def test_two_different_copies_are_refused_by_name(sharded):
    name, first, last = copied(sharded, 1e-3)
    with pytest.raises(CheckpointError, match=rf"{name} is in {first.name}, .* differs in {last.name}"):
        Checkpoint.open(sharded)


def test_a_copy_of_another_type_is_refused(sharded):
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: tensor.double()}, last, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is in {first.name}"):
        Checkpoint.open(sharded)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("span", [2**22, 0], ids=["by their span", "one by one"])
def test_rows_are_those_of_the_whole(span, tmp_path, monkeypatch):
    monkeypatch.setattr("transfusion.files.tensor_files.SPAN", span)
    tensors = {
        "a": torch.randn(7, 3, 2),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(3.0),
        "d": torch.ones(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    for name in "ab":
        for rows in (
            slice(1, 4),
            slice(2, 2),
            slice(3, 99),
            torch.tensor([4, 0, 4, 2]),
            torch.tensor([], dtype=torch.int64),
        ):
            assert torch.equal(checkpoint.read(name, rows), tensors[name][rows])


def test_a_file_that_shrinks_is_a_known_error(copy):
    """Through a mapping, it would be a signal that ends the program."""
    checkpoint = Checkpoint.open(copy)
    name = next(iter(checkpoint.tensors))
    checkpoint.read(name)
    os.truncate(copy / "model.safetensors", 4096)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read .* changed while it was being read"):
        checkpoint.read(name)


# ── adapters of other libraries ──────────────────────────────────────────────────────────────

KOHYA = [
    "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
    "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight",
    "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha",
]
DIFFUSERS = ["unet.down_blocks.0.attn1.to_q.lora_A.weight", "text_encoder.layers.0.fc1.lora_B.weight"]
OLDER_DIFFUSERS = ["unet.mid_block.attn1.processor.to_q_lora.down.weight"]


@pytest.mark.parametrize("names", [KOHYA, DIFFUSERS, OLDER_DIFFUSERS])
def test_a_lora_in_the_place_of_a_model_is_named_as_such(names, tmp_path):
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "style.safetensors")
    for place in (tmp_path, tmp_path / "style.safetensors"):
        with pytest.raises(CheckpointError, match="this is a LoRA, and not a model") as caught:
            Checkpoint.open(place)
        assert "FINETUNED" in str(caught.value.hint)


def test_a_renamed_file_of_peft_is_an_adapter(tmp_path):
    file = tmp_path / "mine.safetensors"
    save_file({"base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 2)}, file)
    with pytest.raises(CheckpointError, match="the weights of an adapter"):
        Checkpoint.open(file)
