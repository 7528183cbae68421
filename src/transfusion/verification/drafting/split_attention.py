"""Attention of torch in parts: ``nn.MultiheadAttention`` computes its projections without calling modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class SplitAttention(nn.Module):
    """The function of an ``nn.MultiheadAttention``, with a module for every projection."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        """Take the parameters of ``fused``, which then only computes what is between the projections."""
        super().__init__()
        parts = {"weight": fused.in_proj_weight, "bias": fused.in_proj_bias}
        self.kinds = [kind for kind, value in parts.items() if value is not None]
        self.batch_first = fused.batch_first  # torch's encoders ask for it
        width, same = fused.embed_dim, torch.eye(fused.embed_dim, dtype=fused.in_proj_weight.dtype)
        for number, name in enumerate(PROJECTIONS):
            linear = nn.Linear(width, width, bias="bias" in self.kinds)
            for kind in self.kinds:
                linear.register_parameter(kind, nn.Parameter(parts[kind].data.chunk(3)[number].clone()))
            self.add_module(name, linear)
        self.out_proj = fused.out_proj
        fused.in_proj_weight.data = same.repeat(3, 1)  # (3 width, width)
        fused.register_parameter("in_proj_bias", None)
        fused.out_proj = type(fused.out_proj)(width, width, bias=False)
        fused.out_proj.weight.data = same
        self._between = [fused]  # in a list: its parameters are none of the model's

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the fused module returns."""
        given = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        seen, weights = self._between[0](*given, *args, **kwargs)
        return self.out_proj(seen), weights


def split_attentions(module: nn.Module) -> nn.Module:
    """Return the module with a `SplitAttention` for every ``nn.MultiheadAttention`` of one width in it."""
    for owner in list(module.modules()):
        for name, child in owner.named_children():
            if isinstance(child, nn.MultiheadAttention) and _is_plain(child):
                setattr(owner, name, SplitAttention(child))
    return module


def _is_plain(attention: nn.MultiheadAttention) -> bool:
    return attention._qkv_same_embed_dim and attention._parameters.get("bias_k") is None


@contextmanager
def every_module_called() -> Iterator[None]:
    """Within the block, torch's encoder layers call their modules instead of one fused operation."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
