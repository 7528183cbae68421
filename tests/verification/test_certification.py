"""A table of one's own: from a file to a certificate, and messages that lead its writer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transfusion import families
from transfusion.cli import main
from transfusion.errors import ArchitectureError, LayoutError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport
from transfusion.verification.certify import certify_file, randomise

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_talker.py"


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(families, "_registered", [])


@pytest.fixture
def edited(tmp_path):
    """The example with something changed in its table."""

    def edit(old: str, new: str) -> Path:
        text = EXAMPLE.read_text()
        assert old in text
        path = tmp_path / "edited.py"
        path.write_text(text.replace(old, new))
        return path

    return edit


def test_the_example_is_certified():
    certificate = certify_file(EXAMPLE, "TinyTalker")
    assert certificate.passed
    assert certificate.difference < 1e-9


def test_the_command_line_prints_the_certificate(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["verify", "--architecture", str(EXAMPLE), "--model", "TinyTalker"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.count("✓") == 8


def test_a_model_of_one_s_own_goes_the_whole_way(tmp_path):
    """Registered, its checkpoints are moved like any other's."""
    module = families.register_file(EXAMPLE)
    torch.manual_seed(0)
    folders = {}
    for name, seed in (("a", 1), ("tuned", 1)):
        model = randomise(module.TinyTalker(**module.EXAMPLE), seed)
        if name == "tuned":
            model.speak.bias.data += 1
        folders[name] = tmp_path / name
        folders[name].mkdir()
        save_file(model.state_dict(), folders[name] / "model.safetensors")
        (folders[name] / "config.json").write_text(
            json.dumps({"model_type": "tiny_talker", **module.EXAMPLE})
        )
    shuffle = align(folders["a"], folders["a"], method="random", residual="tied")
    b = apply(shuffle, folders["a"]).save(tmp_path / "b")
    pi = align(folders["a"], b, residual="tied")
    assert pi.digest == shuffle.digest
    state = transport(folders["tuned"], base=folders["a"], onto=b, via=pi).state_dict()
    assert torch.allclose(state["speak.bias"], Model.open(b).checkpoint.read("speak.bias") + 1)


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("axis qk in head", "axis qk", None),
        ("blocks.{}.volume              scale x@next", "blocks.{}.volume              _", "the free axis x"),
        ("after.*                       scale x@last", "after.*   x@last", "the vector after.weight"),
        (
            "speak.*                       vocab <- x@last",
            "speak.weight vocab <- x@last\nspeak.bias scale vocab",
            "the scale speak.bias",
        ),
        ("fixed vocab: token ids select its rows", "axis vocab per model", "the free axis vocab"),
        ("axis ffn", "fixed ffn per layer: no reason", "the fixed axis ffn"),
        ("[(head qk)|(head qk)|(head vo)] <- x", "[(head qk)|(head vo)|(head qk)] <- x", "the free axis qk"),
    ],
)
def test_a_wrong_table_is_told_which_axis_broke_the_outputs(old, new, broken, edited):
    certificate = certify_file(edited(old, new), "TinyTalker")
    assert certificate.passed == (broken is None)
    if broken:
        assert broken in [check.what for check in certificate.failures]


def test_a_failed_certificate_exits_with_3(edited, capsys):
    path = edited("fixed vocab: token ids select its rows", "axis vocab per model")
    with pytest.raises(SystemExit) as exit:
        main(["verify", "--architecture", str(path), "--model", "TinyTalker"])
    assert exit.value.code == 3
    assert "is wrong about TinyTalker" in capsys.readouterr().err


def test_an_unclaimed_tensor_is_named(edited):
    with pytest.raises(
        ArchitectureError, match=r"the table does not know: blocks\.0\.volume, blocks\.1\.volume"
    ):
        certify_file(edited("blocks.{}.volume              scale x@next\n", ""), "TinyTalker")


def test_layouts_that_disagree_about_a_size_are_named(edited):
    path = edited("blocks.{}.gather.*            y <- (head vo)", "blocks.{}.gather.*            y <- ffn")
    with pytest.raises(
        LayoutError, match=r"blocks\.0\.gather\.weight of shape \(24, 24\) does not fit .* layer\.0\.ffn = 20"
    ):
        certify_file(path, "TinyTalker")


def test_an_undeclared_axis_is_named(edited):
    with pytest.raises(ArchitectureError, match="uses an axis 'ffn' that it does not declare"):
        certify_file(edited("axis ffn\n", ""), "TinyTalker")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "it defines no FAMILIES"),
        ("FAMILIES = (1,)", "it defines no FAMILIES"),
        ("1 / 0", r"running it failed \(ZeroDivisionError"),
    ],
)
def test_a_file_without_tables_is_refused(text, message, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ArchitectureError, match=message):
        families.register_file(tmp_path / "bad.py")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArchitectureError, match="not a file of Python"):
        families.register_file(tmp_path / "none.py")


def test_a_class_that_is_not_there_is_refused():
    with pytest.raises(ArchitectureError, match=r"there is no class Nobody in tiny_talker or transformers"):
        certify_file(EXAMPLE, "Nobody")


def test_a_table_for_a_class_of_a_library(tmp_path):
    (tmp_path / "mine.family").write_text("family mine : gpt2\nmodels gpt2\n")
    settings = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 20, "vocab_size": 31, "n_positions": 13}
    (tmp_path / "tiny.json").write_text(json.dumps({**settings, "bos_token_id": 1, "eos_token_id": 1}))
    for name in ("GPT2LMHeadModel", "transformers:GPT2LMHeadModel"):
        assert certify_file(tmp_path / "mine.family", name, tmp_path / "tiny.json").passed
    with pytest.raises(ArchitectureError, match="it defines no EXAMPLE"):
        certify_file(tmp_path / "mine.family", "GPT2LMHeadModel")


def test_a_verb_in_python_uses_the_table_that_it_is_given(made, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "_registered", [])
    (tmp_path / "mine.family").write_text("family mine : gpt2\nmodels gpt2\n")
    assert align(made("gpt2"), made("gpt2", 2), method="naive").provenance.family == "gpt2"
    for _ in range(2):  # the same file is used once
        found = align(made("gpt2"), made("gpt2", 2), method="naive", architecture=tmp_path / "mine.family")
        assert found.provenance.family == "mine"
    assert [family.name for family in families._registered] == ["mine"]


def test_an_entry_point_offers_tables(monkeypatch):
    class Point:
        def load(self):
            sys.modules.pop("tiny_talker", None)
            return families.register_file(EXAMPLE)

    monkeypatch.setattr(families, "entry_points", lambda group: [Point()])
    families._installed.cache_clear()
    try:
        assert "tiny_talker" in [family.name for family in families._installed()]
    finally:
        families._installed.cache_clear()
