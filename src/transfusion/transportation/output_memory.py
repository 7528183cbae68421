"""Bounds: how much memory an output takes to make, known from headers alone, and how a limit is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.checkpoint.references import PICKLES
from transfusion.checkpoint.tensor_content import BLOCK
from transfusion.errors import SettingError
from transfusion.runtime.byte_sizes import at_least, format_bytes
from transfusion.runtime.resources import Resources

if TYPE_CHECKING:
    from transfusion.transportation.output_model import EntryT, OutputModel

_COPIES, _COPIES_OF_EACH = 20, 16
"""How many blocks a thread has at the most, for the result and for each change. About half of them are free
already, and kept by the allocator: measured by benchmarks/transporting.py.
"""


@dataclass(frozen=True)
class OutputMemory:
    """A bound on the memory for tensors, those of mapped pickles included; the program comes on top."""

    fixed: int
    """Bytes, however many threads there are."""
    of_a_thread: int = 0
    largest: str = ""
    """The tensor that most of it is for."""

    def at(self, threads: int) -> int:
        """Bytes for tensors, on so many threads."""
        return self.fixed + self.of_a_thread * threads

    def require(self, resources: Resources) -> None:
        """Refuse a limit within which not even one thread can work."""
        program = resources.program
        least = program + self.at(1)
        if resources.memory is not None and resources.memory < least:
            of = f" ({self.largest} asks for most)" if self.largest else ""
            raise SettingError(
                f"memory of {format_bytes(resources.memory)} is too little:"
                f" tensors take {format_bytes(self.at(1))} on one thread{of},"
                f" and the program itself {format_bytes(program)}",
                hint=f"give at least {at_least(least)}",
            )

    def within(self, resources: Resources) -> Resources:
        """The means with as many threads as fit into the memory; a worker of Ray has one."""
        self.require(resources)
        if not resources.shared:
            return resources
        threads = resources.jobs or torch.get_num_threads()
        if resources.memory is not None and self.of_a_thread:
            threads = min(threads, (resources.memory - resources.program - self.fixed) // self.of_a_thread)
        return replace(resources, jobs=threads)

    def as_dict(self, resources: Resources) -> dict[str, int]:
        """As plain data, for a plan: the memory of this process, or of each worker."""
        chosen = self.within(resources)
        threads = chosen.jobs or 1 if resources.shared else 1
        return {
            "memory": self.at(threads),
            "threads": threads,
            "memory_in_all": resources.program + self.at(threads),
        }


def streaming_bytes(
    output: OutputModel[EntryT],
    alignment: Alignment,
    *,
    changes: int,
    scattered: Callable[[EntryT], bool],
    holds: int = 0,
) -> OutputMemory:
    """What a model takes that is made of so many changes, some rows at a time where that can be."""
    maps = sum(map_.to_tensor().nbytes for map_ in alignment.maps.values())
    needs = {
        entry.name: _at_a_time(output, entry) * (8 if entry.shape.dtype.itemsize > 2 else 4)
        for entry in output.entries
    }
    largest = max(needs, key=needs.__getitem__)
    stored = max(
        entry.shape.nbytes if scattered(entry) else _at_a_time(output, entry) * entry.shape.dtype.itemsize
        for entry in output.entries
    )
    pickles = sum(
        info.nbytes
        for checkpoint in output.checkpoints
        for info in checkpoint.tensors.values()
        if info.file.suffix in PICKLES
    )
    fixed = 2 * maps + stored * len(output.checkpoints) + pickles + holds
    return OutputMemory(fixed, needs[largest] * (_COPIES + _COPIES_OF_EACH * changes), largest)


def _at_a_time(output: OutputModel[EntryT], entry: EntryT) -> int:
    """How many numbers of a tensor are worked on at a time."""
    extents = entry.shape.extents
    total = torch.Size(extents).numel()
    row = torch.Size(extents[1:]).numel()
    return min(total, max(BLOCK, row)) if output.by_rows(entry) else total
