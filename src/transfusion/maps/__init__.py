"""Maps: what an alignment does to one axis, and how a tensor moves when its axes are mapped.

A map takes A's basis of an axis to B's. An axis that lies within another (the units inside a head)
has one map per element of its parents, stacked in the order of the destination; everything here
therefore carries a leading dimension of rows, of which an axis without a parent has one.

`move` is all that the rest of the program knows about maps. A new kind of map is a subclass of
`Map` with an `apply`; permutations take the faster road of a single gather per dimension.
"""

from __future__ import annotations

from transfusion.maps.kinds import KINDS, Map, Permutation, Plan, Rotation
from transfusion.maps.moving import RowMover, move, move_dim, moves_by_rows

__all__ = [
    "KINDS",
    "Map",
    "Permutation",
    "Plan",
    "Rotation",
    "RowMover",
    "move",
    "move_dim",
    "moves_by_rows",
]
