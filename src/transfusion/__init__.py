"""TransFusion moves a fine-tune onto a new release of its base model, without training or data.

The verbs of the command line are functions here, imported when first used::

    pi = transfusion.align("models/a", "models/b")
    moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via=pi)
    moved.save("models/tuned-on-b")  # or moved.module(), in memory
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from transfusion.alignment import Alignment
    from transfusion.description import inspect
    from transfusion.errors import TransfusionError
    from transfusion.evaluation import evaluate
    from transfusion.interpolation import barrier
    from transfusion.matching import align
    from transfusion.model import Model
    from transfusion.planning import plan
    from transfusion.reporting import report
    from transfusion.scaling import fewshot, sweep
    from transfusion.transportation import apply, merge, transport
    from transfusion.verification import predict, verify

__all__ = [
    "Alignment",
    "Model",
    "TransfusionError",
    "__version__",
    "align",
    "apply",
    "barrier",
    "evaluate",
    "fewshot",
    "inspect",
    "merge",
    "plan",
    "predict",
    "report",
    "sweep",
    "transport",
    "verify",
]

_HOMES = {
    "Alignment": "alignment",
    "Model": "model",
    "TransfusionError": "errors",
    "align": "matching",
    "apply": "transportation",
    "barrier": "interpolation",
    "evaluate": "evaluation",
    "fewshot": "scaling",
    "inspect": "description",
    "merge": "transportation",
    "plan": "planning",
    "predict": "verification",
    "report": "reporting",
    "sweep": "scaling",
    "transport": "transportation",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
