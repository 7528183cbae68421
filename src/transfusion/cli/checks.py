"""What flags are checked for, and made into, before a verb sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import typer

from transfusion.errors import SettingError
from transfusion.sizes import as_bytes


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
        return as_bytes(text)
    except SettingError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}") from error


def use_tables(file: Path | None) -> Path | None:
    """Register the tables of a file before the verb runs."""
    if file is not None:
        from transfusion.architectures import register

        register(file)
    return file
