"""Students whose adapter alone is trained, through PEFT: LoRA in, LoRA out."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import AdapterError
from transfusion.runtime.optional_libraries import require_library
from transfusion.transportation.adapters.adapter_transport import AdapterTransport


def with_adapter(module: nn.Module, moved: AdapterTransport) -> nn.Module:
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


def with_lora(module: nn.Module, rank: int, kept: nn.Module, own_heads: list[str]) -> nn.Module:
    """Return a module with a new LoRA in every linear layer, whose product is the change from ``kept``.

    ``own_heads`` are modules that B lacks; they are trained and stored whole.
    """
    peft: Any = require_library("peft")
    heads = {name.rpartition(".")[0] or name for name in own_heads}
    before = dict(kept.named_modules())
    targets = [
        name
        for name, part in module.named_modules()
        if _is_linear(part) and name in before and name not in heads
    ]
    if not targets:
        raise AdapterError(
            "the model has no linear layers for a LoRA",
            hint="leave out `refine_rank`: all weights are refined",
        )
    changes = {name: (module.get_submodule(name).weight - before[name].weight).detach() for name in targets}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=targets,
        modules_to_save=sorted(heads) or None,
        lora_dropout=0.0,
    )
    student: nn.Module = peft.get_peft_model(kept, config).eval()
    for name, change in changes.items():
        _factor(student.get_submodule(f"base_model.model.{name}"), change, rank)
    return student


def lora_config(student: nn.Module) -> dict[str, Any]:
    """Return the configuration of a student's LoRA as PEFT stores it."""
    config: Any = student.peft_config["default"]  # type: ignore[index]
    info: Mapping[str, Any] = config.to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in info.items()}
    return {**plain, "peft_type": "LORA", "inference_mode": True}


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


def _factor(layer: Any, change: Tensor, rank: int) -> None:
    """Let the product of a LoRA's factors be the best approximation of a change."""
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
