"""The steps of a demo with trained models: align, transport and verify, with a record of each."""

from __future__ import annotations

from pathlib import Path

from transfusion.matching.alignment_run import align
from transfusion.transportation.transport_run import transport
from transfusion.verification.equivalence import predict

TOLD = "functional"
"""The method of the run that a demo's report is about."""


def move(folder: Path, finetuned: str, method: str, onto: str) -> Path:
    """Align A with a base in the folder, transport a fine-tune of A onto it, and return the output's path."""
    base, target, pi = folder / "a", folder / onto, pi_of(folder, onto, method)
    place = folder / f"{onto}-{method}"
    align(base, target, method=method, output=pi)
    transport(folder / finetuned, base=base, onto=target, via=pi, output=place)
    return place


def pi_of(folder: Path, onto: str, method: str) -> Path:
    """Return the path of a π."""
    return folder / f"pi-{onto}-{method}.safetensors"


def predict_activations(folder: Path) -> None:
    """Measure how much of B's activations the reported π predicts, and write it as `verify` does."""
    predict(folder / "a", folder / "b", via=pi_of(folder, "b", TOLD), output=folder / "verify.json")
