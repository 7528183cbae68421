"""Refine an output: build the students, choose a start, train, and return the output with trained tensors."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion import __version__
from transfusion.architecture.naming import Naming
from transfusion.errors import MismatchError, SettingError, listing
from transfusion.files.tensor_files import as_dtype, tensor_digest
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.engines import fitting_threads
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.sharding import joined
from transfusion.transport.adapters.factoring import (
    OF_MODELS,
    adapter_tensors,
    lora_config,
    with_adapter,
    with_lora,
)
from transfusion.transport.adapters.outputs import lora_output
from transfusion.transport.output import Action, Output
from transfusion.transport.refinement.asked import Asked
from transfusion.transport.refinement.denoised import AskedDenoiser
from transfusion.transport.refinement.denoising import learned_denoiser
from transfusion.transport.refinement.inputs import TEXTS
from transfusion.transport.refinement.language import learned_student
from transfusion.transport.refinement.settings import (
    BASE,
    MOVED,
    REFINEMENT,
    STARTS_FROM_B,
    RefinementRecord,
    RefinementSettings,
)
from transfusion.transport.refinement.starts import choose_start, fit_head
from transfusion.transport.refinement.teaching import Teacher, Teaching
from transfusion.transport.refinement.training import ADAPTER_RATE, Training


def refine(
    output: Output,
    teacher: Teacher,
    b: Model,
    settings: RefinementSettings,
    *,
    unmoved: Output | None = None,
    whole: Output | None = None,
    targets: Collection[str] | None = None,
    checkpoint: Path | None = None,
    insists: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
) -> Output:
    """Train an output to answer like the fine-tune of A, and return it with the trained tensors.

    ``unmoved`` is the same output with α = 0: B, with the heads of the fine-tune where B has none. Training
    starts from whichever of the two answers more like the fine-tune.
    ``whole`` is B as a model of the class that an adapter was trained in, if the adapter brings heads.
    A rank in ``settings`` trains a LoRA in place of all weights; it changes the tensors ``targets``, or those
    of all linear layers.
    If the answers come no nearer to the fine-tune's than those of B, nothing is worth writing, unless the
    user ``insists``.
    ``checkpoint`` is a file name for what an interrupted run keeps, to go on from it.
    """
    is_adapter = output.moved_adapter is not None
    if settings.rank is not None:
        require_no_rank(output)
    began = time.monotonic()
    kept = checkpoint and checkpoint.with_name(f"{checkpoint.stem}-{_key(output, settings)}")
    device = resources.device
    threads = settings.threads or resources.jobs
    if threads is None:
        threads = _fitting_threads(teacher, kept) if device == "cpu" else torch.get_num_threads()
    torch.set_num_threads(threads)
    settings = replace(settings, threads=threads)
    outputs = {MOVED: output, **({} if unmoved is None else {BASE: unmoved})}
    with phase("building the models"):
        of_b = build(b, torch.float32).to(device)
        if is_adapter:
            base = b if whole is None else whole.model()
            starts = {name: with_adapter(build(base, torch.float32), one) for name, one in outputs.items()}
        else:
            wide = {name: one.in_dtype(torch.float32) for name, one in outputs.items()}
            starts = {name: build(one.model(), torch.float32) for name, one in wide.items()}
        starts = {name: one.to(device) for name, one in starts.items()}
    carried = output.names(Action.CARRIED)
    teaching = Teaching(
        teacher, b, of_b, starts[MOVED], settings, same_class=not [*output.dropped, *carried], kept=kept
    )
    start, near = choose_start(teaching, starts)
    training = Training(teaching, near.get(BASE), progress, began=began)
    if start == BASE:
        progress.warn(STARTS_FROM_B)
    student = starts[start]
    fit_head(teaching, student, carried)
    if is_adapter:
        record = training.train(student, start, ADAPTER_RATE, insists=insists)
        return _with_trained(output, adapter_tensors(student.cpu()), record, fits_as_it_is=False)
    if settings.rank is not None:
        naming = Naming(b.family, live=True)
        student = with_lora(student, settings.rank, starts[BASE], carried, naming=naming, targets=targets)
        record = training.train(student, start, ADAPTER_RATE, insists=insists)
        return _as_lora(output, adapter_tensors(student.cpu()), lora_config(student), record)
    starts.clear()
    record = training.train(student.requires_grad_(True), start, teacher.rate, insists=insists)
    config = None if hasattr(student, "config") else output.config
    return _with_weights(output, Model.open(student.cpu(), config=config), record)


def require_no_rank(output: Output) -> None:
    """Refuse a rank beside an adapter, which has its own, and beside a model that no adapter can be."""
    if output.adapter_files is not None:
        raise SettingError(
            "`refine_rank`: the fine-tune is an adapter, and keeps its own rank", hint="leave it out"
        )
    if output.decisive:
        raise MismatchError(
            f"{output.label}: the fine-tune has other settings or ties than its base, which an adapter cannot"
            f" have: {listing(output.decisive)}",
            hint="leave out `refine_rank`, and write a model",
        )


def refine_by_answers(
    output: Output,
    b: Model,
    of_a: Callable[[], Asked],
    settings: RefinementSettings,
    *,
    answers: str | Path | None = None,
    checkpoint: Path | None = None,
    **how: Any,
) -> Output:
    """Train an output to answer like a language model that was asked; return it with the trained tensors.

    ``of_a`` asks it, unless an interrupted run has, or reads the file of its ``answers``.
    """
    kept = checkpoint and checkpoint.with_name(f"{checkpoint.stem}-{_key(output, settings, answers)}")
    student, record = learned_student(output, b, of_a, settings, kept=kept, **how)
    student = joined(student)
    if output.adapter_files is not None:
        return _with_trained(output, adapter_tensors(student), record, fits_as_it_is=False)
    config = None if hasattr(student, "config") else output.config
    return _with_weights(output, Model.open(student, config=config), record)


def refine_denoiser(
    output: Output,
    b: Model,
    of_a: Callable[[], AskedDenoiser],
    settings: RefinementSettings,
    *,
    answers: str | Path | None = None,
    checkpoint: Path | None = None,
    **how: Any,
) -> Output:
    """Train a moved adapter to denoise like the fine-tune; return it with the trained tensors.

    ``of_a`` asks the fine-tune, unless an interrupted run has, or reads the file of its ``answers``.
    """
    if settings.rank is not None:
        require_no_rank(output)
    kept = checkpoint and checkpoint.with_name(f"{checkpoint.stem}-{_key(output, settings, answers)}")
    tensors, record = learned_denoiser(output, b, of_a, settings, kept=kept, **how)
    return _with_trained(output, tensors, record, fits_as_it_is=False)


def _key(output: Output, settings: RefinementSettings, answers: str | Path | None = None) -> str:
    """A hash of everything that decides the steps, so that no run goes on from the state of another."""
    own = [one and Path(one).stat().st_mtime_ns for one in (settings.calibrate, answers)]
    text = json.dumps(
        [__version__, asdict(settings), *own, output.recipe(), output.moved_adapter is not None]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fitting_threads(teacher: Teacher, kept: Path | None) -> int:
    """Return how many threads are fastest, or were when an interrupted run began."""
    note = kept and kept.with_suffix(".threads")
    if note is not None and note.exists():
        return int(note.read_text())
    inputs = ProbedModel(teacher.tuned, teacher.module).template(TEXTS)
    found = fitting_threads(
        lambda: teacher.run(teacher.tuned, teacher.module, inputs), torch.get_num_threads()
    )
    if note is not None:
        note.write_text(str(found))
    return found


# ── outputs with trained tensors ─────────────────────────────────────────────────────────────


def _with_trained(
    output: Output, trained: Mapping[str, Tensor], record: RefinementRecord, **about: Any
) -> Output:
    """Return an output with trained tensors; others stay."""
    tensors = {
        name: replace(one, compute=partial(_rows, trained[name].reshape(one.shape)))
        for name, one in output.tensors.items()
        if name in trained
    }
    return replace(
        output,
        tensors={**output.tensors, **tensors},
        metadata=lambda: record.added_to({**output.metadata(), **about}),
    )


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _with_weights(output: Output, student: Model, record: RefinementRecord) -> Output:
    """Return a model with the weights of a student."""
    trained = {name: student.raw(name) for name in output.tensors if name in student.names}
    known = output.onto.names
    output.changed.clear()
    output.changed |= {
        name for name, one in trained.items() if name in known and not _is_equal(output.onto.raw(name), one)
    }

    def recipe() -> dict[str, Any]:
        digests = {name: tensor_digest(student.read(name)).hex() for name in sorted(student.names)}
        return {**output.recipe(), REFINEMENT: digests}

    return replace(_with_trained(output, trained, record), recipe=recipe)


def _is_equal(own: Tensor, refined: Tensor) -> bool:
    return own.shape == refined.shape and torch.equal(own.to(refined.dtype), refined)


def _as_lora(
    output: Output, trained: Mapping[str, Tensor], config: Mapping[str, Any], record: RefinementRecord
) -> Output:
    """Return a LoRA for B that was trained in place of a model's weights."""

    def metadata() -> dict[str, Any]:
        about = {key: value for key, value in output.metadata().items() if key not in OF_MODELS}
        about |= {"kind": "adapter", "peft_type": "LORA", "moved": len(trained), "carried": []}
        return record.added_to(about)

    dtype = as_dtype(output.metadata()["dtype"])
    return lora_output(f"{output.label} as an adapter", output, trained, config, metadata, dtype)
