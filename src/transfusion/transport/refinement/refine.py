"""Refine an output: build the students, choose a start, train, and return the output with trained tensors."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion import __version__
from transfusion.architecture.naming import Naming
from transfusion.errors import AdapterError, MismatchError, SettingError, listing
from transfusion.files.tensor_files import as_dtype, tensor_digest
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.adapters.move import lora_output
from transfusion.transport.output import Action, Output
from transfusion.transport.refinement.settings import (
    BASE,
    MOVED,
    REFINEMENT,
    RefinementRecord,
    RefinementSettings,
)
from transfusion.transport.refinement.training import ADAPTER_RATE, Refiner, Teacher

_OF_MODELS = ("unchanged", "dropped", "left_out", "changed_settings", "new_tokens", "lost_tokens")
"""What the record of a model says, and that of an adapter does not."""


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
    jobs: int | None = None,
    progress: Progress = SILENT,
) -> Output:
    """Train an output to answer like the fine-tune of A, and return it with the trained tensors.

    ``unmoved`` is the same output with α = 0: B, with the heads of the fine-tune where B has none. Training
    starts from whichever of the two answers more like the fine-tune.
    ``whole`` is B as a model of the class that an adapter was trained in, if the adapter brings heads.
    A rank in ``settings`` trains a LoRA in place of all weights; it changes the tensors ``targets``, or those
    of all linear layers.
    ``checkpoint`` is a file from which an interrupted run goes on.
    """
    if checkpoint is not None:
        checkpoint = checkpoint.with_stem(f"{checkpoint.stem}-{_key(output, settings)}")
    adapter = output.moved
    if adapter is not None and settings.rank is not None:
        raise SettingError(
            "`refine_rank`: the fine-tune is an adapter, and keeps its own rank", hint="leave it out"
        )
    if settings.rank is not None and output.decisive:
        raise MismatchError(
            f"{output.label}: the fine-tune has other settings or ties than its base, which an adapter cannot"
            f" have: {listing(output.decisive)}",
            hint="leave out `refine_rank`, and write a model",
        )
    other_heads = [*output.dropped, *output.names(Action.CARRIED)]
    with phase("building the models"):
        refiner = Refiner(
            teacher,
            b,
            build(b, torch.float32),
            settings,
            same_class=not other_heads,
            progress=progress,
            kept=checkpoint,
        )
    threads = settings.threads or jobs or _fitting(refiner, checkpoint)
    torch.set_num_threads(threads)
    refiner.settings = replace(settings, threads=threads)
    both = {MOVED: output, **({BASE: unmoved} if unmoved is not None else {})}
    if adapter is not None:
        starts = {name: with_adapter(_module(whole, b), one) for name, one in both.items()}
    else:
        starts = {name: one.in_dtype(torch.float32).module().eval() for name, one in both.items()}
    start = refiner.choose(starts)
    if start == BASE:
        progress.warn("π takes B's answers away from the fine-tune's, so the refinement starts from B")
    if adapter is not None:
        student = starts[start]
        record = refiner.refine(student, start, checkpoint, rate=ADAPTER_RATE)
        return _with_adapter_tensors(output, adapter_tensors(student), record)
    if settings.rank is not None:
        naming = Naming(b.family, live=True)
        student, _ = with_lora(
            starts[start],
            settings.rank,
            starts[BASE],
            output.names(Action.CARRIED),
            naming=naming,
            targets=targets,
        )
        record = refiner.refine(student, start, checkpoint, rate=ADAPTER_RATE)
        return _as_lora(output, adapter_tensors(student), lora_config(student), record)
    student = starts.pop(start).requires_grad_(True)
    starts.clear()
    record = refiner.refine(student, start, checkpoint)
    config = None if hasattr(student, "config") else output.config
    return _with_weights(output, Model.open(student, config=config), record)


def _key(output: Output, settings: RefinementSettings) -> str:
    """A hash of everything that decides the steps, so that no run goes on from the state of another."""
    own = settings.calibrate and Path(settings.calibrate).stat().st_mtime_ns
    text = json.dumps([__version__, asdict(settings), own, output.recipe(), output.moved is not None])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fitting(refiner: Refiner, checkpoint: Path | None) -> int:
    """Return how many threads are fastest, or were when an interrupted run began."""
    note = checkpoint and checkpoint.with_suffix(".threads")
    if note is not None and note.exists():
        return int(note.read_text())
    found = refiner.fitting_threads(torch.get_num_threads())
    if note is not None:
        note.write_text(str(found))
    return found


def _module(whole: Output | None, b: Model) -> nn.Module:
    return build(b, torch.float32) if whole is None else whole.module().eval()


# ── outputs with trained tensors ─────────────────────────────────────────────────────────────


def _with_weights(output: Output, student: Model, record: RefinementRecord) -> Output:
    """Return a model with the weights of a student; other tensors stay."""
    output.changed.clear()  # what differs from B is found anew

    def rows(name: str, shape: tuple[int, ...], some: slice) -> Tensor:
        here = some if shape else None
        refined = student.raw(name, here)
        if name in output.onto.names:
            own = output.onto.raw(name, here)
            if own.shape != refined.shape or not torch.equal(own.to(refined.dtype), refined):
                output.changed.add(name)
        return refined

    tensors = {
        name: replace(one, compute=partial(rows, name, one.shape), by_rows=True)
        for name, one in output.tensors.items()
        if name in student.names
    }

    def recipe() -> dict[str, Any]:
        digests = {name: tensor_digest(student.read(name)).hex() for name in sorted(student.names)}
        return {**output.recipe(), REFINEMENT: digests}

    return replace(
        output,
        tensors={**output.tensors, **tensors},
        metadata=lambda: record.added_to(output.metadata()),
        recipe=recipe,
    )


def _with_adapter_tensors(output: Output, trained: Mapping[str, Tensor], record: RefinementRecord) -> Output:
    """Return an adapter with trained tensors: the same keys, kind and rank."""
    tensors = {
        key: replace(one, compute=partial(_trained, trained[key].reshape(one.shape)))
        for key, one in output.tensors.items()
        if key in trained
    }
    return replace(
        output,
        tensors={**output.tensors, **tensors},
        metadata=lambda: record.added_to({**output.metadata(), "fits_as_it_is": False}),
    )


def _trained(tensor: Tensor, rows: slice) -> Tensor:
    return tensor


def _as_lora(
    output: Output, trained: Mapping[str, Tensor], config: Mapping[str, Any], record: RefinementRecord
) -> Output:
    """Return a LoRA for B that was trained in place of a model's weights."""

    def metadata() -> dict[str, Any]:
        about = {key: value for key, value in output.metadata().items() if key not in _OF_MODELS}
        about |= {"kind": "adapter", "peft_type": "LORA", "moved": len(trained), "carried": []}
        return record.added_to(about)

    dtype = as_dtype(output.metadata()["dtype"])
    return lora_output(f"{output.label} as an adapter", output, trained, config, metadata, dtype)


# ── students whose adapter alone is trained, through PEFT ────────────────────────────────────


def with_adapter(module: nn.Module, moved: Output) -> nn.Module:
    """Return B's module with a moved adapter in it, whose tensors alone are trainable."""
    peft: Any = require_library("peft")
    with tempfile.TemporaryDirectory() as folder:
        place = moved.save(Path(folder) / "adapter")
        student: nn.Module = peft.PeftModel.from_pretrained(module, str(place), is_trainable=True).eval()
    return student.float()


def adapter_tensors(student: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a student's adapter, by the keys of its file."""
    peft: Any = require_library("peft")
    found = peft.get_peft_model_state_dict(student, save_embedding_layers=False)
    return {key: tensor.detach().cpu() for key, tensor in found.items()}


def with_lora(
    module: nn.Module,
    rank: int,
    kept: nn.Module,
    own_heads: Collection[str],
    *,
    naming: Naming,
    targets: Collection[str] | None = None,
) -> tuple[nn.Module, dict[str, float]]:
    """Return a module with a new LoRA, whose product is the change from ``kept``.

    Also return, for every module, the share of the change's squared norm that the rank holds.

    ``own_heads`` are tensors that B lacks; their modules are trained and stored whole. ``targets`` are the
    weights that the LoRA changes; without them, those of all linear layers.
    """
    peft: Any = require_library("peft")
    heads = {name.rpartition(".")[0] or name for name in own_heads}
    before = dict(kept.named_modules())
    chosen = [
        name
        for name, part in module.named_modules()
        if _is_linear(part)
        and name in before
        and name not in heads
        and (targets is None or naming.canonical(f"{name}.weight") in targets)
    ]
    if not chosen:
        raise AdapterError(
            "the model has no linear layers for a LoRA",
            hint="leave out `refine_rank`: all weights are refined",
        )
    changes = {name: (module.get_submodule(name).weight - before[name].weight).detach() for name in chosen}
    wholes = {name: module.get_submodule(name).state_dict() for name in sorted(heads)}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=chosen,
        modules_to_save=sorted(heads) or None,
        lora_dropout=0.0,
    )
    student: nn.Module = peft.get_peft_model(kept, config).eval()
    shares = {
        name: _factor(student.get_submodule(f"base_model.model.{name}"), change, rank)
        for name, change in changes.items()
    }
    for name, tensors in wholes.items():
        saved: Any = student.get_submodule(f"base_model.model.{name}")
        saved.modules_to_save["default"].load_state_dict(tensors)
    return student, shares


def lora_config(student: nn.Module) -> dict[str, Any]:
    """Return the configuration of a student's LoRA as PEFT stores it."""
    config: Any = student.peft_config["default"]  # type: ignore[index]
    info: Mapping[str, Any] = config.to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in info.items()}
    return {**plain, "peft_type": "LORA", "inference_mode": True}


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


def _factor(layer: Any, change: Tensor, rank: int) -> float:
    """Let the product of a LoRA's factors be the nearest to a change; return the share that it holds."""
    transposed = type(layer.get_base_layer()).__name__ == "Conv1D"
    left, values, right = torch.linalg.svd(change.T if transposed else change, full_matrices=False)
    kept = min(rank, len(values))
    roots = values[:kept].sqrt()
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        second.zero_()
        if float(values[0]) > 0:
            second[:, :kept] = left[:, :kept] * roots
            first[:kept] = roots[:, None] * right[:kept]
    total = float(values.square().sum())
    return float(values[:kept].square().sum()) / total if total else 1.0
