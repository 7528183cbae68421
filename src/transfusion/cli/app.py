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
from transfusion.cli.console import in_options, out
from transfusion.cli.demo import DemoSettings, demo, show_demo
from transfusion.cli.inspect import InspectSettings, inspect, show_inspected
from transfusion.cli.results import (
    show_align,
    show_applied,
    show_asked,
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
from transfusion.matching.methods import RECOMMENDATION
from transfusion.matching.settings import AlignSettings, MatchingSettings
from transfusion.report import views
from transfusion.report.settings import ReportSettings
from transfusion.transport.settings import ApplySettings, AskSettings, MergeSettings, TransportSettings

FEW = ("as_json", "quiet")
MODELS_ARE = "A model is a local folder or file, or a hub id (org/name or org/name@revision)."
REQUIRED = {"output": MISSING}

VERBS = (
    Verb(
        "transport",
        TransportSettings,
        "Write B + α·π(τ): the fine-tune of A, moved onto B. An adapter stays an adapter.",
        show_moved,
        defaults=REQUIRED,
        example="transport my-lora --base org/v1 --onto org/v2 -o my-lora-on-v2",
    ),
    Verb(
        "align",
        AlignSettings,
        "Find how the units of A correspond to those of B, and write it as a file of π.",
        show_align,
        console=("dry_run", "as_json", "quiet", "verbose"),
        dry="transfusion.matching.align",
        defaults=REQUIRED,
        example="align org/v1 org/v2 -o pi.safetensors",
    ),
    Verb(
        "merge",
        MergeSettings,
        "Write B + α·(several fine-tunes of A, moved by one π and combined).",
        show_moved,
        defaults=REQUIRED,
        example="merge lora-1 lora-2 --base org/v1 --onto org/v2 --how ties -o both-on-v2",
    ),
    Verb(
        "ask",
        AskSettings,
        "Let a fine-tuned language model write texts and answer them, or a LoRA for images or videos make"
        " latents, for 'transport --refine --answers'.",
        show_asked,
        console=FEW,
        defaults=REQUIRED,
        example="ask my-lora --base org/v1 -o answers.safetensors",
    ),
    Verb(
        "apply",
        ApplySettings,
        "Write π(A): the same function as A, its units in B's order.",
        show_applied,
        console=FEW,
        defaults=REQUIRED,
        example="apply pi.safetensors org/v1 -o v1-in-the-order-of-v2",
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
        example="verify org/v1 --via pi.safetensors",
    ),
    Verb(
        "evaluate",
        EvaluateSettings,
        "Measure models and adapters on a task, and on a support: what the base could do before.",
        show_measured,
        console=FEW,
        example="evaluate tuned-on-v2 --against org/v2 --data task.jsonl --support other.jsonl",
    ),
    Verb(
        "sweep",
        SweepSettings,
        "Measure B + α·π(τ) and B + α·τ for many α, without writing any model, and draw the gains over B.",
        show_measured,
        console=FEW,
        example="sweep tuned --base org/v1 --onto org/v2 --data task.jsonl",
    ),
    Verb(
        "fewshot",
        FewShotSettings,
        "Learn one α for every layer from a few examples of every class, for 'transport --alpha'.",
        show_measured,
        console=FEW,
        defaults=REQUIRED,
        example="fewshot tuned --base org/v1 --onto org/v2 --data few.jsonl -o alpha.json",
    ),
    Verb(
        "barrier",
        BarrierSettings,
        "Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, and draw it.",
        show_measured,
        console=FEW,
        example="barrier org/v1 org/v2 --via pi.safetensors --data other.jsonl",
    ),
    Verb(
        "inspect",
        InspectSettings,
        "Show the axes of a model and which of them may move; what an adapter is for; or what a π moves.\n\n"
        "With --propose: draft a table for a model that has none.",
        show_inspected,
        console=("as_json",),
        function=inspect,
        example="inspect my-lora",
    ),
    Verb(
        "report",
        ReportSettings,
        "Write a run as one self-contained HTML page: advice, layers, heads, curves, scores and time.",
        show_report,
        console=FEW,
        defaults={"output": Path("report.html")},
        example="report tuned-on-v2 results.json -o report.html",
    ),
    Verb(
        "demo",
        DemoSettings,
        "Train two small models on real data, fine-tune one, and move that onto the other.",
        show_demo,
        console=FEW,
        function=demo,
        example="demo --keep kept",
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


class _Aligning(_Verb):
    """A verb that takes a method: its help ends with a table of all."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        out.print(views.methods())


class _Verbs(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Say below the verbs what to do first; all verbs must be known to name its options."""
        self.epilog = f"{in_options(RECOMMENDATION)}\n\n{MODELS_ARE}"
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Move a fine-tune onto a new release of its base model, without data.",
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
    app.command(cls=_Aligning if issubclass(verb.settings, MatchingSettings) else _Verb)(command(verb))
