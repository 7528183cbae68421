"""A model of one's own in every verb: an encoder with a decoder, two vocabularies, norms behind additions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

import transfusion
from transfusion import families
from transfusion.cli import main
from transfusion.errors import ArchitectureError, MismatchError
from transfusion.verification.certify import certify_file, randomise

EXAMPLE = Path(__file__).parents[2] / "examples" / "small_translator.py"
CROSS = "decoder.layers.0.multihead_attn.in_proj_weight"

CONVOLVING = """
import torch
from torch import nn
from transfusion.families import read_families

class Waves(nn.Module):
    def __init__(self, width, blocks, classes):
        super().__init__()
        self.first = nn.Conv1d(1, width, 3, padding=1)
        self.entries = nn.ModuleList(nn.Identity() for _ in range(blocks))
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(blocks))
        self.bends = nn.ModuleList(nn.GELU() for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, signal):
        x = self.first(signal[:, None]).mT
        for enter, conv, bend in zip(self.entries, self.convs, self.bends):
            x = x + bend(conv(enter(x).mT).mT)
        return self.head(x)

FAMILIES = read_families('''
family waves
library mine
models waves
ignores model_type
@usual_axes
stack layer blocks
sizes x = width, label = classes
first.*      x@first <- _ _
convs.{}.*   x@next <- x _
skip entries.{}   x -> x@next   bends.{}
heads
    head.*   label <- x@last
''', __file__, build=lambda config: Waves(**{name: config[name] for name in EXAMPLE}),
    make_inputs=lambda config, count, generator: {"signal": torch.randn(count, 20, generator=generator)})
EXAMPLE = {"width": 6, "blocks": 2, "classes": 5}
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(families, "_registered", [])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A, its fine-tune, one with a new word of the target language, B, a B with fewer blocks, and data."""
    there = tmp_path_factory.mktemp("translators")
    module = families.python_module(EXAMPLE)
    shallow = {**module.EXAMPLE, "encoder_blocks": 2, "decoder_blocks": 1}

    def store(name, model, sizes):
        (there / name).mkdir()
        save_file(model.state_dict(), there / name / "model.safetensors")
        (there / name / "config.json").write_text(json.dumps({"model_type": "small_translator", **sizes}))

    torch.manual_seed(0)
    a = randomise(module.SmallTranslator(**module.EXAMPLE), 1)
    store("a", a, module.EXAMPLE)
    store("b", randomise(module.SmallTranslator(**module.EXAMPLE), 2), module.EXAMPLE)
    store("shallow", randomise(module.SmallTranslator(**shallow), 3), shallow)
    with torch.no_grad():
        for parameter in a.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    store("tuned", a, module.EXAMPLE)
    grown = {**module.EXAMPLE, "target_words": module.EXAMPLE["target_words"] + 1}
    state, larger = a.state_dict(), module.SmallTranslator(**grown)
    new = {name: one for name, one in larger.state_dict().items() if one.shape != state[name].shape}
    larger.load_state_dict(
        {**state, **{name: torch.cat([state[name], one[-1:]]) for name, one in new.items()}}
    )
    store("grown", larger, grown)
    inputs = module.make_inputs(module.EXAMPLE, 24, torch.Generator().manual_seed(5))
    save_file({**inputs, "labels": inputs["target_ids"].clone()}, there / "task.safetensors")
    save_file(inputs, there / "inputs.safetensors")
    return there


def run(folder, *words):
    with pytest.raises(SystemExit) as exit:
        main([*words[:1], *(str(folder / one) if isinstance(one, Path) else one for one in words[1:])])
    return exit.value.code


def test_the_example_is_certified():
    certificate = certify_file(EXAMPLE, "SmallTranslator")
    assert certificate.passed
    assert certificate.difference < 1e-9


def test_a_stream_that_only_convolutions_read_is_compared(tmp_path):
    """Their inputs show it, and drawn numbers have the model's own type."""
    file = tmp_path / "waves.py"
    file.write_text(CONVOLVING)
    assert certify_file(file, "Waves").passed
    module = families.register_file(file)
    torch.manual_seed(0)
    a, b = (module.Waves(**module.EXAMPLE).state_dict() for _ in "ab")
    config = {"model_type": "waves", **module.EXAMPLE}
    opened = [transfusion.Model.open(one, config=config) for one in (a, b)]
    assert transfusion.align(*opened, method="functional").maps.keys() >= {"layer.0.x", "layer.1.x"}


def test_a_stored_table_that_is_no_parameter_is_certified(tmp_path):
    """Positions that a module computes, stores and adds to the stream move like weights."""
    file, parameter = tmp_path / "waves.py", "nn.Parameter(torch.zeros(length, width))"
    waves = "nn.Buffer(torch.arange(length * width).reshape(length, width).cos())"
    file.write_text(EXAMPLE.read_text().replace(parameter, waves))
    assert certify_file(file, "SmallTranslator").passed


def test_queries_and_keys_of_cross_attention_move_apart(folders):
    """In memory they are one parameter; they read two streams."""
    own = {"architecture": EXAMPLE}
    pi = transfusion.align(folders / "a", folders / "b", advice=False, **own)
    assert not torch.equal(
        torch.tensor(pi.maps["decoder.0.y"].index), torch.tensor(pi.maps["encoder.3.x"].index)
    )
    assert transfusion.verify(folders / "a", via=pi).equal


@pytest.mark.parametrize("method", ["functional", "auto", "ot", "git-rebasin", "transfusion"])
def test_every_kind_of_method_runs_it(method, folders, tmp_path):
    moved = transfusion.transport(
        folders / "tuned",
        base=folders / "a",
        onto=folders / "b",
        method=method,
        architecture=EXAMPLE,
        force_unrelated=True,
    )
    moved.save(tmp_path / "out")
    written, b = (load_file(one / "model.safetensors") for one in (tmp_path / "out", folders / "b"))
    assert written.keys() == b.keys(), "in the names of its files"
    assert not torch.equal(written[CROSS], b[CROSS])
    module = moved.module()
    assert type(module).__name__ == "SmallTranslator"
    assert torch.equal(module.state_dict()[CROSS], written[CROSS])


def test_it_is_verified_measured_and_reported(folders, tmp_path, capsys):
    table, pi = ["--architecture", str(EXAMPLE)], str(tmp_path / "pi.safetensors")
    tied = str(tmp_path / "tied.safetensors")
    a, b, tuned, task = (str(folders / name) for name in ("a", "b", "tuned", "task.safetensors"))
    moving = [tuned, "--base", a, "--onto", b, "--via", pi, *table]
    assert run(folders, "align", a, b, "--method", "functional", "-o", pi, *table) == 0
    assert run(folders, "align", a, b, "--residual", "tied", "--no-advice", "-o", tied, *table) == 0
    assert run(folders, "verify", a, "--via", tied, *table) == 0
    assert run(folders, "apply", tied, a, "-o", str(tmp_path / "pi-a"), *table) == 0
    assert run(folders, "transport", *moving, "-o", str(tmp_path / "out"), "--force-unrelated") == 0
    out = str(tmp_path / "out")
    assert run(folders, "evaluate", out, "--against", b, "--data", task, *table) == 0
    assert "class of every position of 29" in capsys.readouterr().out
    assert run(folders, "sweep", *moving, "--data", task) == 0
    assert run(folders, "fewshot", *moving, "--data", task, "-o", str(tmp_path / "alpha.json")) == 0
    assert run(folders, "barrier", a, b, "--via", tied, "--data", task, *table) == 0
    assert run(folders, "report", out, "-o", str(tmp_path / "report.html")) == 0


@pytest.mark.parametrize("onto", ["b", "shallow"])
def test_it_is_refined_on_drawn_inputs_and_on_the_user_s(onto, folders, tmp_path):
    for calibrate in (None, folders / "inputs.safetensors"):
        moved = transfusion.transport(
            folders / "tuned",
            base=folders / "a",
            onto=folders / onto,
            method="functional",
            refine=True,
            refine_steps=2,
            calibrate=calibrate,
            architecture=EXAMPLE,
        )
        record = moved.metadata()["refinement"]
        assert record["measure"] == "answers", "the only output of a module of one's own are its logits"
        assert ("own" in record["after"]) == (calibrate is not None)


@pytest.mark.parametrize(("fate", "words"), [("keep", 30), ("drop", 29)])
def test_a_word_that_the_fine_tune_added(fate, words, folders, tmp_path):
    moving = {"base": folders / "a", "onto": folders / "b", "architecture": EXAMPLE, "method": "functional"}
    with pytest.raises(MismatchError, match=r"grown has 1 token\(s\) more than its base"):
        transfusion.transport(folders / "grown", **moving)
    moved = transfusion.transport(
        folders / "grown", **moving, new_tokens=fate, refine=True, refine_steps=1, force_unrelated=True
    )
    moved.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["target_words"] == words
    assert len(load_file(tmp_path / "out" / "model.safetensors")["speak.weight"]) == words


def test_a_word_that_was_added_is_dropped_between_shapes(folders):
    moved = transfusion.transport(
        folders / "grown",
        base=folders / "a",
        onto=folders / "shallow",
        architecture=EXAMPLE,
        method="functional",
        new_tokens="drop",
        force_unrelated=True,
    )
    assert len(moved.state_dict()["speak.weight"]) == 29


def test_words_of_ones_own_may_differ(tmp_path):
    """Rows are matched by the words of a vocab.json, whatever the configuration calls their number."""
    talker = EXAMPLE.with_name("tiny_talker.py")
    module = families.register_file(talker)
    for name, words in (("a", 31), ("b", 37)):
        sizes = {**module.EXAMPLE, "words": words}
        model = randomise(module.TinyTalker(**sizes), words)
        (tmp_path / name).mkdir()
        save_file(model.state_dict(), tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "tiny_talker", **sizes}))
        known = {chr(ord("a") + (row * 5) % words): row for row in range(words)}
        (tmp_path / name / "vocab.json").write_text(json.dumps(known))
    a, b, tuned = (tmp_path / name for name in ("a", "b", "tuned"))
    shutil.copytree(a, tuned)
    state = {name: 1.1 * one for name, one in load_file(a / "model.safetensors").items()}
    save_file(state, tuned / "model.safetensors")
    for more in ({}, {"method": "functional", "refine": True, "refine_steps": 1}):
        moved = transfusion.transport(tuned, base=a, onto=b, force_unrelated=True, **more)
        assert moved.module().words.num_embeddings == 37


def test_a_table_of_a_librarys_type_is_for_models_with_its_tensors(tmp_path):
    """BERT with one more head is of the user's family; BERT itself stays what it is."""
    file = tmp_path / "more.family"
    file.write_text(
        "family more : bert\nmodels bert\nsignature + cls.mood.weight\n"
        "heads\n    cls.mood.*   mood <- x@last\nfixed mood: sad, happy\n"
    )
    families.register_file(file)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "num_hidden_layers": 1}
    module = BertModel(BertConfig(vocab_size=11, **sizes))
    state, config = module.state_dict(), {**module.config.to_dict(), "architectures": ["BertModel"]}
    assert transfusion.Model.open(state, config=config).family.name == "bert"
    state["cls.mood.weight"] = torch.zeros(2, 8)
    assert transfusion.Model.open(state, config=config).family.name == "more"


# ── messages ─────────────────────────────────────────────────────────────────────────────────


def test_a_table_without_a_class_says_how_to_give_one(folders, tmp_path):
    table = tmp_path / "mine.family"
    table.write_text(families.register_file(EXAMPLE).TABLE)
    families._registered.clear()
    pi = transfusion.align(folders / "a", folders / "b", architecture=table, advice=False)
    with pytest.raises(
        ArchitectureError, match="is of no library, and its file does not say how it is built"
    ):
        transfusion.verify(folders / "a", via=pi)


def test_a_class_that_cannot_be_built_is_the_file_s_fault(folders, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.read_text().replace("return SmallTranslator(", "return SmallTranslator(1, "))
    pi = transfusion.align(folders / "a", folders / "b", architecture=file, advice=False)
    with pytest.raises(ArchitectureError, match="the `build` of its file cannot build the module"):
        transfusion.verify(folders / "a", via=pi)


def test_different_inputs_for_two_shapes_are_refused(folders, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        EXAMPLE.read_text().replace('(count, config["length"])', '(count, config["encoder_blocks"])')
    )
    with pytest.raises(MismatchError, match=r"inputs that the table draws for .* differ in source_ids"):
        transfusion.align(folders / "a", folders / "shallow", method="functional", architecture=file)


def test_an_unknown_key_leads_to_the_table(folders, tmp_path):
    config = json.loads((folders / "a" / "config.json").read_text())
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, "volume": 11}))
    (tmp_path / "odd" / "model.safetensors").write_bytes((folders / "a" / "model.safetensors").read_bytes())
    with pytest.raises(ArchitectureError, match="volume=11") as error:
        transfusion.align(tmp_path / "odd", folders / "b", architecture=EXAMPLE)
    assert "add 'ignores KEY …' to the table" in str(error.value.hint)
