"""The command line for typer: a command for every verb of `verbs`.

Heavy libraries are imported when a verb runs, so that ``--help`` is fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from transfusion import __version__
from transfusion.cli.command import command
from transfusion.cli.verbs import VERBS


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
