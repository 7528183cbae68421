"""Charts: inline SVG, drawn here, in the colours of the page that holds it."""

from transfusion.reporting.charts.bars import Bars
from transfusion.reporting.charts.canvas import NARROW, WIDE
from transfusion.reporting.charts.heat import Heat
from transfusion.reporting.charts.lines import Curve, Lines
from transfusion.reporting.charts.strands import Strands

__all__ = ["NARROW", "WIDE", "Bars", "Curve", "Heat", "Lines", "Strands"]
