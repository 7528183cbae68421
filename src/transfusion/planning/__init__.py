"""Planning on paper: what aligning and moving would take, from configurations and a machine's constants.

`paper` makes a model of a configuration, `phases` and `sweeping` go through the search's own waves and blocks
with `work` in the place of numbers, `machine` says how long that takes, and `assumptions` has every number
that is not measured.
"""

from __future__ import annotations

from transfusion.planning.machine import Machine
from transfusion.planning.measuring import measure
from transfusion.planning.paper import sketch
from transfusion.planning.planning import Plan, plan

__all__ = ["Machine", "Plan", "measure", "plan", "sketch"]
