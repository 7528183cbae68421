"""Modules larger than memory: the weights of one unit at a time, read as it is needed and dropped.

A unit is a block of the model, or a table or projection of the vocabulary. All other parameters are small and
stay in memory. Weights have the type of their file until they are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming, without_part
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.building import require_modest_size, skeleton

Meet = Callable[[Callable[[], None]], None]
Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class _Place:
    """Where a parameter is in its module, and how it is read."""

    name: str
    """Its name in the whole module."""
    ours: str
    """Its canonical name, with a number if it is a part of a tensor."""
    owner: nn.Module
    read: Callable[[], Tensor]
    shape: torch.Size

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    def fill(self, value: Tensor) -> None:
        self.owner._parameters[self.leaf] = nn.Parameter(value)

    def empty(self) -> None:
        self.fill(torch.empty(self.shape, device="meta"))


@dataclass
class StreamedModule:
    """A module whose weights are on the device meta, except those of the unit that runs."""

    module: nn.Module
    units: Mapping[str, nn.Module]
    places: Mapping[str, list[_Place]]
    """The parameters of every unit."""
    resident: list[_Place]
    """The parameters that stay in memory."""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    meet: Meet = lambda load: load()
    """Called in front of every unit, with what loads it."""
    change: Change = lambda name, value: value
    """What becomes of a parameter, by its canonical name, when it is loaded."""
    loaded: str | None = None
    loads: int = field(default=0, compare=False)
    """How many times a unit was loaded."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the block the module can be run; every unit is loaded when it is called."""
        for name, unit in self.units.items():
            unit.forward = self._loading_first(name, unit.forward)
        self._fill(self.resident)
        try:
            yield
        finally:
            for unit in self.units.values():
                del unit.forward
            self._drop()

    def _loading_first(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a unit's forward pass that loads its weights first."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, Tensor) and one.is_meta for one in (*args, *kwargs.values())):
                raise RuntimeError(f"{name} was given inputs that went where weights are not loaded yet")
            self.meet(partial(self._load, name))
            return forward(*args, **kwargs)

        return run

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
        self._fill(self.places[name])
        self.loaded, self.loads = name, self.loads + 1

    def _fill(self, places: list[_Place]) -> None:
        with torch._C.DisableTorchFunction():  # reading is no part of what is computed in float64 throughout
            for place in places:
                value = place.read().to(device=self.device, dtype=self.dtype)
                place.fill(self.change(place.ours, value))

    def _drop(self) -> None:
        for place in self.places[self.loaded] if self.loaded is not None else ():
            place.empty()
        self.loaded = None

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Within the block, whoever loads parameters gets them with a change."""
        before, self.change = self.change, change
        try:
            yield
        finally:
            self.change = before


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
    if model.family.whole_only:
        raise ArchitectureError(
            f"{model.label}: a {model.family.name} asks for the place of weights that are not loaded yet",
            hint="leave out `memory`: the model is then held whole",
        )
    require_modest_size(model)
    module, read = without_cache(skeleton(model)), read or _checked_once(model)
    places = _places(model, module, read)
    units = dict(_units(module, _of_vocabulary(model, module)))
    owned: dict[str, list[_Place]] = {name: [] for name in units}
    resident: list[_Place] = []
    for name, place in places.items():
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), None)
        (resident if unit is None else owned[unit]).append(place)
    _fill_buffers(model, module, dtype, device)
    return StreamedModule(module, units, owned, resident, dtype, device)


def without_cache(module: nn.Module) -> nn.Module:
    """Let a language model remember nothing for a next token, unless it is asked to.

    Keys and values of all blocks would add up: the states of all batches are in memory together.
    """
    configs: list[Any] = [one.config for one in module.modules() if hasattr(one, "config")]
    for config in configs:
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return module


def unit_sizes(model: Model, module: nn.Module) -> int:
    """Return the most bytes of weights in float32 that a streamed module holds, from a skeleton."""
    units = dict(_units(module, _of_vocabulary(model, module)))
    sizes, stays = dict.fromkeys(units, 0), 0
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), None)
        if unit is None:
            stays += parameter.numel()
        else:
            sizes[unit] += parameter.numel()
    return torch.float32.itemsize * (max(sizes.values(), default=0) + stays)


def _places(model: Model, module: nn.Module, read: Callable[[str], Tensor]) -> dict[str, _Place]:
    """Return the place of every parameter, by its name in the module."""
    naming, found = Naming(model.family, live=True), dict[str, _Place]()
    ours: dict[nn.Parameter, str] = {}
    named = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        canonical = naming.canonical(name)
        if without_part(canonical)[0] in model.names:
            ours.setdefault(parameter, canonical)
    parts = {known: len(parameter) for parameter, known in ours.items() if without_part(known)[1] is not None}
    for name, parameter in named.items():
        path = name.rpartition(".")[0]
        known = ours.get(parameter)
        if known is None:
            raise ArchitectureError(
                f"{model.label}: {name} of {type(module).__name__} is not in the file",
                hint="leave out `memory`: the model is then held whole",
            )
        whole, part = without_part(known)
        rows = None
        if part is not None:
            before = (size for one, size in parts.items() if _is_before(one, whole, part))
            start = sum(before)
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
        found[name] = _Place(name, known, module.get_submodule(path), source, parameter.shape)
    return found


def _is_before(name: str, whole: str, part: int) -> bool:
    """Whether a name is that of an earlier part of a tensor."""
    owner, number = without_part(name)
    return owner == whole and number is not None and number < part


def _checked_once(model: Model) -> Callable[[str], Tensor]:
    """Return what reads tensors, and refuses NaN and infinite values where one is read for the first time."""
    seen: set[str] = set()

    def read(name: str) -> Tensor:
        value = model.raw(name) if name in seen else model.read(name)
        seen.add(name)
        return value

    return read


def _cut(read: Callable[[str], Tensor], name: str, rows: slice | None) -> Tensor:
    value = read(name)
    return value if rows is None else value[rows]


def _units(
    module: nn.Module, alone: frozenset[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks, and the modules that are loaded alone, by name."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Embedding) and child not in alone:
            continue  # small, and some modules read its weight without calling it
        if child in alone or (isinstance(module, nn.ModuleList | nn.Sequential) and not _is_list(child)):
            yield path, child
        else:
            yield from _units(child, alone, f"{path}.")


def _of_vocabulary(model: Model, module: nn.Module) -> frozenset[nn.Module]:
    """Return the tables and projections with an axis of the vocabulary."""
    naming, tensors = Naming(model.family, live=True), model.architecture.tensors
    layouts = {
        part: tensors.get(f"{naming.canonical(name)}.weight")
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding)
    }
    return frozenset(
        part for part, layout in layouts.items() if layout is not None and layout.dims_with(VOCABULARY)
    )


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


# ── Several forward passes side by side, which go through a module unit by unit t… ──────────────────


def run_side_by_side(
    run: Callable[[int], None], count: int, workers: int, streamed: StreamedModule | None = None
) -> None:
    """Call ``run(number)`` for every number below ``count``, some at a time, each on one thread of torch."""
    steps = _Lockstep(count, workers)

    def pass_through(number: int) -> None:
        torch.set_num_threads(1)
        steps.guard(lambda: run(number))

    threads = [threading.Thread(target=pass_through, args=(number,)) for number in range(count)]
    before = torch.get_num_threads()
    try:
        with nullcontext() if streamed is None else streamed.meeting(steps.wait_for_all):
            _run(threads, steps)
    finally:
        torch.set_num_threads(before)
    if steps.error is not None:
        raise steps.error


def _run(threads: list[threading.Thread], steps: _Lockstep) -> None:
    """Run all threads; an interrupt stops those that still run at their next unit."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:
        steps.stop(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


class _StoppedError(Exception):
    """Another pass has failed."""


class _Lockstep:
    """Lets ``workers`` passes run at a time, and all of them meet in front of every unit."""

    def __init__(self, count: int, workers: int) -> None:
        self.error: BaseException | None = None
        self._members, self._free = count, max(1, workers)
        self._waiting = self._round = 0
        self._change = threading.Condition()

    def guard(self, run: Callable[[], None]) -> None:
        """Run one pass; an error ends all of them."""
        try:
            self._take_turn()
            run()
        except _StoppedError:
            pass
        except BaseException as error:
            self.stop(error)
        finally:
            with self._change:
                self._members -= 1
                self._free += 1
                self._change.notify_all()

    def stop(self, error: BaseException) -> None:
        """End all passes, because of an error in one of them or an interrupt."""
        with self._change:
            self.error = self.error or error
            self._change.notify_all()

    def wait_for_all(self, load: Callable[[], None]) -> None:
        """Wait until every pass is here; the last one to come loads what all of them need."""
        with self._change:
            self._waiting += 1
            self._free += 1
            self._change.notify_all()
            here = self._round
            while self._round == here and self._waiting < self._members:
                self._wait()
            if self._round == here:
                load()
                self._waiting, self._round = 0, self._round + 1
                self._change.notify_all()
        self._take_turn()

    def _take_turn(self) -> None:
        with self._change:
            while not self._free:
                self._wait()
            if self.error is not None:
                raise _StoppedError
            self._free -= 1

    def _wait(self) -> None:
        if self.error is not None:
            raise _StoppedError
        self._change.wait()
