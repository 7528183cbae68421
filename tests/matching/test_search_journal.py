"""The journal: an interrupted search goes on where it stood, and comes to the same end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from small_models import often
from transfusion.alignment.maps import Permutation
from transfusion.matching import block_solutions
from transfusion.matching.alignment_run import align
from transfusion.matching.methods import preset
from transfusion.matching.search_journal import SearchJournal
from transfusion.matching.trial import Trial
from transfusion.matching.weights.gains import GainSnapshot

METHODS = {
    "guarded": preset("guarded"),
    "transfusion": preset("transfusion"),
    "brute-force": preset("brute-force"),
    "git-rebasin": preset("git-rebasin"),
    "short": preset("transfusion").changed(max_sweeps=3),
    "restarted": preset("transfusion").changed(restarts=2),
    "alternating": preset("guarded").changed(order="alternating", residual="tied"),
}


class Stopping:
    """Counts steps, and interrupts after some."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.steps = after, []

    def __call__(self, step) -> None:
        self.steps.append(step)
        if self.after is not None and len(self.steps) > self.after:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def undisturbed(made):
    """A method's result without any interruption, and how many steps it took."""
    done = {}

    def find(name):
        if name not in done:
            watching = Stopping()
            pi = align(made("vit", 1), made("vit", 2), method=METHODS[name], on_step=watching, advice=False)
            done[name] = pi, watching.steps
        return done[name]

    return find


@settings(max_examples=settings.default.max_examples // 5)
@given(name=st.sampled_from(list(METHODS)), share=st.floats(0, 0.99), again=st.floats(0, 0.99))
def test_an_interrupted_search_goes_on_and_finds_the_same(
    name, share, again, undisturbed, made, tmp_path_factory
):
    """Interrupted twice, at any step."""
    whole, steps = undisturbed(name)
    journal = tmp_path_factory.mktemp("journal") / "j"
    taken, pi = [], None
    for part in (share, again, None):
        watching = Stopping(None if part is None else int(part * len(steps)))
        with suppress(KeyboardInterrupt):
            pi = pi or align(
                made("vit", 1),
                made("vit", 2),
                method=METHODS[name],
                journal=journal,
                on_step=watching,
                advice=False,
            )
        taken.append(watching.steps)
    assert pi.digest == whole.digest
    assert pi.provenance.objective == pytest.approx(whole.provenance.objective, rel=1e-5)
    assert not journal.exists()
    before = {(step.trial, step.sweep) for step in taken[0]} - {(taken[0][-1].trial, taken[0][-1].sweep)}
    assert not before & {(step.trial, step.sweep) for step in (*taken[1], *taken[2])}, (
        "a finished sweep was repeated"
    )


@pytest.mark.parametrize("name", often(METHODS, ["guarded", "short"]))
def test_no_sweep_of_a_resumed_search_looks_at_more_than_the_undisturbed_one(
    name, made, tmp_path, monkeypatch
):
    asked = []
    propose = block_solutions._solve

    def noted(context, task):
        asked.append(str(task[0]))
        return propose(context, task)

    monkeypatch.setattr(block_solutions, "_solve", noted)
    models = made("vit", 1), made("vit", 2)
    steps = Stopping()
    align(*models, method=METHODS[name], on_step=steps, advice=False)
    whole = list(asked)
    asked.clear()
    ends = [n for n, step in enumerate(steps.steps, 1) if step.done == step.total]
    with pytest.raises(KeyboardInterrupt):
        align(*models, method=METHODS[name], on_step=Stopping(ends[-2]), journal=tmp_path / "j", advice=False)
    asked.clear()
    align(*models, method=METHODS[name], journal=tmp_path / "j", advice=False)
    assert asked == whole[len(whole) - len(asked) :]
    assert len(asked) < len(whole)


def test_a_trial_is_remembered_whole(tmp_path):
    trial = Trial("restart 2", {"x": Permutation([2, 0, 1])}, [1.0, 2.5], True, 2)
    trial.changes.update(["x", "x"])
    trial.visits["Alone(id='x')"] = [1, 2]
    trial.states.append("abc")
    trial.history["x"] = (
        GainSnapshot(("w:0:0",), {"y": Permutation([1, 0])}),
        GainSnapshot(("w:0:0",), {"y": Permutation([0, 1])}, 2),
    )
    trial.gaps["x"] = 1e-8
    SearchJournal(tmp_path / "j", "these").note(trial)
    known = SearchJournal(tmp_path / "j", "these").recall()
    assert known == {"restart 2": trial}
    assert known["restart 2"].restart == 2
    assert known["restart 2"].changes["never"] == 0
    assert SearchJournal(tmp_path / "j", "others").recall() == {}


@pytest.mark.parametrize(
    "other",
    [
        {"b": 3},
        {"a": 3},
        {"seed": 1},
        {"method": "brute-force"},
        {"method": preset("git-rebasin").changed(outputs=False)},
        {"residual": "untied"},
        {"dtype": torch.float64},
    ],
    ids=["b", "a", "seed", "method", "options", "policy", "dtype"],
)
def test_the_journal_of_another_search_is_not_used(other, made, tmp_path):
    journal = tmp_path / "j"
    with pytest.raises(KeyboardInterrupt):
        align(made("vit", 1), made("vit", 2), method="git-rebasin", journal=journal, on_step=Stopping(20))
    assert journal.exists()
    choices = {"method": "git-rebasin", "seed": 0, "advice": False, **other}
    models = made("vit", choices.pop("a", 1)), made("vit", choices.pop("b", 2))
    alone, steps = Stopping(), Stopping()
    expected = align(*models, **choices, on_step=alone)
    found = align(*models, **choices, journal=journal, on_step=steps)
    assert found.digest == expected.digest
    assert len(steps.steps) == len(alone.steps)
    assert not journal.exists()


def foreign(kind, path, genuine):
    """Something at a journal's place that is none, or none any more."""
    provenance = json.loads(genuine["transfusion-journal"])
    tensors = {"x": torch.zeros(2)}
    info = {
        "list": "[]",
        "number": "3",
        "no json": "{",
        "empty": "{}",
        "no maps": json.dumps(provenance),
        "trials as a list": json.dumps({**provenance, "trials": [1]}),
        "trials as numbers": json.dumps({**provenance, "trials": {"identity": 1}}),
    }
    if kind in info:
        save_file(tensors, path, {"transfusion-journal": info[kind]})
    elif kind == "other metadata":
        save_file(tensors, path, {"format": "pt"})
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif kind == "text":
        path.write_text("my diary")
    elif kind == "nothing":
        path.write_bytes(b"")
    elif kind == "damaged maps":
        damaged = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
        save_file(damaged, path, genuine)


@pytest.mark.parametrize(
    "kind",
    [
        *("list", "no json", "no maps", "trials as numbers", "truncated", "damaged maps"),
        *often(["number", "empty", "trials as a list", "other metadata", "text", "nothing"], []),
    ],
)
def test_a_file_that_is_no_journal_is_ignored(kind, made, undisturbed, tmp_path):
    from safetensors import safe_open

    journal = tmp_path / "j"
    models = made("vit", 1), made("vit", 2)
    with pytest.raises(KeyboardInterrupt):
        align(*models, method=METHODS["short"], journal=journal, on_step=Stopping(30), advice=False)
    with safe_open(journal, framework="pt") as opened:
        genuine = opened.metadata()
    foreign(kind, journal, genuine)
    whole, steps = undisturbed("short")
    watching = Stopping()
    pi = align(*models, method=METHODS["short"], journal=journal, on_step=watching, advice=False)
    assert pi.digest == whole.digest
    assert len(watching.steps) == len(steps)
    assert not journal.exists()


def test_the_command_line_keeps_a_journal_beside_the_output_and_goes_on_from_it(
    cli, made, undisturbed, tmp_path
):
    code = (
        "import os, signal, sys\n"
        "from transfusion.cli import main\n"
        "from transfusion.matching.search_journal import SearchJournal\n"
        "note = SearchJournal.note\n"
        "def stop(self, trial):\n"
        "    note(self, trial)\n"
        "    if trial.sweeps == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "SearchJournal.note = stop\n"
        "main(sys.argv[1:])\n"
    )
    pi = tmp_path / "pi.safetensors"
    arguments = ["align", made("vit", 1), made("vit", 2), "-o", pi, "--method", "transfusion", "--json"]
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["pi.safetensors.journal"]
    shutil.copy(tmp_path / "pi.safetensors.journal", tmp_path / "other.journal")

    exit, out, err = cli(*arguments)
    assert exit == 0
    assert f"going on from {pi}.journal" in " ".join(err.split()).replace("- ", "-")
    assert json.loads(out)["blake3"] == undisturbed("transfusion")[0].digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.journal", "pi.safetensors"]
