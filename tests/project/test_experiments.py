"""The recipes of the paper's tables: what can be checked in seconds, and (slow) every recipe at the small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("open_clip")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

import huggingface_hub
import open_clip
from PIL import Image
from safetensors.torch import load_file

import experiments.__main__ as program
from experiments import documents, making, results, running, work
from experiments.full import FULL, Released, image_task
from experiments.making import Maker
from experiments.pairs import passages
from experiments.pairs.clips import Saved
from experiments.pairs.data import Examples as Images
from experiments.pairs.passages import KINDS, Review
from experiments.pairs.training import Told
from experiments.recipes import LANGUAGE, RECIPES, VISUAL, ZERO, Kind, recipe
from experiments.settings import ImageTask, Scale, Schedule, TextTask
from experiments.small import SMALL, shown
from transfusion.data.dataset import Dataset
from transfusion.errors import CheckpointError, SettingError
from transfusion.evaluation.task import EvaluationData
from transfusion.matching.methods import METHODS

READERS = cache(open_clip.SimpleTokenizer)
"""Reading the list of pieces takes longer than everything else here."""
CONFIG = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 8, "patch_size": 4, "layers": 1, "width": 16, "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "layers": 1, "width": 8, "heads": 2},
}


@dataclass(frozen=True)
class Untrained:
    """Bases as chance made them."""

    place: Path

    def folder(self, which: str, seed: int) -> Path:
        folder = self.place / f"{which}-{seed}"
        if not folder.exists():
            torch.manual_seed(10 * seed + "ab".index(which))
            folder.mkdir(parents=True)
            Saved(open_clip.CLIP(**CONFIG), {"model_cfg": CONFIG, "preprocess_cfg": {}}).save_pretrained(
                str(folder)
            )
        return folder

    def about(self) -> str:
        return "bases as chance made them"


def corners(seed: int, count: int = 60) -> EvaluationData:
    """Images with a light corner, and names for the corners."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pixels = 0.5 * torch.randn(count, 2, 2, 3, 4, 4, generator=generator)
    pixels[torch.arange(count), labels // 2, labels % 2] += 1.0
    whole = pixels.permute(0, 3, 1, 4, 2, 5).reshape(count, 3, 8, 8)
    names = ("first", "second", "third", "last")
    return shown("corners", Images(whole, labels), names, lambda images, _: images, seed)


def letters(seed: int, count: int = 60) -> Dataset:
    """Texts of one word or another."""
    labels = torch.randint(2, (count,), generator=torch.Generator().manual_seed(seed))
    words = [["good film", "bad film"][label] for label in labels.tolist()]
    tokens = open_clip.SimpleTokenizer(context_length=16)(words)
    return Dataset.of("letters", {"input_ids": tokens}, labels)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    monkeypatch.setattr(making, "MODELS", tmp_path / "models")
    monkeypatch.setattr(open_clip, "SimpleTokenizer", READERS)
    schedule = Schedule(steps=25, rate=1e-2, batch=16)
    return Scale(
        name="tiny",
        bases=Untrained(tmp_path / "bases"),
        images=tuple(
            ImageTask(name, "corners", "", schedule, partial(corners, 1), partial(corners, 2))
            for name in VISUAL.tasks
        ),
        support=partial(corners, 3),
        support_about="other corners",
        texts=tuple(
            TextTask(name, "letters", "", schedule, 2, partial(letters, 1), partial(letters, 2))
            for name in LANGUAGE.tasks
        ),
        lmc=SMALL.lmc,
        alphas=(0.5, 1.0),
        shots=3,
        epochs=2,
    )


# ── the paper ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name, one in RECIPES.items() if one.table])
def test_the_paper_has_a_number_for_every_row_and_task(name: str) -> None:
    chosen = recipe(name)
    assert chosen.table is not None
    assert chosen.table.tasks == chosen.tasks
    assert set(chosen.table.rows) == set(chosen.methods)
    support = chosen.kind is Kind.IMAGES
    for row in (ZERO, *chosen.methods):
        for task in chosen.tasks:
            cell = chosen.table.cell(row, task)
            assert cell is not None
            assert (cell[1] is not None) == support
    assert chosen.table.cell("functional", chosen.tasks[0]) is None


def test_every_recipe_resolves_at_both_scales() -> None:
    for chosen in RECIPES.values():
        assert {row.split(":")[0] for row in chosen.rows} <= set(METHODS)
        for scale in (FULL, SMALL):
            known = {task.paper for task in (*scale.images, *scale.texts)}
            assert chosen.kind is Kind.BARRIER or set(chosen.tasks) <= known


def test_the_full_scale_is_the_papers() -> None:
    bases = FULL.bases
    assert isinstance(bases, Released)
    for tag in (bases.a, bases.b):
        assert (bases.model, tag) in open_clip.list_pretrained()
    assert (bases.a, bases.b) == ("commonpool_l_s1b_b8k", "datacomp_l_s1b_b8k")
    assert FULL.shots == 10
    assert min(FULL.alphas) == 0.01
    assert max(FULL.alphas) == 2.0
    assert len({task.about for task in FULL.images}) == 4
    assert all("/" in task.about for task in FULL.images)


def test_a_base_that_cannot_be_fetched_is_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr("experiments.full.MODELS", tmp_path)
    monkeypatch.setattr("experiments.full.require_answer", lambda *_: None)
    monkeypatch.setattr(open_clip, "create_model", offline)
    with pytest.raises(CheckpointError, match="commonpool_l_s1b_b8k: cannot be fetched") as raised:
        FULL.bases.folder("a", 0)
    assert raised.value.hint is not None
    assert "--small needs neither, but the package registries" in raised.value.hint
    assert not list(tmp_path.glob("ViT*"))


def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def info(_: Any, place: str, *, timeout: float) -> None:
        asked.append(place)
        raise ConnectionError("nobody answers")

    def absent(place: str, *, local_files_only: bool) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError(place)

    monkeypatch.setattr("experiments.full.MODELS", tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(open_clip, "create_model", lambda *_, **__: pytest.fail("it was fetched"))
    assert program.main(["table-1"]) == CheckpointError.exit_code
    assert len(asked) == 1
    details = " ".join(capfd.readouterr().err.split())
    assert "ViT-B-16 commonpool_l_s1b_b8k: cannot be fetched (nobody answers)" in details
    assert "Retry" not in details


def test_the_full_scales_tasks_read_and_ask_as_they_should(
    tiny: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same task on a folder instead of the hub, with a tiny base: tuned, moved and measured."""
    names = ("AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial", "Pasture")
    names += ("PermanentCrop", "Residential", "River", "SeaLake")
    for split in ("train", "test"):
        for number, name in enumerate(names):
            place = tmp_path / "eurosat" / split / name
            place.mkdir(parents=True)
            for copy in range(2):
                Image.new("RGB", (9, 7), (25 * number, 10 * copy, 255 - 25 * number)).save(
                    place / f"{copy}.png"
                )
    task = image_task("EuroSAT", str(tmp_path / "eurosat"), "eurosat")
    quick = replace(task, schedule=replace(task.schedule, steps=40, rate=3e-3, batch=20))
    [rows] = running.images(replace(tiny, images=(quick,)), ["EuroSAT"], ["naive"], 1, "cpu")["EuroSAT"]
    assert rows[running.EXPERT]["task"] > rows[ZERO]["task"]


# ── tuning ───────────────────────────────────────────────────────────────────────────────────


def test_the_rate_rises_and_then_falls_to_nothing() -> None:
    shares = [Schedule(steps=100, rate=1.0).share(step) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(before >= after for before, after in pairwise(shares[10:]))
    assert shares[-1] < 0.001


def test_an_image_task_trains_the_image_tower_alone_and_once(
    tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, task = Maker(tiny), tiny.images[0]
    tuned = maker.image_tuned(task)
    before, after = (load_file(folder / "open_clip_model.safetensors") for folder in (maker.base("a"), tuned))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("visual.") for name in changed)
    monkeypatch.setattr(making, "follow", lambda *_, **__: pytest.fail("trained again"))
    assert maker.image_tuned(task) == tuned
    other = replace(task, schedule=replace(task.schedule, rate=2e-2))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        maker.image_tuned(other)


def test_a_text_task_trains_the_text_tower_and_a_head(tiny: Scale) -> None:
    maker, task = Maker(tiny), tiny.texts[0]
    before, after = (
        load_file(folder / "open_clip_model.safetensors")
        for folder in (maker.base("a"), maker.text_tuned(task))
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "text_projection" in changed
    assert not any(name.startswith(("visual.", "logit")) for name in changed)
    assert maker.head(task).weight.shape == (2, 8)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────


def test_what_moves_onto_itself_arrives_whole(tiny: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """With B = A, B + τ is the fine-tune, to the last digit of every percentage."""
    monkeypatch.setattr(Untrained, "folder", partialled(Untrained.folder))
    [rows] = running.images(tiny, ["SVHN"], ["naive", "transfusion"], 1, "cpu")["SVHN"]
    assert rows[running.EXPERT]["task"] > rows[ZERO]["task"]
    for row in ("naive", "transfusion"):
        assert rows[row]["task"] == rows[running.EXPERT]["task"]
        assert rows[row]["support"] == rows[running.EXPERT]["support"]
        assert rows[row]["task gain"] == pytest.approx(rows[row]["task"] - rows[ZERO]["task"])


def partialled(folder: Callable[..., Path]) -> Callable[..., Path]:
    """Bases of which B is A."""
    return lambda self, which, seed: folder(self, "a", seed)


def test_texts_are_measured_under_the_fine_tuned_head(tiny: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untrained, "folder", partialled(Untrained.folder))
    [rows] = running.texts(tiny, ["SST2"], ["naive"], 1, "cpu")["SST2"]
    assert rows[running.EXPERT]["task"] == 100.0
    assert rows["naive"]["task"] == 100.0
    assert "support" not in rows["naive"]


def run(tiny: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """A recipe at the tiny scale, through the command line."""
    monkeypatch.setattr(work, "SMALL", tiny)
    output = tmp_path / "result.json"
    assert program.main([*arguments, "--small", "-o", str(output)]) == 0
    metadata: dict[str, Any] = json.loads(output.read_text())
    return metadata


def test_a_table_is_kept_with_its_command_and_shown_beside_the_papers(
    tiny: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("no-attention", "transfusion")
    metadata = run(tiny, monkeypatch, tmp_path, "table-3", "--seeds", "2", "--methods", *methods)
    assert metadata["command"].startswith("python -m experiments table-3 --seeds 2 ")
    assert metadata["verb"] == "experiments table-3"
    assert metadata["run"]["machine"]["cores"]
    assert [len(by_seed) for by_seed in metadata["found"].values()] == [2, 2, 2]
    said = capsys.readouterr().out
    assert "+4.95 / −0.06" in said
    assert "49.02 / 68.73" in said
    assert "bases as chance made them; 2 seeds" in said
    heads, rows = results.grid(metadata)
    assert heads[1:3] == ["EuroSAT\n(paper)", "corners\n(here)"]
    names = [row[0] for row in rows]
    assert names == ["A, fine-tuned", "B, zero-shot", "no-attention", "B + π(τ), TransFusion"]
    assert all(len(row) == len(heads) for row in rows)
    assert rows[2][1:2] == ["+2.22 / −0.47"]
    assert "±" in rows[2][2]


def test_a_recipe_with_other_methods_is_kept_only_where_a_place_is_named(
    tiny: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(work, "SMALL", tiny)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    assert program.main(["table-2", "--small", "--methods", "naive"]) == 0
    assert not (tmp_path / "results").exists()
    monkeypatch.setattr(work, "recipe", lambda name: replace(recipe(name), ours=(), methods=("naive",)))
    assert program.main(["table-2", "--small"]) == 0
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["table-2-tiny.json"]


def test_few_shots_never_lose_on_the_shots(
    tiny: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = run(tiny, monkeypatch, tmp_path, "table-4", "--methods", "naive", "transfusion")
    for by_seed in metadata["found"].values():
        for row in ("naive", "transfusion"):
            assert by_seed[0][row]["loss learned"] <= by_seed[0][row]["loss at 1"]


def test_the_figure_of_strengths_is_drawn(
    tiny: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "alpha.svg"
    metadata = run(
        tiny, monkeypatch, tmp_path, "alpha", "--methods", "naive", "transfusion", "--figure", str(figure)
    )
    curves = metadata["found"]["DTD"][0]["curves"]
    assert [point["alpha"] for point in curves["naive"]] == [0.5, 1.0]
    drawn = figure.read_text()
    assert "corners" in drawn
    assert "B + α·τ" in drawn


# ── the program ──────────────────────────────────────────────────────────────────────────────


def test_all_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in RECIPES)


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("flags", [[], ["--small"]])
def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "run", lambda *_: pytest.fail("done"))
    assert program.main([name, "--dry-run", *flags]) == 0
    said = capsys.readouterr().out
    for row in recipe(name).rows:
        assert row in said
    scale = SMALL if flags else FULL
    assert (scale.lmc.about if name == "barrier" else scale.bases.about()) in said.replace("\n", " ")


@pytest.mark.parametrize("absent", ["open_clip", "transformers"])
def test_help_and_list_need_no_library_and_the_rest_says_which(absent: str) -> None:
    """In a process of its own, in which a library cannot be imported."""
    program = f"""
import sys
sys.modules[{absent!r}] = None
from experiments.__main__ import main
assert main(["--list"]) == 0
assert main(["table-1", "--dry-run"]) == 1
main(["--help"])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "table-1" in done.stdout
    assert "--small" in done.stdout
    assert f"need {absent}, which is not installed" in done.stderr
    assert "pip install '.[demo,images,open-clip]'" in done.stderr


def test_a_training_is_never_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("experiments.pairs.training.time.monotonic", lambda: next(clock))
    told = Told("A", 8)
    for step in range(1, 9):
        told.step(step, float(step))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "A: step 1 of 8, loss 1.000, 4 s",
        "A: step 4 of 8, loss 3.000, 16 s",
        "A: step 7 of 8, loss 6.000, 28 s",
        "A: step 8 of 8, loss 8.000, 32 s",
    ]


def test_mistakes_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["table-9", "--small"]) == SettingError.exit_code
    assert "there is no recipe table-9" in capsys.readouterr().err
    assert program.main(["table-1", "--seeds", "0"]) == SettingError.exit_code


# ── data ─────────────────────────────────────────────────────────────────────────────────────


def test_questions_about_reviews_have_the_answers_that_they_should() -> None:
    import random

    here = Review(tuple(f"a{n}" for n in range(200)), 1)
    there = Review(tuple(f"b{n}" for n in range(200)), 0)
    for seed in range(20):
        ask = {kind: KINDS[kind](here, there, random.Random(seed)) for kind in KINDS}
        text, label = ask["ending"]
        assert text.split()[0] == ("a176" if label else "a0")
        little = Review(("the", "film") * 100, 1)
        text, label = KINDS["grammar"](little, there, random.Random(seed))
        words = text.split()
        assert len(words) == passages.WORDS
        assert (words.count("the") == words.count("film")) == bool(label)
        text, label = ask["copy"]
        first, second = (part.split() for part in text.split("|"))
        assert len(first) == passages.WORDS // 2
        assert (set(second) <= set(first)) == bool(label) or not second
        assert ask["verdict"] == (" ".join(here.words[-passages.WORDS :]), 1)


# ── documents ────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_what_the_results_say() -> None:
    assert documents.PAGE.read_text(encoding="utf-8") == documents.page()
    for name in RECIPES:
        metadata = results.load(name, "small")
        assert metadata["command"].startswith("python -m experiments")
        assert {"seconds", "memory", "machine"} <= set(metadata["run"])


# ── slow ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_runs_small(name: str, tmp_path: Path) -> None:
    """On real data; what is in the cache is used, and the rest is trained first, for minutes."""
    output = tmp_path / "result.json"
    assert program.main([name, "--small", "-o", str(output)]) == 0
    metadata = json.loads(output.read_text())
    chosen = recipe(name)
    if chosen.kind is Kind.BARRIER:
        assert len(metadata["found"]["curves"]) == 1 + len(chosen.rows)
        assert output.with_suffix(".png").exists()
        return
    assert list(metadata["found"]) == list(chosen.tasks)
    for by_seed in metadata["found"].values():
        rows = by_seed[0]["curves"] if chosen.kind is Kind.STRENGTHS else by_seed[0]
        assert set(chosen.rows) <= set(rows)
        if running.EXPERT in rows:
            assert rows[running.EXPERT]["task"] > rows[ZERO]["task"]
