"""Evaluation: models measured on tasks, with the model's own preparation of images and texts."""

from transfusion.evaluation.data import Data
from transfusion.evaluation.meters import Meter
from transfusion.evaluation.scores import Score, gain

__all__ = ["Data", "Meter", "Score", "gain"]
