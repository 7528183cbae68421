"""Files of α."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, DEEP_OBJECT, LONG, SURROGATE, TWICE, Raw, changed_text, code, dumps

COUNT = 50
VALID = '{"default": 1.0, "encoder.layer.0.*": 0.5, "encoder.layer.1.*": 0.25, "classifier.*": 2}'


def uses(place: Place, file: object, *, refused: bool = False) -> list[Command]:
    return [place.transport(more=["--alpha", file], refused=refused)]


def _file(content: str | bytes, *, refused: bool = True, name: str = "alpha.json") -> Build:
    return lambda place: uses(place, place.write(name, content), refused=refused)


def _at(where: Callable[[Place], object], *, refused: bool = True) -> Build:
    return lambda place: uses(place, where(place), refused=refused)


def _fifo(place: Place) -> Path:
    os.mkfifo(place.inputs / "pipe")
    return place.inputs / "pipe"


def _merged(content: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        tuned = place.world.seed("tuned")
        return [place.merge(tuned, tuned, more=["--alpha", place.write("alpha.json", content)])]

    return build


def _code(number: int) -> Build:
    def build(place: Place) -> Sequence[Command]:
        text = code(place.canary)[number]
        return [
            *uses(place, place.write("key.json", dumps({text: 1.0})), refused=True),
            *uses(place, place.write("value.json", dumps({"default": text})), refused=True),
        ]

    return build


def made() -> Iterator[Made]:
    yield Made("nothing is wrong", _file(VALID, refused=False))
    for text in (
        "",
        "{",
        "[]",
        "null",
        '"x"',
        "{} {}",
        DEEP.text,
        DEEP_OBJECT.text,
        LONG.text,
        '{"default": 1, "default": 2}',
        b"\xff\xfe",
        "\x00",
        "NaN",
        "[1.0]",
        b"\xef\xbb\xbf{}",
    ):
        yield Made(f"the file is {text[:20]!r}", _file(text), text in (DEEP.text, LONG.text))
    values: tuple[Any, ...] = (
        None,
        True,
        "1",
        "x",
        [],
        {},
        [1],
        Raw("NaN"),
        Raw("Infinity"),
        Raw("-Infinity"),
        -1,
        Raw("1e400"),
        LONG,
        DEEP,
        TWICE,
    )
    for value in values:
        info = str(getattr(value, "text", value))[:20]
        yield Made(f"default = {info}", _file(dumps({"default": value})), value is LONG)
        yield Made(f"a pattern with {info}", _file(dumps({"encoder.layer.0.*": value})))
        yield Made(f"of a merge: default = {info}", _merged(dumps({"default": value})))
    for value in (1e308, 1e-308, 2**1024, 10**30, 0):
        yield Made(
            f"default = {value:.3}" if isinstance(value, float) else f"default = 1e{len(str(value))}",
            _file(dumps({"default": value}), refused=False),
        )
    for pattern in (
        "",
        "*",
        "nothing",
        "[",
        "[!",
        "***" * 500 + "x",
        "[/b]",
        "a\x00",
        "?" * 5000,
        "*a" * 40 + "b",
        "*" * 60 + "z",
        SURROGATE,
    ):
        text = f"{{{pattern.text}: 1}}" if isinstance(pattern, Raw) else dumps({pattern: 1})
        yield Made(
            f"the pattern {str(pattern)[:20]!r}",
            _file(text, refused=pattern != "*"),
            pattern == "*a" * 40 + "b",
        )
    yield Made("10,000 patterns", _file(dumps({f"encoder.layer.{n}.*": 1 for n in range(10_000)})))
    for device in ("/dev/zero", "/dev/stdin", "/dev/random", "/proc/self/mem", "/dev/null", "/proc/kcore"):
        yield Made(f"the file is {device}", _at(lambda place, d=device: d), device == "/dev/zero")
    yield Made("the file is a pipe", _at(_fifo), True)
    yield Made("the file is a folder", _at(lambda place: place.inputs))
    for name in ("nan", "inf", "-1", "1e400", "auto ", "x" * 5000, "a\x00b", "[/b]", "no\\[/b] such", ""):
        yield Made(f"α is {name[:20]!r}", _at(lambda place, n=name: n))
    for number in range(6):
        yield Made(f"code {number}", _code(number))


def mutant(place: Place) -> Sequence[Command]:
    text, what = changed_text(VALID, place.rng, place.canary)
    place.note(what)
    return uses(place, place.write("alpha.json", text.encode("utf-8", "surrogatepass")))
