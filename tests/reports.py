"""What a report is made of, in a small: a moved fine-tune, and results as the other verbs write them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import transfusion
from small_models import CASES, finetuned
from transfusion.runtime.run_record import RunRecord

DATA = {"data": "digits", "examples": 40, "question": "class", "metric": "accuracy", "classes": 7}


def score(value: float) -> dict[str, Any]:
    return {"value": value, "loss": 2 - value, "accuracy": value, "metrics": {"accuracy": value}}


def write(path: Path, verb: str, info: dict[str, Any], command: str | None = None) -> Path:
    path.write_text(json.dumps(RunRecord(verb, command or f"transfusion {verb} …").of(info)))
    return path


def swept(label: str, method: str | None, scale: float) -> dict[str, Any]:
    points = [
        {
            "alpha": alpha,
            "task": score(0.3 + scale * alpha * (2 - alpha)),
            "support": score(0.9 - 0.05 * alpha),
            "gain": {"task": 100 * scale * alpha * (2 - alpha), "support": -5 * alpha},
        }
        for alpha in (0.25, 0.5, 1.0, 1.5)
    ]
    return {"label": label, "method": method, "points": points, "best": 1.0}


def evaluation(b: str, run: str, ceiling: str) -> dict[str, Any]:
    def row(model: str, task: float, support: float) -> dict[str, Any]:
        gain = {"task": 100 * (task - 0.3), "support": 100 * (support - 0.9)}
        sure = {part: [value - 3, value + 3] for part, value in gain.items()}
        scores = {
            part: {**score(value), "interval": [value - 0.04, value + 0.04]}
            for part, value in (("task", task), ("support", support))
        }
        return {"model": model, **scores, "gain": gain, "gain_interval": sure}

    first = {**row(b, 0.3, 0.9), "gain": None, "gain_interval": None}
    models = [first, row(run, 0.525, 0.85), row(ceiling, 0.6, 0.88)]
    return {"task": DATA, "support": {**DATA, "data": "plain"}, "against": b, "models": models}


def sweep(tuned: str, a: str, b: str) -> dict[str, Any]:
    return {
        "finetuned": tuned,
        "base": a,
        "onto": b,
        "task": DATA,
        "support": {**DATA, "data": "plain"},
        "at_zero": {"task": score(0.3), "support": score(0.9)},
        "curves": [swept("naive", None, 0.05), swept("guarded", "guarded", 0.25)],
    }


def fewshot(tuned: str, a: str, b: str) -> dict[str, Any]:
    curve = {
        "label": "guarded",
        "method": "guarded",
        "coefficients": {"default": 1.0, "encoder.layer.0.*": 0.4, "encoder.layer.1.*": 1.3},
        "losses": [1.0, 0.8, 0.7],
        "plain": score(0.52),
        "learned": score(0.57),
        "gain": {"plain": 22.0, "learned": 27.0},
    }
    info = {"finetuned": tuned, "base": a, "onto": b, "shots": 10, "seed": 0}
    return {**info, "task": DATA, "zero": score(0.3), "curves": [curve]}


def barrier(a: str, b: str) -> dict[str, Any]:
    def curve(label: str, method: str | None, height: float) -> dict[str, Any]:
        points = [
            {"alpha": alpha, "loss": 0.2 + 4 * height * alpha * (1 - alpha), "accuracy": 0.9}
            for alpha in (0.0, 0.5, 1.0)
        ]
        return {
            "label": label,
            "method": method,
            "height": height,
            "summit": 0.5,
            "faithful": True,
            "points": points,
        }

    common = {
        "a": a,
        "b": b,
        "data": "plain",
        "examples": 40,
        "question": "class of every example",
        "dtype": "float32",
    }
    return {**common, "curves": [curve("vanilla", None, 1.5), curve("guarded", "guarded", 0.01)]}


PROOF = {
    "difference": 3e-15,
    "tolerance": 1e-9,
    "outputs": ["logits"],
    "shortcuts": 0,
    "parting": None,
    "reason": None,
    "equal": True,
}


@dataclass(frozen=True)
class Job:
    """Models on the disk, a run, and all kinds of results beside it."""

    a: Path
    b: Path
    tuned: Path
    ceiling: Path
    pi: Path
    run: Path

    def with_results(self) -> Job:
        a, b, tuned = str(self.a), str(self.b), str(self.tuned)
        write(self.run / "evaluate.json", "evaluate", evaluation(b, str(self.run), str(self.ceiling)))
        write(self.run / "sweep.json", "sweep", sweep(tuned, a, b))
        write(self.run / "fewshot.json", "fewshot", fewshot(tuned, a, b))
        write(self.run / "barrier.json", "barrier", barrier(a, b))
        write(self.run / "verify.json", "verify", self.proof(transfusion.Alignment.load(self.pi).digest))
        return self

    def proof(self, digest: str) -> dict[str, Any]:
        info = {"blake3": digest, "method": "guarded"}
        return {"a": str(self.a), "via": str(self.pi), "alignment": info, **PROOF}


def make(place: Path, origin: Path, method: str = "guarded") -> Job:
    """B is A with its units in another order; the fine-tune is moved by the verbs that users type."""
    from transfusion.cli import main

    a, b, pi, run = place / "a", place / "b", place / "pi.safetensors", place / "moved"
    shutil.copytree(origin, a)
    order = transfusion.align(a, a, method="random", residual="tied", seed=3)
    transfusion.apply(order, a).save(b)
    tuned = finetuned(CASES["vit-classifier"], a, place / "tuned")
    ceiling = finetuned(CASES["vit-classifier"], b, place / "ceiling", seed=9)
    for command in (
        ["align", a, b, "-o", pi, "--method", method, "-q"],
        ["transport", tuned, "--base", a, "--onto", b, "--via", pi, "-o", run, "-q"],
    ):
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in command])
        assert not exit.value.code
    return Job(a, b, tuned, ceiling, pi, run)
