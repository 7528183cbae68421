"""Probes that look like what models are made for: what both models are shown when they are compared.

`synthetic_images`, `synthetic_texts` and `synthetic_audio` draw them; `calibration` reads the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from transfusion.data.probes.calibration import read_calibration
from transfusion.data.probes.probed_model import BATCH, ProbedModel, Probes, batched
from transfusion.data.probes.synthetic_audio import spectrograms, waveforms
from transfusion.data.probes.synthetic_images import synthetic_images
from transfusion.data.probes.synthetic_texts import synthetic_texts
from transfusion.model.model import Model

__all__ = ["Probes", "calibration_probes", "synthetic_probes"]


def synthetic_probes(model: Model, module: nn.Module, count: int, seed: int) -> Probes:
    """So many inputs, in float32, for every model of this architecture; nobody's data."""
    subject = ProbedModel(model, module)
    if model.family.probes is not None:
        rounds = range(0, count, BATCH)
        return Probes([subject.template() for _ in rounds], "the inputs that the family's table makes up")
    inputs, about = _made_up(subject, count, seed)
    return Probes(list(batched(inputs)), "; ".join(about))


def calibration_probes(path: Path, model: Model, module: nn.Module, count: int, seed: int) -> Probes:
    """At most so many of the user's own inputs, chosen by the seed; kinds that it has none of are made up."""
    subject = ProbedModel(model, module)
    inputs, about = read_calibration(path, subject, count, seed)
    found = len(next(iter(inputs.values())))
    rest, made = _made_up(subject, found, seed, given=frozenset(inputs))
    return Probes(list(batched({**rest, **inputs})), "; ".join([about, *made]))


def _made_up(
    subject: ProbedModel, count: int, seed: int, given: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], list[str]]:
    """Inputs of every kind that the model takes and nobody has given, by name, and what they are."""
    inputs: dict[str, Tensor] = {}
    about: list[str] = []
    for kind in subject.model.family.inputs:
        for name, make in _MAKERS[kind].items():
            if name not in given:
                made, info = make(subject, count, seed)
                inputs |= made
                about.append(info)
    return inputs, about


_Maker: TypeAlias = Callable[[ProbedModel, int, int], tuple[dict[str, Tensor], str]]
_MAKERS: dict[str, dict[str, _Maker]] = {
    "image": {"pixel_values": synthetic_images},
    "patches": {"pixel_values": synthetic_images},
    "waveform": {"input_values": waveforms},
    "spectrogram": {"input_features": spectrograms, "decoder_input_ids": synthetic_texts},
    "tokens": {"input_ids": synthetic_texts},
}
"""Who makes what a kind of model reads, by the name of the input."""
