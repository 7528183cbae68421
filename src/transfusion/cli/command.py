"""The options of a verb, derived from its settings.

A verb of the command line is a function whose signature typer reads: a parameter for every setting, then
those of the console (``--json``, ``--quiet``, ``--verbose``). It checks the values, calls the Python function
of its name and prints what that returns.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature
from math import isfinite
from typing import Annotated, Any, Protocol

import typer

import transfusion
from transfusion.cli import without_collection
from transfusion.cli.console import VERB, Messages, results_apart
from transfusion.errors import SettingError
from transfusion.runtime.progress import SILENT
from transfusion.runtime.settings import Setting, described

LARGEST = 2**63 - 1


class Show(Protocol):
    """Prints the result of a verb, for people or as JSON."""

    def __call__(self, result: Any, values: Mapping[str, Any], as_json: bool) -> None:
        """Print ``result`` of a verb that was called with ``values``."""


@dataclass(frozen=True)
class Verb:
    """One verb: its name, its settings, a line of help and what prints its result."""

    name: str
    settings: type[Any]
    help: str
    show: Show
    console: tuple[str, ...] = ("as_json", "quiet", "verbose")
    example: str = ""
    """What users might type after ``transfusion``."""
    dry: str | None = None
    """The module of its function ``plan_…``, which says what would be done."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from those in Python, where a result may stay in memory; MISSING: to be given."""
    function: Callable[..., Any] | None = None
    """What it calls; without it, the function of its name in the package."""


_FIRST = ("finetuned", "base", "onto", "output")
"""What users look for first."""
_CONSOLE = {
    "as_json": ("--json", "Print the result as JSON."),
    "dry_run": ("--dry-run", "Say what would be done, and do nothing."),
    "quiet": ("--quiet,-q", "Print only errors, warnings and results."),
    "verbose": ("--verbose,-v", "Print details."),
}


def command(verb: Verb) -> Callable[..., None]:
    """Return the function of a verb for typer."""
    own = sorted(options(verb.settings, verb.defaults), key=lambda one: one.name not in _FIRST)
    parameters = [*own, *(_console(name) for name in verb.console)]
    names = [one.name for one in parameters if one.name not in verb.console]

    def run(**values: Any) -> None:
        VERB.set(verb.name)
        main = os.environ.get("RANK", "0") == "0"  # of several processes, one speaks
        as_json, quiet = values["as_json"], values.get("quiet", False)
        messages = Messages(quiet=quiet, verbose=values.get("verbose", False)) if main else SILENT
        given = {name: _checked(name, values[name]) for name in names}
        if "torch" not in sys.modules:
            with messages.bar(text="loading libraries"), without_collection():
                getattr(transfusion, verb.name, None)
                gc.freeze()  # the collector passes over what was imported
        function = verb.function or getattr(transfusion, verb.name)
        if verb.dry and values["dry_run"]:
            function = getattr(import_module(verb.dry), f"plan_{verb.name}")
        with results_apart():
            result = function(**_grouped(verb.settings, given), progress=messages)
        if main:
            verb.show(result, values, as_json)

    run.__name__, run.__doc__ = verb.name, f"{verb.help}\n\nExample: transfusion {verb.example}"
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _console(name: str) -> Parameter:
    flag, help = _CONSOLE[name]
    info = typer.Option(*flag.split(","), help=help)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info])


def options(
    settings: type[Any], defaults: Mapping[str, Any] | None = None, *, positional: bool = True
) -> Iterator[Parameter]:
    """Yield the options and arguments of a dataclass of settings, those of its groups among them.

    ``defaults`` take the place of its own.
    """
    keyword = {one.name: one.kw_only for one in fields(settings)}
    for name, (about, default) in described(settings).items():
        if is_dataclass(about.kind):
            group = options(about.kind, positional=False)
            yield from (one for one in group if not about.only or one.name in about.only)
        elif about.typed:
            default = (defaults or {}).get(name, default)
            yield _option(name, about, default, argument=positional and not keyword[name])


def _option(name: str, about: Setting, default: Any, *, argument: bool) -> Parameter:
    flags = about.flag.split(",") if about.flag else [f"--{name.replace('_', '-')}"]
    common: dict[str, Any] = {
        "help": about.help,
        "metavar": about.metavar or ("|".join(about.choices) if 0 < len(about.choices) < 5 else None),
        "callback": _check_of(about),
        "show_default": about.shown or default not in (MISSING, None, False),
        "rich_help_panel": about.panel,
        "min": about.least if about.kind in (int, float) else None,
    }
    info = typer.Argument(**common) if argument else typer.Option(*flags, **common)
    kind: Any = str if about.parse else about.kind
    kind = list[kind] if about.many else kind
    optional = default is not MISSING and kind is not bool
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=Parameter.empty if default is MISSING else None if about.many or about.parse else default,
        annotation=Annotated[kind | None if optional else kind, info],
    )


def _check_of(about: Setting) -> Callable[[Any], Any] | None:
    """Return what checks the values of a setting and makes them of what was typed."""
    if not (about.choices or about.most or about.parse):
        return None

    def check(value: Any) -> Any:
        if value is None:
            return None
        if about.choices and value not in about.choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(about.choices)}")
        if about.most is not None and not (about.least or 0) <= value <= about.most:
            raise typer.BadParameter(f"{value} is not between {about.least or 0} and {about.most}")
        if about.parse is None or not isinstance(value, str):
            return value
        try:
            return about.parse(value)
        except SettingError as error:
            raise typer.BadParameter(f"{error.message}: {error.hint}") from error

    return check


def _checked(name: str, value: Any) -> Any:
    """Refuse numbers that nothing can be computed with."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, float) and not isfinite(value):
        raise typer.BadParameter(f"{option}: must be finite")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise typer.BadParameter(f"{option}: {value} is too large")
    return value


def _grouped(settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a verb: those of a group become one."""
    grouped: dict[str, Any] = {}
    for name, (about, _) in described(settings).items():
        if is_dataclass(about.kind):
            own = {one.name for one in options(about.kind)} & given.keys()
            grouped[name] = about.kind(**{key: given[key] for key in own if given[key] is not None})
        elif about.typed and given[name] is not None:  # else the default of the settings
            grouped[name] = given[name]
    return grouped
