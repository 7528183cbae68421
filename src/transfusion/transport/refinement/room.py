"""How many inputs pass through a student together, within what its activations may take of the memory.

What a pass keeps for its gradients is counted on one input. If not even that fits, layers compute their
activations a second time on the way back (checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.runtime.engines import device_memory
from transfusion.runtime.processes import is_part, processes

SHARE, FLOOR = 0.2, 1 << 27
"""The bytes that activations may take on a CPU: a share of the weights, and a fixed part."""
LOGITS = 2
"""How often the logits are there: with their gradients."""
OF_DEVICE = 0.5
"""The share of an accelerator's free memory that they may take."""
LAYER = "GradientCheckpointingLayer"
"""The class of transformers' layers that can do so themselves."""


def inputs_in_a_pass(student: nn.Module, run_one: Callable[[], Tensor]) -> int:
    """Return how many inputs fit; switch checkpointing on if one is too large."""
    room = processes().agreed(_room(student))
    needed = _kept_for_gradients(student, run_one)
    if needed > room and _checkpointed(student):
        needed = _kept_for_gradients(student, run_one)
    return max(1, room // max(1, needed))


def _room(student: nn.Module) -> int:
    parameters = list(student.parameters())
    device = parameters[0].device
    if device.type == "cuda":
        return int(OF_DEVICE * torch.cuda.mem_get_info(device)[0])
    weights = sum(one.numel() * one.element_size() for one in parameters)
    return min(int(SHARE * weights) + FLOOR, int(OF_DEVICE * device_memory(device)))


def _kept_for_gradients(student: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes that one pass keeps for its gradients, beside the weights."""
    own, divided = _places(student), any(map(is_part, student.parameters()))
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        known = _places(student) if divided else own  # a block is whole while it runs
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = run()
    return sum(sizes.values()) + LOGITS * output.numel() * output.element_size()


def _places(student: nn.Module) -> set[int]:
    """Return where the weights are that this process holds as a whole."""
    return {one.untyped_storage().data_ptr() for one in student.parameters() if not is_part(one)}


def _checkpointed(student: nn.Module) -> bool:
    """Let layers compute their activations again on the way back; False where the library cannot.

    The library does so for modules that train. Only the layers are told so, and not while they compute: the
    dropout in them stays off.
    """
    if hasattr(student, "enable_gradient_checkpointing"):  # diffusers, whose layers need not train
        able = bool(getattr(student, "_supports_gradient_checkpointing", False))
        if able:
            student.enable_gradient_checkpointing()  # type: ignore[operator]
        return able
    enable = getattr(student, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(student, "supports_gradient_checkpointing", True):
        return False
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    told = [one for one in student.modules() if getattr(one, "gradient_checkpointing", False)]
    layers: list[Any] = [one for one in told if any(kind.__name__ == LAYER for kind in type(one).__mro__)]
    for one in layers or told:  # in older releases, the model around the layers does it
        one.training = True
    for one in layers:
        one._gradient_checkpointing_func = partial(_at_rest, one, one._gradient_checkpointing_func)
    return bool(told)


def _at_rest(layer: nn.Module, checkpointed: Callable[..., Any], run: Callable[..., Any], *given: Any) -> Any:
    """Run a layer that computes its activations again, without the dropout of training."""

    def compute(*given: Any) -> Any:
        layer.training = False
        try:
            return run(*given)
        finally:
            layer.training = True

    return checkpointed(compute, *given)
