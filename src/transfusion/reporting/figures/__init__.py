"""Figures, drawn with matplotlib without a window."""

from transfusion.reporting.figures.barrier_figure import draw_barriers
from transfusion.reporting.figures.fewshot_figure import draw_fewshot
from transfusion.reporting.figures.sweep_figure import draw_sweep

__all__ = ["draw_barriers", "draw_fewshot", "draw_sweep"]
