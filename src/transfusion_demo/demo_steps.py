"""The steps that both demos share: align, transport, evaluate, sweep and verify, each with its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transfusion.matching.alignment_run import align
from transfusion.runtime.progress import Advance, Progress, phase
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.transport_run import transport
from transfusion.verification.equivalence import predict
from transfusion_demo.output_folder import write_result
from transfusion_demo.results import DemoRow, DemoScores, DemoTests, evaluation, measure_curve, sweep

REPORTED_METHOD = "functional"
"""The method of the π that the report is about."""
REFINED = "refined"
"""The output that was moved by that π, and refined."""


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


def evaluate_models(
    folder: Path,
    tests: DemoTests,
    models: Mapping[str, tuple[str, Any]],
    measure: Callable[[Any], DemoScores],
    result: str = "evaluation",
) -> dict[str, Any]:
    """Measure models and write the result, as `evaluate` would.

    ``models`` maps the name of each model's folder to its title and the model. The first is the base and the
    last the ceiling.
    """
    record = RunRecord("evaluate")
    rows = []
    with phase("measuring", len(models)) as advance:
        for name, (title, model) in models.items():
            rows.append(DemoRow(title, folder / name, measure(model)))
            advance(f"measuring {title}")
    metadata = evaluation(tests, rows)
    write_result(folder, record, metadata, result)
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
    curves = [measure_curve(method, before, at) for method, at in methods.items()]
    names = {"finetuned": str(folder / finetuned), "base": str(folder / "a"), "onto": str(folder / "b")}
    metadata = sweep(names, tests, before, curves)
    write_result(folder, record, metadata)
    return metadata


def predict_activations(folder: Path) -> None:
    """Measure how much of B's activations the reported π predicts, and write it as `verify` does."""
    pi = pi_path(folder, "b", REPORTED_METHOD)
    predict(folder / "a", folder / "b", via=pi, output=folder / "verify.json")
