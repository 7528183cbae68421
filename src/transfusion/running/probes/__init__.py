"""Probes: the inputs on which two models are compared.

`synthetic_images`, `synthetic_texts` and `synthetic_audio` generate them; `calibration` reads the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from transfusion.model.model import Model
from transfusion.running.probes.audio import spectrograms, waveforms
from transfusion.running.probes.calibration import read_calibration
from transfusion.running.probes.images import synthetic_images
from transfusion.running.probes.probed_model import (
    BATCH,
    ProbedModel,
    Probes,
    SideBySide,
    batched,
    one_by_one,
)
from transfusion.running.probes.texts import synthetic_texts

__all__ = ["Probes", "calibration_probes", "synthetic_probes"]


def synthetic_probes(
    model: Model, module: nn.Module, count: int, seed: int, each: SideBySide = one_by_one
) -> Probes:
    """Generate ``count`` inputs in float32 for models of this architecture; no data is needed."""
    subject = ProbedModel(model, module, each)
    if model.family.probes is not None:
        rounds = range(0, count, BATCH)
        return Probes([subject.template() for _ in rounds], "the inputs that the family's table generates")
    if model.family.draws is not None:
        return Probes(
            list(batched(subject.template(count, seed))), f"{count} latents of noise, at random time steps"
        )
    inputs, about = _generated(subject, count, seed)
    return Probes(list(batched(inputs)), "; ".join(about))


def calibration_probes(
    path: Path, model: Model, module: nn.Module, count: int, seed: int, each: SideBySide = one_by_one
) -> Probes:
    """Read at most ``count`` of the user's inputs, chosen by the seed; generate missing kinds."""
    subject = ProbedModel(model, module, each)
    inputs, about = read_calibration(path, subject, count, seed)
    found = len(next(iter(inputs.values())))
    rest, made = _generated(subject, found, seed, given=frozenset(inputs))
    return Probes(list(batched({**rest, **inputs})), "; ".join([about, *made]))


def _generated(
    subject: ProbedModel, count: int, seed: int, given: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], list[str]]:
    """Generate the inputs that the model takes and that are not in ``given``; also describe them."""
    inputs: dict[str, Tensor] = {}
    about: list[str] = []
    for kind in subject.model.family.inputs:
        for name, generate in _GENERATORS[kind].items():
            if name not in given:
                made, info = generate(subject, count, seed)
                inputs |= made
                about.append(info)
    return inputs, about


_Generator: TypeAlias = Callable[[ProbedModel, int, int], tuple[dict[str, Tensor], str]]
_GENERATORS: dict[str, dict[str, _Generator]] = {
    "image": {"pixel_values": synthetic_images},
    "patches": {"pixel_values": synthetic_images},
    "waveform": {"input_values": waveforms},
    "spectrogram": {"input_features": spectrograms, "decoder_input_ids": synthetic_texts},
    "tokens": {"input_ids": synthetic_texts},
}
"""The generators of a model's inputs, by kind of input and by name."""
