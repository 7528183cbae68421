"""The verbs whose options are their settings: what each is for, and how its result is printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfusion.cli.align import show_align
from transfusion.cli.command import Verb
from transfusion.cli.console import show, show_result
from transfusion.cli.transport import show_moved
from transfusion.evaluation.settings import (
    BarrierSettings,
    EvaluateSettings,
    FewShotSettings,
    SweepSettings,
)
from transfusion.matching.settings import AlignSettings
from transfusion.transport.settings import ApplySettings, MergeSettings, TransportSettings

Values = Mapping[str, Any]


def _applied(result: Any, values: Values, as_json: bool) -> None:
    written = str(values["output"])
    show({"written": written}, as_json, f"π(A) written to {written}")


def _evaluated(result: Any, values: Values, as_json: bool) -> None:
    from transfusion.cli import views

    show_result(result.record, views.evaluation(result.record), [values["output"]], as_json)


def _swept(result: Any, values: Values, as_json: bool) -> None:
    from transfusion.cli import views

    _written(result.record, values["output"] or (), views.sweep, as_json)


def _learned(result: Any, values: Values, as_json: bool) -> None:
    from transfusion.cli import views

    files = (values["output"], values["naive_output"], *(values["results"] or ()))
    _written(result.record, [file for file in files if file is not None], views.fewshot, as_json)


def _followed(result: Any, values: Values, as_json: bool) -> None:
    from transfusion.cli import views

    _written(result.record, values["output"] or (), views.barrier, as_json)


def _written(record: Values, files: Any, view: Any, as_json: bool) -> None:
    """Print a result and the files that it was written to."""
    paths: list[Path] = list(files)
    whole = {"written": [str(file) for file in paths], **record}
    show_result(whole, view(whole), paths, as_json)


_FEW = ("as_json", "quiet")

ALIGN = Verb(
    "align",
    AlignSettings,
    "Find how the units of A correspond to those of B, and write it as a file of π.",
    show_align,
    console=("dry_run", "as_json", "quiet", "verbose"),
    dry="transfusion.matching.align",
    written=True,
)
APPLY = Verb(
    "apply",
    ApplySettings,
    "Write π(A): the same function as A, its units in B's order.",
    _applied,
    console=_FEW,
    written=True,
)
TRANSPORT = Verb(
    "transport",
    TransportSettings,
    "Write B + α·π(τ): the fine-tune of A, moved onto B. An adapter stays an adapter.",
    show_moved,
    written=True,
)
MERGE = Verb(
    "merge",
    MergeSettings,
    "Write B + α·(several fine-tunes of A, moved by one π and combined).",
    show_moved,
    written=True,
)
EVALUATE = Verb(
    "evaluate",
    EvaluateSettings,
    "Measure models and adapters on a task, and on a support: what the base could do before.",
    _evaluated,
    console=_FEW,
)
SWEEP = Verb(
    "sweep",
    SweepSettings,
    "Measure B + α·π(τ) and B + α·τ for many α, without writing any model, and draw the gains over B.",
    _swept,
    console=_FEW,
)
FEWSHOT = Verb(
    "fewshot",
    FewShotSettings,
    "Learn one α for every layer from a few examples of every class, for 'transport --alpha'.",
    _learned,
    console=_FEW,
    written=True,
)
BARRIER = Verb(
    "barrier",
    BarrierSettings,
    "Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, and draw it.",
    _followed,
    console=_FEW,
)
