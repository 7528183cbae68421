"""Proposals: the blocks of a wave, each solved where the engine sees fit.

Where there are more workers than blocks, and they cannot share memory, a gain is divided among them: some of
its rows for each, in whole blocks of rows, so that it has the same digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from transfusion.engines import Engine
from transfusion.evidence.gains import Past
from transfusion.evidence.products import BLOCK
from transfusion.evidence.spilling import rows_at_a_time
from transfusion.maps import Map
from transfusion.matching.blocks import Alone, Block, Grounds, Proposal, Situation

Task: TypeAlias = tuple[Block, Situation]
_Share: TypeAlias = tuple[str, Past, range]
"""Some rows of the gain of an axis."""


def proposals(engine: Engine, grounds: Grounds, tasks: Sequence[Task]) -> list[Proposal]:
    """What each block proposes, in their order."""
    if engine.shares_memory or 2 * len(tasks) > engine.count:
        return engine.each(grounds, _propose, tasks, near=lambda task: task[0].ids[0])
    return [_together(engine, grounds, task) for task in tasks]


def _propose(grounds: Grounds, task: Task) -> Proposal:
    block, now = task
    with grounds.clock.phase("gains"):
        proposal = block.propose(grounds, now)
    return proposal


def _together(engine: Engine, grounds: Grounds, task: Task) -> Proposal:
    """One block by several workers, if it is an axis alone with enough rows."""
    block, now = task
    shares = _shares(grounds.weights.architecture.sizes[block.ids[0]], engine.count)
    if (
        not isinstance(block, Alone)
        or len(shares) < 2
        or rows_at_a_time(grounds.weights, block.ids[0], grounds.room) is not None
    ):
        return engine.each(grounds, _propose, [task], near=lambda task: task[0].ids[0])[0]
    past = grounds.past(block.id, now)
    return engine.joined(
        grounds,
        _rows,
        [(block.id, past, rows) for rows in shares],
        _Solve(block, past, now.maps.get(block.id)),
        near=lambda share: f"{share[0]} {share[2]}",
    )


def _shares(size: int, count: int) -> list[range]:
    """The rows of a gain in at most so many runs of whole blocks."""
    blocks = -(-size // BLOCK)
    edges = [blocks * number // min(blocks, count) * BLOCK for number in range(min(blocks, count))]
    return [range(first, last) for first, last in zip(edges, [*edges[1:], size], strict=True)]


def _rows(grounds: Grounds, share: _Share) -> np.ndarray:
    id, past, rows = share
    with grounds.clock.phase("gains"):
        gain = grounds.gains.of(id, past, rows)
    return gain.cpu().numpy()


class _Solve:
    """Puts a gain together, and solves it."""

    def __init__(self, block: Alone, past: Past, here: Map | None) -> None:
        self.block, self.past, self.here = block, past, here

    def __call__(self, grounds: Grounds, shares: list[np.ndarray]) -> Proposal:
        gain = torch.cat([torch.from_numpy(share) for share in shares], dim=1)
        return self.block.solved(grounds, gain, self.past, self.here)
