"""Transport on paper: what moving fine-tunes takes, once π is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from transfusion.alignment import Alignment
from transfusion.architecture import Policy
from transfusion.maps import Permutation
from transfusion.model import Model
from transfusion.planning.work import Task, Wave, Work
from transfusion.transportation import Journey, Transport


@dataclass(frozen=True)
class Moving:
    """One fine-tune on its way: the work, tensor by tensor, and how many bytes are in memory for it."""

    wave: Wave
    memory: int
    read: int
    written: int


def moving(a: Model, b: Model, policy: Policy) -> Moving:
    """What `transport` does with a fine-tune of A, of A's own shape, by a π that moves everything."""
    story = replace(Journey.planned(a, b).alignment.provenance, policy=policy)
    architecture = a.architecture.under(policy)
    maps = {
        space.id: Permutation.identity(space.size, architecture.rows(space.id))
        for space in architecture.free()
    }
    story = replace(story, architecture=architecture.digest())
    journey = Journey.planned(a, b, Alignment.of(maps, architecture, story))
    transport = journey.transport(a, trust_base=True)
    assert isinstance(transport, Transport)  # of a whole model, not of an adapter
    told = transport.plan()
    return Moving(
        [_task(a, name) for name in a.architecture.tensors],
        told["memory"],
        told["bytes_to_read"],
        told["bytes_to_write"],
    )


def _task(a: Model, name: str) -> Task:
    """All three models hashed; read once more, subtracted, moved, added, looked through and written."""
    info = a.info(name)
    count = torch.Size(info.shape).numel()
    return Task(
        Work(
            hashed=3 * info.nbytes,
            read=3 * info.nbytes,
            moved=count,
            compared=2 * count,
            written=info.nbytes,
            visits=1,
        )
    )
