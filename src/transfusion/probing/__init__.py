"""Probes that look like what models are made for: what both models are shown when they are compared.

`images`, `texts` and `sounds` make them up; `calibration` reads those that the user gives.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from transfusion.model import Model
from transfusion.probing.calibration import calibrated
from transfusion.probing.images import noise_images
from transfusion.probing.sounds import spectrograms, waveforms
from transfusion.probing.subject import BATCH, Probes, Subject, batched
from transfusion.probing.texts import made_texts

__all__ = ["Probes", "made_up", "real"]


def made_up(model: Model, module: nn.Module, count: int, seed: int) -> Probes:
    """So many inputs, in float32, for every model of this architecture; nobody's data."""
    subject = Subject(model, module)
    if model.family.probes is not None:
        rounds = range(0, count, BATCH)
        return Probes([subject.template() for _ in rounds], "the inputs that the family's table makes up")
    inputs, about = _made_up(subject, count, seed)
    return Probes(list(batched(inputs)), "; ".join(about))


def real(path: Path, model: Model, module: nn.Module, count: int, seed: int) -> Probes:
    """At most so many of the user's own inputs, chosen by the seed; what the file has none of is made up."""
    subject = Subject(model, module)
    inputs, about = calibrated(path, subject, count, seed)
    found = len(next(iter(inputs.values())))
    rest, made = ({}, []) if inputs.keys() >= subject.template().keys() else _made_up(subject, found, seed)
    missing = {name: one for name, one in rest.items() if name not in inputs}
    told = [about, *(made if missing else [])]
    return Probes(list(batched({**missing, **inputs})), "; ".join(told))


def _made_up(subject: Subject, count: int, seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """Inputs of every kind that the model takes, by name, and what they are."""
    makers = {
        "image": noise_images,
        "patches": noise_images,
        "spectrogram": spectrograms,
        "waveform": waveforms,
        "tokens": made_texts,
    }
    kinds = [makers[kind] for kind in subject.model.family.inputs]
    if subject.takes("spectrogram"):
        kinds.append(made_texts)  # its decoder says something
    inputs: dict[str, Tensor] = {}
    about: list[str] = []
    for make in kinds:
        made, told = make(subject, count, seed)
        inputs |= made
        about.append(told)
    return inputs, about
