"""What flags are checked for, and made into, before a verb sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any

import typer

from transfusion.errors import SettingError
from transfusion.runtime.byte_sizes import parse_bytes

LARGEST = 2**63 - 1


def with_numbers(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, whose numbers are numbers: neither NaN nor infinite, nor more than can be counted."""

    @wraps(verb)
    def run(**said: Any) -> Any:
        for name, value in said.items():
            if odd := _odd(value):
                raise typer.BadParameter(f"--{name.replace('_', '-')}: {odd}")
        return verb(**said)

    return run


def _odd(value: object) -> str | None:
    match value:
        case float() if not isfinite(value):
            return f"{value} is not a number to go by"
        case int() if abs(value) > LARGEST:
            return f"{value} is more than can be counted"
    return None


def within(least: int, most: int) -> Callable[[int | None], int | None]:
    """A check that refuses a number with which nothing could be done, as wrong usage."""

    def check(value: int | None) -> int | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"{value} is not between {least} and {most}")
        return value

    return check


def one_of(known: Collection[str]) -> Callable[[str | None], str | None]:
    """A check that refuses a word which is not among the known ones, as wrong usage."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}")
        return value

    return check


def as_size(text: str) -> int:
    """A size in bytes; what is none is refused as wrong usage."""
    try:
        return parse_bytes(text)
    except SettingError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from error


def use_tables(file: Path | None) -> Path | None:
    """Register the tables of a file before the verb runs."""
    if file is not None:
        from transfusion.architecture.families import register_file

        register_file(file)
    return file
