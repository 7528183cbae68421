"""Modules larger than memory: the weights of one unit at a time, read as it is needed and dropped.

A unit is a block of the model, or a large table or projection outside of the blocks. All other parameters are
small and stay in memory. Weights have the type of their file until they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import ArchitectureError
from transfusion.live.meta_models import require_modest_size, skeleton
from transfusion.model.model import Model

LARGE = 2**20
"""The numbers from which a table or projection outside of the blocks is a unit."""

Meet = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class _Place:
    """Where a parameter is in its module, and how it is read."""

    owner: nn.Module
    leaf: str
    read: Callable[[], Tensor]
    shape: torch.Size

    def fill(self, value: Tensor) -> None:
        self.owner._parameters[self.leaf] = nn.Parameter(value, requires_grad=False)

    def empty(self) -> None:
        self.fill(torch.empty(self.shape, device="meta"))


@dataclass
class StreamedModule:
    """A module whose weights are on the device meta, except those of the unit that runs."""

    module: nn.Module
    units: Mapping[str, nn.Module]
    places: Mapping[str, list[_Place]]
    """The parameters of every unit."""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    meet: Meet = lambda load: load()
    """Called in front of every unit, with what loads it."""
    loaded: str | None = None
    loads: int = field(default=0, compare=False)
    """How many times a unit was loaded."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the block the module can be run; every unit is loaded when it is called."""

        def hook_of(name: str) -> Callable[..., None]:
            return lambda module, args: self.meet(partial(self._load, name))

        handles = [unit.register_forward_pre_hook(hook_of(name)) for name, unit in self.units.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._drop()

    @contextmanager
    def meeting(self, meet: Meet) -> Iterator[None]:
        """Within the block, call this in front of every unit."""
        before, self.meet = self.meet, meet
        try:
            yield
        finally:
            self.meet = before

    def _load(self, name: str) -> None:
        if self.loaded == name:
            return
        self._drop()
        for place in self.places[name]:
            place.fill(place.read().to(device=self.device, dtype=self.dtype))
        self.loaded, self.loads = name, self.loads + 1

    def _drop(self) -> None:
        for place in self.places[self.loaded] if self.loaded is not None else ():
            place.empty()
        self.loaded = None

    @property
    def largest(self) -> int:
        """The most bytes of weights that are in memory at once: a unit as it is used, and all that stays."""
        sizes = [sum(place.shape.numel() for place in places) for places in self.places.values()]
        stays = sum(one.numel() for one in self.module.parameters() if not one.is_meta)
        return (max(sizes, default=0) + stays) * self.dtype.itemsize


def stream(
    model: Model,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    read: Callable[[str], Tensor] | None = None,
) -> StreamedModule:
    """Return a model's module without its weights, which are read while it runs.

    ``read`` returns a tensor by its canonical name; by default that of the model. A module of the user's own,
    and one with parameters that the file does not have, cannot be streamed: that is an `ArchitectureError`.
    """
    if model.checkpoint.in_memory or model.checkpoint.config is None:
        raise ArchitectureError(
            f"{model.label}: a model in memory is not read from files", hint="leave out `memory`"
        )
    require_modest_size(model)
    module, read = skeleton(model), read or model.read
    places = _places(model, module, read)
    units = dict(_units(module))
    owned: dict[str, list[_Place]] = {name: [] for name in units}
    for name, place in places.items():
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), None)
        if unit is None:
            place.fill(place.read().to(device=device, dtype=dtype))
        else:
            owned[unit].append(place)
    _fill_buffers(model, module, dtype, device)
    return StreamedModule(module, units, owned, dtype, device)


def _places(model: Model, module: nn.Module, read: Callable[[str], Tensor]) -> dict[str, _Place]:
    """Return the place of every parameter, by its name in the module."""
    naming, found = Naming(model.family, live=True), dict[str, _Place]()
    ours: dict[nn.Parameter, str] = {}
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        canonical = naming.canonical(name)
        if without_part(canonical)[0] in model.names:
            ours.setdefault(parameter, canonical)
    begun: dict[str, int] = {}
    for name, parameter in named.items():
        path, _, leaf = name.rpartition(".")
        known = ours.get(parameter)
        if known is None:
            raise ArchitectureError(
                f"{model.label}: {name} of {type(module).__name__} is not in the file",
                hint="leave out `memory`: the model is then held whole",
            )
        whole, part = without_part(known)
        rows = None
        if part is not None:
            start = begun.get(whole, 0)
            begun[whole] = start + len(parameter)
            rows = slice(start, start + len(parameter))
        shape = tuple(model.info(whole).shape)
        wanted = shape if rows is None else (len(parameter), *shape[1:])
        if tuple(parameter.shape) != wanted:
            raise ArchitectureError(
                f"{model.label}: {name} of {type(module).__name__} has the shape {tuple(parameter.shape)},"
                f" and the file {wanted}",
                hint="leave out `memory`: the model is then held whole",
            )
        source = partial(_cut, read, whole, rows)
        found[name] = _Place(module.get_submodule(path), leaf, source, parameter.shape)
    return found


def _cut(read: Callable[[str], Tensor], name: str, rows: slice | None) -> Tensor:
    value = read(name)
    return value if rows is None else value[rows]


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks, and what else is large enough to be loaded alone, by name."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, nn.ModuleList | nn.Sequential) and not _is_list(child):
            yield path, child
        elif isinstance(child, nn.Linear | nn.Embedding) and not isinstance(module, nn.MultiheadAttention):
            if child.weight.numel() >= LARGE:
                yield path, child
        else:
            yield from _units(child, f"{path}.")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _fill_buffers(model: Model, module: nn.Module, dtype: torch.dtype, device: str) -> None:
    """Give the buffers the values that the file has, and the type and place of the weights."""
    naming = Naming(model.family, live=True)
    for name, buffer in list(module.named_buffers()):
        path, _, leaf = name.rpartition(".")
        owner: Any = module.get_submodule(path)
        value = model.read(ours) if (ours := naming.canonical(name)) in model.names else buffer
        owner._buffers[leaf] = value.to(device, dtype) if value.is_floating_point() else value.to(device)
