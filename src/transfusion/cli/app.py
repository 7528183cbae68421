"""The command line for typer: a command for every verb, with its settings and its help.

A verb calls the function of its name in the package. The commands ``inspect``, ``verify`` and ``demo`` unite
several functions; theirs stand beside this module. Heavy libraries are imported when a verb runs, so that
``--help`` is fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from transfusion import __version__
from transfusion.cli.command import Verb, command
from transfusion.cli.demo import DemoSettings, demo, show_demo
from transfusion.cli.inspect import InspectSettings, inspect, show_inspected
from transfusion.cli.results import (
    show_align,
    show_applied,
    show_measured,
    show_moved,
    show_report,
)
from transfusion.cli.verify import VerifySettings, show_verified, verify
from transfusion.evaluation.settings import (
    BarrierSettings,
    EvaluateSettings,
    FewShotSettings,
    SweepSettings,
)
from transfusion.matching.settings import AlignSettings
from transfusion.report.settings import ReportSettings
from transfusion.transport.settings import ApplySettings, MergeSettings, TransportSettings

FEW = ("as_json", "quiet")
REQUIRED = {"output": MISSING}

VERBS = (
    Verb(
        "inspect",
        InspectSettings,
        "Show the axes of a model and which of them may move; what an adapter is for; or what a π moves.\n\n"
        "With --propose: draft a table for a model that has none.",
        show_inspected,
        console=("as_json",),
        function=inspect,
    ),
    Verb(
        "align",
        AlignSettings,
        "Find how the units of A correspond to those of B, and write it as a file of π.",
        show_align,
        console=("dry_run", "as_json", "quiet", "verbose"),
        dry="transfusion.matching.align",
        defaults=REQUIRED,
    ),
    Verb(
        "apply",
        ApplySettings,
        "Write π(A): the same function as A, its units in B's order.",
        show_applied,
        console=FEW,
        defaults=REQUIRED,
    ),
    Verb(
        "verify",
        VerifySettings,
        "Run A and π(A) through their own library in float64 and compare; exit 3 if they differ.\n\n"
        "With --onto B, or if π rotates units, which is no symmetry: measure how much of B's activations π"
        " predicts from A's, axis by axis, on inputs that π was not found on; exit 3 if it is no more than"
        " chance.\n\n"
        "With --architecture FILE --model CLASS: certify a table of your own on a small model of that class.",
        show_verified,
        console=("as_json",),
        function=verify,
    ),
    Verb(
        "transport",
        TransportSettings,
        "Write B + α·π(τ): the fine-tune of A, moved onto B. An adapter stays an adapter.",
        show_moved,
        defaults=REQUIRED,
    ),
    Verb(
        "merge",
        MergeSettings,
        "Write B + α·(several fine-tunes of A, moved by one π and combined).",
        show_moved,
        defaults=REQUIRED,
    ),
    Verb(
        "evaluate",
        EvaluateSettings,
        "Measure models and adapters on a task, and on a support: what the base could do before.",
        show_measured,
        console=FEW,
    ),
    Verb(
        "sweep",
        SweepSettings,
        "Measure B + α·π(τ) and B + α·τ for many α, without writing any model, and draw the gains over B.",
        show_measured,
        console=FEW,
    ),
    Verb(
        "barrier",
        BarrierSettings,
        "Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, and draw it.",
        show_measured,
        console=FEW,
    ),
    Verb(
        "fewshot",
        FewShotSettings,
        "Learn one α for every layer from a few examples of every class, for 'transport --alpha'.",
        show_measured,
        console=FEW,
        defaults=REQUIRED,
    ),
    Verb(
        "report",
        ReportSettings,
        "Write a run as one self-contained HTML page: advice, layers, heads, curves, scores and time.",
        show_report,
        console=FEW,
        defaults={"output": Path("report.html")},
    ),
    Verb(
        "demo",
        DemoSettings,
        "Train two small models on real data, fine-tune one, and move that onto the other.",
        show_demo,
        console=FEW,
        function=demo,
    ),
)


def _without_types_of_flags(params: Iterable[Any]) -> list[Any]:
    """Return the parameters, with no ``<bool>`` in the help of a flag: it takes no value."""
    params = list(params)
    for one in params:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return params


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class _Verbs(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Move a fine-tune onto a new release of its base model: no training, no data.",
    epilog="A model is a local folder or file, or a hub id (org/name or org/name@revision).",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"transfusion {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for verb in VERBS:
    app.command(cls=_Verb)(command(verb))
