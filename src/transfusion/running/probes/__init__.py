"""Probes: the inputs on which two models are compared.

`synthetic_images`, `synthetic_texts` and `synthetic_audio` generate them; `calibration` reads the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.probes.audio import FRAMES, spectrograms, waveforms
from transfusion.running.probes.calibration import read_calibration
from transfusion.running.probes.images import patch_grid, synthetic_images
from transfusion.running.probes.probed_model import BATCH, ProbedModel, Probes, batched
from transfusion.running.probes.texts import synthetic_texts

__all__ = ["Probes", "enough_probes", "make_probes", "tokens_of_a_probe"]
PLENTY = 4
"""Tokens or patches for every sample that is recorded, from which on more inputs are not needed."""


def make_probes(subject: ProbedModel, count: int, seed: int, calibrate: str | Path | None = None) -> Probes:
    """Generate ``count`` inputs in float32 for models of this architecture; no data is needed.

    Of the user's own inputs in ``calibrate`` at most so many are read, chosen by the seed, and only missing
    kinds are generated.
    """
    if calibrate is not None:
        inputs, about = read_calibration(Path(calibrate), subject, count, seed)
        found = len(next(iter(inputs.values())))
        rest, made = _generated(subject, found, seed, given=frozenset(inputs))
        return Probes(list(batched({**rest, **inputs})), "; ".join([about, *made]))
    if subject.model.family.draws_inputs:
        drawn = list(batched(_of_common_tokens(subject, subject.template(count, seed))))
        if subject.model.family.library == "diffusers":
            return Probes(drawn, f"{count} latents of noise, at random time steps")
        return Probes(drawn, f"{count} inputs drawn as the table says")
    inputs, made = _generated(subject, count, seed)
    return Probes(list(batched(inputs)), "; ".join(made))


def _of_common_tokens(subject: ProbedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return drawn inputs in which others stand for tokens that only one of A and B has.

    A table of one's own draws them from all ids of its vocabulary; their names end in ``ids``.
    """
    if not subject.unknown or VOCABULARY not in subject.model.architecture.sizes:
        return dict(inputs)
    size = subject.model.architecture.sizes[VOCABULARY]
    known = torch.tensor([one for one in range(size) if one not in subject.unknown])
    others = torch.tensor([one for one in range(size) if one in subject.unknown])
    taken = torch.arange(size).index_copy(0, others, known[torch.arange(len(others)) % len(known)])
    return {name: taken[one] if name.endswith("ids") else one for name, one in inputs.items()}


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


def tokens_of_a_probe(subject: ProbedModel) -> int:
    """Return into how many tokens, patches or frames the model divides one probe, about."""
    counts = [1]
    if subject.takes("image") or subject.takes("patches"):
        grid = patch_grid(subject)
        counts.append(1 + grid[0] * grid[1] if grid else 1)
    if subject.takes("spectrogram"):
        counts.append(int(subject.settings["max_source_positions"]))
    if subject.takes("waveform"):
        counts.append(FRAMES)
    if subject.takes("tokens"):
        counts.append(subject.length)
    return max(counts)


def enough_probes(subject: ProbedModel, asked: int, samples: int) -> int:
    """Return how many of the probes that were asked for are needed for so many samples: whole batches.

    Large inputs have many tokens or patches, of which only some are recorded.
    """
    if subject.model.family.draws_inputs:
        return asked
    needed = ceil(PLENTY * samples / tokens_of_a_probe(subject))
    return min(asked, BATCH * ceil(needed / BATCH))
