"""A LoRA from a change of weights: the product of its rank that is nearest to the change.

It serves a LoRA that moves to a B of another shape, and refinement with a rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.errors import AdapterError
from transfusion.runtime.optional_libraries import require_library
from transfusion.transport.adapters.in_place import adapter_in, at_rest, with_adapter_in_place
from transfusion.transport.adapters.outputs import lora_output
from transfusion.transport.output import Output

OF_MODELS = ("unchanged", "dropped", "left_out", "changed_settings", "new_tokens", "lost_tokens")
"""What the record of a model says, and that of an adapter does not."""


def lora_between_shapes(
    dense: Output,
    unmoved: Output,
    lora: tuple[int, Collection[str] | None, Collection[str]],
    dtype: torch.dtype | None,
    *,
    planned: bool,
) -> Output:
    """Return an adapter for B whose products are the nearest of their rank to the moved changes.

    ``dense`` is B with all of the moved change, ``unmoved`` the same with α = 0. ``lora`` is the rank, and
    the tensors of B that the adapter changes (None for all linear layers) and replaces. If it is
    ``planned``, it has shapes alone.
    """
    onto, (rank, targets, wholes) = dense.onto, lora
    made, settings, share = dict[str, Tensor](), dict[str, Any](), 1.0
    if planned:
        shapes = {name: dense.tensors[name].shape for name in wholes}
        for name, shape in ((name, onto.info(name).shape) for name in targets or ()):
            if len(shape) == 2:
                shapes |= {f"{name}.lora_A": (rank, shape[1]), f"{name}.lora_B": (shape[0], rank)}
        made = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    else:
        moved, base = (one.in_dtype(torch.float32).module() for one in (dense, unmoved))
        naming = Naming(onto.family, live=True)
        student, shares = with_lora(moved, rank, base, sorted(wholes), naming=naming, targets=targets)
        made, settings, share = adapter_tensors(student), lora_config(student), min(shares.values())

    def metadata() -> dict[str, Any]:
        about = {key: value for key, value in dense.metadata().items() if key not in OF_MODELS}
        stored = dtype and str(dtype).removeprefix("torch.")
        about |= {"kind": "adapter", "peft_type": "LORA", "dtype": stored}
        return {**about, "moved": len(made), "rank": rank, "kept": share}

    return lora_output(f"{dense.label} as an adapter", dense, made, settings, metadata, dtype)


# ── modules with an adapter, through PEFT ────────────────────────────────────────────────────


def with_adapter(module: nn.Module, moved: Output) -> nn.Module:
    """Return B's module with a moved adapter in it, whose tensors alone are trainable, in float32.

    That of a LoRA file is put in its place without PEFT.
    """
    if moved.moved_adapter is not None and moved.adapter_files is not None and moved.adapter_files.lora:
        return with_adapter_in_place(module, moved.moved_adapter)
    peft: Any = require_library("peft")
    with tempfile.TemporaryDirectory() as folder:
        place = moved.save(Path(folder) / "adapter")
        student: nn.Module = peft.PeftModel.from_pretrained(module, str(place), is_trainable=True).eval()
    for one in student.parameters():
        one.data = one.data.float() if one.requires_grad else one.data
    return student


def adapter_tensors(student: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a student's adapter, by the keys of its file."""
    if (own := adapter_in(student)) is not None:
        return own.tensors
    peft: Any = require_library("peft")
    found = peft.get_peft_model_state_dict(student, save_embedding_layers=False)
    return {key: tensor.detach().cpu() for key, tensor in found.items()}


def without_adapter(student: nn.Module) -> AbstractContextManager[Any]:
    """Within the block, a student computes what B does without the adapter."""
    own = adapter_in(student)
    return student.disable_adapter() if own is None else at_rest(own)  # type: ignore[operator]


def with_lora(
    module: nn.Module,
    rank: int,
    base: nn.Module,
    own_heads: Collection[str],
    *,
    naming: Naming,
    targets: Collection[str] | None = None,
) -> tuple[nn.Module, dict[str, float]]:
    """Return a module with a new LoRA, whose product is the change from ``base``.

    Also return, for every module, the share of the change's squared norm that the rank holds.

    ``own_heads`` are tensors that B lacks; their modules are trained and stored whole. ``targets`` are the
    weights that the LoRA changes; without them, those of all linear layers.
    """
    peft: Any = require_library("peft")
    heads = {name.rpartition(".")[0] or name for name in own_heads}
    before = dict(base.named_modules())
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
    student: nn.Module = peft.get_peft_model(base, config).eval()
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
            second[:, :kept] = left[:, :kept] * roots  # (out, rank)
            first[:kept] = roots[:, None] * right[:kept]  # (rank, in)
    total = float(values.square().sum())
    return float(values[:kept].square().sum()) / total if total else 1.0
