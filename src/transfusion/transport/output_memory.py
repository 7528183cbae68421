"""The memory that making an output takes, computed from headers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.files.held_tensors import held_bytes
from transfusion.files.references import PICKLES
from transfusion.files.tensor_content import BLOCK
from transfusion.runtime.resources import Resources

if TYPE_CHECKING:
    from transfusion.transport.output_model import EntryT, OutputModel

_COPIES, _COPIES_OF_EACH = 20, 16
"""The largest number of blocks that a thread holds, for the result and for each change. About half are freed
blocks that the allocator keeps: measured by benchmarks/transporting.py.
"""


@dataclass(frozen=True)
class OutputMemory:
    """An upper bound on the memory for tensors, mapped pickles included. The program comes on top."""

    fixed: int
    """Bytes, independent of the number of threads."""
    per_thread: int = 0
    largest: str = ""
    """The tensor that takes most of a thread's memory."""

    def at(self, threads: int) -> int:
        """Return the bytes for tensors on this number of threads."""
        return self.fixed + self.per_thread * threads

    def require(self, resources: Resources) -> None:
        """Refuse a memory limit that is too small for one thread."""
        largest = f" (most of it for {self.largest})" if self.largest else ""
        resources.budget.require(self.at(1), f"one thread{largest}")

    def within(self, resources: Resources) -> Resources:
        """Return the resources with as many threads as fit. A worker of Ray has one thread."""
        self.require(resources)
        if not resources.shared:
            return resources
        wanted = resources.jobs or torch.get_num_threads()
        return replace(resources, jobs=resources.budget.threads(wanted, self.per_thread, self.fixed))

    def as_dict(self, resources: Resources) -> dict[str, int]:
        """Return plain data for a dry run: the memory of this process, or of each worker."""
        chosen = self.within(resources)
        threads = chosen.jobs or 1 if resources.shared else 1
        return {
            "memory": self.at(threads),
            "threads": threads,
            "memory_in_all": resources.budget.program + self.at(threads),
        }


def streaming_bytes(
    output: OutputModel[EntryT],
    alignment: Alignment,
    *,
    changes: int,
    scattered: Callable[[EntryT], bool],
    held: int = 0,
) -> OutputMemory:
    """Return the memory for a model made of this number of task vectors, some rows at a time where possible.

    ``scattered`` says whether the rows of an entry are read from all over a tensor; ``held`` is the number
    of bytes that the task vectors keep in memory.
    """
    maps = alignment.nbytes
    needs = {
        entry.name: _block_size(output, entry) * (8 if entry.shape.dtype.itemsize > 2 else 4)
        for entry in output.entries
    }
    largest = max(needs, key=needs.__getitem__)
    stored = max(
        held_bytes(entry.shape.nbytes)
        if scattered(entry)
        else _block_size(output, entry) * entry.shape.dtype.itemsize
        for entry in output.entries
    )
    pickles = sum(
        info.nbytes
        for checkpoint in output.checkpoints
        for info in checkpoint.tensors.values()
        if info.file.suffix in PICKLES
    )
    fixed = 2 * maps + stored * len(output.checkpoints) + pickles + held
    return OutputMemory(fixed, needs[largest] * (_COPIES + _COPIES_OF_EACH * changes), largest)


def _block_size(output: OutputModel[EntryT], entry: EntryT) -> int:
    """Return the number of elements of a tensor that are computed at a time."""
    extents = entry.shape.extents
    total = torch.Size(extents).numel()
    row = torch.Size(extents[1:]).numel()
    return min(total, max(BLOCK, row)) if output.by_rows(entry) else total
