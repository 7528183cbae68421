"""Language models: the fine-tune is asked, then B learns, with one base in memory at a time.

The fine-tune, in the type that it is stored in, writes texts and answers them. Then B answers texts of its
own, and the student of B learns from both.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.errors import MismatchError
from transfusion.model.model import Model
from transfusion.running.building import build, places_of, skeleton
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.texts import tokenizer_of
from transfusion.runtime.engines import release_memory, require_device
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.processes import processes
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.runtime.sharding import divided, placed_like
from transfusion.transport.adapters.factoring import with_adapter, without_adapter
from transfusion.transport.adapters.in_place import adapter_in
from transfusion.transport.output import Output
from transfusion.transport.refinement.asked import Asked
from transfusion.transport.refinement.asking import ask, own_tokens
from transfusion.transport.refinement.denoised import AskedDenoiser
from transfusion.transport.refinement.descent import copied, put, rate_for
from transfusion.transport.refinement.learning import AskedLessons
from transfusion.transport.refinement.lessons import Agreement, Lessons, values_in
from transfusion.transport.refinement.settings import (
    BASE,
    MOVED,
    STARTS_FROM_B,
    RefinementRecord,
    RefinementSettings,
)
from transfusion.transport.refinement.training import ADAPTER_RATE, Training
from transfusion.transport.refinement.translation import Translation, translated

AnswersT = TypeVar("AnswersT", Asked, AskedDenoiser)


def is_language_model(model: Model) -> bool:
    """Whether a model writes texts and takes nothing else, by its class."""
    return model.family.inputs == ("tokens",) and ProbedModel(model, skeleton(model)).writes


# ── asking ───────────────────────────────────────────────────────────────────────────────────


def ask_fine_tune(
    a: Model,
    tuned: Model | Output,
    about: Mapping[str, Any],
    *,
    seed: int,
    device: str = "cpu",
    calibrate: Path | None = None,
    kept: Path | None = None,
) -> Asked:
    """Ask a fine-tune of A: a model, or an adapter for A as an output.

    ``about`` says whom, and how many ``tokens`` A has.
    """
    about, tokens = dict(about), about["tokens"]
    with phase("building the fine-tune"):
        if isinstance(tuned, Model):
            module = build(tuned, None).to(device)
            about["change"] = size_of_change(tuned, a)
        else:
            module = with_adapter(build(a, None), tuned).to(device)
    release_memory()  # a new module is initialised before it has its values

    @contextmanager
    def base() -> Iterator[nn.Module]:
        nonlocal module
        if not isinstance(tuned, Model):
            with without_adapter(module):
                yield module
            return
        module = None  # type: ignore[assignment]
        release_memory()
        yield build(a, None).to(device).eval()

    asked_of = tuned if isinstance(tuned, Model) else a
    return ask(
        asked_of, module, about, seed=2 * seed, tokens=tokens, calibrate=calibrate, kept=kept, base=base
    )


def size_of_change(tuned: Model, a: Model) -> float:
    """Return the root mean square of what a fine-tune changed in the matrices of A."""
    squares, count = 0.0, 0
    for name in a.names.keys() & tuned.names.keys():
        if len(a.info(name).shape) >= 2 and a.info(name).shape == tuned.info(name).shape:
            change = tuned.read(name).float() - a.read(name).float()
            squares, count = squares + float(change.square().sum()), count + change.numel()
    return math.sqrt(squares / max(count, 1))


def once(path: Path | None, make: Callable[[], AnswersT], load: Callable[[Path], AnswersT]) -> AnswersT:
    """Let the main process ask, unless an interrupted run has; the others read what it wrote."""
    every = processes()
    if path is None:
        return make()
    if every.is_main and not path.exists():
        staged = path.with_suffix(".new")  # an interrupted run leaves no part of a file
        make().save(staged)
        os.replace(staged, path)
    every.wait()
    return load(path)  # tensors of a file are not in memory until they are used


# ── learning ─────────────────────────────────────────────────────────────────────────────────


def learned_student(
    output: Output,
    b: Model,
    of_a: Callable[[], Asked],
    settings: RefinementSettings,
    *,
    unmoved: Output | None = None,
    allowed: Tensor | None = None,
    kept: Path | None = None,
    insists: bool = False,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> tuple[nn.Module, RefinementRecord]:
    """Train an output to answer like a fine-tune that was asked, and return the student and the record.

    ``unmoved`` is an adapter with α = 0, if it is no LoRA, of which it is known. ``allowed`` are the tokens
    that A and B share, if some are not. ``kept`` is a file name for what an interrupted run goes on with.
    """
    began = time.monotonic()
    if (device := processes().device(device)) != "cpu":
        require_device(device)
    asked = once(kept and kept.with_name(f"{kept.name}-of-a.safetensors"), of_a, Asked.load)
    release_memory()
    subject = ProbedModel(b, skeleton(b))
    in_others = other_tokens(subject, asked)

    def ask_b() -> Asked:
        module = build(b, None).to(device)
        release_memory()
        tokens = None if in_others else asked.about["tokens"]
        return ask(b, module, {}, seed=2 * settings.seed + 1, tokens=tokens)

    of_b = once(kept and kept.with_name(f"{kept.name}-of-b.safetensors"), ask_b, Asked.load)
    release_memory()
    with phase("building the student"):
        student, model = _student(output, b)
        divides = model is not None and processes().count > 1
        student = divided(student, device) if divides else student.to(device)
    release_memory()
    trained = {name: one for name, one in student.named_parameters() if one.requires_grad}
    values = _values_of(model, unmoved, b, student, trained)
    if in_others:
        asked, allowed = _in_tokens_of(subject, asked), None
    else:
        asked = asked.within(subject.positions)
    lessons = AskedLessons(asked, of_b, b, settings, values, allowed=allowed, kept=kept)
    start, near = chosen_start(lessons, student, trained)
    if start == BASE:
        progress.warn(STARTS_FROM_B)
    rate = ADAPTER_RATE
    if output.adapter_files is None:
        rate = rate_for(float(asked.about["change"]))
    record = Training(lessons, near, progress, began=began).train(student, start, rate, insists=insists)
    return student, record


def other_tokens(of_b: ProbedModel, asked: Asked) -> bool:
    """Whether a fine-tune was asked in its own tokens, and B has others."""
    own = own_tokens(of_b)
    if own is None or asked.tokens is None:
        return False
    return own.table.digest != asked.tokens.table.digest


def _in_tokens_of(of_b: ProbedModel, asked: Asked) -> Asked:
    """Return the answers in B's tokens."""
    own, (tokenizer, reason) = own_tokens(of_b), tokenizer_of(of_b)
    if tokenizer is None or own is None or asked.tokens is None:
        raise MismatchError(f"{of_b.model.label}: {reason}", hint="B's tokenizer has to be in its folder")
    translation = Translation(asked.tokens, own, tokenizer.encode, of_b.positions)
    return translated(asked, translation, of_b.vocabulary)


def _student(output: Output, b: Model) -> tuple[nn.Module, Model | None]:
    """Return the moved model in float32 and what it was built of; or B with an adapter, which alone is
    trained. A B in float16 is then one in bfloat16.
    """
    if output.adapter_files is not None:
        # products are computed in bfloat16, and so is what lies between them; gradients overflow float16
        half = any(b.info(name).dtype is torch.float16 for name in b.architecture.tensors)
        return with_adapter(build(b, torch.bfloat16 if half else None), output), None
    wide = output.in_dtype(torch.float32)
    model = wide.shaped()
    return build(model, torch.float32, wide.tensor).requires_grad_(True), model


def _values_of(
    model: Model | None,
    unmoved: Output | None,
    b: Model,
    student: nn.Module,
    trained: Mapping[str, nn.Parameter],
) -> Callable[[Mapping[str, nn.Parameter]], dict[str, Tensor]]:
    """Return what reads B's values of trained parameters; parameters that B lacks are skipped."""
    naming = Naming(b.family, live=True)
    if (own := adapter_in(student)) is not None:
        return own.values_of_b
    if unmoved is not None and unmoved.adapter_files is not None:
        peft: Any = require_library("peft")
        moved = copied(trained)
        peft.set_peft_model_state_dict(student, unmoved.state_dict())
        of_b = copied(trained)
        put(trained, moved)
        return lambda asked: {name: of_b[name] for name in asked}

    def of_adapter(asked: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        known = {name: naming.canonical(name) for name in asked}
        own = {one: b.read(one) for one in known.values() if one in b.names}
        found = values_in(own, naming, asked)
        return {name: placed_like(value, asked[name]) for name, value in found.items()}

    def of_model(asked: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        assert model is not None
        places, _ = places_of(model, student)
        known = {
            name for name in b.names.keys() & model.names if b.info(name).shape == model.info(name).shape
        }
        return {
            one.name: placed_like(one.read(b.read), asked[one.name])
            for one in places
            if one.name in asked and known.issuperset(one.tensors)
        }

    return of_adapter if model is None else of_model


def chosen_start(
    lessons: Lessons, student: nn.Module, trained: Mapping[str, nn.Parameter]
) -> tuple[str, dict[str, Agreement]]:
    """Leave a student at B + α·π(τ) or at B, whichever answers more like the fine-tune; return its name, and
    how near B is.
    """
    moved = copied(trained)
    with phase("comparing starts with the fine-tune", 2) as advance:
        found = {}
        for name, values in ((MOVED, moved), (BASE, {**moved, **lessons.values_of_b(trained)})):
            put(trained, values)
            found[name] = {kind: lessons.measure(student, kind) for kind in lessons.judges}
            advance("starts compared with the fine-tune")
        apart = {name: sum(one.divergence for one in several.values()) for name, several in found.items()}
        start = min(apart, key=lambda name: apart[name])
        if start == MOVED:
            put(trained, moved)
    return start, found[BASE]
