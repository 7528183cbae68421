"""Trials of models of speech that others trained, on words that espeak-ng speaks."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import wave
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from scipy.signal import resample_poly
from torch import Tensor, nn

from zoo.formats import stored
from zoo.models import MODELS
from zoo.packages import ZOO
from zoo.trials import WAYS, Measure, Skipped, Trial, Way, trained

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-029")
VOICES = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4")
TESTED = ("m3", "m6", "f2", "f4")
"""The voices that are heard in tests alone."""
RATE = 16000
FRAMES = 50
"""Places of a second of sound: Whisper has 1500, and 30 seconds for each word would be a waste."""
NOISE = 0.1
"""Of the loudness of a word."""
STEPS, BATCH = 60, 16


@cache
def spoken() -> dict[str, Tensor]:
    """Return words as Whisper reads them, their numbers, and whether each is for tests."""
    place = ZOO / "sounds" / "words.safetensors"
    if not place.exists():
        if shutil.which("espeak-ng") is None:
            raise Skipped("the words of this trial are spoken by espeak-ng, which is not installed")
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file(_speak(), place)
    return load_file(place)


def _speak() -> dict[str, Tensor]:
    extractor = transformers.WhisperFeatureExtractor(chunk_length=2 * FRAMES // 100)
    random = np.random.default_rng(4)
    sounds, words, tested = [], [], []
    for accent, voice, word in product(ACCENTS, VOICES, WORDS):
        speed, pitch = random.integers(130, 200), random.integers(30, 70)
        command = [
            "espeak-ng",
            "-v",
            f"{accent}+{voice}",
            "-s",
            str(speed),
            "-p",
            str(pitch),
            "--stdout",
            word,
        ]
        heard = subprocess.run(command, capture_output=True, check=True).stdout
        with wave.open(io.BytesIO(heard)) as file:
            data, rate = file.readframes(file.getnframes()), file.getframerate()
        sound = resample_poly(np.frombuffer(data, np.int16) / 32768, RATE, rate)
        sound = np.pad(sound, (int(random.integers(2000)), RATE))[:RATE]
        sounds.append(sound + NOISE * sound.std() * random.standard_normal(RATE))
        words.append(WORDS.index(word))
        tested.append(voice in TESTED)
    made = extractor([sound.astype(np.float32) for sound in sounds], sampling_rate=RATE, return_tensors="pt")
    return {
        "sounds": made.input_features.contiguous(),
        "words": torch.tensor(words),
        "tested": torch.tensor(tested),
    }


def of_a_second(name: str) -> Path:
    """Return a Whisper for sounds of a second: its positions are sines, of which it keeps the first."""

    def make(to: Path) -> None:
        model = transformers.WhisperForConditionalGeneration.from_pretrained(MODELS[name].folder())
        state = {key: one for key, one in model.state_dict().items() if key != "proj_out.weight"}
        places = "model.encoder.embed_positions.weight"
        state[places] = state[places][:FRAMES].clone()
        config = json.loads((MODELS[name].folder() / "config.json").read_text())
        config["max_source_positions"] = FRAMES
        stored(to, state, config)
        for file in MODELS[name].folder().glob("tokenizer*.json"):
            shutil.copy(file, to)

    return trained(f"{name}-second", make)


def _learn_words(base: Path, to: Path) -> None:
    """Fine-tune the encoder, with a head of its own."""
    model: Any = transformers.WhisperForAudioClassification.from_pretrained(
        base, num_labels=len(WORDS), dtype=torch.float32
    )
    heard = spoken()
    shown = (~heard["tested"]).nonzero().flatten()
    heads = [one for name, one in model.named_parameters() if not name.startswith("encoder.")]
    body = [one for name, one in model.named_parameters() if name.startswith("encoder.layers.")]
    groups = [{"params": heads, "lr": 1e-3}, {"params": body, "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups)
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(STEPS):
        some = shown[torch.randint(len(shown), (BATCH,), generator=generator)]
        loss = model(heard["sounds"][some], labels=heard["words"][some]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(to)


@torch.no_grad()
def accuracy_of_words(model: nn.Module) -> float:
    """Return the share of words of new voices that a classifier tells."""
    heard = spoken()
    sounds, words = (heard[key][heard["tested"]] for key in ("sounds", "words"))
    kind = next(model.parameters()).dtype
    right = 0
    for start in range(0, len(words), 40):
        some = slice(start, start + 40)
        right += int((model(sounds[some].to(kind)).logits.argmax(-1) == words[some]).sum())
    return right / len(words)


def _words(a: str, b: str) -> Mapping[str, Way]:
    spoken()
    a_folder, b_folder = (of_a_second(one) for one in (a, b))
    tuned, ceiling = (
        trained(f"{one}-words", lambda to, base=base: _learn_words(base, to))  # type: ignore[misc]
        for one, base in ((a, a_folder), (b, b_folder))
    )
    best, own = (
        accuracy_of_words(transformers.WhisperForAudioClassification.from_pretrained(one).eval())
        for one in (ceiling, tuned)
    )
    print(f"  ceiling {best:.3f}, the fine-tune itself {own:.3f}", flush=True)
    return Measure(
        tuned,
        a_folder,
        b_folder,
        accuracy_of_words,
        best,
        options={"force_unrelated": True},
        ways={name: WAYS[name] for name in ("unchanged", "default", "functional")},
    ).all()


TRIALS = (
    Trial(
        "spoken-words",
        "Whisper tiny.en (4 + 4 × 384), for sounds of a second",
        "Whisper tiny (4 + 4 × 384), for sounds of a second",
        "spoken words with a head of its own; ours",
        "apart; the same shape",
        f"accuracy on words of {len(TESTED)} new voices of espeak-ng; not refined: it takes over ten minutes",
        {"functional": 0.1},
        lambda: _words("whisper-en", "whisper"),
    ),
)
