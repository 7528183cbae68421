"""Files of a machine's constants, for ``plan``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, TWICE, Raw, changed_text, dumps

COUNT = 20


def _plan(place: Place, machine: object) -> list[Command]:
    return [place.plan(place.world.seed("a") / "config.json", machine=machine)]


def _info(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.world.seed("machine").read_text())
    return found


def _with(key: str, value: Any) -> Build:
    return lambda place: _plan(place, place.write("machine.json", dumps({**_info(place), key: value})))


def _text(text: str | bytes) -> Build:
    return lambda place: _plan(place, place.write("machine.json", text))


def _pipe(place: Place) -> Sequence[Command]:
    import os

    os.mkfifo(place.inputs / "pipe")
    return _plan(place, place.inputs / "pipe")


def made() -> Iterator[Made]:
    for text in (
        "",
        "[]",
        "5",
        "null",
        DEEP.text,
        LONG.text,
        b"\xff\xfe",
        "{}",
        '{"transfusion-machine": 3}',
        '["transfusion-machine"]',
    ):
        yield Made(f"the file is {text[:20]!r}", _text(text), text == DEEP.text)
    for key in ("cores", "operations_per_second", "bytes_per_second", "transfusion-machine"):
        for value in (
            None,
            0,
            "x",
            [],
            {},
            Raw("NaN"),
            LONG,
            DEEP,
            TWICE,
            True,
            -1,
            1e308,
        ):
            yield Made(f"{key} = {str(getattr(value, 'text', value))[:20]}", _with(key, value))
    yield Made("the file is a pipe", _pipe, True)
    for device in ("/dev/zero", "/dev/null"):
        yield Made(f"the file is {device}", lambda place, d=device: _plan(place, Path(d)))


def mutant(place: Place) -> Sequence[Command]:
    text, what = changed_text(json.dumps(_info(place)), place.rng, place.canary)
    place.note(what)
    return _plan(place, place.write("machine.json", text.encode("utf-8", "surrogatepass")))
