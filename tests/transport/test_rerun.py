"""The record beside an output: it names every input, and is enough to run again."""

from __future__ import annotations

import json
import shutil
from importlib import import_module

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from transfusion.alignment.alignment import Alignment
from transfusion.cli import main
from transfusion.errors import CheckpointError, MismatchError, SettingError
from transfusion.transport.record import PI_FILE
from transfusion.transport.transport import merge, transport


@pytest.fixture
def inputs(made, tmp_path):
    places = {"a": tmp_path / "a", "b": tmp_path / "b"}
    for seed, place in enumerate(places.values(), 1):
        shutil.copytree(made("vit", seed), place)
    (tmp_path / "b" / "README.md").write_text("---\nlicense: mit\n---\n# B\n")
    tuned = finetuned(CASES["vit-classifier"], places["a"], tmp_path / "tuned")
    return {**places, "tuned": tuned}


def weights(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def run(cli, inputs, *more):
    return cli("transport", inputs["tuned"], "--base", inputs["a"], "--onto", inputs["b"], *more)


@pytest.mark.parametrize(
    "settings",
    [
        ["--force-unrelated"],
        ["--alpha", "0.5", "--dtype", "bfloat16", "--residual", "tied", "--force-unrelated"],
        ["--alpha", "auto", "--method", "transfusion"],
        ["--method", "ot"],
        ["--method", "random", "--seed", "4"],
    ],
)
def test_a_run_is_repeated(settings, cli, inputs, tmp_path):
    code, _, err = run(cli, inputs, "-o", tmp_path / "first", *settings)
    assert code == 0, err
    (tmp_path / "first" / PI_FILE).unlink()  # it is found again
    code, _, err = cli(
        "transport", "--from", tmp_path / "first" / "transfusion.json", "-o", tmp_path / "again"
    )
    assert code == 0, err
    assert weights(tmp_path / "again") == weights(tmp_path / "first")


def test_the_pi_that_a_run_kept_is_used(cli, inputs, tmp_path, monkeypatch):
    assert run(cli, inputs, "-o", tmp_path / "first", "--force-unrelated")[0] == 0
    metadata = json.loads((tmp_path / "first" / "transfusion.json").read_text())
    assert metadata["alignment"]["file"] == PI_FILE
    assert PI_FILE in metadata["contents"]
    assert Alignment.load(tmp_path / "first" / PI_FILE).digest == metadata["alignment"]["blake3"]
    assert len(list((tmp_path / "first").glob("*.safetensors"))) == 1, "some programs load all of them"
    assert run(cli, inputs, "-o", tmp_path / "first", "--force-unrelated", "--force")[0] == 0, (
        "it is a file of this program"
    )
    monkeypatch.delattr(import_module("transfusion.transport.rerun"), "align")
    code, _, err = cli("transport", "--from", tmp_path / "first", "-o", tmp_path / "again")
    assert code == 0, err
    assert (tmp_path / "again" / PI_FILE).read_bytes() == (tmp_path / "first" / PI_FILE).read_bytes()
    via = ["--via", tmp_path / "first" / PI_FILE]
    assert run(cli, inputs, "-o", tmp_path / "third", *via)[0] == 0
    assert not (tmp_path / "third" / PI_FILE).exists(), "π is in a file of the user's"


def test_a_kept_pi_that_is_a_link_to_elsewhere_is_refused(cli, inputs, tmp_path):
    assert run(cli, inputs, "-o", tmp_path / "first", "--force-unrelated")[0] == 0
    (tmp_path / "first" / PI_FILE).rename(tmp_path / "elsewhere.safetensors")
    (tmp_path / "first" / PI_FILE).symlink_to(tmp_path / "elsewhere.safetensors")
    for command in (["transport", "--from"], ["report"]):
        code, _, err = cli(*command, tmp_path / "first", "-o", tmp_path / "again.html")
        assert code == 1
        assert "leads outside" in err


def test_the_metadata_of_a_rerun_is_as_good(cli, inputs, tmp_path):
    run(cli, inputs, "-o", tmp_path / "first", "--method", "random", "--seed", "4")
    for info, place in (("first", "again"), ("again", "third")):
        code, _, err = cli("transport", "--from", tmp_path / info, "-o", tmp_path / place)
        assert code == 0, err
    assert weights(tmp_path / "third") == weights(tmp_path / "first")


def test_with_a_pi_or_without_it(cli, inputs, tmp_path):
    """The file of π is used if it is there, and the same π is found again if it is gone."""
    pi = tmp_path / "pi.safetensors"
    cli(
        "align",
        inputs["a"],
        inputs["b"],
        "-o",
        pi,
        "--method",
        "tied",
        "--restarts",
        "1",
        "--max-sweeps",
        "3",
    )
    code, _, err = run(cli, inputs, "--via", pi, "-o", tmp_path / "first")
    assert code == 0, err
    metadata = tmp_path / "first" / "transfusion.json"
    assert cli("transport", "--from", metadata, "-o", tmp_path / "second")[0] == 0
    pi.unlink()
    assert cli("transport", "--from", metadata, "-o", tmp_path / "third")[0] == 0
    assert weights(tmp_path / "third") == weights(tmp_path / "second") == weights(tmp_path / "first")
    cli("align", inputs["a"], inputs["b"], "-o", pi, "--method", "random")
    code, _, err = cli("transport", "--from", metadata, "-o", tmp_path / "fourth")
    assert code == 1
    assert "is another π than that of" in err


def test_a_merge_and_an_adapter_are_repeated_too(cli, inputs, made, tmp_path):
    import peft
    import transformers

    base = transformers.ViTModel.from_pretrained(inputs["a"])
    adapter = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapter.save_pretrained(tmp_path / "lora")
    common = ["--base", inputs["a"], "--onto", inputs["b"], "--method", "naive"]
    assert cli("transport", tmp_path / "lora", *common, "-o", tmp_path / "one")[0] == 0
    assert cli("transport", tmp_path / "lora", *common, "--full", "-o", tmp_path / "two")[0] == 0
    both = [inputs["tuned"], tmp_path / "lora"]
    assert cli("merge", *both, *common, "--how", "dare", "--seed", "3", "-o", tmp_path / "three")[0] == 0
    twice = [tmp_path / "lora", tmp_path / "lora"]
    assert cli("merge", *twice, *common, "--rank", "3", "--how", "mean", "-o", tmp_path / "four")[0] == 0
    for verb, name in (("transport", "one"), ("transport", "two"), ("merge", "three"), ("merge", "four")):
        code, _, err = cli(verb, "--from", tmp_path / name, "-o", tmp_path / f"{name}-again")
        assert code == 0, err
        assert weights(tmp_path / f"{name}-again") == weights(tmp_path / name)


@pytest.mark.parametrize("role", ["a", "b", "tuned"])
def test_other_inputs_are_refused(role, cli, inputs, tmp_path):
    run(cli, inputs, "-o", tmp_path / "first", "--method", "naive")
    file = inputs[role] / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if "layernorm" in name and name.endswith("bias"))
    state[name][0] += 1
    save_file(state, file, {"format": "pt"})
    with pytest.raises(MismatchError, match="is not what it was when"):
        transport(repeat=tmp_path / "first")


def test_moved_inputs_are_found_by_their_full_path(inputs, tmp_path, monkeypatch):
    """The metadata is read in another folder than that of the run."""
    monkeypatch.chdir(tmp_path)
    arguments = ["transport", "tuned", "--base", "a", "--onto", "b", "-o", "first", "--method", "naive", "-q"]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="0"):
        main(["transport", "--from", "../first", "-o", "again", "-q"])
    assert weights(tmp_path / "elsewhere" / "again") == weights(tmp_path / "first")


def test_what_is_no_metadata_is_refused(cli, inputs, tmp_path):
    with pytest.raises(CheckpointError, match="not the metadata"):
        transport(repeat=inputs["a"] / "config.json")
    with pytest.raises(CheckpointError, match="no such file"):
        transport(repeat=tmp_path / "nowhere.json")
    code, _, err = cli("transport", inputs["tuned"], "--base", inputs["a"], "-o", tmp_path / "again")
    assert code == 2
    assert "--onto" in err


def test_metadata_in_another_format_is_refused(tmp_path):
    (tmp_path / "transfusion.json").write_text(json.dumps({"verb": "transport", "base": {"sha256": "0"}}))
    with pytest.raises(CheckpointError, match="written in format 1, but this version reads format 3"):
        transport(repeat=tmp_path)


@pytest.mark.parametrize(
    "said", [["--alpha", "0.3"], ["--dtype", "bfloat16"], ["--full"], ["--method", "naive"]]
)
def test_whatever_the_metadata_decides_is_refused_beside_it(said, cli, inputs, tmp_path):
    run(cli, inputs, "-o", tmp_path / "first", "--method", "naive")
    code, _, err = cli("transport", "--from", tmp_path / "first", "-o", tmp_path / "again", *said)
    assert code == 2
    assert f"--from decides {said[0]}" in err


def test_a_dry_run_of_a_repetition_writes_nothing(cli, inputs, tmp_path):
    run(cli, inputs, "-o", tmp_path / "first", "--method", "naive")
    code, out, _ = cli("transport", "--from", tmp_path / "first", "-o", tmp_path / "again", "--dry-run")
    assert code == 0
    assert "would write" in out
    assert not (tmp_path / "again").exists()


def test_inputs_that_were_moved_are_given_by_their_new_places(cli, inputs, tmp_path):
    pi = tmp_path / "pi.safetensors"
    cli("align", inputs["a"], inputs["b"], "-o", pi, "--method", "random")
    run(cli, inputs, "--via", pi, "-o", tmp_path / "first")
    for name in ("a", "b", "tuned", "pi.safetensors"):
        (tmp_path / name).rename(tmp_path / f"new-{name}")
    new = [tmp_path / "new-tuned", "--base", tmp_path / "new-a", "--onto", tmp_path / "new-b"]
    metadata = tmp_path / "first" / "transfusion.json"
    code, _, err = cli(
        "transport",
        "--from",
        metadata,
        *new,
        "--via",
        tmp_path / "new-pi.safetensors",
        "-o",
        tmp_path / "again",
    )
    assert code == 0, err
    assert weights(tmp_path / "again") == weights(tmp_path / "first")
    code, _, err = cli("transport", "--from", metadata, *new, "-o", tmp_path / "third")
    assert code == 0, err
    assert "so A and B are aligned again" in err


def test_as_many_fine_tunes_as_the_metadata_names(cli, inputs, tmp_path):
    run(cli, inputs, "-o", tmp_path / "first", "--method", "naive")
    with pytest.raises(SettingError, match=r"2 fine-tune\(s\) given, and .* records 1"):
        merge(["one", "two"], repeat=tmp_path / "first")


def test_what_was_made_from_memory_promises_no_repetition(inputs, tmp_path):
    import transformers

    a, b, tuned = (transformers.ViTModel.from_pretrained(inputs[role]) for role in ("a", "b", "a"))
    tuned.layernorm.weight.data += 1
    transport(tuned, base=a, onto=b, method="naive").save(tmp_path / "made")
    assert "--from" not in (tmp_path / "made" / "README.md").read_text()
    with pytest.raises(CheckpointError, match="were in memory"):
        transport(repeat=tmp_path / "made")


def test_the_card_tells_people(cli, inputs, tmp_path):
    code, _, err = run(cli, inputs, "-o", tmp_path / "first", "--force-unrelated")
    assert code == 0, err
    text = (tmp_path / "first" / "README.md").read_text()
    card = ModelCard.load(tmp_path / "first" / "README.md")
    assert card.data.base_model is None  # B is a folder of one's own, which the hub does not know
    assert card.data.pipeline_tag == "image-classification"
    assert str(inputs["b"].parent) not in text  # cards are shared
    assert card.data.library_name == "transformers"
    assert "transfusion" in card.data.tags
    metadata = json.loads((tmp_path / "first" / "transfusion.json").read_text())
    for one in (*metadata["finetuned"], metadata["base"], metadata["onto"]):
        assert one["fingerprint"] in text
    assert metadata["alignment"]["blake3"] in text
    assert metadata["command"].startswith("transfusion ")
    assert metadata["onto"]["licence"] == "mit"
    assert metadata["alignment"]["advice"]["verdict"] in text
    assert "--from transfusion.json" in text


def test_a_fine_tune_that_was_made_for_another_base_is_refused(cli, inputs, tmp_path):
    """The metadata of the input names the content of its base."""
    run(cli, inputs, "-o", tmp_path / "on-b", "--method", "naive")
    arguments = [
        "transport",
        tmp_path / "on-b",
        "--onto",
        inputs["b"],
        "--method",
        "naive",
        "-o",
        tmp_path / "c",
    ]
    code, _, err = cli(*arguments, "--base", inputs["a"])
    assert code == 1
    assert f"was moved onto {inputs['b']}" in err
    assert "--trust-base" in err
    code, _, err = cli(*arguments, "--base", inputs["b"])
    assert code == 0, err
