"""The whole screen of `transport` with defaults: three relations of A and B, three kinds of fine-tunes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import make_models
from transfusion import transport
from transfusion.cli.console import in_options
from transfusion.matching.methods import METHODS, RECOMMENDATION, USES
from transfusion.runtime.progress import Progress

FINETUNES = {"lora": "llama", "tuned": "llama", "lora.safetensors": "flux"}
RELATIONS = ("trained-on", "b", "apart")
LOADS = {
    "lora": 'import peft, transformers; model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained("{b}"), "{out}")',
    "tuned": 'import transformers; model = transformers.LlamaForCausalLM.from_pretrained("{out}")',
    "lora.safetensors": 'pipeline.load_lora_weights("{out}")  # or as the file that was moved',
}
DRIFT = """\
where the adapter acts, B's weights differ from A's by …; the adapter changes A's by …
in every direction of the adapter, B changed less than the adapter does
"""
SAME = (
    "same lineage: the units of B are where A has them: B descends from A, and a change of A fits B as it is"
)
SEEN = "cost to B: not measured: look at what it makes"
COST = "cost to B: not measured: transfusion evaluate {out} --against {b} --data TASK --support DATA"
FITS = {
    "lora": "the fine-tune fits {b} as it is: all of its 56 tensors are unchanged, with α = 1\n" + DRIFT,
    "tuned": "39 tensors moved onto {b} with α = 1\n",
    "lora.safetensors": "the fine-tune fits {b} as it is: all of its 24 tensors are unchanged, with α = 1\n"
    + DRIFT,
}
MOVES = {
    "lora": "56 tensors moved onto {b} with α = 1\n" + DRIFT,
    "tuned": "39 tensors moved onto {b} with α = 1\n",
    "lora.safetensors": "24 tensors moved onto {b} with α = 1\n" + DRIFT,
}
SCREENS = {
    "trained-on": "{fits}"
    + SAME
    + """
written to {out}
arrived: the whole change, as it is
{cost}
load it: {load}
""",
    "b": """{moves}alignable: the units of A were found again in B
written to {out}
arrived: the whole change, moved to where A's units are in B
{cost}
load it: {load}
""",
    "apart": """error: nothing was written: {a} and {b} are not alignable by permutation: a permutation matches the \
units of A and B hardly better than chance (… of the way to a perfect match; 10% would count)
hint: transport with --refine goes on: it trains the result to answer like the fine-tune, on synthetic inputs and \
without your data. {functional}--force-unrelated writes the permutation nevertheless.
type this next: transfusion transport {tuned} --base {a} --onto {b} -o {out} --refine
""",
}
FUNCTIONAL = "--method functional does without training and brings less. "


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A, B trained on from A, B shuffled, and B trained apart, of a Llama and of a Flux."""
    import diffusers
    import transformers

    root = tmp_path_factory.mktemp("screens")
    reader = make_models.tokenizer(["<unk>", "<s>", "</s>"], [])
    llama, flux = root / "llama", root / "flux"
    made = make_models.make(llama, transformers.LlamaForCausalLM, make_models.LLAMA, reader)
    assert len(list(made)) == 3
    make_models.make_adapter(llama / "a", llama / "lora")
    assert list(make_models.make_flux(flux))
    classes = {llama: transformers.LlamaForCausalLM, flux: diffusers.FluxTransformer2DModel}
    for folder, kind in classes.items():
        near = make_models.changed(kind.from_pretrained(folder / "a"), 0.05, seed=6)
        near.save_pretrained(folder / "trained-on")
    torch.manual_seed(9)
    transformers.LlamaForCausalLM(make_models.LLAMA).save_pretrained(llama / "apart")
    diffusers.FluxTransformer2DModel(**make_models.FLUX).save_pretrained(flux / "apart")
    for name in ("trained-on", "apart"):
        reader.save(str(llama / name / "tokenizer.json"))
    return root


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("finetune", FINETUNES)
def test_the_screen_of_a_transport_with_defaults(finetune, relation, models, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    family = FINETUNES[finetune]
    names = {"a": f"{family}/a", "b": f"{family}/{relation}", "tuned": f"{family}/{finetune}"}
    out = f"{finetune.partition('.')[0]}-on-{family}-{relation}{Path(finetune).suffix}"
    code, printed, said = cli(
        "transport", names["tuned"], "--base", names["a"], "--onto", names["b"], "-o", out
    )
    given = {**names, "out": out, "load": LOADS[finetune].format(**names, out=out)}
    given["fits"], given["moves"] = (one[finetune].format(**names) for one in (FITS, MOVES))
    given["cost"] = SEEN if finetune.endswith("safetensors") else COST.format(**names, out=out)
    given["functional"] = FUNCTIONAL if family == "llama" else ""
    expected = re.escape(SCREENS[relation].format(**given)).replace("…", ".*")
    assert re.fullmatch(expected, said + printed), said + printed
    assert code == (4 if relation == "apart" else 0)
    assert (models / out).exists() == (relation != "apart")


def test_the_json_ends_with_the_same(models, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(models)
    words = ["transport", "llama/tuned", "--base", "llama/a", "--onto", "llama/b", "--json", "-q"]
    code, printed, _ = cli(*words, "-o", tmp_path / "out")
    assert code == 0
    ended = json.loads(printed)["outcome"]
    assert ended["arrived"] == "the whole change, moved to where A's units are in B"
    scope: dict[str, object] = {}
    exec(ended["load"], scope)
    assert type(scope["model"]).__name__ == "LlamaForCausalLM", "the line that is printed loads the result"


def test_align_stops_where_weights_do_not_match(models, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(models)
    code, _, said = cli("align", "llama/a", "llama/apart", "-o", tmp_path / "pi.safetensors")
    assert code == 4
    assert "hardly better than chance" in said
    assert "transport with --refine" in said
    assert "type this next" not in said, "align refines nothing"
    assert not (tmp_path / "pi.safetensors").exists()
    code, printed, _ = cli(
        "align", "llama/a", "llama/apart", "-o", tmp_path / "pi.safetensors", "--method", "guarded"
    )
    assert code == 0, "whoever names a method gets exactly that"
    assert "not alignable by permutation" in printed


def test_a_refinement_goes_on_where_weights_do_not_match(models, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(models)
    words = ["transport", "llama/lora", "--base", "llama/a", "--onto", "llama/apart", "-o", tmp_path / "out"]
    code, printed, said = cli(*words, "--refine", "--refine-steps", 4, "--force-unrelated")
    assert code == 0, said
    lines = printed.splitlines()[-3:]
    assert re.fullmatch(
        r"arrived: (hardly anything: )?answers like the fine-tune's, .* → .*, on inputs that are not your task's",
        lines[0],
    )
    assert re.fullmatch(r"cost to B: B's own answers stay the same on \d+% of synthetic inputs", lines[1])
    record = json.loads((tmp_path / "out" / "transfusion.json").read_text())
    assert record["alignment"]["advice"]["predicted_by"].keys() == {"identity", "permutation", "functional"}


def test_a_dry_run_shows_a_bar_while_it_tries_the_machine(models, monkeypatch):
    monkeypatch.chdir(models)
    shown: list[str] = []

    class Shown(Progress):
        def bar(self, total=None, text=""):
            shown.append(text)
            return super().bar(total, text)

    asked = {"base": "llama/a", "onto": "llama/apart", "refine": True, "dry_run": True}
    assert transport("llama/lora", **asked, progress=Shown()).plan()["seconds_to_learn"] > 0
    assert "measuring how fast this machine is" in shown


def test_bases_of_other_shapes_stop_with_what_to_type(models, cli, monkeypatch, tmp_path):
    import transformers

    monkeypatch.chdir(models)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**make_models.LLAMA.to_dict(), "num_hidden_layers": 3})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_bytes(Path("llama/a/tokenizer.json").read_bytes())
    words = ["transport", "llama/lora", "--base", "llama/a", "--onto", tmp_path / "b", "-o", tmp_path / "out"]
    code, _, said = cli(*words)
    assert code == 4
    assert "different shapes (4 and 3 blocks)" in said
    assert said.endswith(f"\ntype this next: transfusion {' '.join(map(str, words))} --refine\n")
    assert "--force-unrelated" not in said, "there is no permutation between shapes"


def test_one_recommendation_for_users_wherever_they_look(cli):
    """README, the first page, questions and --help say the same words, which errors take apart."""
    words = " ".join(in_options(RECOMMENDATION).split())
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/index.md", "docs/faq.md"):
        assert words in " ".join((root / page).read_text().replace("`", "").split()), page
    _, printed, _ = cli("--help")
    assert words in " ".join(printed.split())


def test_every_method_is_listed_by_its_use(cli):
    listed = [name for names in USES.values() for name in names]
    assert sorted(listed) == sorted(METHODS)
    _, printed, _ = cli("transport", "--help")
    for name in METHODS:
        assert METHODS[name].about[:20] in printed, name
