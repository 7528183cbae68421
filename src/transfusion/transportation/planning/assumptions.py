"""Assumptions: every number of the cost model that is not measured on the machine, in one place."""

from __future__ import annotations

MOVING = (1.0, 0.22, 0.107, 0.07)
"""The share of columns that are no longer what a gain was computed with: in the second sweep, the third, and
so on; the last for all that follow, of which none was looked at. Between two Llamas of random weights, which
have nothing in common: 0.23 and 0.22 in the third sweep at 0.1 and 0.3 billion parameters, 0.107 at both in
the fourth, 0.07 at 0.1 billion in the fifth. Where the first sweep finds all, nothing moves after it."""
SWEEPS = 5
"""How many sweeps are counted, unless a number is given."""
SEEN = 0.5
"""The share of its columns that an axis must have been matched by in the first sweep to move in later ones.
What an axis had not seen by then was matched to it afterwards, and confirms it; and one moves only if another
does that it shares a tensor with. Heads and their units stay as
well: what is proposed for them anew is scored, and left. So it was in every block of the smaller pair; in the
larger one, the operations of the second sweep are those that follow from it."""
LATER = 0.55
"""What an assignment takes in later sweeps, as a share of what it takes in the first: 0.45 to 0.7 at 2048 and
2816 units of the same pairs."""
COMPUTED = 4
"""Bytes of a number in the type of the computation."""
VISIT = 1e-3
"""Seconds that visiting a block, or scoring a tensor, takes beside the work on its numbers: what was left
over of late sweeps of the smaller pair, 0.15 s for 180 of them, rounded up."""
NEW = 0.5
"""The share of what is read or computed that goes into memory which the system hands out anew; within a limit
and on a cluster all of it does, since it is given back at once. Reading 1.0 GB in the first sweep of a 0.1 B
pair took 0.78 s without a limit and 1.15 s within one, 0.35 s of which would do for memory in use already."""
