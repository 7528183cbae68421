"""Synthetic audio: coloured noise, chirps, and a voice without words."""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any

import torch
from torch import Tensor

from transfusion.running.probes.inputs import samples_of
from transfusion.running.probes.probed_model import BATCH, ProbedModel, seeded_generator
from transfusion.runtime.optional_libraries import require_library

RATE = 16000
"""Samples per second, as in all models of speech."""
FRAMES = 48
HOP, SPAN = 160, 400
"""The distance and the length of the windows of a spectrogram, in samples."""
FORMANTS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
"""The formants of five vowels, in Hz."""


def waveforms(subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    """Generate sounds of at most one second, with zero mean and unit variance."""
    needed = samples_of(subject.settings, frames=1)
    length = max(needed, min(RATE, samples_of(subject.settings, FRAMES)))
    made = synthetic_audio(count, length, seeded_generator(seed, 2))
    return {"input_values": made}, f"{count} synthetic sounds"


def spectrograms(subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    """Generate sounds as Whisper reads them: logarithms of powers on the mel scale."""
    frames = 2 * subject.settings["max_source_positions"]
    bins = subject.settings["num_mel_bins"]
    generator = seeded_generator(seed, 2)
    parts = [
        log_mel(synthetic_audio(min(BATCH, count - start), frames * HOP, generator), bins)
        for start in range(0, count, BATCH)
    ]
    return {"input_features": torch.cat(parts)}, f"{count} synthetic sounds"


def log_mel(sounds: Tensor, bins: int) -> Tensor:
    """Return spectrograms (sounds, bins, frames), computed as Whisper's own preparation does."""
    bank = require_library("transformers.audio_utils", "transformers").mel_filter_bank
    filters: Any = bank(
        num_frequency_bins=1 + SPAN // 2,
        num_mel_filters=bins,
        min_frequency=0.0,
        max_frequency=RATE / 2,
        sampling_rate=RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    loud = 0.1 * sounds  # a recording stays below 1
    spectrum = torch.stft(loud, SPAN, HOP, window=torch.hann_window(SPAN), return_complex=True)
    # (sounds, bins, frames)
    powers = torch.from_numpy(filters).float().T @ spectrum[..., :-1].abs().square().contiguous()
    levels = powers.clamp(min=1e-10).log10()
    floor = levels.amax(dim=(1, 2), keepdim=True) - 8.0
    return (torch.maximum(levels, floor) + 4.0) / 4.0


def synthetic_audio(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Generate sounds (count, length), of each kind in turn."""
    kinds: tuple[Callable[[int, torch.Generator], Tensor], ...] = (voice, coloured_noise, voice, chirp)
    sounds = torch.stack([kinds[number % len(kinds)](length, generator) for number in range(count)])
    sounds = sounds + 0.01 * sounds.std(1, keepdim=True) * torch.randn(sounds.shape, generator=generator)
    sounds = sounds - sounds.mean(1, keepdim=True)
    return sounds / sounds.std(1, keepdim=True)


def coloured_noise(length: int, generator: torch.Generator, slope: float | None = None) -> Tensor:
    """Generate noise with power 1 / f**slope: from white, 0, to brown, 2."""
    slope = 2 * _uniform(generator) if slope is None else slope
    spectrum = torch.fft.rfft(torch.randn(length, generator=generator))
    frequencies = torch.arange(len(spectrum)).clamp(min=1).float()
    shaped: Tensor = torch.fft.irfft(spectrum * frequencies ** (-slope / 2), n=length)
    return shaped


def chirp(length: int, generator: torch.Generator) -> Tensor:
    """Generate a tone that glides from one pitch to another, with varying loudness."""
    low, high = (100 * 40 ** _uniform(generator) for _ in range(2))
    pitch = low * (high / low) ** torch.linspace(0, 1, length)
    return torch.sin(2 * pi * torch.cumsum(pitch / RATE, 0)) * _syllables(length, generator)


def voice(length: int, generator: torch.Generator) -> Tensor:
    """Generate pulses that pass through the formants of one vowel after the other."""
    pitch = 80 + 140 * _uniform(generator)
    bend = 1 + 0.15 * torch.sin(torch.linspace(0, 6 * _uniform(generator), length))
    phase = torch.cumsum(pitch * bend / RATE, 0)
    pulses = (phase.floor().diff(prepend=torch.zeros(1)) > 0).float()
    breath = 0.03 * torch.randn(length, generator=generator)
    spectrum = torch.fft.rfft(pulses + breath)
    frequencies = torch.fft.rfftfreq(length, 1 / RATE)
    vowels = [
        torch.fft.irfft(spectrum * _vocal_tract(frequencies, formants), n=length)
        for formants in (FORMANTS[at] for at in torch.randperm(len(FORMANTS), generator=generator)[:3])
    ]
    turns = torch.stack([_syllables(length, generator) for _ in vowels])
    return (torch.stack(vowels) * turns).sum(0)


def _vocal_tract(frequencies: Tensor, formants: tuple[int, ...]) -> Tensor:
    """Return the response of the vocal tract: a sum of resonances."""
    response = torch.zeros_like(frequencies)
    for number, centre in enumerate(formants):
        width = 60 + 40 * number
        response += 0.6**number / (1 + ((frequencies - centre) / width) ** 2)
    return response


def _syllables(length: int, generator: torch.Generator) -> Tensor:
    """Return a loudness that rises and falls a few times per second."""
    rate, start = 2 + 4 * _uniform(generator), _uniform(generator)
    swing = torch.sin(2 * pi * (rate * torch.arange(length) / RATE + start))
    return 0.05 + ((1 + swing) / 2) ** 2


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
