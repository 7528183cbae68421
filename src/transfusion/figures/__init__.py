"""Figures, drawn on the side: no window, no global state of the drawing library."""

from transfusion.figures.barriers import draw_barriers
from transfusion.figures.coefficients import draw_fewshot
from transfusion.figures.style import matplotlib
from transfusion.figures.sweeps import draw_sweep

__all__ = ["draw_barriers", "draw_fewshot", "draw_sweep", "matplotlib"]
