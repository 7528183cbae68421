"""Models run on probes: whole, or within a memory that holds one layer at a time, read as it is needed.

A layer is a block of the model, or a table or projection of the vocabulary. All other parameters are small
and stay in memory. Weights have the type of their file until they are used. Several forward passes go through
the module side by side, so that each layer is read once for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.naming import Naming
from transfusion.architecture.table import Family
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.building import (
    Place,
    build,
    fill,
    fill_buffers,
    places_of,
    require_modest_size,
    skeleton,
)
from transfusion.running.probes.inputs import plain_experts, run_model
from transfusion.runtime.engines import device_memory, require_device
from transfusion.runtime.resources import Resources, format_bytes

_WHOLE = "leave out `memory`: the model is then held whole"


class StreamedModule:
    """A module whose weights are on the device meta, except those of the layer that runs.

    ``read`` returns a tensor by its canonical name; by default that of the model. A module of the user's own,
    and one with parameters that the file does not have, cannot be streamed: that is an `ArchitectureError`.
    """

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        read: Callable[[str], Tensor] | None = None,
    ) -> None:
        if model.checkpoint.in_memory or model.checkpoint.config is None:
            raise ArchitectureError(
                f"{model.label}: a model in memory is not read from files", hint="leave out `memory`"
            )
        if model.family.whole_only:
            raise ArchitectureError(
                f"{model.label}: a {model.family.name} asks for the place of weights that are not loaded yet",
                hint=_WHOLE,
            )
        require_modest_size(model)
        self.module = without_cache(skeleton(model))
        places, missing = places_of(model, self.module)
        if missing:
            raise ArchitectureError(
                f"{model.label}: {missing[0]} of {type(self.module).__name__} is not in the file", hint=_WHOLE
            )
        self.model, self.dtype, self.device = model, dtype, device
        self.layers = dict(_layers(self.module, _of_vocabulary(model, self.module)))
        self.places: dict[str | None, list[Place]] = {name: [] for name in (None, *self.layers)}
        """The parameters of every layer; under None, those that stay in memory."""
        for place in places:
            self.places[_layer_of(place.name, self.layers)].append(place)
        fill_buffers(model, self.module, dtype, device)
        self.read = read
        self.change: Callable[[str, Tensor], Tensor] | None = None
        """What becomes of a parameter, by its canonical name, when it is loaded."""
        self.loaded: str | None = None
        self.loads = 0
        """How many times a layer was loaded."""
        self._checked: set[str] = set()
        self._enter: Callable[[str], None] | None = None

    def _read(self, name: str) -> Tensor:
        """Read a tensor; refuse NaN and infinite values when it is read for the first time."""
        if self.read is not None:
            return self.read(name)
        value = self.model.raw(name) if name in self._checked else self.model.read(name)
        self._checked.add(name)
        return value

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within the block the module can be run; every layer is loaded when it is called."""
        for name, layer in self.layers.items():
            layer.forward = partial(self._run_layer, name, layer.forward)
        fill(self.places[None], self._value)
        try:
            yield
        finally:
            for layer in self.layers.values():
                del layer.forward
            self._drop()

    def _run_layer(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, Tensor) and one.is_meta for one in (*args, *kwargs.values())):
            raise RuntimeError(f"{name} was given inputs that went where weights are not loaded yet")
        (self._enter or self.load)(name)
        return forward(*args, **kwargs)

    @contextmanager
    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
        """Within the block, parameters are loaded with a change."""
        self.change = change
        try:
            yield
        finally:
            self.change = None

    @contextmanager
    def entered_by(self, enter: Callable[[str], None]) -> Iterator[None]:
        """Within the block, call ``enter(name)`` in front of every layer; it has to load the layer."""
        self._enter = enter
        try:
            yield
        finally:
            self._enter = None

    def load(self, name: str) -> None:
        """Load a layer, and drop the one before."""
        if self.loaded != name:
            self._drop()
            fill(self.places[name], self._value)
            self.loaded, self.loads = name, self.loads + 1

    def _value(self, place: Place) -> Tensor:
        def change(name: str, value: Tensor) -> Tensor:
            value = value.to(self.device, self.dtype)
            return value if self.change is None else self.change(name, value)

        return place.read(self._read, change)

    def _drop(self) -> None:
        for place in self.places[self.loaded] if self.loaded is not None else ():
            place.put(nn.Parameter(torch.empty(place.parameter.shape, device="meta")))
        self.loaded = None


def without_cache(module: nn.Module) -> nn.Module:
    """Let a language model keep no KV cache, unless it is asked to: the caches of all batches would be in
    memory together.
    """
    for one in module.modules():
        config: Any = getattr(one, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return module


def streamed_bytes(model: Model, module: nn.Module) -> int:
    """Return the most bytes of weights in float32 that a streamed module holds, from a skeleton."""
    layers = dict(_layers(module, _of_vocabulary(model, module)))
    sizes: dict[str | None, int] = dict.fromkeys((None, *layers), 0)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        sizes[_layer_of(name, layers)] += parameter.numel()
    always = sizes.pop(None)
    return torch.float32.itemsize * (max(sizes.values(), default=0) + always)


def _layers(
    module: nn.Module, alone: frozenset[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks, and the modules that are loaded alone, by name."""
    lists = (nn.ModuleList, nn.Sequential)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Embedding) and child not in alone:
            continue  # small, and some modules read its weight without calling it
        if child in alone or (isinstance(module, lists) and not isinstance(child, (*lists, nn.ModuleDict))):
            yield path, child
        else:
            yield from _layers(child, alone, f"{path}.")


def _layer_of(name: str, layers: dict[str, nn.Module]) -> str | None:
    return next((layer for layer in layers if name.startswith(f"{layer}.")), None)


def _of_vocabulary(model: Model, module: nn.Module) -> frozenset[nn.Module]:
    """Return the tables and projections with an axis of the vocabulary."""
    naming, tensors = Naming(model.family, live=True), model.architecture.tensors
    layouts = {
        part: tensors.get(f"{naming.canonical(name)}.weight")
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding)
    }
    return frozenset(part for part, layout in layouts.items() if layout and layout.dims_with(VOCABULARY))


def run_side_by_side(
    run: Callable[[int], None], count: int, workers: int, streamed: StreamedModule | None = None
) -> None:
    """Call ``run(number)`` for every number below ``count``, some at a time, each on one thread of torch.

    Passes through a streamed module meet in front of every layer, and the last one to come loads it.
    """
    if streamed is None:
        _run_all(run, count, workers, stop=lambda: None)
        return
    turns, lock, waiting, over = threading.Semaphore(workers), threading.Lock(), list[str](), list[int]()
    differ = ArchitectureError(
        f"{streamed.model.label}: inputs differ in the layers that they go through", hint=_WHOLE
    )

    def load() -> None:
        name = waiting[0]
        waiting.clear()
        streamed.load(name)

    barrier = threading.Barrier(count, load)

    def enter(name: str) -> None:
        with lock:
            if over or (waiting and waiting[0] != name):
                raise differ
            waiting.append(name)
        turns.release()
        try:
            barrier.wait()
        finally:
            turns.acquire()

    def run_in_turn(number: int) -> None:
        with turns:
            run(number)
        with lock:
            over.append(number)
            if waiting:
                raise differ

    with streamed.entered_by(enter):
        _run_all(run_in_turn, count, count, stop=barrier.abort)


def _run_all(run: Callable[[int], None], count: int, threads: int, stop: Callable[[], None]) -> None:
    """Run all numbers on threads; an error in one of them, or an interrupt, ends all."""
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            if not failed:
                run(number)
        except BaseException as error:
            failed.append(error)
            stop()

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            try:
                list(pool.map(guarded, range(count)))
            except BaseException as error:  # an interrupt
                failed.append(error)
                stop()
                raise
    finally:
        torch.set_num_threads(before)
    if failed:
        others = (error for error in failed if not isinstance(error, threading.BrokenBarrierError))
        raise next(others, failed[0])


# ── how models are run on probes ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RunningModel:
    """A module that can be run, whole or layer by layer."""

    module: nn.Module
    family: Family
    workers: int = 1
    device: str = "cpu"
    streamed: StreamedModule | None = None

    def outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the module on one batch."""
        given = {name: one.to(self.device) for name, one in inputs.items()}
        return run_model(self.module, self.family, given, double=False)

    def each(self, run: Callable[[int], None], count: int) -> None:
        """Call ``run(number)`` for every number below ``count``, some at a time.

        Streamed weights are loaded once for all of them.
        """
        with plain_experts(self.module):
            run_side_by_side(run, count, self.workers, self.streamed)


@dataclass(frozen=True)
class RunConfig:
    """How models are run on probes."""

    workers: int = 1
    """How many batches run side by side."""
    device: str = "cpu"
    limit: int | None = None
    """Bytes of memory. With a limit, the weights of one layer at a time are in memory."""
    note: Callable[[str], None] = lambda text: None
    """Told if a model cannot be run layer by layer, and is run whole."""

    @classmethod
    def within(cls, resources: Resources) -> RunConfig:
        """Return how models are run with these resources."""
        workers = resources.jobs or torch.get_num_threads()
        return cls(workers, require_device(resources.device), resources.memory)

    @property
    def by_layer(self) -> bool:
        return self.limit is not None

    def require_room(self, model: Model, copies: int = 1) -> None:
        """Refuse to run a whole model of which so many copies, in float32, exceed the memory."""
        needed = copies * torch.float32.itemsize * model.checkpoint.parameters
        room = device_memory(torch.device(self.device))
        if not self.by_layer and needed > room:
            raise ArchitectureError(
                f"{model.label}: running it takes {format_bytes(needed)} in float32, and there are"
                f" {format_bytes(room)}",
                hint="with a limit, such as `memory` of half of that, models run block by block",
            )

    @contextmanager
    def opened(self, model: Model, read: Callable[[str], Tensor] | None = None) -> Iterator[RunningModel]:
        """Within the block, the model can be run in float32.

        ``read`` returns other values than the model's own by canonical name.
        """
        if self.limit is not None:
            try:
                streamed = StreamedModule(model, torch.float32, self.device, read)
            except ArchitectureError as error:
                whole = torch.float32.itemsize * model.checkpoint.parameters
                if whole > self.limit:
                    raise
                self.note(f"note: the model runs whole, in {format_bytes(whole)}: {error.message}")
            else:
                with streamed.loading():
                    yield RunningModel(streamed.module, model.family, self.workers, self.device, streamed)
                return
        self.require_room(model)
        module = nn.Module.to(without_cache(build(model, torch.float32, read)), self.device)
        yield RunningModel(module, model.family, self.workers, self.device)


WHOLE = RunConfig()
"""Whole models, one batch at a time."""
