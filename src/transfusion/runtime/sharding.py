"""Modules whose weights are divided among the processes of a run: each holds a part of every one.

A block has its whole weights only while it runs. All processes have to run the module equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import LibraryError
from transfusion.runtime.processes import is_part, processes


def divided(module: nn.Module, device: str) -> nn.Module:
    """Divide the weights of a module among all processes; its gradients will be sums over them."""
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        raise LibraryError(
            f"torch {torch.__version__} cannot divide a model among processes", hint="install a later release"
        )
    mesh = init_device_mesh(torch.device(device).type, (processes().count,))
    for part in (*_blocks(module), module):
        # also the module itself gives back what it gathered, or it would go on with old values
        fsdp.fully_shard(part, mesh=mesh, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a module, from the outermost lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def joined(module: nn.Module) -> nn.Module:
    """Return a module on the CPU, with its whole weights in every process; it is not to be run any more."""
    if not any(map(is_part, module.parameters())):
        return module.cpu()
    from torch.distributed.fsdp import FSDPModule

    whole: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None:
                if one not in whole:
                    whole[one] = nn.Parameter(whole_of(one.detach()), one.requires_grad)
                part._parameters[name] = whole[one]
        if isinstance(part, FSDPModule):
            part.__class__ = type(part).__mro__[2]  # the class that `fully_shard` has replaced
    return module.cpu()


def whole_of(tensor: Tensor) -> Tensor:
    """Return a whole tensor on the CPU; all processes have to ask for it."""
    given: Any = tensor
    whole: Tensor = given.full_tensor() if is_part(tensor) else tensor
    return whole.cpu()


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a value in the type and on the device of another one; of a divided one, this process's part."""
    if is_part(value) or not is_part(like):
        return value.to(like.device, like.dtype)
    from torch.distributed.tensor import distribute_tensor

    of_all: Any = like
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, of_all.device_mesh, of_all.placements, src_data_rank=None)
