"""One phase of a refinement of random weights, in a process of its own; prints what it took as JSON.

    python -m refining.phase ask LORA A ANSWERS
    python -m refining.phase learn LORA A B PI ANSWERS
    python -m refining.phase peft LORA B

The texts are fewer than usual, and as long: their number changes neither the memory nor the time of a step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import transfusion
from transfusion.transport.refinement import inputs
from transfusion.transport.refinement.learning import AskedLessons

STEPS, LEARNED, HELD_OUT, LENGTH = 6, 8, 4, 256
BATCH = 2
"""The texts of a step that A answered; half as many of B's come on top."""
inputs.WRITTEN, inputs.HELD_OUT = LEARNED, HELD_OUT


def ask(lora: str, a: str, answers: str) -> dict[str, Any]:
    began = time.perf_counter()
    asked = transfusion.ask(lora, base=a, output=answers, force=True)
    tokens = sum(count * length for count, length in asked.about["texts"].values())
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def learn(lora: str, a: str, b: str, pi: str, answers: str) -> dict[str, Any]:
    seconds: list[float] = []
    whole = AskedLessons.add_gradients

    def timed(self: AskedLessons, student: nn.Module, step: int, keep: float) -> float:
        began = time.perf_counter()
        found = whole(self, student, step, keep)
        seconds.append(time.perf_counter() - began)
        return found

    AskedLessons.add_gradients = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        transfusion.transport(
            lora, base=a, onto=b, via=pi, answers=answers, refine=True, refine_steps=STEPS,
            refine_batch=BATCH, force_unrelated=True, output=Path(folder) / "out",
        )  # fmt: skip
    return {"step": median(seconds[1:])}


def peft(lora: str, b: str) -> dict[str, Any]:
    """Fine-tune the same LoRA on as many tokens, with PEFT's own model and the library's loss."""
    import peft as library
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(b, dtype=torch.bfloat16)
    tuned = library.PeftModel.from_pretrained(model, lora, is_trainable=True)
    trained = [one for one in tuned.parameters() if one.requires_grad]
    for one in trained:
        one.data = one.data.float()
    optimizer, seconds = torch.optim.Adam(trained, lr=1e-3), []
    texts = torch.randint(100, (BATCH + BATCH // 2, LENGTH))
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = tuned(input_ids=texts, labels=texts).loss
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return {"step": median(seconds[1:]), "tokens": texts.numel()}


if __name__ == "__main__":
    PHASES: dict[str, Callable[..., dict[str, Any]]] = {"ask": ask, "learn": learn, "peft": peft}
    print(json.dumps(PHASES[sys.argv[1]](*sys.argv[2:])))
