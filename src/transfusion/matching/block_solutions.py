"""Proposals: the blocks of a wave, each solved where the engine sees fit.

Where there are more workers than blocks, and they cannot share memory, a gain is divided among them: some of
its rows for each, in whole blocks of rows, so that it has the same digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from transfusion.alignment.maps import Map
from transfusion.matching.blocks import AxisBlock, Block, BlockSolution, BlockState, SearchContext
from transfusion.matching.weights.gain_products import BLOCK
from transfusion.matching.weights.gains import GainHistory
from transfusion.matching.weights.gains_on_disk import rows_at_a_time
from transfusion.runtime.engines import Engine

Task: TypeAlias = tuple[Block, BlockState]
_Share: TypeAlias = tuple[str, GainHistory, range]
"""Some rows of the gain of an axis."""


def solve_blocks(engine: Engine, context: SearchContext, tasks: Sequence[Task]) -> list[BlockSolution]:
    """What each block proposes, in their order."""
    if engine.shares_memory or 2 * len(tasks) > engine.count:
        return engine.each(context, _propose, tasks, affinity=lambda task: task[0].ids[0])
    return [_together(engine, context, task) for task in tasks]


def _propose(context: SearchContext, task: Task) -> BlockSolution:
    block, now = task
    with context.clock.phase("gains"):
        proposal = block.propose(context, now)
    return proposal


def _together(engine: Engine, context: SearchContext, task: Task) -> BlockSolution:
    """One block by several workers, if it is an axis alone with enough rows."""
    block, now = task
    shares = _shares(context.weights.architecture.sizes[block.ids[0]], engine.count)
    if (
        not isinstance(block, AxisBlock)
        or len(shares) < 2
        or rows_at_a_time(context.weights, block.ids[0], context.room) is not None
    ):
        return engine.each(context, _propose, [task], affinity=lambda task: task[0].ids[0])[0]
    history = context.history(block.id, now)
    return engine.map_reduce(
        context,
        _rows,
        [(block.id, history, rows) for rows in shares],
        _Solve(block, history, now.maps.get(block.id)),
        affinity=lambda share: f"{share[0]} {share[2]}",
    )


def _shares(size: int, count: int) -> list[range]:
    """The rows of a gain in at most so many runs of whole blocks."""
    blocks = -(-size // BLOCK)
    edges = [blocks * number // min(blocks, count) * BLOCK for number in range(min(blocks, count))]
    return [range(first, last) for first, last in zip(edges, [*edges[1:], size], strict=True)]


def _rows(context: SearchContext, share: _Share) -> np.ndarray:
    id, history, rows = share
    with context.clock.phase("gains"):
        gain = context.gains.of(id, history, rows)
    return gain.cpu().numpy()


class _Solve:
    """Puts a gain together, and solves it."""

    def __init__(self, block: AxisBlock, history: GainHistory, here: Map | None) -> None:
        self.block, self.history, self.here = block, history, here

    def __call__(self, context: SearchContext, shares: list[np.ndarray]) -> BlockSolution:
        gain = torch.cat([torch.from_numpy(share) for share in shares], dim=1)
        return self.block.solved(context, gain, self.history, self.here)
