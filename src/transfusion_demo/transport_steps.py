"""What a demo does with models that are trained: align, transport and verify, with a record of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transfusion.alignment.alignment import Alignment
from transfusion.matching.alignment_run import align
from transfusion.runtime.run_record import RunRecord
from transfusion.transportation.output_record import OutputRecord
from transfusion.transportation.transport_plan import TransportPlan
from transfusion.verification.equivalence import predict, verified_model
from transfusion_demo.output_folder import write_result

TOLD = "functional"
"""The method whose run a demo's report is about."""


def move(folder: Path, finetuned: str, method: str, onto: str) -> Path:
    """Transport a fine-tune of A onto a base in the folder; π and the output tell how long they took."""
    base, target, pi = folder / "a", folder / onto, pi_of(folder, onto, method)
    record = RunRecord("align")
    found = align(base, target, method=method)
    replace(found, provenance=replace(found.provenance, run=record.run())).save(pi)
    record = RunRecord("transport")
    output_record = OutputRecord(settings={"via": str(pi.resolve())}, record=record)
    moved = TransportPlan.between(base, target, pi).transport(folder / finetuned, output_record=output_record)
    place: Path = moved.save(folder / f"{onto}-{method}")
    return place


def pi_of(folder: Path, onto: str, method: str) -> Path:
    """Where a π is kept."""
    return folder / f"pi-{onto}-{method}.safetensors"


def predict_activations(folder: Path) -> None:
    """How much of what B computes the π of the run that is reported predicts, as `verify` would write it."""
    record, place, a, b = RunRecord("verify"), pi_of(folder, "b", TOLD), folder / "a", folder / "b"
    pi = Alignment.load(place)
    found = predict(a, b, via=pi)
    write_result(folder, record, {**verified_model(str(a), pi, place), "b": str(b), **found.metadata()})
