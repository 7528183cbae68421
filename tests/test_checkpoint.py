"""Checkpoints: every way of storing a model, and every way in which that can be wrong."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfusion.checkpoint import Checkpoint
from transfusion.errors import CheckpointError
from transfusion.model import Model
from transfusion.references import resolve


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
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for reference in (
        sharded,
        made("llama") / "model.safetensors",
        tmp_path / "weights.pt",
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
    assert Model.open(tmp_path).digest == Model.open(made("llama")).digest


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


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a kind of file that holds weights"):
        Checkpoint.open(tmp_path / "notes.txt")


def test_a_file_without_tensors(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a single tensor"):
        Checkpoint.open(tmp_path)


def test_a_truncated_file(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file") as caught:
        Checkpoint.open(copy)
    assert "truncated" in str(caught.value.hint)


def test_a_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name}: not a whole safetensors file"):
        Checkpoint.open(sharded)


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"names 1 shard\(s\) that are not there: {shard.name}"):
        Checkpoint.open(sharded)


def test_an_index_that_names_an_absent_tensor(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.ghost"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) that no shard holds: model\.layers\.9\.ghost"):
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


def test_an_index_that_names_no_file(sharded):
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"x": 3}}')
    with pytest.raises(CheckpointError, match="there is no weight_map in it"):
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
    with pytest.raises(CheckpointError, match="there is no weight_map in it"):
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
    with pytest.raises(CheckpointError, match=r"model\.pt: not a whole checkpoint"):
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
