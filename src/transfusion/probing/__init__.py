"""Probes that look like what models are made for: what both models are shown when they are compared.

`images`, `texts` and `sounds` make them up; `calibration` reads those that the user gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

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
    """At most so many of the user's own inputs, chosen by the seed; kinds that it has none of are made up."""
    subject = Subject(model, module)
    inputs, about = calibrated(path, subject, count, seed)
    found = len(next(iter(inputs.values())))
    rest, made = _made_up(subject, found, seed, given=frozenset(inputs))
    return Probes(list(batched({**rest, **inputs})), "; ".join([about, *made]))


def _made_up(
    subject: Subject, count: int, seed: int, given: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], list[str]]:
    """Inputs of every kind that the model takes and nobody has given, by name, and what they are."""
    inputs: dict[str, Tensor] = {}
    about: list[str] = []
    for kind in subject.model.family.inputs:
        for name, make in _MAKERS[kind].items():
            if name not in given:
                made, told = make(subject, count, seed)
                inputs |= made
                about.append(told)
    return inputs, about


_Maker: TypeAlias = Callable[[Subject, int, int], tuple[dict[str, Tensor], str]]
_MAKERS: dict[str, dict[str, _Maker]] = {
    "image": {"pixel_values": noise_images},
    "patches": {"pixel_values": noise_images},
    "waveform": {"input_values": waveforms},
    "spectrogram": {"input_features": spectrograms, "decoder_input_ids": made_texts},
    "tokens": {"input_ids": made_texts},
}
"""Who makes what a kind of model reads, by the name of the input."""
