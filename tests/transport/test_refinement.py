"""Refinement: the fine-tune of A as the teacher, synthetic inputs, and what is written in the end."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned, often
from tests.transport.test_adapter import train_adapter
from transfusion import align, transport
from transfusion.cli.results import _lines
from transfusion.errors import MismatchError, SettingError, UselessResultError
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.running.building import build
from transfusion.running.probes.changed_inputs import (
    REACH,
    adversarial,
    corrupted_images,
    invert,
    recombined_texts,
    roughness,
)
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.progress import Progress
from transfusion.runtime.resources import Resources
from transfusion.transport.alpha import Alpha
from transfusion.transport.alpha_on_probes import AlphaSearch, OutputShift
from transfusion.transport.plan import TransportPlan
from transfusion.transport.record import OutputRecord
from transfusion.transport.refinement import inputs as refinement_inputs
from transfusion.transport.refinement import refine as refining
from transfusion.transport.refinement import starts, teaching, training
from transfusion.transport.refinement.answers import OutputTargets, with_similarities
from transfusion.transport.refinement.descent import Schedule, find_rate, train
from transfusion.transport.refinement.inputs import RefinementInputs
from transfusion.transport.refinement.settings import RefinementSettings, describe_refinement
from transfusion.transport.refinement.starts import choose_start

VIT = "vit-classifier"


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """Few inputs, so that the runs are short."""
    monkeypatch.setattr(refinement_inputs, "INVERTED", 16)
    monkeypatch.setattr(refinement_inputs, "INVERSION_STEPS", 5)
    monkeypatch.setattr(refinement_inputs, "HELD_OUT", 32)
    monkeypatch.setattr(refinement_inputs, "POOL", 64)
    monkeypatch.setattr(teaching, "BATCH", 16)
    monkeypatch.setattr(starts, "FITTED", 32)


@pytest.fixture(scope="module")
def inputs(made, aligned, tmp_path_factory):
    """Return the parameters of a transport onto a stranger: ``inputs(case)``."""
    done: dict[str, dict[str, object]] = {}

    def of(case: str, onto: str | None = None) -> dict[str, object]:
        if (key := f"{case} {onto}") not in done:
            base = onto or case
            a, b = made(base), made(base, 2)
            tuned = finetuned(CASES[case], a, tmp_path_factory.mktemp("t") / "tuned")
            done[key] = {"finetuned": tuned, "base": a, "onto": b, "via": aligned(a, b, method="naive")}
        return done[key]

    return of


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def equal(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Interrupted(Progress):
    """Interrupts a refinement after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    @contextmanager
    def bar(self, total=None, text=""):
        def advance(text, done=None, total=None):
            if done == self.after and text.startswith("refining"):
                raise KeyboardInterrupt

        yield advance


# ── what is learned ──────────────────────────────────────────────────────────────────────────


REFINED = [(VIT, None), ("bert-classifier", "bert"), ("llama", None), ("clip", None)]


@pytest.mark.parametrize(
    ("case", "onto"),
    often([*REFINED, ("vit", None), ("open_clip", None), ("timm-vit", None)], REFINED),
)
def test_a_refined_model_answers_more_like_the_fine_tune(case, onto, inputs, tmp_path):
    asked = {"refine": True, "refine_steps": 24, "refine_keep": 0.0, "output": tmp_path / "out"}
    moved = transport(**inputs(case, onto), **asked)
    record = moved.metadata()["refinement"]
    before, after = record["divergence"]
    assert after < 0.98 * before, record
    assert 0 < record["steps"] <= 24
    Model.open(tmp_path / "out")
    info = json.loads((tmp_path / "out" / "transfusion.json").read_text())
    assert info["refinement"] == json.loads(json.dumps(record))


def test_nothing_is_lost_where_pi_is_exact(shuffled, tmp_path_factory):
    a, b = shuffled(VIT)
    tuned = finetuned(CASES[VIT], a, tmp_path_factory.mktemp("t") / "tuned")
    moved = transport(tuned, base=a, onto=b, via=align(a, b), refine=True, refine_steps=12)
    record = moved.metadata()["refinement"]
    assert record["start"] == "moved"
    assert record["divergence"][0] < 1e-5
    assert record["divergence"][1] <= record["divergence"][0] + 1e-6, "nothing was lost"


def test_b_is_the_start_where_pi_does_harm(inputs):
    given = inputs(VIT)
    noted: list[str] = []

    class Noted(Progress):
        def note(self, text: str) -> None:
            noted.append(text)

    moved = transport(**given, alpha=30.0, refine=True, refine_steps=2, progress=Noted())
    assert moved.metadata()["refinement"]["start"] == "base"
    lines = _lines(moved.metadata())
    assert "tensors moved" not in lines[0]
    assert not [one for one in lines if one.startswith(("same lineage", "predicted"))], (
        "π is not in the result"
    )
    assert any("starts from B" in one for one in noted)


class Lessons:
    """Stands for what a student is taught: wanted logits, and students that are logits themselves."""

    judges, batch, targets = ("synthetic",), 64, OutputTargets("classes", ("logits",))

    def __init__(self) -> None:
        self.wanted = {"logits": 6 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))}
        self.held_out = {"synthetic": self.wanted}

    def wanted_of(self, kind, given):
        return [self.wanted]

    def answers(self, student, inputs):
        return {"logits": student}

    def measure(self, student, kind):
        pair = self.wanted, self.answers(student, None)
        return teaching.Agreement(self.targets.agreement(*pair), float(self.targets.loss(*pair)))


def test_a_start_that_answers_right_with_small_logits_is_taken():
    lessons = Lessons()
    right = lessons.wanted["logits"]
    small, half_right = right / 50, right.where(torch.arange(64)[:, None] % 4 > 0, right.roll(1, 1))
    apart = [lessons.measure(one, "synthetic").divergence for one in (small, half_right / 8)]
    assert apart[0] > apart[1], "as they are, the wrong answers look nearer"
    assert choose_start(lessons, {"base": half_right / 8, "moved": small})[0] == "moved"


def test_a_refinement_that_brings_nothing_writes_nothing_unless_asked_to(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", _spoiled)
    monkeypatch.setattr(refining, "choose_start", _from_b)
    given = {**inputs(VIT), "refine": True, "refine_steps": 2, "output": tmp_path / "out"}
    noted: list[str] = []

    class Noted(Progress):
        def note(self, text: str) -> None:
            noted.append(text)

    with pytest.raises(
        UselessResultError, match="nothing was written: the refinement brought nothing"
    ) as refused:
        transport(**given)
    assert not (tmp_path / "out").exists()
    kept = tmp_path / ".out.partial"
    assert refused.value.hint.endswith(f"writes nevertheless; what was found is kept in {kept}")
    assert [*(kept / "kept").glob("refinement-*")], "to write nevertheless is no work of hours again"
    transport(**given, force_unrelated=True, progress=Noted())
    assert (tmp_path / "out").exists()
    assert any("brought nothing" in one for one in noted)
    ways = [one.partition("starts again ")[2] for one in noted if "came no nearer" in one]
    assert ways == ["at an eighth of the learning rate", "and keeps less of B"], "from B it started already"


def _spoiled(parameters, *args, **kwargs) -> int:
    """Train in vain: the answers only get worse."""
    parameters["classifier.weight"].data.mul_(50)
    return 0


def _from_b(teaching, starts):
    """Take B as the start, as if π did harm."""
    return "base", {"base": {kind: teaching.measure(starts["base"], kind) for kind in teaching.judges}}


def test_without_photographs_the_user_is_told_how_to_get_them(inputs, monkeypatch):
    noted: list[str] = []

    class Noted(Progress):
        def note(self, text: str) -> None:
            noted.append(text)

    shown = transport(**inputs(VIT), refine=True, refine_steps=1).metadata()["refinement"]["inputs"]
    assert shown[0] == "synthetic inputs, half of them photographs"
    for module in (refinement_inputs, teaching):
        monkeypatch.setattr(module, "has_natural", lambda kind: False)
    shown = transport(**inputs(VIT), refine=True, refine_steps=1, progress=Noted()).metadata()
    assert shown["refinement"]["inputs"][0] == "synthetic inputs"
    assert sum("pip install 'transfusion-rebasin[images]'" in one for one in noted) == 1


def test_the_time_decides_on_the_steps_which_the_record_keeps(cli, inputs, tmp_path):
    given = inputs(VIT)
    moved = transport(**given, refine=True, refine_time="1s", output=tmp_path / "out")
    settings = moved.metadata()["settings"]["refinement"]
    assert settings["time"] is None
    assert 1 <= settings["steps"] < 20_000
    transport(repeat=tmp_path / "out", output=tmp_path / "again")
    assert equal(tmp_path / "out", tmp_path / "again"), "another machine takes as many steps"
    most = transport(**given, refine=True, refine_time=3600.0, refine_steps=2).metadata()
    assert most["settings"]["refinement"]["steps"] == 2


def test_half_of_the_time_is_for_the_steps_however_long_the_fine_tune_was_asked():
    lessons = SimpleNamespace(settings=RefinementSettings(steps=20_000, time=1e6), file=lambda name: None)
    for spent, steps in ((0, 2000), (2e5, 1600), (9e5, 1000), (5e6, 1000)):
        one = training.Training(lessons, began=time.monotonic() - spent)
        rate, found = one._decided(lambda: (1e-3, 500.0))
        assert (rate, found) == (1e-3, pytest.approx(steps, abs=1))


def test_a_heavier_weight_keeps_more_of_b(inputs):
    given = inputs(VIT)
    kept = [
        transport(**given, refine=True, refine_steps=24, refine_keep=weight).metadata()["refinement"]["kept"]
        for weight in (0.0, 10.0)
    ]
    assert kept[1] > kept[0]


def test_own_inputs_are_used(inputs, tmp_path):
    from safetensors.torch import save_file

    given = inputs(VIT)
    pixels = torch.randn(20, *_image_shape(given["base"]))
    save_file({"pixel_values": pixels}, tmp_path / "own.safetensors")
    moved = transport(**given, refine=True, refine_steps=3, calibrate=tmp_path / "own.safetensors")
    record = moved.metadata()["refinement"]
    assert any("20 examples of" in one for one in record["inputs"])
    assert "own" in record["before"].keys() & record["after"].keys()
    assert "of your inputs" in describe_refinement(record)


@pytest.mark.parametrize(("case", "shape"), [(VIT, None), ("bert-classifier", (20, 12))])
def test_some_own_inputs_are_held_out(case, shape, made):
    model = Model.open(made(case))
    module = build(model, torch.float32)
    if shape is None:
        own = {"pixel_values": torch.arange(20.0)[:, None, None, None] * torch.ones(_image_shape(made(case)))}
    else:
        own = {"input_ids": torch.arange(20)[:, None].expand(shape)}
    name = next(iter(own))
    inputs = RefinementInputs(model, module, 0, own=own)
    held = inputs.held_out()["own"][name]
    assert held.flatten(1)[:, 0].tolist() == [0, 5, 10, 15]
    drawn = torch.cat([inputs.draw(step, 32)[1][name] for step in range(4)])
    alone = [one for one in drawn.flatten(1) if len(one.unique()) == 1]
    assert alone, "some are as they were given"
    assert not {float(one[0]) for one in alone} & {0.0, 5.0, 10.0, 15.0}
    assert len(drawn.flatten(1).unique(dim=0)) > 16, "others are mixed"


def _image_shape(folder) -> tuple[int, int, int]:
    config = json.loads((Path(folder) / "config.json").read_text())
    return config["num_channels"], config["image_size"], config["image_size"]


# ── what is written ──────────────────────────────────────────────────────────────────────────


def test_a_seed_gives_the_same_bits_and_another_one_does_not(inputs, tmp_path):
    given = {**inputs(VIT), "refine": True, "refine_steps": 2}
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        transport(**given, seed=seed, output=tmp_path / name)
    assert equal(tmp_path / "one", tmp_path / "two")
    assert not equal(tmp_path / "one", tmp_path / "three")


def test_an_interrupted_refinement_goes_on_to_the_same_bits(inputs, tmp_path):
    given = {**inputs(VIT), "refine": True, "refine_steps": 6}
    transport(**given, output=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        transport(**given, output=tmp_path / "out", progress=Interrupted(4))
    assert not (tmp_path / "out").exists()
    steps: list[int] = []

    class Counted(Progress):
        @contextmanager
        def bar(self, total=None, text=""):
            yield lambda text, done=None, total=None: steps.append(done) if done else None

    transport(**given, output=tmp_path / "out", progress=Counted())
    assert steps[0] == 4, "the first three steps were kept"
    assert equal(tmp_path / "whole", tmp_path / "out")


class Phases(Progress):
    """Remembers every bar, and how far it came."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.totals: dict[str, int | None] = {}

    @contextmanager
    def bar(self, total=None, text=""):
        self.totals[text] = total
        self.done.setdefault(text, 0)

        def advance(_: str, done=None, total=None) -> None:
            self.done[text] += 1

        yield advance


@pytest.mark.parametrize(
    ("case", "building", "preparing"),
    [
        (VIT, "building the models", "inverting inputs"),
        ("gpt2", "building the student", "writing texts"),
        ("gpt2", "building the fine-tune", "answering texts"),
    ],
)
def test_every_long_phase_has_a_bar_and_prepared_inputs_are_kept(case, building, preparing, inputs, tmp_path):
    given = {**inputs(case), "refine": True, "refine_steps": 3}
    with pytest.raises(KeyboardInterrupt):
        transport(**given, output=tmp_path / "out", progress=Interrupted(3))
    again = Phases()
    transport(**given, output=tmp_path / "out", progress=again)
    first = Phases()
    transport(**given, output=tmp_path / "whole", progress=first)
    assert {building, "comparing starts with the fine-tune", "refining"} <= {*first.done}
    assert first.done[preparing] >= first.totals[preparing] > 0
    assert preparing not in again.done, "nothing is prepared twice"
    assert equal(tmp_path / "whole", tmp_path / "out")


def test_the_number_of_threads_is_tried_once_and_recorded(inputs, tmp_path, monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(refining, "fitting_threads", lambda work, most: tried.append(most) or 1)
    given = {**inputs(VIT), "refine": True, "refine_steps": 3}
    with pytest.raises(KeyboardInterrupt):
        transport(**given, output=tmp_path / "out", progress=Interrupted(3))
    moved = transport(**given, output=tmp_path / "out")
    assert len(tried) == 1, "an interrupted run goes on with as many threads"
    assert moved.metadata()["settings"]["refinement"]["threads"] == 1
    transport(repeat=tmp_path / "out", output=tmp_path / "again")
    asked = transport(**given, resources=Resources(jobs=2)).metadata()
    assert asked["settings"]["refinement"]["threads"] == 2, "whoever asks for a number gets it"
    assert len(tried) == 1


def test_no_run_goes_on_from_the_state_of_another(inputs, tmp_path):
    given = {**inputs(VIT), "refine": True, "refine_steps": 6}
    with pytest.raises(KeyboardInterrupt):
        transport(**given, output=tmp_path / "out", progress=Interrupted(4))
    transport(**given, seed=1, output=tmp_path / "out")
    transport(**given, seed=1, output=tmp_path / "alone")
    assert equal(tmp_path / "out", tmp_path / "alone")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_inputs_are_drawn_by_no_step(seed, made):
    model = Model.open(made(VIT))
    drawn = refinement_inputs.RefinementInputs(model, build(model, torch.float32), seed)
    held_out = {tuple(one.flatten().tolist()) for one in drawn.held_out()["synthetic"]["pixel_values"]}
    for step in range(8):
        images = drawn.draw_plain(step, 32)["pixel_values"]
        assert not any(tuple(one.flatten().tolist()) in held_out for one in images)


def test_a_fine_tune_with_more_classes_than_a_is_refined(made, aligned, tmp_path):
    import transformers

    a, b = made(VIT), made(VIT, 2)
    config = transformers.AutoConfig.from_pretrained(a, num_labels=11)
    torch.manual_seed(0)
    live = transformers.ViTForImageClassification.from_pretrained(
        a, config=config, ignore_mismatched_sizes=True
    )
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    live.save_pretrained(tmp_path / "tuned")
    via = aligned(a, b, method="naive")
    moved = transport(tmp_path / "tuned", base=a, onto=b, via=via, refine=True, refine_steps=2)
    assert moved.module().config.num_labels == 11


def test_a_refinement_is_repeated_bit_for_bit(inputs, tmp_path):
    given = {**inputs(VIT)}
    given["via"].save(tmp_path / "pi.safetensors")
    given["via"] = tmp_path / "pi.safetensors"
    transport(**given, refine=True, refine_steps=2, output=tmp_path / "first")
    transport(repeat=tmp_path / "first", output=tmp_path / "second")
    assert equal(tmp_path / "first", tmp_path / "second")


def test_an_adapter_stays_an_adapter_of_its_rank(made, aligned, tmp_path):
    import peft

    a, b = made(VIT), made(VIT, 2)
    train_adapter(a, tmp_path / "lora", ["q_proj", "fc1"])
    via = aligned(a, b, method="naive")
    moved = transport(
        tmp_path / "lora", base=a, onto=b, via=via, refine=True, refine_steps=24, output=tmp_path / "out"
    )
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < before
    plain = transport(tmp_path / "lora", base=a, onto=b, via=via).state_dict()
    written = tensors(tmp_path / "out")
    assert {name: one.shape for name, one in written.items()} == {
        name: one.shape for name, one in plain.items()
    }
    assert any(not torch.equal(written[name], plain[name]) for name in plain), "it was trained"
    peft.PeftModel.from_pretrained(build(Model.open(b), torch.float32), str(tmp_path / "out"))


def test_an_adapter_brings_a_head_that_b_lacks(made, aligned, tmp_path):
    import peft
    import transformers

    a, b = made("bert"), made("bert", 2)
    live = transformers.BertForSequenceClassification.from_pretrained(a, num_labels=3)
    config = peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query", "value"])
    tuned = peft.get_peft_model(live, config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    tuned.save_pretrained(tmp_path / "lora")
    via = aligned(a, b, method="naive")
    given = {"base": a, "onto": b, "via": via, "output": tmp_path / "out"}
    moved = transport(tmp_path / "lora", **given, refine=True, refine_steps=24)
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < before
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "lora").keys()


def test_a_rank_leaves_b_alone_and_writes_a_lora(inputs, tmp_path):
    import peft

    given = inputs(VIT)
    moved = transport(**given, refine=True, refine_steps=24, refine_rank=2, output=tmp_path / "out")
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < before
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (2, "LORA")
    onto = build(Model.open(given["onto"]), torch.float32)
    own = {name: one.clone() for name, one in onto.named_parameters()}
    loaded = peft.PeftModel.from_pretrained(onto, str(tmp_path / "out"))
    assert any("lora_B" in name and one.abs().max() > 0 for name, one in loaded.named_parameters())
    base = {name.replace(".base_layer", ""): one for name, one in loaded.get_base_model().named_parameters()}
    assert all(torch.equal(base[name], one) for name, one in own.items()), "B is as it was"


def test_changed_settings_and_ties_come_along_and_are_refused_for_a_lora(made, aligned, tmp_path):
    """Of an untied head, too: the fine-tune is trained with a head of its own."""
    a, b = made("mistral-tied"), made("mistral-tied", 2)
    tuned = finetuned(CASES["mistral-tied"], a, tmp_path / "tuned")
    state = load_file(tuned / "model.safetensors")
    state["lm_head.weight"] = 1.2 * state["model.embed_tokens.weight"]
    save_file(state, tuned / "model.safetensors", {"format": "pt"})
    config = json.loads((tuned / "config.json").read_text())
    changed = {"tie_word_embeddings": False, "rms_norm_eps": 0.3}
    (tuned / "config.json").write_text(json.dumps({**config, **changed}))
    given = {"base": a, "onto": b, "via": aligned(a, b, method="naive"), "refine": True, "refine_steps": 2}
    transport(tuned, **given, output=tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: found[key] for key in changed} == changed
    assert "lm_head.weight" in tensors(tmp_path / "out")
    with pytest.raises(MismatchError, match="an adapter cannot have: rms_norm_eps, lm_head.weight"):
        transport(tuned, **given, refine_rank=2)


def test_a_head_that_b_lacks_goes_with_the_lora(inputs, tmp_path):
    given = inputs("bert-classifier", "bert")
    transport(**given, refine=True, refine_steps=2, refine_rank=2, output=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["classifier"]
    assert any("classifier" in name for name in tensors(tmp_path / "out"))


def test_the_command_line_says_what_was_reached(cli, inputs, tmp_path):
    given = inputs(VIT)
    given["via"].save(tmp_path / "pi.safetensors", force=True)
    code, out, _ = cli(
        "transport",
        given["finetuned"],
        *("--base", given["base"], "--onto", given["onto"], "--via", tmp_path / "pi.safetensors"),
        *("--refine", "--refine-steps", 3, "-o", tmp_path / "out"),
    )
    assert code == 0
    assert "agrees with the fine-tune on" in out
    assert "refined from" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"refine_steps": 5}, "nothing is refined"),
        ({"refine_rank": 5}, "nothing is refined"),
        ({"refine": True, "refine_steps": 0}, "at least one step"),
        ({"refine": True, "refine_rank": 0}, "a rank is at least 1"),
        ({"refine": True, "refine_keep": -1.0}, "must be 0 or more"),
        ({"refine_time": "5m"}, "nothing is refined"),
        ({"refine": True, "refine_time": "five minutes"}, "is not a duration"),
        ({"refine": True, "refine_time": 0.0}, "must be above 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(asked, message, inputs):
    with pytest.raises(SettingError, match=message):
        transport(**inputs(VIT), **asked)


def test_a_limit_of_memory_is_refused_before_any_work(inputs):
    with pytest.raises(SettingError, match="a refinement holds whole models"):
        transport(**inputs(VIT), refine=True, resources=Resources(memory=10**9))


def test_a_dry_run_trains_nothing(cli, inputs, tmp_path):
    given = inputs(VIT)
    code, out, err = cli(
        "transport",
        given["finetuned"],
        *("--base", given["base"], "--onto", given["onto"], "--refine", "--dry-run", "-o", tmp_path / "out"),
    )
    assert code == 0, err
    assert "would write" in out
    assert not (tmp_path / "out").exists()


def test_an_adapter_keeps_its_own_rank(made, aligned, tmp_path):
    a, b = made(VIT), made(VIT, 2)
    train_adapter(a, tmp_path / "lora", ["q_proj"])
    with pytest.raises(SettingError, match="keeps its own rank"):
        transport(
            tmp_path / "lora",
            base=a,
            onto=b,
            via=aligned(a, b, method="naive"),
            refine=True,
            refine_rank=2,
        )


# ── its parts ────────────────────────────────────────────────────────────────────────────────


def by(loss):
    """Return what adds the gradients of a loss, and returns it."""

    def add(step: int) -> float:
        value = loss(step)
        value.backward()
        return float(value.detach())

    return add


def _line() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def _trained(model: torch.nn.Linear, until: int = 24, **how) -> int:
    """Train for 24 steps, and stop as by Ctrl-C after some of them."""

    def loss(step: int) -> torch.Tensor:
        if step == until:
            raise KeyboardInterrupt
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return (model(batch) - 1).square().mean()

    values = {"rate": 0.05, "steps": 24, **how}
    return train(dict(model.named_parameters()), by(loss), lambda: float(loss(99).detach()), 9.0, **values)


def test_a_training_goes_on_where_it_was_saved(tmp_path):
    whole, stopped, resumed = _line(), _line(), _line()
    best = _trained(whole)
    assert 0 < best <= 24
    with pytest.raises(KeyboardInterrupt):
        _trained(stopped, 13, file=tmp_path / "state.pt")
    assert _trained(resumed, file=tmp_path / "state.pt") == best
    assert torch.equal(whole.weight, resumed.weight)


def _steps_of(values: list[float], steps: int = 100) -> tuple[int, list[int], float]:
    """Train while the answers are as far from the fine-tune's as the values say, from 1.0 on."""
    found, taken, weight = iter(values), [], torch.nn.Parameter(torch.ones(1))
    best = train(
        {"w": weight},
        by(lambda step: taken.append(step) or weight.square().sum()),
        lambda: next(found),
        1.0,
        rate=0.01,
        steps=steps,
    )
    return best, taken, float(weight.detach())


def test_a_training_ends_after_a_fifth_of_its_steps_if_nothing_improves():
    best, taken, weight = _steps_of([1.1] * 20)
    assert (best, len(taken), weight) == (0, 20, 1.0)


def test_a_training_ends_sooner_when_nothing_improves_any_more():
    best, taken, weight = _steps_of([0.9, *[0.95] * 30])
    assert best == 5
    assert 45 < len(taken) < 90, "what remains is halved after eight checks, and again after eight more"
    assert weight > 0.9, "where it was best"


def test_the_learning_rate_rises_and_falls_to_nothing_and_never_jumps():
    whole = Schedule(0.1, 10, 100)
    rates = [whole.rate(step) for step in range(100)]
    assert max(rates) == rates[10] == 0.1
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    shorter = whole.shortened(60)
    assert shorter.rate(60) == whole.rate(60)
    assert shorter.last == 80
    assert shorter.rate(79) < 0.001


def test_a_later_state_is_preferred_to_a_lucky_one():
    best, taken, _ = _steps_of([0.9, 0.5, *[0.6] * 5, *[0.51] * 13])
    assert best == len(taken) > 10, "the last one, which is hardly farther away"
    best, _, _ = _steps_of([0.9, 0.5, *[0.6] * 18])
    assert best == 10
    best, _, _ = _steps_of([1.01] * 20)
    assert best == 0, "no state farther away than the start"


def test_a_training_that_improves_takes_all_its_steps():
    best, taken, _ = _steps_of([0.9**number for number in range(1, 21)])
    assert (best, len(taken)) == (100, 100)


@pytest.mark.parametrize(
    ("expected", "found"), [(0.02, 0.02), (0.0002, 0.0032), (8.0, 2.0)], ids=["good", "too-low", "too-high"]
)
def test_a_learning_rate_that_does_nothing_or_harm_is_replaced(expected, found):
    weight, seen = torch.nn.Parameter(torch.tensor([1.0])), []

    def loss(step: int) -> torch.Tensor:
        seen.append(abs(float(weight.detach()) - 0.5))
        return (weight - 0.5).square().sum()

    def apart() -> float:
        """What was thrown off stays so."""
        farthest = max(seen)
        seen.clear()
        return farthest if farthest > 1 else abs(float(weight.detach()) - 0.5)

    rate, seconds = find_rate({"w": weight}, by(loss), apart, 0.5, expected, 100)
    assert rate == pytest.approx(found)
    assert float(weight.detach()) == 1.0, "it was only tried"
    assert seconds > 0


def test_corrupted_images_are_of_the_same_shape_and_mostly_others():
    images = torch.randn(64, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    corrupted = corrupted_images(images, torch.Generator().manual_seed(1))
    changed = (corrupted != images).flatten(1).any(1)
    assert corrupted.shape == images.shape
    assert 0.6 < changed.float().mean() < 1
    assert torch.equal(corrupted, corrupted_images(images, torch.Generator().manual_seed(1)))


def test_recombined_texts_keep_the_place_of_every_token(made):
    model = Model.open(made("bert"))
    subject = ProbedModel(model, build(model, torch.float32))
    ids = torch.arange(16 * 20).reshape(16, 20)
    mixed = recombined_texts(subject, ids, torch.Generator().manual_seed(0))["input_ids"]
    assert torch.equal(mixed % 20, ids % 20)
    assert ((mixed // 20).diff(dim=1) != 0).any(1).all(), "every text is made of several"


def test_inversion_finds_what_a_model_is_sure_of():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    start = torch.randn(8, 1, 8, 8)
    classes = torch.arange(8) % 4

    def loss(images):
        return torch.nn.functional.cross_entropy(model(images), classes)

    found = invert(start, loss, 60, torch.Generator().manual_seed(0))
    assert loss(found) < 0.5 * loss(start)
    smooth = torch.ones(1, 1, 8, 8)
    assert float(roughness(smooth)) == 0 < float(roughness(start))
    assert found.abs().max() <= 3


def test_adversarial_inputs_raise_the_loss_and_stay_near():
    weight = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    start = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(2))

    def loss(pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.flatten(1) @ weight).square().mean()

    found = adversarial(start, loss, torch.Generator().manual_seed(0))
    assert loss(found) > 1.05 * loss(start)
    assert (found - start).abs().max() <= REACH + 1e-6
    reaches = (found - start).abs().flatten(1).amax(1)
    assert reaches.max() > 2 * reaches.min()


def test_logits_are_compared_as_distributions_and_other_outputs_as_vectors():
    logits, vectors = torch.randn(6, 5), torch.randn(6, 3, 4)
    outputs = {"logits": logits, "last_hidden_state": vectors}
    assert OutputTargets.between(outputs, outputs).names == ("logits",)
    shifted = {"logits": logits + 3.0, "last_hidden_state": vectors}
    targets = OutputTargets.between(outputs, shifted)
    assert float(targets.loss(outputs, shifted)) == pytest.approx(0, abs=1e-6), "the same distribution"
    assert targets.agreement(outputs, shifted) == 1
    alone = OutputTargets.between({"x": vectors}, {"x": vectors})
    assert alone.names == ("x",)
    assert float(alone.loss({"x": vectors}, {"x": vectors + 1})) > 0.1
    assert OutputTargets.between({"logits": logits[:, :1]}, {"logits": logits[:, :1]}).kind == "vectors"


def test_two_towers_are_compared_by_their_similarities():
    towers = {"image_features": torch.randn(4, 8), "text_features": torch.randn(4, 8)}
    found = with_similarities(towers)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    rotated = with_similarities({name: one @ turn for name, one in towers.items()})
    targets = OutputTargets.between(found, rotated)
    assert set(targets.names) == {"logits_per_image", "logits_per_text"}
    assert float(targets.loss(found, rotated)) == pytest.approx(0, abs=1e-4)


# ── no harm by default ───────────────────────────────────────────────────────────────────────


def _search(direction: float, reach: float) -> AlphaSearch:
    one = AlphaSearch.__new__(AlphaSearch)
    one.at = lambda alpha: OutputShift(alpha, direction, alpha, reach * alpha)  # type: ignore[method-assign]
    return one


def _harmless(direction: float, reach: float, *bound: float) -> float:
    search = _search(direction, reach)
    return search.harmless(search.at(1.0), *bound).alpha


def test_a_default_alpha_is_lowered_where_b_would_move_far_in_another_direction():
    assert _harmless(0.3, 0.5) == 1.0
    assert _harmless(0.95, 3.0) == 1.0, "B moves as A did"
    assert 0.48 < _harmless(0.3, 1.2) <= 0.5
    assert _harmless(0.6, 1.2) < 1.0
    assert _harmless(0.6, 1.2, 0.5) == 1.0, "as for an α that was chosen by the outputs"


def test_a_functional_pi_is_checked_unless_alpha_is_given(made, tmp_path_factory, monkeypatch):
    a, b = made(VIT), made(VIT, 2)
    tuned = Model.open(finetuned(CASES[VIT], a, tmp_path_factory.mktemp("t") / "tuned"))
    plan = TransportPlan.between(Pair.open(a, b), align(a, b, method="functional"))
    monkeypatch.setattr(plan.__class__, "alpha_search", lambda *args, **more: _named(0.3, 1.2))
    alpha, record = plan.choose_alpha(None, [tuned], OutputRecord())
    assert alpha.default == pytest.approx(0.5, abs=0.02)
    assert record.output_shift["lowered"]["reach"] == 1.2
    assert plan.choose_alpha(1.0, [tuned], OutputRecord()) == (Alpha(1.0), OutputRecord())
    monkeypatch.setattr(plan.__class__, "alpha_search", lambda *args, **more: _named(0.01, 0.5))
    with pytest.raises(UselessResultError, match="would change in another direction than A's did"):
        plan.choose_alpha(None, [tuned], OutputRecord())


def _named(direction: float, reach: float) -> AlphaSearch:
    from transfusion.running.probes.probed_model import Probes

    search = _search(direction, reach)
    search.probes = Probes([], "some inputs")
    return search


@pytest.mark.parametrize("fate", ["keep", "drop"])
def test_a_fine_tune_that_added_tokens_is_asked_about_those_of_its_base(fate, made, aligned, tmp_path):
    """A and B could not even read the new ones, and have no logits for them."""
    a, b = made("gpt2", 1), made("gpt2", 2)
    module = build(Model.open(finetuned(CASES["gpt2"], a, tmp_path / "tuned")), torch.float32)
    before = module.config.vocab_size
    module.resize_token_embeddings(before + 3, mean_resizing=False)
    moved = transport(
        module,
        base=a,
        onto=b,
        via=aligned(a, b, method="naive"),
        new_tokens=fate,
        refine=True,
        refine_steps=2,
        force_unrelated=True,
    )
    assert moved.metadata()["refinement"]["measure"] == "answers"
    assert moved.config["vocab_size"] == before + (3 if fate == "keep" else 0)
