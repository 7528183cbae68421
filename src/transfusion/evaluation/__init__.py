"""Evaluation: models measured on tasks, with the model's own preparation of images and texts."""

from transfusion.evaluation.classes import Classes
from transfusion.evaluation.data import Data
from transfusion.evaluation.evaluating import Evaluation, evaluate
from transfusion.evaluation.meters import Meter
from transfusion.evaluation.scores import LESS_IS_BETTER, Score, gain

__all__ = ["LESS_IS_BETTER", "Classes", "Data", "Evaluation", "Meter", "Score", "evaluate", "gain"]
