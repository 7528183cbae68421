"""Assumptions: every number of the cost model that is not measured on the machine, in one place."""

from __future__ import annotations

MOVING = (1.0, 0.22, 0.107, 0.07, 0.05)
"""The share of columns that are no longer what a gain was computed with: in the second sweep, the third, and
so on; the last for all that follow. As seen between models that have nothing in common, which is the worst:
0.1 and 0.3 billion parameters, both within a hundredth (docs/verbs/plan.md). Between models whose units are
found again in the first sweep nothing moves any more."""
SWEEPS = 5
"""How many sweeps are counted, unless a number is given."""
SEEN = 0.5
"""The share of its columns that an axis must have been matched by in the first sweep to move in later ones.
What an axis had not seen by then was matched to it afterwards, and confirms it. Heads and their units stay as
well: what is proposed for them anew is scored, and left. Seen in the same runs, block by block."""
SHARE_OF_GAINS = 3 / 4
"""The share of both models, in the type of the computation, that gains are kept in at most."""
COMPUTED = 4
"""Bytes of a number in the type of the computation."""
COPIES = 4
"""Matrices of the size of what a block reads that are in memory with it: both sides in the type of the
computation, columns that were picked, and what is in mapped files."""
PROGRAM = 400e6
"""Bytes that the program and its libraries take by themselves."""
FINDING = 0.5
"""What hashing takes of the time that one core would need for both models, where there are two cores or more:
every model is hashed by one."""
VISIT = 1e-3
"""Seconds that visiting a block, or scoring a tensor, takes beside the work on its numbers."""
