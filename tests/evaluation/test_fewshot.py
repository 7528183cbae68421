"""One α for every layer from a few examples: right derivatives, what is harmful goes, and the file is good."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
import torch

from small_models import CASES, finetuned
from tests.evaluation.test_sweep import examples, loss_of
from transfusion.data.dataset import Dataset
from transfusion.errors import DataError, MismatchError, SettingError
from transfusion.evaluation.evaluator import Evaluator
from transfusion.evaluation.fewshot import (
    derivatives,
    draw_shots,
    fewshot,
    groups_of,
    learn,
    remaining_examples,
    same_examples,
)
from transfusion.evaluation.line import Lines
from transfusion.evaluation.task import EvaluationData
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.transport.alpha import Alpha
from transfusion.transport.transport import transport


@pytest.fixture(scope="module")
def job(made, tmp_path_factory):
    """Two bases, a fine-tune, π and examples."""
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path_factory.mktemp("job") / "tuned")
    images = torch.randn(70, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    data = Dataset.of("made up", {"pixel_values": images}, torch.arange(70) % 7)
    return {"finetuned": tuned, "base": a, "onto": b, "via": align(a, b, advice=False), "data": data}


def evaluator_of(lines: Lines, data, batch: int | None = None) -> Evaluator:
    return EvaluationData.of(data).evaluator(lines.input_model, lines.live, batch=batch)


# ── derivatives ───────────────────────────────────────────────────────────────────────────────────


def test_slopes_are_finite_differences(job):
    lines = Lines.of(job["finetuned"], job["base"], job["onto"], dtype=torch.float64)
    line, evaluator = lines.along(job["via"]), evaluator_of(lines, job["data"], batch=16)
    groups = groups_of(line)
    assert list(groups) == ["default", "encoder.layer.0.*", "encoder.layer.1.*", "encoder.layer.2.*"]
    here = dict(zip(groups, (0.9, 0.2, 1.3, 0.6), strict=True))
    loss, found = derivatives(line, evaluator, Alpha.of(here), groups)

    def at(**more):
        with line.at(Alpha.of({**here, **more})):
            return evaluator.measure().loss

    assert loss == pytest.approx(at(), abs=1e-12)
    step = 1e-5
    for pattern, slope in zip(groups, found.tolist(), strict=True):
        up, down = at(**{pattern: here[pattern] + step}), at(**{pattern: here[pattern] - step})
        assert slope == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-9)
        assert abs(slope) > 1e-4


def test_losses_are_those_of_texts_too(made, tmp_path):
    """Texts of other lengths: tokens count, and not batches."""
    a = made("llama", 1)
    tuned = finetuned(CASES["llama"], a, tmp_path / "tuned")
    data = examples(a, 6)
    mask = torch.ones_like(data.inputs["input_ids"])
    mask[0, 3:] = 0
    masked = Dataset.of("texts", {**data.inputs, "attention_mask": mask}, None)
    lines = Lines.of(tuned, a, a)
    line, evaluator = lines.along(None), evaluator_of(lines, masked, batch=4)
    assert derivatives(line, evaluator, Alpha(), groups_of(line))[0] == pytest.approx(
        loss_of(tuned, masked), abs=1e-5
    )


# ── learning ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The right model is B and the change of all layers but one; that one is noise.

    Labels are what the right model says, so the coefficients to be found are 1, and 0 for the noise.
    """
    root = tmp_path_factory.mktemp("planted")
    case, generator = CASES["vit-classifier"], torch.Generator().manual_seed(5)
    right = case.build(3)
    images = torch.randn(200, 3, 12, 12, generator=generator)
    with torch.no_grad():
        right.classifier.weight *= 4
        labels = right(images).logits.argmax(-1)
        case.store(right, root / "right")
        tuned, base = case.build(3), case.build(3)
        for model in (tuned, base):
            model.load_state_dict(right.state_dict())
        changes = dict(base.named_parameters())
        for name, parameter in tuned.named_parameters():
            noise = 0.15 * torch.randn(parameter.shape, generator=generator)
            if "layers.1." in name:
                parameter += noise  # right is without it
            elif "layers." in name:
                changes[name] -= noise  # right is with it
    return case.store(tuned, root / "tuned"), case.store(base, root / "base"), images, labels


def test_what_is_harmful_goes_and_the_rest_stays(planted):
    tuned, base, images, labels = planted
    data = Dataset.of("planted", {"pixel_values": images}, labels)
    lines = Lines.of(tuned, base, base)
    evaluator = evaluator_of(lines, data)
    line = lines.along(None)
    alpha, losses = learn(line, evaluator, epochs=35, rate=0.1)
    learned = alpha.patterns
    assert learned["encoder.layer.1.*"] < 0.15
    for layer in (0, 2):
        assert learned[f"encoder.layer.{layer}.*"] == pytest.approx(1, abs=0.25)
    assert min(losses) < 0.5 * losses[0]
    with line.at(alpha):
        assert evaluator.measure().loss == pytest.approx(min(losses), abs=1e-5)


def test_no_coefficient_falls_below_zero(planted):
    """The other way round: all of the change is away from what is right."""
    tuned, base, images, _ = planted
    model = Model.open(base)
    live = LiveModel.of(model, torch.float32)
    with torch.no_grad():
        labels = live.module(images).logits.argmax(-1)
    data = Dataset.of("planted", {"pixel_values": images}, labels)
    lines = Lines.of(tuned, base, base)
    alpha, _ = learn(lines.along(None), evaluator_of(lines, data), epochs=20, rate=0.15)
    assert all(0 <= value < 0.35 for value in alpha.patterns.values())
    assert 0 in alpha.patterns.values()


def test_the_training_loss_falls_and_the_file_gives_the_same_model(job, tmp_path):
    found = fewshot(**job, shots=3, epochs=6, seed=1)
    assert [curve.label for curve in found.curves] == ["naive", "auto"]
    lines = Lines.of(job["finetuned"], job["base"], job["onto"])
    evaluator = evaluator_of(lines, job["data"])
    scored = job["data"].chosen(remaining_examples(evaluator, draw_shots(evaluator, 3, seed=1)))
    for curve in found.curves:
        assert len(curve.losses) == 7
        assert all(after < before for before, after in pairwise(curve.losses))
        plain = transport(
            job["finetuned"],
            base=job["base"],
            onto=job["onto"],
            method="naive" if curve.method is None else "guarded",
        )
        file = tmp_path / f"{curve.label}.json"
        file.write_text(json.dumps(curve.coefficients))
        assert Alpha.of(file) == curve.alpha
        how = {"via": job["via"]} if curve.method else {"method": "naive"}
        moved = transport(job["finetuned"], base=job["base"], onto=job["onto"], alpha=file, **how)
        assert loss_of(moved.save(tmp_path / curve.label), scored) == pytest.approx(
            curve.learned.loss, abs=1e-6
        )
        assert loss_of(plain.save(tmp_path / f"{curve.label}-plain"), scored) == pytest.approx(
            curve.plain.loss, abs=1e-6
        )
    assert found.naive == found.curves[0]
    assert found.alpha == found.moved.alpha == found.curves[1].alpha
    metadata = found.metadata()
    assert metadata["training"] == {
        "data": "made up",
        "examples": 21,
        "of": 70,
        "test": "the examples that were not drawn",
    }
    assert metadata["task"]["examples"] == 49
    for curve in metadata["curves"]:
        for what in ("plain", "learned"):
            gain = 100 * (curve[what]["value"] - metadata["zero"]["value"])
            assert curve["gain"][what] == pytest.approx(gain)


def test_a_run_is_the_same_every_time(job):
    first, second, other = (fewshot(**job, shots=2, epochs=2, naive=False, seed=seed) for seed in (4, 4, 5))
    assert first == second
    assert first.curves[0].losses[0] != other.curves[0].losses[0]


def test_another_file_is_tested_whole(job):
    test = job["data"].limited(14)
    found = fewshot(**job, test=test, shots=2, epochs=1, naive=False)
    assert found.task["examples"] == 14
    assert found.training["test"] == "other examples"


def test_an_adapter_for_texts_gets_its_file(made, tmp_path):
    """As many texts as shots; the adapter can stay one, or be merged, with the same α."""
    import peft
    import transformers

    from tests.transport.test_folded_adapters import adapted, lora

    a, b = made("llama", 1), made("llama", 2)
    adapter, data, pi = adapted(a, tmp_path / "adapter", lora()), examples(a, 8), align(a, b, advice=False)
    found = fewshot(adapter, base=a, onto=b, via=pi, data=data, shots=5, epochs=3, naive=False)
    assert (found.training["examples"], found.task["examples"]) == (5, 3)
    assert found.task["metric"] == "loss"
    assert found == fewshot(adapter, onto=b, via=pi, data=data, shots=5, epochs=3, naive=False)
    lines = Lines.of(adapter, a, b)
    rest = data.chosen(
        remaining_examples(evaluator := evaluator_of(lines, data), draw_shots(evaluator, 5, seed=0))
    )
    whole = transport(adapter, base=a, onto=b, via=pi, alpha=found.alpha, full=True).save(tmp_path / "whole")
    assert loss_of(whole, rest) == pytest.approx(found.moved.learned.loss, abs=1e-6)
    kept = transport(adapter, base=a, onto=b, via=pi, alpha=found.alpha).save(tmp_path / "kept")
    model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(b), kept)
    assert loss_of(model.merge_and_unload(), rest) == pytest.approx(found.moved.learned.loss, abs=1e-5)


# ── drawing ──────────────────────────────────────────────────────────────────────────────────


def test_shots_are_of_every_class_and_drawn_once(job):
    lines = Lines.of(job["finetuned"], job["base"], job["onto"])
    evaluator = evaluator_of(lines, job["data"])
    places = draw_shots(evaluator, 4, seed=2)
    assert len(set(places)) == len(places) == 28
    assert torch.bincount(job["data"].labels[places]).tolist() == [4] * 7
    assert draw_shots(evaluator, 4, seed=2) == places != draw_shots(evaluator, 4, seed=3)
    assert sorted([*places, *remaining_examples(evaluator, places)]) == list(range(70))
    assert len(evaluator.chosen(places)) == 28


def test_the_same_examples_are_known_again(tmp_path):
    (tmp_path / "a.npz").touch()
    data = EvaluationData(tmp_path / "a.npz")
    assert same_examples(data, EvaluationData(str(tmp_path / ".." / tmp_path.name / "a.npz")))
    assert not same_examples(data, EvaluationData(tmp_path / "a.npz", split="test"))
    assert not same_examples(EvaluationData("org/name"), EvaluationData("org/other"))


def test_refusals(job, made, tmp_path):
    few = job["data"].limited(12)
    with pytest.raises(DataError, match=r"fewer of classes 5 \(1\), 6 \(1\)") as caught:
        fewshot(**{**job, "data": few}, shots=2)
    assert caught.value.hint == "ask for 1 or fewer, or give more examples"
    with pytest.raises(DataError, match=r"fewer of class 6 \(0\)") as caught:
        fewshot(**{**job, "data": job["data"].limited(6)}, shots=1)
    assert caught.value.hint == "give examples of every class of the model"
    with pytest.raises(DataError, match="none is left to test on"):
        fewshot(**job, shots=10)
    for wrong, text in (
        ({"shots": 0}, "nothing to learn from"),
        ({"seed": -1}, "cannot be negative"),
        ({"epochs": 0}, "nothing would be learned"),
        ({"rate": 0.0}, "rate = 0.0"),
        ({"start": -1.0}, "at least 0"),
    ):
        with pytest.raises(SettingError, match=text):
            fewshot(**job, **wrong)
    a = made("llama", 1)
    tuned = finetuned(CASES["llama"], a, tmp_path / "tuned")
    with pytest.raises(DataError, match="7 shots were asked for, and there are 5 examples"):
        fewshot(tuned, base=a, onto=a, data=examples(a, 5), shots=7)


def test_nothing_to_learn(job):
    lines = Lines.of(job["finetuned"], job["base"], job["onto"])
    line = lines.along(None)
    still = dataclasses.replace(line, end=line.start)
    with pytest.raises(MismatchError, match="changes nothing of B"):
        groups_of(still)
