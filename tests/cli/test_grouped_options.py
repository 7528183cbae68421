"""Flags that are made into what they stand for."""

from __future__ import annotations

from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from transfusion.cli.option_checks import given

Port = Annotated[int, typer.Option(min=1, help="Where it listens.")]


def place(host: Annotated[str, typer.Option()], port: Port = 80) -> str:
    return f"{host}:{port}"


@given(where=place)
def door(where: str, port: Port = 80, locked: bool = False) -> str:
    return f"{where}/{port}{'!' * locked}"


@given(entry=door)
def visit(who: Annotated[str, typer.Argument()], entry: str, quiet: bool = False) -> None:
    print(who, "" if quiet else entry)


def asked(*words: str):
    app = typer.Typer()
    app.command()(visit)
    return CliRunner().invoke(app, words)


def test_the_flags_of_a_maker_are_in_place_of_what_it_makes():
    assert list(signature(visit).parameters) == ["who", "host", "port", "locked", "quiet"]


def test_what_is_made_reaches_the_verb_through_makers_of_makers():
    assert asked("me", "--host", "here", "--port", "7", "--locked").stdout == "me here:7/7!\n"
    assert asked("me", "--host", "here").stdout == "me here:80/80\n"


@pytest.mark.parametrize("words", [["me"], ["me", "--host", "here", "--port", "0"], ["--host", "here"]])
def test_flags_of_makers_are_checked_like_any_other(words):
    assert asked(*words).exit_code == 2
