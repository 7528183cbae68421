"""The command line. Each verb parses its options, calls the library function of its name, and prints.

``verify`` calls `verify`, `predict` or `certify_file`, by its options; ``--from`` calls `rerun`. Heavy
libraries are imported inside the verbs, so that ``--help`` is fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from transfusion import __version__
from transfusion.cli.command import Verb, command
from transfusion.cli.demo import demo
from transfusion.cli.inspect import inspect
from transfusion.cli.option_checks import checked
from transfusion.cli.report import report
from transfusion.cli.verbs import ALIGN, APPLY, BARRIER, EVALUATE, FEWSHOT, MERGE, SWEEP, TRANSPORT
from transfusion.cli.verify import verify


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


for verb in (
    *(inspect, ALIGN, APPLY, verify, TRANSPORT, MERGE),
    *(EVALUATE, SWEEP, BARRIER, FEWSHOT, report, demo),
):
    app.command(cls=_Verb)(command(verb) if isinstance(verb, Verb) else checked(verb))
