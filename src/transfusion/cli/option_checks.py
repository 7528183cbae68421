"""Checks of option values, and options that are grouped into one parameter of a verb."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from typing import Any, get_type_hints

import typer

from transfusion.cli.console import VERB, Messages
from transfusion.cli.lazy_import import load_library
from transfusion.errors import SettingError
from transfusion.runtime.byte_sizes import parse_bytes

LARGEST = 2**63 - 1


def checked(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return the verb with checks around it: numbers must be finite, and hints speak of its options."""

    @wraps(verb)
    def run(**values: Any) -> Any:
        VERB.set(verb.__name__)
        for name, value in values.items():
            if odd := _odd(value):
                raise typer.BadParameter(f"--{name.replace('_', '-')}: {odd}")
        with Messages(quiet=bool(values.get("quiet"))).bar(text="loading libraries"):
            load_library(verb.__name__)
        return verb(**values)

    return run


def _odd(value: object) -> str | None:
    match value:
        case float() if not isfinite(value):
            return f"{value} is not a number to go by"
        case int() if abs(value) > LARGEST:
            return f"{value} is more than can be counted"
    return None


def missing(inputs: Mapping[str, object]) -> typer.BadParameter:
    """Return the error for inputs that were not given, nor the ``--from`` that would give them all."""
    absent = " and ".join(name for name, value in inputs.items() if not value)
    return typer.BadParameter(f"missing {absent}: give {', '.join(inputs)}; or --from, to repeat a run")


def within(least: int, most: int) -> Callable[[int | None], int | None]:
    """Return a check that refuses numbers out of range."""

    def check(value: int | None) -> int | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"{value} is not between {least} and {most}")
        return value

    return check


def one_of(known: Collection[str]) -> Callable[[str | None], str | None]:
    """Return a check that refuses words that are not among the known ones."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}")
        return value

    return check


def as_size(text: str) -> int:
    """Return a size in bytes; refuse a text that is none."""
    try:
        return parse_bytes(text)
    except SettingError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from error


def use_tables(file: Path | None) -> Path | None:
    """Register the tables of a file before the verb runs."""
    if file is not None:
        from transfusion.families import register_file

        register_file(file)
    return file


def given(**makers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a parameter of a verb from several options: those of its maker stand in its place.

    >>> def place(host: str = "here", port: int = 1) -> str:
    ...     return f"{host}:{port}"
    >>> @given(where=place)
    ... def call(where: str, loud: bool = False) -> str:
    ...     return where.upper() if loud else where
    >>> list(signature(call).parameters), call(port=2, loud=True)
    (['host', 'port', 'loud'], 'HERE:2')

    A maker may itself be decorated, and two makers may share an option.
    """

    def around(verb: Callable[..., Any]) -> Callable[..., Any]:
        flags = {flag.name: flag for flag in _flags(verb, makers)}
        usual = {name: flag.default for name, flag in flags.items() if flag.default is not Parameter.empty}

        @wraps(verb)
        def run(**values: Any) -> Any:
            known = {**usual, **values}
            own = {name: known[name] for name in signature(verb).parameters if name not in makers}
            for name, maker in makers.items():
                own[name] = maker(**{flag: known[flag] for flag in signature(maker).parameters})
            return verb(**own)

        run.__signature__ = Signature(list(flags.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: flag.annotation for name, flag in flags.items()}
        return run

    return around


def _flags(verb: Callable[..., Any], makers: dict[str, Callable[..., Any]]) -> Iterator[Parameter]:
    """Yield the options of a verb; those of a maker stand in place of what it makes."""
    parameters = signature(verb).parameters
    info = {name: one.annotation for name, one in parameters.items() if name not in makers}
    kinds = get_type_hints(  # of these alone: what makers make may be of a type that is imported late
        type("Flags", (), {"__annotations__": info}), verb.__globals__, include_extras=True
    )
    for name, parameter in parameters.items():
        if name in makers:
            yield from _flags(makers[name], {})
        else:
            yield parameter.replace(annotation=kinds[name], kind=Parameter.KEYWORD_ONLY)
