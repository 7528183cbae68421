"""Trials of the advice alone: models of others that were trained apart, and must not be called alignable."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file

import transfusion
from transfusion.errors import TransfusionError
from transfusion.matching.advice import Verdict
from zoo.formats import stored
from zoo.models import MODELS
from zoo.packages import ZOO
from zoo.trials import Trial, Way, trained

PLACES = "roberta.embeddings.position_embeddings.weight"


def advised(a: Path, b: Path) -> Way:
    """Return the advice of `align` with its default: its share is 1 if it says "not alignable"."""
    began = time.process_time()
    try:
        advice = transfusion.align(a, b, method="guarded").provenance.advice
    except TransfusionError as error:
        return Way(None, None, time.process_time() - began, error.message.replace(f"{ZOO}/", ""))
    right = advice["verdict"] == Verdict.DOUBT
    return Way(float(right), None, time.process_time() - began, f"{advice['verdict']}: {advice['text']}")


def _shortened(a: Path, b: Path, to: Path) -> None:
    """Write A with as few positions as B has."""
    config = json.loads((b / "config.json").read_text())
    state = load_file(a / "model.safetensors")
    state[PLACES] = state[PLACES][: config["max_position_embeddings"]].clone()
    stored(to, state, config)


def _sapiens() -> Mapping[str, Way]:
    a, b = (MODELS[name].folder() for name in ("sapiens-vh", "sapiens-vl"))
    short = trained("sapiens-vh-short", lambda to: _shortened(a, b, to))
    ways = {"as they are": advised(a, b), "default": advised(short, b)}
    for name, way in ways.items():
        print(f"  {name}: {way}", flush=True)
    return ways


TRIALS = (
    Trial(
        "sapiens",
        "Sapiens of heavy chains (4 × 128, 146 positions)",
        "Sapiens of light chains (4 × 128, 130 positions)",
        "none",
        "apart; the same shape but for the number of positions",
        "1 if the advice is right; as they are, and with the positions of A cut to those of B",
        {"default": 1.0},
        _sapiens,
    ),
)
