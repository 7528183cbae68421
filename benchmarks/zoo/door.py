"""The door: each model is opened, shuffled, aligned with its shuffled self, verified, and moved.

The truth is planted: B is π(A) for a random π, so that a fine-tune must arrive exactly as π(A_ft).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import transfusion
from transfusion.errors import TransfusionError
from zoo.models import ZooModel


@dataclass(frozen=True)
class Passage:
    """How a model came through."""

    name: str
    family: str
    parameters: int
    found: bool
    """Whether the planted π was found again, unit by unit: a fine-tune then arrives where it belongs."""
    equal: bool
    """Whether π(A) computes what A computes."""
    predicted: float
    """The share of B's activations that `functional` predicts."""
    seconds: float
    """Processor time of all of it."""
    refused: str = ""
    """Why the door stayed closed."""


def passed(model: ZooModel) -> Passage:
    """Put a model through `inspect`, `align`, `verify`, `transport` and `functional`."""
    began = time.process_time()
    try:
        with TemporaryDirectory() as folder:
            found = _through(model, Path(folder))
    except TransfusionError as error:
        return Passage(model.name, "", 0, False, False, 0.0, time.process_time() - began, error.message)
    return Passage(*found, time.process_time() - began)


def _through(model: ZooModel, folder: Path) -> tuple[str, str, int, bool, bool, float]:
    if model.architecture is not None:
        transfusion.register_file(model.architecture)
    a = transfusion.Model.open(model.folder())
    shuffle = transfusion.align(a, a, method="random", residual="tied", advice=False)
    b = transfusion.apply(shuffle, a).save(folder / "b")
    pi = transfusion.align(a, b, residual="tied")
    equal = transfusion.verify(a, via=pi).equal
    found = pi.digest == shuffle.digest
    transfusion.transport(_tuned(a), base=a, onto=b, via=pi).save(folder / "moved")
    functional = transfusion.align(a, b, method="functional")
    predicted = transfusion.predict(a, b, via=functional).mean.found
    return model.name, a.family.name, a.checkpoint.parameters, found, equal, predicted


def _tuned(a: transfusion.Model) -> transfusion.Model:
    """Return a fine-tune of A: every matrix with a little noise."""
    generator = torch.Generator().manual_seed(7)
    once = [piece for stored in a.names.values() for piece in stored.names]  # tied tensors have two names
    state = {name: a.checkpoint.read(name) for name in once}
    for name, value in state.items():
        if value.is_floating_point() and value.ndim >= 2:
            noise = torch.randn(value.shape, generator=generator).to(value.dtype)
            state[name] = value + 0.02 * value.std() * noise
    return transfusion.Model.open(state, config=a.checkpoint.config)
