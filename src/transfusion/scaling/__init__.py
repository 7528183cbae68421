"""Scaling: how much of a moved fine-tune to add to B, seen on examples: one α for all, or one a layer."""

from transfusion.scaling.fewshots import FewShot, fewshot
from transfusion.scaling.sweeping import ALPHAS, Sweep, sweep

__all__ = ["ALPHAS", "FewShot", "Sweep", "fewshot", "sweep"]
