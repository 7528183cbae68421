"""How the vectors of a module act: which of them multiply activations, and which are added to them.

Measured at the operation that first combines a vector with another tensor, whatever the operation and the
vector are called. The vector is raised by one there. If every output rises by one or not at all, the vector
is added (a bias, a class token); otherwise it multiplies (the weight of a norm, LayerScale).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def vector_effects(module: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """Return how far each vector that ``run`` uses is from being added; zero means added."""
    watch = _VectorWatch()
    vectors = [(name, one) for name, one in module.named_parameters() if one.ndim == 1]
    held = [parameter.data for _, parameter in vectors]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one operation that hides what its biases do
        for name, parameter in vectors:
            parameter.data = parameter.data.clone()  # in a storage of its own, so that views are recognised
            watch.follow(parameter, name)
        with watch:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for (_, parameter), data in zip(vectors, held, strict=True):
            parameter.data = data
    return watch.effects


class _VectorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows vectors, and tensors made of one vector alone, to the first operation with another tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.effects: dict[str, float] = {}
        self._vector_at: dict[int, str] = {}
        self._alive: list[Tensor] = []
        """Keeps the followed storages, so that no other tensor gets their addresses."""

    def follow(self, tensor: Tensor, name: str) -> None:
        self._vector_at[_address(tensor)] = name
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {"args": args, "kwargs": kwargs or {}}
        owners = {self._vector_at.get(_address(one)) for one in tree_leaves(given) if isinstance(one, Tensor)}
        if len(owners) > 1:
            for name in owners:
                if name is not None and name not in self.effects:
                    self.effects[name] = self._effect(func, given, name)
        output = func(*args, **given["kwargs"])
        if len(owners) == 1 and (name := owners.pop()) is not None:
            for one in tree_leaves(output):
                if isinstance(one, Tensor) and _address(one) not in self._vector_at:
                    self.follow(one, name)
        return output

    def _effect(self, func: Any, given: Mapping[str, Any], name: str) -> float:
        def output(rise: float) -> Tensor:
            def copied(tensor: Tensor) -> Tensor:
                is_vector = self._vector_at.get(_address(tensor)) == name
                return tensor + rise if is_vector else tensor.clone()

            copy = tree_map_only(Tensor, copied, given)
            first: Tensor = tree_leaves(func(*copy["args"], **copy["kwargs"]))[0]
            return first

        rise = output(1.0) - output(0.0)
        return float(torch.minimum(rise.abs(), (rise - 1).abs()).max())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
