"""How models are run on probes: whole or unit by unit, on how many threads, on which device.

Batches run side by side, each on one thread, so that the outputs do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Family
from transfusion.errors import ArchitectureError
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.lockstep import run_side_by_side
from transfusion.running.probes.random_inputs import plain_experts, run_model
from transfusion.running.streaming import StreamedModule, stream, without_cache
from transfusion.runtime.byte_sizes import format_bytes
from transfusion.runtime.devices import device_memory
from transfusion.runtime.resources import Resources


@dataclass(frozen=True)
class RunningModel:
    """A module that can be run, whole or unit by unit."""

    module: nn.Module
    family: Family
    workers: int = 1
    device: str = "cpu"
    streamed: StreamedModule | None = None

    def outputs(self, inputs: Mapping[str, Tensor], *, gradients: bool = False) -> dict[str, Tensor]:
        """Run the module on one batch."""
        given = {name: one.to(self.device) for name, one in inputs.items()}
        return run_model(self.module, self.family, given, double=False, gradients=gradients)

    def each(self, run: Callable[[int], None], count: int) -> None:
        """Call ``run(number)`` for every number below ``count``, some at a time.

        Streamed weights are loaded once for all of them.
        """
        with plain_experts(self.module):
            run_side_by_side(run, count, self.workers, self.streamed)


@dataclass(frozen=True)
class HowToRun:
    """How models are run on probes."""

    workers: int = 1
    """How many batches run side by side."""
    device: str = "cpu"
    limit: int | None = None
    """Bytes of memory. With a limit, the weights of one unit at a time are in memory, not the whole model."""
    shared: bool = True
    """Whether all who look at the activations are in this process."""
    note: Callable[[str], None] = lambda text: None
    """Told if a model cannot be run unit by unit, and is run whole."""

    @classmethod
    def within(cls, resources: Resources) -> HowToRun:
        """Return how models are run with these resources."""
        workers = resources.jobs or torch.get_num_threads()
        return cls(workers, resources.device, resources.memory)

    @property
    def by_unit(self) -> bool:
        return self.limit is not None

    def require_room(self, model: Model, copies: int = 1) -> None:
        """Refuse to run a whole model of which so many copies, in float32, exceed the memory."""
        needed = copies * torch.float32.itemsize * model.checkpoint.parameters
        room = device_memory(torch.device(self.device))
        if not self.by_unit and needed > room:
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
        if not self.by_unit:
            self.require_room(model)
            module = nn.Module.to(without_cache(build(model, torch.float32)), self.device)
            yield RunningModel(module, model.family, self.workers, self.device)
            return
        try:
            streamed = stream(model, torch.float32, self.device, read)
        except ArchitectureError as error:
            whole = torch.float32.itemsize * model.checkpoint.parameters
            if read is not None or (self.limit is not None and whole > self.limit):
                raise
            self.note(f"note: the model runs whole, in {format_bytes(whole)}: {error.message}")
            with replace(self, limit=None).opened(model) as running:
                yield running
            return
        with streamed.loading():
            yield RunningModel(streamed.module, model.family, self.workers, self.device, streamed)


WHOLE = HowToRun()
"""Whole models, one batch at a time."""
