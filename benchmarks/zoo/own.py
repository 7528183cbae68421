"""Trials of models that are of no library: their tables are in ``architectures``."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import transfusion
from transfusion.running.building import build
from zoo.models import MODELS
from zoo.trials import WAYS, Measure, Trial, Way, trained


def _module_of(folder: Path) -> nn.Module:
    return build(transfusion.Model.open(folder), torch.float32)


# ── formulas: white on black ─────────────────────────────────────────────────────────────────

LETTERS = "abcdefghkmnpqrstuvwxyzABCDEFGHKLMNPQRSTUVWXYZ"
GREEK = ("alpha", "beta", "gamma", "delta", "lambda", "mu", "pi", "sigma", "phi", "omega")
FRAME = (128, 512)
BEGIN, END, PADDING = 1, 2, 0
STEPS, BATCH, RATE = 48, 8, 2e-4
TESTED = 48
LEARNING, TESTING = range(2)
"""Seeds of formulas."""


def formulas(count: int, seed: int) -> list[str]:
    """Return random formulas in LaTeX: letters, numbers, indices, powers, fractions and roots."""
    draw = random.Random(seed)

    def atom() -> str:
        kind = draw.random()
        if kind < 0.65:
            return draw.choice(LETTERS) if kind < 0.45 else "\\" + draw.choice(GREEK)
        return str(draw.randint(0, 99))

    def term() -> str:
        kind = draw.random()
        if kind < 0.3:
            return atom() + " "
        if kind < 0.7:
            return f"{draw.choice(LETTERS)}{'_' if kind < 0.5 else '^'}{{{atom()}}}"
        return f"\\sqrt{{{atom()}}}" if kind < 0.85 else f"\\frac{{{atom()}}}{{{atom()}}}"

    def formula() -> str:
        terms = [term() for _ in range(draw.randint(3, 5))]
        return "".join(one + draw.choice("+-=") for one in terms[:-1]) + terms[-1]

    return [formula().strip() for _ in range(count)]


def pictured(formula: str) -> Tensor:
    """Return a formula as both models want it: black on white, enlarged to the frame, black around it."""
    from matplotlib import mathtext, rc_context
    from matplotlib.font_manager import FontProperties
    from PIL import Image

    file = BytesIO()
    with rc_context({"mathtext.fontset": "cm"}):
        font = FontProperties(size=20)
        mathtext.math_to_image(f"${formula}$", file, prop=font, dpi=100, format="png")
    drawn, canvas = Image.open(file).convert("L"), Image.new("L", FRAME[::-1])
    enlarged = min(FRAME[1] / drawn.width, FRAME[0] / drawn.height)
    sides = (round(enlarged * drawn.width), round(enlarged * drawn.height))
    corner = ((FRAME[1] - sides[0]) // 2, (FRAME[0] - sides[1]) // 2)
    canvas.paste(drawn.resize(sides, Image.Resampling.BILINEAR), corner)
    return torch.from_numpy(np.asarray(canvas, dtype=np.float32) / 255)[None]


@cache
def characters(name: str) -> dict[str, int]:
    """Return the characters of a model, and their rows."""
    found: dict[str, int] = json.loads((MODELS[name].folder() / "vocab.json").read_text())
    return found


@cache
def pages(count: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Return pictures of formulas, and the formulas in a model's characters, with spaces between symbols."""
    chosen, rows = formulas(count, seed), characters(name)
    spaced = [" ".join(re.findall(r"\\[a-z]+|\S", one)) for one in chosen]
    ids = [torch.tensor([BEGIN, *(rows[one] for one in text), END]) for text in spaced]
    written = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PADDING)
    return torch.stack([pictured(one) for one in chosen]), written


def _learn_white_on_black(name: str, to: Path) -> None:
    base = MODELS[name].folder()
    module = _module_of(base)
    images, written = pages(STEPS * BATCH, LEARNING, name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    module.train()
    for step in range(STEPS):
        some = slice(step * BATCH, (step + 1) * BATCH)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 5, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        logits = module(1 - images[some], written[some, :-1])
        loss = nn.functional.cross_entropy(logits.mT, written[some, 1:], ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    _stored_like(base, module, to)


def _stored_like(base: Path, module: nn.Module, to: Path) -> None:
    save_file(module.state_dict(), to / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "vocab.json"):
        if (base / name).exists():
            shutil.copy(base / name, to)


@torch.no_grad()
def read_right(module: nn.Module, name: str, *, white: bool) -> float:
    """Return the share of characters of test formulas, spaces aside, that are right after the right ones."""
    images, written = pages(TESTED, TESTING, name)
    pictures, wanted = 1 - images if white else images, written[:, 1:]
    found = torch.cat(
        [
            module(pictures[start : start + 8], written[start : start + 8, :-1]).argmax(-1)
            for start in range(0, TESTED, 8)
        ]
    )
    counted = (wanted != PADDING) & (wanted != characters(name)[" "])
    return float((found == wanted)[counted].float().mean())


def _tuned_reader(name: str) -> Path:
    return trained(f"{name}-white-on-black", lambda to: _learn_white_on_black(name, to))


def _formulas(a: str, b: str) -> Mapping[str, Way]:
    architecture = MODELS[a].architecture
    assert architecture is not None
    transfusion.register_file(architecture)
    tuned, ceiling = _tuned_reader(a), _module_of(_tuned_reader(b)).eval()
    return Measure(
        tuned,
        MODELS[a].folder(),
        MODELS[b].folder(),
        lambda module: read_right(module, b, white=True),
        read_right(ceiling, b, white=True),
        lambda module: read_right(module, b, white=False),
        options={"force_unrelated": True},
        ways={name: WAYS[name] for name in ("unchanged", "default", "functional")},
    ).all()


# ── heartbeats: a fine-tune that others made ─────────────────────────────────────────────────

SIGNALS, SAMPLES = 32, 5000


def _heartbeats(tuned: str, base: str, onto: str) -> Mapping[str, Way]:
    architecture = MODELS[tuned].architecture
    assert architecture is not None
    generator = torch.Generator().manual_seed(11)
    file = transfusion.register_file(architecture)
    signals: Tensor = file.heartbeats(SIGNALS, SAMPLES, generator, noise=0.05, early=0.2)

    @torch.no_grad()
    def waves(module: nn.Module) -> Tensor:
        return torch.cat([module(some)["wave_logits"].argmax(-1) for some in torch.split(signals, 8)])

    wanted = waves(_module_of(MODELS[tuned].folder()).eval())
    return Measure(
        MODELS[tuned].folder(),
        MODELS[base].folder(),
        MODELS[onto].folder(),
        lambda module: float((waves(module) == wanted).float().mean()),
        1.0,
        ways={**WAYS, "refined": {**WAYS["refined"], "refine_steps": 60}},
    ).all()


TRIALS = (
    Trial(
        "formulas",
        "latex-ocr-torch (102 characters)",
        "latex-ocr (166 characters)",
        "formulas in white on black; ours",
        "apart; of no library",
        f"characters of {TESTED} formulas; support: the same in black on white",
        {},
        lambda: _formulas("latex-1", "latex-2"),
    ),
    Trial(
        "heartbeats",
        "openecg codec v5",
        "openecg codec v1",
        "codec v6: waves with a physiological prior; theirs",
        "one ancestor; of no library",
        f"agreement with v6 on the wave at every sample of {SIGNALS} simulated signals",
        {"functional": 0.0, "refined": 0.1},
        lambda: _heartbeats("ecg-6", "ecg-5", "ecg-1"),
    ),
)
