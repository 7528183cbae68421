"""Transport on paper: what moving fine-tunes takes, once π is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Permutation
from transfusion.architecture.architecture import Policy
from transfusion.model.model import Model
from transfusion.transportation.dense_transport import DenseTransport
from transfusion.transportation.planning.work import ParallelGroup, Work, WorkItem
from transfusion.transportation.transport_plan import TransportPlan


@dataclass(frozen=True)
class TransportCost:
    """One fine-tune on its way: the work, tensor by tensor, and how many bytes are in memory for it."""

    parallel_group: ParallelGroup
    memory: int
    read: int
    written: int


def transport_cost(a: Model, b: Model, policy: Policy) -> TransportCost:
    """What `transport` does with a fine-tune of A, of A's own shape, by a π that moves everything."""
    metadata = replace(TransportPlan.planned(a, b).alignment.provenance, policy=policy)
    architecture = a.architecture.under(policy)
    maps = {
        space.id: Permutation.identity(space.size, architecture.rows(space.id))
        for space in architecture.free()
    }
    metadata = replace(metadata, architecture=architecture.digest())
    transport_plan = TransportPlan.planned(a, b, Alignment.of(maps, architecture, metadata))
    transport = transport_plan.transport(a, trust_base=True)
    assert isinstance(transport, DenseTransport)  # of a whole model, not of an adapter
    details = transport.plan()
    return TransportCost(
        [_task(a, name) for name in a.architecture.tensors],
        details["memory"],
        details["bytes_to_read"],
        details["bytes_to_write"],
    )


def _task(a: Model, name: str) -> WorkItem:
    """All three models hashed; read once more, subtracted, moved, added, looked through and written."""
    info = a.info(name)
    count = torch.Size(info.shape).numel()
    return WorkItem(
        Work(
            hashed=3 * info.nbytes,
            read=3 * info.nbytes,
            moved=count,
            compared=2 * count,
            written=info.nbytes,
            visits=1,
        )
    )
