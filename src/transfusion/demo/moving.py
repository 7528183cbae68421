"""What a demo does with models that are trained: align, transport and verify, with a record of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transfusion.alignment import Alignment
from transfusion.demo.workplace import write_result
from transfusion.matching import align
from transfusion.record import Record
from transfusion.transportation import Account, Journey
from transfusion.verification import predict, subject

TOLD = "functional"
"""The method whose run a demo's report is about."""


def move(folder: Path, finetuned: str, method: str, onto: str) -> Path:
    """Transport a fine-tune of A onto a base in the folder; π and the output tell how long they took."""
    base, target, pi = folder / "a", folder / onto, pi_of(folder, onto, method)
    record = Record("align")
    found = align(base, target, method=method)
    replace(found, provenance=replace(found.provenance, run=record.run())).save(pi)
    record = Record("transport")
    account = Account(settings={"via": str(pi.resolve())}, record=record)
    moved = Journey.between(base, target, pi).transport(folder / finetuned, account=account)
    place: Path = moved.save(folder / f"{onto}-{method}")
    return place


def pi_of(folder: Path, onto: str, method: str) -> Path:
    """Where a π is kept."""
    return folder / f"pi-{onto}-{method}.safetensors"


def foretell(folder: Path) -> None:
    """How much of what B computes the π of the run that is reported predicts, as `verify` would write it."""
    record, place, a, b = Record("verify"), pi_of(folder, "b", TOLD), folder / "a", folder / "b"
    pi = Alignment.load(place)
    found = predict(a, b, via=pi)
    write_result(folder, record, {**subject(str(a), pi, place), "b": str(b), **found.story()})
