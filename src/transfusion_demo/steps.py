"""The steps that both demos share: train, align, transport, evaluate, sweep and verify.

Results have the format of the verbs `evaluate` and `sweep`, so that a report can show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transfusion.files.publishing import write_json
from transfusion.matching.align import align
from transfusion.runtime.progress import Advance, Progress, phase
from transfusion.runtime.resources import Resources
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.transport import transport
from transfusion.verification.verify import predict

REPORTED_METHOD = "functional"
"""The method of the π that the report is about."""
REFINED = "refined"
"""The output that was moved by that π, and refined."""
ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
Score = dict[str, Any]
DemoTests = dict[str, dict[str, Any]]
"""The descriptions of the task and the support."""
Loss = Callable[[torch.Generator], Tensor]
"""Draws a batch with the generator and returns its loss."""


class DemoProgress(Progress):
    """Shows the steps of a demo, and the bars of the verbs that it calls. The notes of these are dropped."""

    def __init__(self, shown: Progress, advance: Advance) -> None:
        self.shown, self.advance = shown, advance

    def step(self, text: str) -> None:
        """Begin a step: a line for it, and its text beside the spinner."""
        self.shown.note(f"{text} …")
        self.advance(text)

    @contextmanager
    def bar(self, total: int | None = None, text: str = "") -> Iterator[Advance]:
        """Show a bar."""
        with self.shown.bar(total, text) as advance:
            yield advance


# ── training ─────────────────────────────────────────────────────────────────────────────────


class TrainingSchedule(NamedTuple):
    """The number of steps, the highest learning rate and the batch size."""

    steps: int
    rate: float
    batch: int = 64


def fit(parameters: Iterable[nn.Parameter], loss: Loss, schedule: TrainingSchedule, *, seed: int) -> None:
    """Minimise a loss by AdamW with one cycle of the learning rate; frozen parameters stay."""
    generator = torch.Generator().manual_seed(seed)
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=schedule.rate, weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.rate, schedule.steps, pct_start=0.15)
    with phase("training", schedule.steps) as advance:
        for _ in range(schedule.steps):
            optimizer.zero_grad()
            torch.autograd.backward(loss(generator))
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            rates.step()
            advance("training")


def draw(count: int, schedule: TrainingSchedule, generator: torch.Generator) -> Tensor:
    """Draw the indices of a batch from ``count`` examples."""
    return torch.randint(count, (schedule.batch,), generator=generator)


# For models this small one thread is faster, and a seed gives the same numbers on any number of cores.
ONE_THREAD = Resources(jobs=1)

# ── moving ───────────────────────────────────────────────────────────────────────────────────


def move(folder: Path, finetuned: str, method: str, onto: str, progress: Progress) -> Path:
    """Align A with a base in the folder, transport a fine-tune of A onto it, and return the output's path."""
    base, target, pi = folder / "a", folder / onto, pi_path(folder, onto, method)
    output = folder / f"{onto}-{method}"
    align(base, target, method=method, output=pi, progress=progress)
    transport(folder / finetuned, base=base, onto=target, via=pi, alpha=1.0, output=output, progress=progress)
    return output


def refine(folder: Path, finetuned: str, steps: int, progress: Progress) -> Path:
    """Transport a fine-tune of A onto B by the reported π, refine it, and return the output's path."""
    base, target, pi = folder / "a", folder / "b", pi_path(folder, "b", REPORTED_METHOD)
    output = folder / f"b-{REFINED}"
    refining: dict[str, Any] = {"refine": True, "refine_steps": steps, "progress": progress}
    transport(folder / finetuned, base=base, onto=target, via=pi, output=output, **refining)
    return output


def pi_path(folder: Path, onto: str, method: str) -> Path:
    """The file of one π."""
    return folder / f"pi-{onto}-{method}.safetensors"


def predict_activations(folder: Path) -> None:
    """Measure how much of B's activations the reported π predicts, and write it as `verify` does."""
    pi = pi_path(folder, "b", REPORTED_METHOD)
    predict(folder / "a", folder / "b", via=pi, output=folder / "verify.json")


# ── measuring ────────────────────────────────────────────────────────────────────────────────


class DemoScores(NamedTuple):
    """The scores of a model on the task and on the support."""

    task: Score
    support: Score

    def gain(self, before: DemoScores) -> dict[str, float]:
        """Return the gains over another model, in percentage points."""
        theirs = before._asdict()
        return {name: 100 * (ours["value"] - theirs[name]["value"]) for name, ours in self._asdict().items()}


def describe_data(label: str, examples: int, question: str, classes: int | None) -> dict[str, Any]:
    """Describe the data of a test."""
    metric = "accuracy"
    return {"data": label, "examples": examples, "question": question, "metric": metric, "classes": classes}


def score(logits: Tensor, labels: Tensor) -> Score:
    """Return the accuracy and the loss of logits."""
    right = float((logits.argmax(-1) == labels).double().mean())
    loss = float(nn.functional.cross_entropy(logits.double(), labels))
    return {"value": right, "loss": loss, "accuracy": right, "metrics": {"accuracy": right}}


@torch.no_grad()
def run_in_batches(model: Callable[[Tensor], Tensor], inputs: Tensor, batch: int = 500) -> Tensor:
    """Return a model's outputs for all inputs, batch by batch."""
    return torch.cat([model(part) for part in torch.split(inputs, batch)])


def evaluate_models(
    folder: Path,
    tests: DemoTests,
    models: Mapping[str, tuple[str, Any]],
    measure: Callable[[Any], DemoScores],
    result: str = "evaluation",
) -> dict[str, Any]:
    """Measure models and write the result, as `evaluate` would.

    ``models`` maps the name of each model's folder to its title and the model. The first is the base and the
    last the ceiling; ``share`` in the result is the part of the gap between them.
    """
    record = RunRecord("evaluate")
    scores: dict[str, DemoScores] = {}
    with phase("measuring", len(models)) as advance:
        for name, (title, model) in models.items():
            scores[name] = measure(model)
            advance(f"measuring {title}")
    first, *_, last = models
    room = scores[last].gain(scores[first])["task"]
    rows = []
    for name, (title, _) in models.items():
        gain = None if name == first else scores[name].gain(scores[first])
        share = gain["task"] / room if gain and name != last and room > 0 else None
        row = {"model": str(folder / name), "name": title, **scores[name]._asdict()}
        rows.append({**row, "gain": gain, "share": share})
    ends = {"against": str(folder / first), "ceiling": str(folder / last)}
    metadata = {**tests, **ends, "models": rows}
    write_json(folder / f"{result}.json", record.of(metadata))
    return metadata


def sweep_alpha(
    folder: Path,
    finetuned: str,
    tests: DemoTests,
    before: DemoScores,
    methods: Mapping[str, Callable[[float], DemoScores]],
) -> dict[str, Any]:
    """Measure each method at every α and write the result, as `sweep` would. ``before`` is B's own score."""
    record = RunRecord("sweep")
    curves = []
    for method, at in methods.items():
        scores = {0.0: before}  # at α = 0 the model is the base itself
        with phase(f"measuring {method}", len(ALPHAS)) as advance:
            for alpha in ALPHAS:
                scores[alpha] = at(alpha)
                advance(f"measuring {method}")
        points = [{"alpha": a, **one._asdict(), "gain": one.gain(before)} for a, one in scores.items()]
        best = max(points, key=lambda point: point["task"]["value"])["alpha"]
        way = None if method == "naive" else method
        curves.append({"label": method, "method": way, "points": points, "best": best})
    names = {"finetuned": str(folder / finetuned), "base": str(folder / "a"), "onto": str(folder / "b")}
    metadata = {**names, **tests, "at_zero": before._asdict(), "curves": curves}
    write_json(folder / "sweep.json", record.of(metadata))
    return metadata
