"""Models with one block more that does nothing: another shape, the same function."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from transfusion.architecture.naming import Naming
from transfusion.model.model import Model
from transfusion.model.part_roles import tensor_parts

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def deepened(module: Any, at: int = 1) -> Any:
    """Return a model of the same class with a block more, at this place; its branches write nothing."""
    config = copy.deepcopy(module.config)
    key = next(name for name in DEPTHS if name in config.to_dict())
    setattr(config, key, getattr(config, key) + 1)
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types[:at], config.layer_types[-1], *config.layer_types[at:]]
    made = type(module)(config).eval()
    a, b = Model.open(module), Model.open(made)
    ours = tensor_parts(a.architecture)
    values = {name: b.read(name).clone() for name in b.architecture.tensors}
    for role, part in tensor_parts(b.architecture).items():
        value = torch.zeros_like(part.of(values[part.tensor]))
        if role.block == at and "stream <- " not in role.use:
            value = part.of(values[part.tensor]).clone()
        elif role.block != at:
            block = role.block
            source = ours[replace(role, block=block - 1 if block is not None and block > at else block)]
            value = source.of(a.read(source.tensor))
        part.put(values[part.tensor], value - part.of(values[part.tensor]))
    naming = Naming(b.family, live=True)
    for name, parameter in made.named_parameters():
        if (known := naming.canonical(name)) in values:
            parameter.data.copy_(values[known])
    return made
