"""What a refinement by answers will take, before anything is read: memory, disk, tokens and seconds.

The seconds are those of the products of matrices that it needs, at the speed of such products in a trial of
two seconds.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from transfusion.model.model import Model
from transfusion.running.building import skeleton
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.texts import CACHE, CACHE_SHARE, longest_length
from transfusion.runtime.processes import is_low_precision, processes
from transfusion.transport.output import Output
from transfusion.transport.refinement.asked import MOST
from transfusion.transport.refinement.inputs import texts_held_out, texts_of_a_step, texts_to_learn
from transfusion.transport.refinement.room import FLOOR, LOGITS, SHARE
from transfusion.transport.refinement.settings import RefinementSettings

PROGRAM = 500_000_000
"""The bytes of the program and its libraries."""
STATES = 5
"""The numbers that are kept for each trained one: itself, its gradient, two moments, the best state."""
OF_AN_ANSWER = 6
"""The bytes of a likely token and its log-probability."""
TRIAL, PLACES = 2.0, 512
"""The seconds of a trial, and the rows of its product."""
FORWARD, OF_ADAPTER, OF_WEIGHTS = 2, 6, 8
"""Operations for each weight and token: of a pass, and of a step of training, with checkpointing."""


def expecting(a: Model, output: Output, settings: RefinementSettings, asks: bool, device: str) -> Output:
    """Return an output with the bytes of memory and disk, the tokens, and the seconds of both phases.

    ``asks`` says that the fine-tune is asked, and has not been asked before.
    """
    b = output.onto
    subject = ProbedModel(a, skeleton(a), natural=True)
    length, vocabulary = longest_length(subject), subject.vocabulary
    learned, held_out = texts_to_learn(length), texts_held_out(length)
    written, answered = (learned + held_out) * length // 2, (2 * learned + 3 * held_out) * length
    of_a, of_b = (
        sum(torch.Size(one.info(name).shape).numel() for name in one.architecture.tensors) for one in (a, b)
    )
    adapter = output.adapter_files is not None or settings.rank is not None
    trained = sum(torch.Size(one.shape).numel() for one in output.tensors.values()) if adapter else of_b
    of_weights = b.checkpoint.nbytes if adapter else 4 * of_b
    logits = LOGITS * 2 * length * vocabulary
    step = 3 * texts_of_a_step(length, settings.batch) * length // 2
    asking = FORWARD * (written + answered)
    speed = operations_in_a_second(device, b.info(next(iter(b.architecture.tensors))).dtype)
    steps = settings.most * step * of_b * (OF_ADAPTER if adapter else OF_WEIGHTS)
    training = min(steps / speed / processes().count, settings.time or math.inf)
    expected = {
        "memory_to_ask": PROGRAM + int((1 + CACHE_SHARE) * a.checkpoint.nbytes) + CACHE + logits,
        "memory_to_learn": PROGRAM + int((1 + SHARE) * of_weights) + FLOOR + logits + 4 * STATES * trained,
        "disk": 2 * answered * min(MOST, vocabulary) * OF_AN_ANSWER,
        "tokens_to_write": written * (1 + asks),
        "seconds_to_ask": math.ceil(asks * of_a * (asking + FORWARD * answered) / speed),
        "seconds_to_learn": math.ceil(of_b * asking / speed + training),
    }
    return replace(output, expected=expected)


def operations_in_a_second(device: str, stored: torch.dtype) -> float:
    """Return how many operations of a product of matrices a device does in a second."""
    kind = torch.bfloat16 if is_low_precision(device, stored) else torch.float32
    one, other = (torch.randn(shape, device=device, dtype=kind) for shape in ((PLACES, 1024), (1024, 4096)))
    float((one @ other).sum())  # not counted: what is done once
    began, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < TRIAL:
        float((one @ other)[0, 0])
        count += 1
    return count * FORWARD * PLACES * other.numel() / taken
