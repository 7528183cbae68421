"""B + α·π(τ) for many α in memory: the same as what is saved, for every kind of fine-tune."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from small_models import CASES, finetuned
from transfusion.data.dataset import Dataset
from transfusion.errors import MismatchError, SettingError
from transfusion.evaluation.line import Lines
from transfusion.evaluation.scores import Score, Scores, gain
from transfusion.evaluation.settings import ALPHAS
from transfusion.evaluation.sweep import SweepCurve, SweepPoint, asked_alphas, sweep
from transfusion.evaluation.task import EvaluationData
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import random_inputs
from transfusion.transport.transport import transport


def examples(folder, count: int = 21) -> Dataset:
    """Synthetic inputs for a model, and synthetic labels where it is a classifier."""
    model = Model.open(folder)
    module = build(model)
    inputs = random_inputs(model.family, module.config.to_dict(), batch=count, seed=3)
    words = "CausalLM" in type(module).__name__
    return Dataset.of("made up", inputs, None if words else torch.arange(count) % module.config.num_labels)


def loss_of(folder, data) -> float:
    model = Model.open(folder)
    return EvaluationData.of(data).evaluator(model, LiveModel.of(model, torch.float32)).measure().loss


def losses(curve) -> list[float]:
    return [point.task.loss for point in curve.points]


@pytest.mark.parametrize("case", ["vit-classifier", "bert-classifier", "llama"])
def test_every_point_is_what_would_be_saved(case, made, tmp_path):
    a, b = made(case, 1), made(case, 2)
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    data, pi = examples(a), align(a, b, advice=False)
    found = sweep(tuned, base=a, onto=b, via=pi, data=data, alphas=[1, 0, 0.3])
    naive, moved = found.curves
    assert [point.alpha for point in moved.points] == [0, 0.3, 1]
    assert (naive.method, moved.method) == (None, "auto")
    assert found.at_zero.task.loss == losses(naive)[0] == losses(moved)[0] == loss_of(b, data)
    for curve, how in ((naive, {"method": "naive"}), (moved, {"via": pi})):
        for point in curve.points[1:]:
            made_of = transport(tuned, base=a, onto=b, alpha=point.alpha, **how)
            saved = made_of.save(tmp_path / f"{curve.label}-{point.alpha}")
            assert point.task.loss == pytest.approx(loss_of(saved, data), abs=1e-6)
            assert abs(point.task.loss - found.at_zero.task.loss) > 1e-5


def test_the_live_b_is_as_it_was(made, tmp_path):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    lines = Lines.of(tuned, a, b)
    before = {name: one.clone() for name, one in lines.live.module.state_dict().items()}
    line = lines.along(align(a, b, advice=False))
    with line.at(0.7):
        now = lines.live.module.state_dict()
        assert any(not torch.equal(now[name], before[name]) for name in before)
    after = lines.live.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_head_of_its_own_comes_along_whole(made, tmp_path):
    """B has no head: at α = 0 it is B's encoder with the fine-tune's head, moved by π where there is one."""
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    data, pi = examples(tuned), align(a, b, residual="tied", advice=False)
    found = sweep(tuned, base=a, onto=b, via=pi, data=data, alphas=[0, 1])
    naive, moved = found.curves
    for curve, how in ((naive, {"method": "naive"}), (moved, {"via": pi})):
        for point in curve.points:
            made_of = transport(tuned, base=a, onto=b, alpha=point.alpha, **how)
            saved = made_of.save(tmp_path / f"{curve.label}-{point.alpha}")
            assert point.task.loss == pytest.approx(loss_of(saved, data), abs=1e-6)
    assert found.at_zero == naive.at_zero
    assert moved.at_zero.task.loss == losses(moved)[0] != losses(naive)[0]


def test_an_adapter_is_folded_in(made, tmp_path):
    from tests.transport.test_folded_adapters import adapted, lora

    a, b = made("llama", 1), made("llama", 2)
    adapter = adapted(a, tmp_path / "adapter", lora())
    data, pi = examples(a), align(a, b, advice=False)
    found = sweep(adapter, base=a, onto=b, via=pi, data=data, alphas=[0.5, 1], naive=False)
    (curve,) = found.curves
    for point in curve.points:
        whole = transport(adapter, base=a, onto=b, via=pi, alpha=point.alpha, full=True)
        saved = whole.save(tmp_path / f"{point.alpha}")
        assert point.task.loss == pytest.approx(loss_of(saved, data), abs=1e-6)
    again = sweep(adapter, onto=b, via=pi, data=data, alphas=[0.5, 1], naive=False)
    assert again == found  # A is the base that the adapter's configuration names
    with pytest.raises(SettingError, match="`base`: the model that was fine-tuned is not given"):
        sweep(b, onto=b, via=pi, data=data)


def test_models_in_memory_and_a_rotation(made, tmp_path):
    a, b = (build(Model.open(made("vit-classifier", seed)), torch.float32) for seed in (1, 2))
    tuned = build(
        Model.open(finetuned(CASES["vit-classifier"], made("vit-classifier", 1), tmp_path / "t")),
        torch.float32,
    )
    data = examples(made("vit-classifier", 1))
    pi = align(a, b, method="functional")
    found = sweep(tuned, base=a, onto=b, via=[pi], data=data, alphas=[0.5], naive=False)
    module = transport(tuned, base=a, onto=b, via=pi, alpha=0.5).module()
    assert losses(found.curves[0])[0] == pytest.approx(loss_of(module, data), abs=1e-5)


def test_metadata_with_support_and_gains(made, tmp_path):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    data = examples(a)
    other = dataclasses.replace(data.limited(14), label="other")
    found = sweep(tuned, base=a, onto=b, data=data, support=other, alphas=[0.5, 2], method="transfusion")
    metadata = found.metadata()
    assert (metadata["finetuned"], metadata["base"], metadata["onto"]) == (str(tuned), str(a), str(b))
    assert metadata["task"]["examples"] == 21
    assert metadata["support"]["data"] == "other"
    assert [curve["label"] for curve in metadata["curves"]] == ["naive", "transfusion"]
    zero = metadata["at_zero"]
    for curve in metadata["curves"]:
        for point in curve["points"]:
            for part in ("task", "support"):
                gain = 100 * (point[part]["value"] - zero[part]["value"])
                assert point["gain"][part] == pytest.approx(gain)


def test_of_a_loss_less_is_better(made, tmp_path):
    def curve(metric, *values):
        scores = [Scores(task=Score(metric, value, loss, None)) for value, loss in values]
        gains = [one.over(scores[0], gain) for one in scores]
        points = [
            SweepPoint(task=one.task, alpha=place, gain=gains[place]) for place, one in enumerate(scores)
        ]
        return SweepCurve("", None, scores[0], tuple(points))

    assert curve("loss", (2.0, 2.0), (1.0, 1.0), (3.0, 3.0)).best.alpha == 1
    assert curve("accuracy", (0.5, 2.0), (0.4, 1.0), (0.6, 3.0)).best.alpha == 2
    assert curve("accuracy", (0.5, 2.0), (0.5, 1.0), (0.5, 3.0)).best.alpha == 1
    assert curve("loss", (2.0, 2.0), (1.5, 1.5)).points[1].gain["task"] == -0.5
    assert curve("accuracy", (0.5, 2.0), (0.6, 2.0)).points[1].gain["task"] == pytest.approx(10)


def test_the_usual_alphas_are_the_papers_range():
    assert (len(ALPHAS), ALPHAS[0], ALPHAS[-1]) == (12, 0.01, 2.0)
    assert 1.0 in ALPHAS
    assert asked_alphas([2, 0.5, 2]) == [0.5, 2]


def test_refusals(made, tmp_path):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    job = {"base": a, "onto": b, "data": examples(a)}
    with pytest.raises(SettingError, match="alphas: no values"):
        sweep(tuned, **job, alphas=[])
    with pytest.raises(SettingError, match="-1 is not a number of at least 0"):
        sweep(tuned, **job, alphas=[-1])
    with pytest.raises(SettingError, match="too coarse"):
        sweep(tuned, **job, dtype=torch.float16)
    with pytest.raises(SettingError, match="`residual` says how to align"):
        sweep(tuned, **job, via=align(a, b, advice=False), residual="tied")
    with pytest.raises(MismatchError, match="there is nothing to move"):
        sweep(a, **job, via=align(a, b, advice=False), trust_base=True)


@pytest.mark.parametrize("given", ["x", "12", 0.5, None, [0.5, "much"], [None]])
def test_alphas_that_are_no_numbers_are_refused_by_name(given):
    with pytest.raises(SettingError, match="alphas = .*several numbers were expected"):
        asked_alphas(given)
