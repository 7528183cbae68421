"""sweep, fewshot and barrier as their users see them: on raw images and texts, with files and figures."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from small_models import CASES, finetuned
from tests.evaluation.test_evaluation import CLASSIFIER, PETS, READERS, TEMPLATES
from transfusion.evaluation.classes import Classes
from transfusion.evaluation.evaluate import evaluate
from transfusion.evaluation.fewshot import fewshot
from transfusion.evaluation.settings import alphas
from transfusion.evaluation.sweep import sweep
from transfusion.evaluation.task import EvaluationData
from transfusion.matching.align import align
from transfusion.report import views
from transfusion.runtime.progress import Progress
from transfusion.transport.alpha import Alpha
from transfusion.transport.transport import transport
from wording import put_tokenizer


@pytest.fixture(scope="module")
def job(made, tmp_path_factory):
    """A fine-tune, two bases, π, and examples in a file."""
    folder = tmp_path_factory.mktemp("job")
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    tuned = finetuned(CASES["vit-classifier"], a, folder / "tuned")
    pi = align(a, b, advice=False).save(folder / "pi.safetensors")
    images = torch.randn(42, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    data = folder / "data.safetensors"
    save_file({"pixel_values": images, "labels": torch.arange(42) % 7}, data)
    return tuned, a, b, pi, data


@pytest.fixture
def run(cli, job):
    tuned, a, b, pi, data = job
    return lambda verb, *more: cli(
        verb, tuned, "--base", a, "--onto", b, "--via", pi, "--data", data, "-q", *more
    )


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """Twelve noisy images of three classes in folders."""
    root, generator = tmp_path_factory.mktemp("pets"), np.random.default_rng(0)
    for number in range(12):
        folder = root / ("Cat", "great_dane", "OWL")[number % 3]
        folder.mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (15 + number, 23, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


# ── sweep ────────────────────────────────────────────────────────────────────────────────────


def test_sweep_in_a_table_a_file_and_a_figure(run, job, tmp_path):
    file, figure = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    more = ("--support", job[4], "--alphas", "0:1:3")
    code, out, err = run("sweep", *more, "-o", file, "-o", figure)
    assert (code, err) == (0, "")
    assert "naive" in out
    assert "auto" in out
    assert "Best α on the task: naive" in out
    assert len(re.findall(r"^│ +0 │", out, re.MULTILINE)) == 1, "α = 0 is B, which is shown force_unrelated"
    assert out.endswith(f"written to {file}\nwritten to {figure}\n")
    result = json.loads(file.read_text())
    assert result["verb"] == "sweep"
    assert result["command"].startswith("transfusion sweep ")
    assert result["run"]["seconds"] > 0
    assert [point["alpha"] for point in result["curves"][0]["points"]] == [0, 0.5, 1]
    for curve in result["curves"]:
        assert curve["points"][0]["gain"] == {"task": 0, "support": 0}
    drawn = "".join(ElementTree.parse(figure).getroot().itertext())
    assert "B + α·τ, naive" in drawn
    assert "B + α·π(τ), auto" in drawn
    assert "Task: data.safetensors" in drawn
    assert "Support: data.safetensors" in drawn


@pytest.mark.parametrize("method", ["transfusion", "auto"])
def test_sweep_without_a_pi_aligns_first(method, cli, job, tmp_path):
    tuned, a, b, _, data = job
    code, out, err = cli(
        *("sweep", tuned, "--base", a, "--onto", b, "--data", data, "--method", method),
        *("--residual", "tied", "--alphas", "1", "--no-naive", "--json", "-q"),
    )
    assert code == 0
    assert [curve["label"] for curve in json.loads(out)["curves"]] == [method]
    assert "warning: not alignable by permutation" in err
    assert ("transport would stop here" in err) == (method == "auto"), "a method that is named does not stop"


def test_models_are_opened_and_built_below_a_bar(job):
    tuned, a, b, pi, data = job
    shown: list[str] = []

    class Shown(Progress):
        def bar(self, total=None, text=""):
            shown.append(text)
            return super().bar(total, text)

    sweep(tuned, base=a, onto=b, via=pi, data=data, alphas=(1.0,), progress=Shown())
    assert shown[:2] == ["building the models"] * 2
    shown.clear()
    evaluate(b, data=data, progress=Shown())
    assert shown[:2] == ["opening the models", "building the models"]


def test_alphas_as_people_write_them():
    assert alphas("0.5, 1,2") == [0.5, 1, 2]
    assert alphas("0.01:2.0:12")[0] == 0.01
    assert alphas("0.01:2.0:12")[-1] == 2
    assert len(alphas("0.01:2.0:12")) == 12
    assert len(alphas("0:1:1000")) == 1000


def shown(view):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def swept(metric, *gains, zero=0.5, first=0.5):
    """A sweep over α = 0 and 1, as its file has it; every curve gains so much at 1."""
    sign = 100 if metric == "accuracy" else 1

    def point(alpha, value):
        return {"alpha": alpha, "task": {"value": value}, "gain": {"task": sign * (value - zero)}}

    curves = [
        {"label": f"way {place}", "points": [point(0, first), point(1, zero + gain / sign)], "best": 1}
        for place, gain in enumerate(gains)
    ]
    task = {"metric": metric, "question": "class", "examples": 4, "data": "some"}
    return {"task": task, "support": None, "at_zero": {"task": {"value": zero}}, "curves": curves}


def test_the_best_of_a_sweep_is_none_where_none_is_better():
    info = shown(views.sweep(swept("accuracy", -3, 4)))
    assert "Best α on the task: way 0 – (none is better than B), way 1 1." in info
    info = shown(views.sweep(swept("loss", -0.2, 0.2)))
    assert "Best α on the task: way 0 1, way 1 – (none is better than B)." in info


def test_a_start_that_is_not_b_is_shown_beside_it():
    info = shown(views.sweep(swept("accuracy", 4, first=0.4)))
    assert re.search(r"│ B │ +50\.0", info)
    assert re.search(r"│ 0 │ +40\.0 │ -10\.0", info)


def test_sweep_refusals(run, job, tmp_path):
    for text in ("1:2", "0:1:1", "0:1:1001", "0:1:99999999999", "much"):
        assert run("sweep", "--alphas", text)[0] == 2
    assert run("sweep", "--alphas=-1")[0] == 2
    assert run("sweep", "--method", "transfusion")[0] == 2
    assert run("sweep", "--support-split", "x")[0] == 2
    code, _, err = run("sweep", "-o", tmp_path / "sweep.txt")
    assert code == 1
    assert "neither a figure nor JSON" in err
    code, _, err = run("sweep", "--device", "moon")
    assert (code, "device 'moon' cannot be used here" in err) == (2, True)
    assert run("sweep", "-o", tmp_path / "a.json", "-o", tmp_path / "a.json")[0] == 2
    (tmp_path / "there.json").write_text("mine")
    code, _, err = run("sweep", "-o", tmp_path / "there.json")
    assert code == 1
    assert "exists already" in err
    assert (tmp_path / "there.json").read_text() == "mine"


# ── fewshot ──────────────────────────────────────────────────────────────────────────────────


def test_fewshot_writes_what_transport_takes(run, cli, job, tmp_path):
    tuned, a, b, pi, data = job
    files = {name: tmp_path / name for name in ("alpha.json", "naive.json", "all.json", "all.svg")}
    code, out, err = run(
        *("fewshot", "--shots", 2, "--epochs", 3, "-o", files["alpha.json"]),
        *("--naive-output", files["naive.json"]),
        *("--results", files["all.json"], "--results", files["all.svg"], "--test", data),
    )
    assert (code, err) == (0, "")
    assert "B + α·π(τ), auto, α learned" in out
    assert "Learned from 14 examples of" in out
    assert "They are the examples that were not drawn." in out
    result = json.loads(files["all.json"].read_text())
    assert (result["verb"], result["shots"], result["task"]["examples"]) == ("fewshot", 2, 28)
    naive, moved = result["curves"]
    assert json.loads(files["alpha.json"].read_text()) == moved["coefficients"]
    assert json.loads(files["naive.json"].read_text()) == naive["coefficients"]
    assert Alpha.of(files["alpha.json"]).patterns.keys() == {f"encoder.layer.{i}.*" for i in range(3)}
    code, _, err = cli(
        *("transport", tuned, "--base", a, "--onto", b, "--via", pi, "--alpha", files["alpha.json"]),
        *("-o", tmp_path / "moved", "-q"),
    )
    assert (code, err) == (0, "")
    drawn = "".join(ElementTree.parse(files["all.svg"]).getroot().itertext())
    assert "encoder.layer" in drawn
    assert "Learned from 14 examples of data.safetensors" in drawn


def test_fewshot_refusals(run, job, tmp_path):
    there = ("-o", tmp_path / "alpha.json")
    assert run("fewshot")[0] == 2
    assert run("fewshot", *there, "--no-naive", "--naive-output", tmp_path / "naive.json")[0] == 2
    assert run("fewshot", *there, "--naive-output", tmp_path / "alpha.json")[0] == 2
    code, _, err = run("fewshot", *there, "--shots", 20)
    assert code == 1
    assert "20 shots of every class were asked for, and there are fewer of classes 0 (6), 1 (6)" in err
    assert not (tmp_path / "alpha.json").exists()
    code, _, err = run("fewshot", "-o", job[4], "--force")
    assert code == 1
    assert "is, or holds, an input" in err


def test_no_input_is_overwritten(run, cli, job, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("mine")
    for verb, more in (
        ("sweep", ["--classes", file]),
        ("sweep", ["--head", file]),
        ("sweep", ["--support", job[4], "--support-classes", file]),
        ("sweep", ["--support", job[4], "--support-head", file]),
        ("fewshot", ["--classes", file]),
        ("fewshot", ["--head", file]),
        ("fewshot", ["--test", file]),
    ):
        code, _, err = run(verb, *more, "-o", file, "--force")
        assert (code, "is, or holds, an input" in err) == (1, True), (verb, more)
    for flag in ("--classes", "--head"):
        code, _, err = cli("barrier", job[1], job[2], "--data", job[4], flag, file, "-o", file, "--force")
        assert (code, "is, or holds, an input" in err) == (1, True), flag
    assert file.read_text() == "mine"


# ── raw examples ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Two CLIPs, and a fine-tune of the first whose text tower is as it was."""
    root = tmp_path_factory.mktemp("clip")
    case = READERS["clip"]
    a, b = (put_tokenizer(case.save(root / name, seed)) for name, seed in (("a", 1), ("b", 2)))
    model, generator = case.build(1), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("vision_model."):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return put_tokenizer(case.store(model, root / "tuned")), a, b


def test_zero_shot_along_the_line(clip, pets, tmp_path):
    tuned, a, b = clip
    data = EvaluationData(pets, classes=Classes("pets", PETS, TEMPLATES))
    pi = align(a, b, advice=False)
    found = sweep(tuned, base=a, onto=b, via=pi, data=data, alphas=[0, 0.5, 1], naive=False)
    assert "zero-shot" in found.task["question"]
    for point in found.curves[0].points:
        saved = transport(tuned, base=a, onto=b, via=pi, alpha=point.alpha).save(tmp_path / f"{point.alpha}")
        put_tokenizer(saved)
        score = evaluate(saved, data=data).rows[0].task
        assert point.task.loss == pytest.approx(score.loss, abs=1e-5)


def test_few_shots_of_pictures(clip, pets):
    tuned, a, b = clip
    data = EvaluationData(pets, classes=Classes("pets", PETS, TEMPLATES))
    found = fewshot(tuned, base=a, onto=b, data=data, shots=2, epochs=2, naive=False)
    assert (found.training["examples"], found.task["examples"]) == (6, 6)
    assert found.moved.losses[-1] < found.moved.losses[0]


def test_few_shots_of_texts(tmp_path):
    a, b, tuned = (put_tokenizer(CLASSIFIER.save(tmp_path / str(seed), seed)) for seed in (1, 2, 3))
    rows = [{"text": f"The river was {word}.", "label": place % 2} for place, word in enumerate("abcdefgh")]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = fewshot(
        *(tuned,), base=a, onto=b, data=tmp_path / "texts.jsonl", shots=3, epochs=1, trust_base=True
    )
    assert (found.training["examples"], found.task["examples"]) == (6, 2)


def test_a_borrowed_head_stays_as_it_is(made, tmp_path):
    """Encoders alone, measured with the head of a classifier, as evaluate does it."""
    a, b, task_head_donor = made("vit", 1), made("vit", 2), made("vit-classifier", 3)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    folder = tmp_path / "images"
    generator = np.random.default_rng(0)
    for number in range(7):
        (folder / str(number)).mkdir(parents=True)
        pixels = generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / str(number) / "0.png")
    data = EvaluationData(folder, task_head=task_head_donor)
    found = sweep(tuned, base=a, onto=b, data=data, alphas=[0, 1], method="naive", naive=False)
    moved = transport(tuned, base=a, onto=b, method="naive").save(tmp_path / "moved")
    rows = evaluate([moved], data=data, against=b).rows
    losses = [point.task.loss for point in found.curves[0].points]
    assert losses == pytest.approx([row.task.loss for row in rows], abs=1e-6)
    assert losses[0] != losses[1]


def test_a_barrier_on_a_folder_of_images(cli, made, pets, tmp_path):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    numbered = tmp_path / "numbered"
    for place, folder in enumerate(sorted(pets.iterdir())):
        (numbered / str(place)).mkdir(parents=True)
        for file in folder.iterdir():
            (numbered / str(place) / file.name).write_bytes(file.read_bytes())
    result = tmp_path / "barrier.json"
    code, _, err = cli("barrier", a, b, "--data", numbered, "--points", 2, "--limit", 6, "-o", result)
    assert code == 0, err
    info = json.loads(result.read_text())
    assert (info["verb"], info["examples"]) == ("barrier", 6)
    assert info["command"].startswith("transfusion barrier ")
    assert set(info["run"]) == {"seconds", "memory", "machine"}
    wanted = [row.task.loss for row in evaluate([a, b], data=EvaluationData(numbered, limit=6)).rows]
    losses = [point["loss"] for point in info["curves"][0]["points"]]
    assert losses == pytest.approx(wanted, abs=1e-6)
