"""Solving blocks in parallel, on the workers of an engine.

With more workers than blocks and no shared memory, workers divide a gain: each computes whole blocks of its
rows, so that the digits stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from transfusion.alignment.maps import Map
from transfusion.matching.blocks import AxisBlock, Block, BlockSolution, BlockState, SearchContext
from transfusion.matching.weights.gain_products import BLOCK
from transfusion.matching.weights.gains import GainHistory
from transfusion.runtime.engines import Engine

Task: TypeAlias = tuple[Block, BlockState]
_Share: TypeAlias = tuple[str, GainHistory, range]
"""An axis, the history of its gain, and the rows to compute."""
_Key = TypeVar("_Key")


def solve_as_ready(
    engine: Engine,
    context: SearchContext,
    ready: Callable[[int], list[tuple[_Key, Task]]],
    done: Callable[[list[tuple[_Key, BlockSolution]]], None],
) -> None:
    """Solve blocks as they become ready, until none is.

    ``ready`` is asked for at most so many blocks, each with a key; ``done`` is told keys and solutions. On
    threads a block is told as soon as it is solved, on other workers all that were ready are told together.
    """
    if engine.shares_memory:
        engine.workers.as_ready(
            lambda item: _solve(context, item[1]),
            ready,
            lambda ended: done([(key, solution) for (key, _), solution in ended]),
        )
        return
    while items := ready(2 * engine.count):
        found = solve_blocks(engine, context, [task for _, task in items])
        done([(key, solution) for (key, _), solution in zip(items, found, strict=True)])


def solve_blocks(engine: Engine, context: SearchContext, tasks: Sequence[Task]) -> list[BlockSolution]:
    """Return the solution of each block, in their order."""
    if 2 * len(tasks) > engine.count:
        return engine.each(context, _solve, tasks, affinity=lambda task: task[0].ids[0])
    return [_solve_divided(engine, context, task) for task in tasks]


def _solve(context: SearchContext, task: Task) -> BlockSolution:
    block, now = task
    with context.clock.phase("gains"):
        proposal = block.propose(context, now)
    return proposal


def _solve_divided(engine: Engine, context: SearchContext, task: Task) -> BlockSolution:
    """Solve one block with several workers, if it is a single axis with enough rows."""
    block, now = task
    shares = _shares(context.weights.architecture.sizes[block.ids[0]], engine.count)
    if not isinstance(block, AxisBlock) or len(shares) < 2:
        return engine.each(context, _solve, [task], affinity=lambda task: task[0].ids[0])[0]
    history = context.history(block.id, now)
    return engine.map_reduce(
        context,
        _rows,
        [(block.id, history, rows) for rows in shares],
        _JoinAndSolve(block, history, now.maps.get(block.id)),
        affinity=lambda share: f"{share[0]} {share[2]}",
    )


def _shares(size: int, count: int) -> list[range]:
    """Divide the rows of a gain into at most ``count`` ranges of whole blocks."""
    blocks = -(-size // BLOCK)
    edges = [blocks * number // min(blocks, count) * BLOCK for number in range(min(blocks, count))]
    return [range(first, last) for first, last in zip(edges, [*edges[1:], size], strict=True)]


def _rows(context: SearchContext, share: _Share) -> np.ndarray:
    id, history, rows = share
    with context.clock.phase("gains"):
        gain = context.gains.of(id, history, rows)
    return gain.cpu().numpy()


class _JoinAndSolve:
    """Join the rows of a gain, and solve it. Picklable, unlike a closure."""

    def __init__(self, block: AxisBlock, history: GainHistory, here: Map | None) -> None:
        self.block, self.history, self.here = block, history, here

    def __call__(self, context: SearchContext, shares: list[np.ndarray]) -> BlockSolution:
        gain = torch.cat([torch.from_numpy(share) for share in shares], dim=1)
        return self.block.solved(context, gain, self.history, self.here)
