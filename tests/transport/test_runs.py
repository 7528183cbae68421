"""Runs in Python: output, resume, record, rerun, and hints in the words of the caller."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import transfusion
from small_models import CASES, finetuned
from tests.transport.test_adapter import edit, train_adapter
from transfusion.cli.console import VERB, in_options
from transfusion.errors import MismatchError, OutputError, SettingError
from transfusion.model.model import Model
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.finetunes import check_named_base, open_finetune
from transfusion.transport.output import Output


class Noted(Progress):
    """Keep the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def inputs(made, tmp_path) -> dict[str, Path]:
    return {
        "base": made("vit", 1),
        "onto": made("vit", 2),
        "finetuned": finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned"),
    }


def test_an_alignment_is_written_and_recorded(made, tmp_path):
    pi = transfusion.align(
        made("vit", 1), made("vit", 2), method="guarded", output=tmp_path / "pi.safetensors"
    )
    kept = transfusion.Alignment.load(tmp_path / "pi.safetensors")
    assert kept.digest == pi.digest
    assert kept.provenance.run["seconds"] > 0


def test_an_interrupted_transport_is_resumed(inputs, tmp_path, monkeypatch):
    rows = Output.rows

    def stop(self, entry, rows_):
        if "layer.2" in entry:
            raise KeyboardInterrupt
        return rows(self, entry, rows_)

    monkeypatch.setattr(Output, "rows", stop)
    with pytest.raises(KeyboardInterrupt):
        transfusion.transport(**inputs, output=tmp_path / "moved", force_unrelated=True)
    monkeypatch.setattr(Output, "rows", rows)
    noted = Noted()
    transfusion.transport(**inputs, output=tmp_path / "moved", force_unrelated=True, progress=noted)
    assert noted.notes[0] == "note: going on with the π that an interrupted run had found"
    metadata = json.loads((tmp_path / "moved" / "transfusion.json").read_text())
    assert metadata["run"]["seconds"] > 0
    assert metadata["command"] is None
    assert metadata["settings"] == {"new_tokens": "refuse"}
    assert (tmp_path / "moved" / "README.md").exists()


def test_a_run_that_is_refused_leaves_nothing(inputs, tmp_path, monkeypatch):
    """π was found and kept for a run that resumes; nobody resumes a run whose inputs are refused."""
    kept = []

    def refuse(self, entry, rows):
        kept.extend((tmp_path / ".moved.partial" / "kept").iterdir())
        raise MismatchError("the inputs are at fault", hint="give others")

    monkeypatch.setattr(Output, "rows", refuse)
    with pytest.raises(MismatchError, match="at fault"):
        transfusion.transport(**inputs, output=tmp_path / "moved", force_unrelated=True)
    assert kept
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_outputs_are_checked_before_any_work(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("transfusion.transport.transport"), "_find_pi", None)
    with pytest.raises(OutputError, match="is, or holds, an input"):
        transfusion.transport(**inputs, output=inputs["finetuned"], force=True)
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        transfusion.transport(**inputs, output=tmp_path / "there")
    with pytest.raises(OutputError, match="exists already"):
        transfusion.align(inputs["base"], inputs["onto"], output=tmp_path / "there")


def test_what_cannot_be_moved_is_refused_before_the_search(inputs, made, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("transfusion.transport.transport"), "_find_pi", None)
    with pytest.raises(SettingError, match="is too little"):
        transfusion.transport(**inputs, resources=Resources(memory=1000))
    other = finetuned(CASES["bert"], made("bert", 1), tmp_path / "other")
    with pytest.raises(MismatchError):
        transfusion.transport(other, base=inputs["base"], onto=inputs["onto"])


def test_a_run_in_python_is_repeated(inputs, tmp_path):
    both = [inputs["finetuned"]] * 2
    bases = {name: inputs[name] for name in ("base", "onto")}
    transfusion.merge(both, **bases, method="naive", head=0, output=tmp_path / "first")
    transfusion.transport(repeat=tmp_path / "first", output=tmp_path / "again")
    first, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again"))
    assert first == again


def test_a_dry_run_reads_no_weights(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "raw", None)
    monkeypatch.setattr(Model, "read", None)
    planned = transfusion.transport(**inputs, output=tmp_path / "moved", dry_run=True)
    assert planned.plan()["tensors"] > 0
    assert not (tmp_path / "moved").exists()


def test_results_are_written_with_their_record(made, tmp_path):
    pi = transfusion.align(
        made("vit", 1), made("vit", 2), method="guarded", output=tmp_path / "pi.safetensors"
    )
    found = transfusion.verify(made("vit", 1), via=tmp_path / "pi.safetensors", output=tmp_path / "v.json")
    assert json.loads((tmp_path / "v.json").read_text()) == json.loads(json.dumps(found.record))
    assert found.record["alignment"]["blake3"] == pi.digest
    with pytest.raises(OutputError, match="not a file of JSON"):
        transfusion.verify(made("vit", 1), via=pi, output=tmp_path / "v.txt")


def test_whole_models_run_in_this_process():
    with pytest.raises(SettingError, match="in this process"), Resources("ray").in_process():
        pass


# ── the base that an adapter names ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("named", ["../models/a", "models/a", "copy", "elsewhere/a"])
def test_only_another_base_is_noted(named, made, tmp_path, monkeypatch):
    """The same base may be named from the working directory, from the adapter's folder, or be a copy."""
    for place in ("models/a", "copy"):
        shutil.copytree(made("llama", 1), tmp_path / place)
    (tmp_path / "adapters").mkdir()
    train_adapter(made("llama", 1), tmp_path / "adapters" / "lora", ["q_proj"])
    shutil.move(tmp_path / "adapters" / "lora", tmp_path / "lora")
    edit(tmp_path / "lora", base_model_name_or_path=named)
    monkeypatch.chdir(tmp_path)
    noted = Noted()
    check_named_base(open_finetune("lora"), Model.open("models/a"), Model.open(made("llama", 2)), noted)
    assert bool(noted.notes) == (named == "elsewhere/a")


def test_a_base_with_other_weights_is_noted(made, tmp_path):
    train_adapter(made("llama", 1), tmp_path / "lora", ["q_proj"])
    edit(tmp_path / "lora", base_model_name_or_path=os.fspath(made("llama", 2)))
    noted = Noted()
    one, three = (Model.open(made("llama", seed)) for seed in (1, 3))
    check_named_base(open_finetune(tmp_path / "lora"), one, three, noted)
    assert "says that it was trained on" in noted.notes[0]
    assert Adapter.open(tmp_path / "lora").label in noted.notes[0]
    assert "if that is another model, give it as `base`" in noted.notes[0]


def test_an_adapter_of_b_is_refused(cli, made, tmp_path):
    """A and B were swapped, or the adapter was moved already: nothing is written, and -q hides no warning."""
    a, b = made("llama", 1), made("llama", 2)
    train_adapter(b, tmp_path / "lora", ["q_proj"])
    edit(tmp_path / "lora", base_model_name_or_path=os.fspath(b))
    bases = ("--base", a, "--onto", b, "--method", "naive", "-q")
    for verb, more in (("transport", ()), ("merge", (tmp_path / "lora",))):
        out = ("-o", tmp_path / verb)
        code, _, err = cli(verb, tmp_path / "lora", *more, *bases, *out)
        assert (code, (tmp_path / verb).exists()) == (1, False)
        assert f"says that it was trained on {b}, and that is the model to move it onto" in err
        assert "are --base and --onto swapped? If its record is wrong, insist with --trust-base" in err
        code, _, err = cli(verb, tmp_path / "lora", *more, *bases, *out, "--trust-base")
        assert (code, (tmp_path / verb).exists()) == (0, True)
        assert f"warning: {tmp_path / 'lora'} says that it was trained on {b}, and the base is {a}" in err


@pytest.mark.parametrize("revision", [None, "v1", "v2"])
def test_a_revision_of_the_named_base_is_that_base(revision, made, tmp_path):
    """An adapter names org/name, and --base org/name@v1 may be it: only another revision rules that out."""
    train_adapter(made("llama", 1), tmp_path / "lora", ["q_proj"])
    edit(tmp_path / "lora", base_model_name_or_path="org/name", revision=revision)
    one, two = Model.open(made("llama", 1)), Model.open(made("llama", 2))
    one, two = (
        replace(model, checkpoint=replace(model.checkpoint, label=label))
        for model, label in ((one, "org/name@v1"), (two, "org/name"))
    )
    noted = Noted()
    if revision == "v2":
        with pytest.raises(MismatchError, match="swapped"):
            check_named_base(open_finetune(tmp_path / "lora"), one, two, noted)
    else:
        check_named_base(open_finetune(tmp_path / "lora"), one, two, noted)
    assert noted.notes == []


def test_a_moved_adapter_is_shown_by_its_name(made, tmp_path):
    train_adapter(made("llama", 1), tmp_path / "lora", ["q_proj"])
    bases = {"base": made("llama", 1), "onto": made("llama", 2), "method": "naive"}
    moved = transfusion.transport(tmp_path / "lora", **bases)
    assert repr(moved).startswith(f"{tmp_path / 'lora'}, moved onto {made('llama', 2)}\n")
    merged = transfusion.merge([tmp_path / "lora", tmp_path / "lora"], **bases)
    assert f"lora, moved onto {made('llama', 2)}\n" in repr(merged)


# ── hints ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("verb", "text", "shown"),
    [
        ("transport", "leave out `full`", "leave out --full"),
        ("merge", "leave out `full`", "leave out --full"),
        ("apply", 'align with `residual="tied"`', "align with --residual tied"),
        ("transport", "or `trust_base=True` if you are sure", "or --trust-base if you are sure"),
        ("fewshot", "`naive=False` leaves out", "--no-naive leaves out"),
        ("barrier", "`ray start --head` and `unknown`", "`ray start --head` and `unknown`"),
    ],
)
def test_hints_speak_of_options_on_the_command_line(verb, text, shown):
    token = VERB.set(verb)
    try:
        assert in_options(text) == shown
    finally:
        VERB.reset(token)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("memory", "resources=transfusion.Resources(memory=…)"), ("methd", "'method'"), ("zzz", "help")],
)
def test_unknown_parameters_are_refused_before_models_are_read(name, hint):
    with pytest.raises(SettingError, match=f"transport has no parameter '{name}'") as caught:
        transfusion.transport("nowhere/tuned", base="nowhere/a", onto="nowhere/b", **{name: 1})
    assert hint in str(caught.value.hint)


def test_hints_of_the_library_speak_of_parameters():
    """Only the command line speaks of options: hints elsewhere name `parameters`, which it translates."""
    package = Path(transfusion.__file__).parent
    for file in package.rglob("*.py"):
        if file.is_relative_to(package / "cli"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                text = re.sub(r"'(?:transfusion|hf) [^']*'|`?\bray start .*", "", ast.unparse(node.value))
                assert not re.search(r"--[a-z]", text), f"{file.name}, line {node.value.lineno}: {text}"
