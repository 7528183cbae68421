"""No text of a model's files is ever run: not by drafts, not by the libraries that build live models."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import transfusion
from tests.verification.test_drafting import GRAIN, Mills
from transfusion import families
from transfusion.errors import ArchitectureError, CheckpointError
from transfusion.families import register_file
from transfusion.model.model import Model
from transfusion.running.building import class_of_transformers
from transfusion.running.live_model import LiveModel
from transfusion.verification.drafting.propose import propose, propose_for

CODE = '__import__("pathlib").Path("CANARY").touch()'
TEXTS = {
    "a string that ends": f'my" + str({CODE}) + "',
    "a single quote": f"my' + str({CODE.replace(chr(34), chr(39))}) + '",
    "a line that ends": f'my"\n{CODE}\n"',
    "a docstring that ends": f'my"""\n{CODE}\n"""',
    "another docstring": f"'''\n{CODE}\n'''",
    "a backslash": f'my\\" + str({CODE}) + "',
    "the last one": "my\\",
    "a format": "{" + CODE + "}",
    "a comment": f'my", # \r{CODE}',
    "a line of Unicode": f'my"\u2028{CODE}\u2028"',
}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path):
    """Every test of this file: no canary, wherever the program is started."""
    monkeypatch.setattr(families, "_registered", [])
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob("CANARY*"))


@pytest.fixture
def llama(made, tmp_path):
    """A configuration with settings of one's own: ``llama(model_type=…)``."""

    def make(**settings: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        config = json.loads((made("llama") / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, **settings}))
        return folder

    return make


def names_called(text: str) -> set[str]:
    """What a file of Python calls."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}


# ── drafts ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_model_type_that_is_code_is_refused(text, llama, cli):
    code, out, err = cli("inspect", llama(model_type=text), "--propose", "-o", "draft.family")
    assert (code, out) == (1, "")
    assert "is not a valid name of a family" in err
    assert not Path("draft.family").exists()


@pytest.mark.parametrize("odd", [5, ["llama"], {"a": 1}, True, "a" * 101, "lla ma"])
def test_a_model_type_that_is_no_word_is_refused(odd, llama):
    refused = (
        "is not a valid name of a family|model_type: input should be a valid string|not readable as JSON"
    )
    with pytest.raises((ArchitectureError, CheckpointError), match=refused):
        propose_for(llama(model_type=odd))


def test_settings_that_are_code_become_texts(llama):
    """As values, in lists and objects: a draft is read, and nothing in it runs."""
    odd = {
        **{f"my_{i}": text for i, text in enumerate(TEXTS.values())},
        "_name_or_path": TEXTS["a string that ends"],
        "torch_dtype": TEXTS["a docstring that ends"],
        "my_settings": {text: [text, {text: text}] for text in TEXTS.values()},
        "id2label": {str(i): text for i, text in enumerate(TEXTS.values())},
        "label2id": {text: i for i, text in enumerate(TEXTS.values())},
    }
    proposal = propose_for(llama(**odd))
    Path("draft.family").write_text(proposal.text, encoding="utf-8")
    (written,) = register_file("draft.family").FAMILIES
    assert all(written.required[f"my_{i}"] == (text,) for i, text in enumerate(TEXTS.values()))
    assert written.required["my_settings"] == (odd["my_settings"],)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_keys_that_are_code_are_refused(text):
    with pytest.raises(ArchitectureError, match="has a name that is not allowed in a table"):
        propose(Mills(), {f"{text}_heads": 3}, "mills", GRAIN)


class Named(Mills):
    """As some classes of the library do, it names a module as it is told: anything without a dot."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.pour = name, nn.ModuleDict({name: self.pour})

    def forward(self, grain):
        x = self.pour[self.name](grain)
        for mill in self.mills:
            x = mill(x)
        return self.sack(x.mean(1))


def named(text: str, what: str) -> nn.Module:
    if what == "tensor":
        return Named(text)
    module = Mills()
    if what == "buffer":
        module.register_buffer(text, torch.zeros(3))
    else:
        module.more = nn.ParameterDict({text: torch.zeros(3)})
    return module


@pytest.mark.parametrize("what", ["tensor", "unused", "buffer"])
@pytest.mark.parametrize("text", list(TEXTS.values())[::3], ids=list(TEXTS)[::3])
def test_a_name_that_is_code_is_refused(text, what):
    with pytest.raises(ArchitectureError, match="is not allowed in a table"):
        propose(named(text.replace(".", ""), what), {"num_heads": 3}, "mills", GRAIN)
    assert propose(named("plain", "tensor"), {"num_heads": 3}, "mills", GRAIN).passed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("inf"), "odd is inf, which is not allowed in a table"),
        (object, "odd is <class 'object'>, which is not"),
        ({"a": [float("nan")]}, "odd is {'a': .nan.}, which is not"),
    ],
)
def test_a_value_that_cannot_be_written_is_refused(value, message):
    with pytest.raises(ArchitectureError, match=message):
        propose(Mills(), {"num_heads": 3, "odd": value}, "mills", GRAIN)


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": TEXTS["a string that ends"]},
        {"hidden_size": "a lot"},
        {"rope_parameters": 5},
        {"num_hidden_layers": 10**9},
        {"vocab_size": -1},
        {"to_dict": 5},
        {"max_position_embeddings": "long"},
        {"num_attention_heads": 0},
    ],
    ids=str,
)
def test_settings_that_make_no_model_are_refused(settings, llama, cli):
    code, out, err = cli("inspect", llama(**settings), "--propose")
    assert (code, out) == (1, "")
    assert "unexpected" not in err


# ── live models ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "names",
    [
        *(
            ["pipeline"],
            ["os"],
            ["AutoModel"],
            ["PreTrainedModel"],
            ["logging"],
            ["LlamaConfig"],
            ["__name__"],
        ),
        *("LlamaForCausalLM", 5, True, {"0": "LlamaForCausalLM"}, [5], [None], [["LlamaForCausalLM"]], [""]),
        *([text] for text in TEXTS.values()),
    ],
    ids=str,
)
def test_only_a_class_of_models_can_be_named(names, llama):
    folder = llama(architectures=names)
    with pytest.raises(ArchitectureError, match=r"class"):
        propose_for(folder)
    with pytest.raises(ArchitectureError, match=r"class"):
        class_of_transformers(json.loads((folder / "config.json").read_text()), "a model")


@pytest.mark.parametrize("named", [True, False])
def test_code_beside_a_model_is_never_run(named, made, cli, capsys, monkeypatch):
    """``auto_map`` names a module in the folder, for the configuration, the model and the tokenizer."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked to run it"))
    shutil.copytree(made("llama"), "model")
    Path("model/modeling_mine.py").write_text(f"import pathlib\n{CODE}\nclass Mine: pass\n")
    file = Path("model/config.json")
    config = json.loads(file.read_text())
    parts = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    config["auto_map"] = dict.fromkeys(parts, "modeling_mine.Mine")
    if not named:
        del config["architectures"]
        config.pop("tie_word_embeddings", None)
    file.write_text(json.dumps(config))
    draft = cli("inspect", "model", "--propose", "-o", "draft.family")
    assert draft[0] == (0 if named else 1)
    cli("inspect", "model")
    cli("verify", "model")
    cli("align", "model", made("llama", 2), "-o", "pi.safetensors")
    config.pop("auto_map")  # what nobody knows is refused: let it pass, so that the library sees it
    model = Model.open("model", config=config)
    assert "auto_map" in file.read_text()
    assert type(LiveModel.of(model).module).__name__ == ("LlamaForCausalLM" if named else "LlamaModel")


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "someone/kernel:fast"},
        {"experts_implementation": "someone/kernel"},
        {"attn_implementation": {"": "eager", "text_config": "someone/kernel"}},
        {"text_config": {"attn_implementation": "someone/kernel"}},
        {"attn_implementation": "flash_attention_2"},
    ],
    ids=str,
)
def test_kernels_are_not_fetched(settings, llama, made):
    """transformers would fetch them from the hub, and run them."""
    with pytest.raises(ArchitectureError, match="asks for code that is not in the library"):
        propose_for(llama(**settings))
    folder = Path(shutil.copytree(made("llama"), "whole"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(ArchitectureError, match="code that is not in the library|does not know"):
        LiveModel.of(Model.open(folder))
    assert LiveModel.of(Model.open(folder, config=config)).outputs(), "another configuration is not read"


def test_an_adapter_beside_a_model_is_not_loaded(made):
    """transformers would load the model that it names, wherever that is, and PEFT what else it names."""
    folder = Path(shutil.copytree(made("llama"), "whole"))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(made("gpt2"))}))
    module = LiveModel.of(Model.open(folder)).module
    assert type(module).__name__ == "LlamaForCausalLM"
    assert not any("lora" in name for name, _ in module.named_modules())


# ── the program ──────────────────────────────────────────────────────────────────────────────


def test_the_program_runs_no_text():
    """The one exception is a file of tables that the user names."""
    source = Path(transfusion.__file__).parent
    found = []
    for file in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("exec", "eval", "compile", "__import__"):
                found.append(f"{file.relative_to(source)}: {called}")
            if called.endswith("exec_module"):
                found.append(f"{file.relative_to(source)}: {called}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", file
    assert found == ["families/__init__.py: spec.loader.exec_module"]
