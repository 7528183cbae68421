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
    from transfusion.alignment.alignment import Alignment
    from transfusion.errors import TransfusionError
    from transfusion.evaluation.barrier import barrier
    from transfusion.evaluation.evaluate import evaluate
    from transfusion.evaluation.fewshot import fewshot
    from transfusion.evaluation.sweep import sweep
    from transfusion.families import register_file
    from transfusion.matching.align import align
    from transfusion.model.model import Model
    from transfusion.report.inspect import inspect
    from transfusion.report.page import report
    from transfusion.runtime.resources import Resources
    from transfusion.transport.apply import apply
    from transfusion.transport.ask import ask
    from transfusion.transport.transport import merge, transport
    from transfusion.verification.verify import predict, verify

__all__ = [
    "Alignment",
    "Model",
    "Resources",
    "TransfusionError",
    "__version__",
    "align",
    "apply",
    "ask",
    "barrier",
    "evaluate",
    "fewshot",
    "inspect",
    "merge",
    "predict",
    "register_file",
    "report",
    "sweep",
    "transport",
    "verify",
]

_HOMES = {
    "Alignment": "alignment.alignment",
    "Model": "model.model",
    "Resources": "runtime.resources",
    "TransfusionError": "errors",
    "align": "matching.align",
    "apply": "transport.apply",
    "ask": "transport.ask",
    "barrier": "evaluation.barrier",
    "evaluate": "evaluation.evaluate",
    "fewshot": "evaluation.fewshot",
    "inspect": "report.inspect",
    "merge": "transport.transport",
    "predict": "verification.verify",
    "register_file": "families",
    "report": "report.page",
    "sweep": "evaluation.sweep",
    "transport": "transport.transport",
    "verify": "verification.verify",
}

for _room in ("report", "transport"):  # named like verbs: loaded now, they do not take the verbs' names later
    import_module(f"{__name__}.{_room}")
    del globals()[_room]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
