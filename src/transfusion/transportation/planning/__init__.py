"""Planning on paper: what aligning and moving would take, from configurations and a machine's constants.

`paper` makes a model of a configuration; `phases`, `sweep_cost` go through the search's own groups and blocks
with `work` in the place of numbers, `machine` says how long that takes, and `assumptions` has every number
that is not measured.
"""

from __future__ import annotations

from transfusion.transportation.planning.cost_plan import CostPlan, plan
from transfusion.transportation.planning.machine import Machine
from transfusion.transportation.planning.machine_benchmark import measure
from transfusion.transportation.planning.paper import sketch

__all__ = ["CostPlan", "Machine", "measure", "plan", "sketch"]
