"""How many inputs are enough: large inputs have many tokens or patches, of which only some are recorded."""

from __future__ import annotations

from math import ceil

from transfusion.running.probes.probed_model import BATCH, ProbedModel
from transfusion.running.probes.synthetic_audio import FRAMES
from transfusion.running.probes.synthetic_images import patch_grid

PLENTY = 4
"""Tokens or patches for every sample that is recorded, from which on more inputs are not needed."""


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
    """Return how many of the probes that were asked for are needed for so many samples: whole batches."""
    family = subject.model.family
    if family.probes is not None or family.draws is not None:
        return asked
    needed = ceil(PLENTY * samples / tokens_of_a_probe(subject))
    return min(asked, BATCH * ceil(needed / BATCH))
