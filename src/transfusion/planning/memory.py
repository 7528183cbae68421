"""Memory on paper: what a node needs at a time."""

from __future__ import annotations

from heapq import nlargest

from transfusion.matching.blocks import Block, Household
from transfusion.matching.search import Search, Trial
from transfusion.planning.assumptions import COMPUTED
from transfusion.planning.costs import Costs


def working_set(needs: list[list[int]], at_once: int) -> int:
    """Bytes for so many blocks at a time, the largest there are in any wave.

    Gains that are kept, and the program itself, come on top.
    """
    return max((sum(nlargest(at_once, wave)) for wave in needs), default=0)


def block_needs(search: Search, costs: Costs) -> list[list[int]]:
    """Bytes that every block needs while it is worked on, wave by wave."""
    waves = search.waves(Trial("paper", {}, [0.0]), None)
    return [[_block(costs, block) for block in wave] for wave in waves]


def _block(costs: Costs, block: Block) -> int:
    """A gain and its copy for the assignment; and what was read of one section at a time: both sides as they
    are stored and in the type of the computation, and the columns of A that were picked.
    """
    architecture = costs.architecture
    gains = max(architecture.rows(id) * architecture.sizes[id] ** 2 for id in block.ids)
    if isinstance(block, Household):
        heads = architecture.sizes[block.parent]
        gains = max(gains, 2 * max((heads * architecture.sizes[child]) ** 2 for child in block.children))
    names = {name for id in block.ids for name in costs.weights.tensors_of[id]}
    read = max(costs.numbers(name) * 3 * COMPUTED + int(costs.reading(name).read) for name in names)
    return 2 * COMPUTED * gains + read
