"""The steps that both demos share: align, transport, evaluate, sweep and verify, each with its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.matching.alignment_run import align
from transfusion.runtime.run_record import RunRecord
from transfusion.transportation.output_record import OutputRecord
from transfusion.transportation.transport_plan import TransportPlan
from transfusion.verification.equivalence import predict, verified_model
from transfusion_demo.output_folder import write_result
from transfusion_demo.results import DemoRow, DemoScores, DemoTests, evaluation, measure_curve, sweep

REPORTED_METHOD = "functional"
"""The method whose run the report is about."""


def move(folder: Path, finetuned: str, method: str, onto: str) -> Path:
    """Transport a fine-tune of A onto a base in the folder; π and the output record their times."""
    base, target, pi = folder / "a", folder / onto, pi_path(folder, onto, method)
    record = RunRecord("align")
    found = align(base, target, method=method)
    replace(found, provenance=replace(found.provenance, run=record.run())).save(pi)
    record = RunRecord("transport")
    output_record = OutputRecord(settings={"via": str(pi.resolve())}, record=record)
    moved = TransportPlan.between(base, target, pi).transport(folder / finetuned, output_record=output_record)
    output: Path = moved.save(folder / f"{onto}-{method}")
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
    rows = [DemoRow(title, folder / name, measure(model)) for name, (title, model) in models.items()]
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
    """Measure how much of B's activations the reported π predicts, and write it, as `verify` would."""
    record, pi_file = RunRecord("verify"), pi_path(folder, "b", REPORTED_METHOD)
    a, b, pi = folder / "a", folder / "b", Alignment.load(pi_file)
    found = predict(a, b, via=pi)
    write_result(folder, record, {**verified_model(str(a), pi, pi_file), "b": str(b), **found.metadata()})
