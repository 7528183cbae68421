"""Results, of which ``report`` makes a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, Raw, changed_text, code, dumps, places, with_value, without

COUNT = 150
VERBS = ("evaluate", "sweep", "fewshot", "barrier", "verify", "align")
Result = dict[str, Any]


def info(place: Place, verb: str) -> Result:
    found: Result = json.loads((place.world.seed("results") / f"{verb}.json").read_text())
    return found


def uses(place: Place, verb: str, text: str, *, alone: bool, refused: bool = False) -> list[Command]:
    """Beside the run that it is about, or alone."""
    file = place.write(f"{verb}.json", text)
    if alone:
        return [place.report(file, refused=refused)]
    return [place.report(place.world.seed("moved"), file, refused=refused)]


def _each(verb: str, key: str, value: Any, *, alone: bool = False) -> Build:
    return lambda place: uses(place, verb, dumps({**info(place, verb), key: value}), alone=alone)


def _less(verb: str, key: str, *, alone: bool = False) -> Build:
    def build(place: Place) -> Sequence[Command]:
        found = info(place, verb)
        return uses(
            place, verb, dumps({name: value for name, value in found.items() if name != key}), alone=alone
        )

    return build


def _inner(verb: str, number: int, value: Any) -> Build:
    """The same at a place within: the numbers count all places."""

    def build(place: Place) -> Sequence[Command]:
        found = info(place, verb)
        inner = [path for path in places(found) if len(path) > 1]
        path = inner[number % len(inner)]
        place.note(".".join(map(str, path)))
        spoilt = without(found, path) if value is ... else with_value(found, path, value)
        return uses(place, verb, dumps(spoilt), alone=bool(number % 2))

    return build


def _text(text: str | bytes) -> Build:
    def build(place: Place) -> Sequence[Command]:
        file = place.write("odd.json", text)
        return [place.report(place.world.seed("moved"), file, refused=True), place.report(file, refused=True)]

    return build


def _code(verb: str, key: str, number: int) -> Build:
    return lambda place: uses(
        place, verb, dumps({**info(place, verb), key: code(place.canary)[number]}), alone=False
    )


def _folder(names: Sequence[str], text: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("results")
        for name in names:
            place.write(str(folder / name), text)
        return [place.report(folder)]

    return build


def _pipe(place: Place) -> Sequence[Command]:
    import os

    folder = place.copy("results")
    os.mkfifo(folder / "pipe.json")
    return [place.report(folder), place.report(place.world.seed("moved"), folder / "pipe.json", refused=True)]


def _link(place: Place) -> Sequence[Command]:
    folder = place.copy("results")
    (folder / "evaluate.json").unlink()
    (folder / "evaluate.json").symlink_to(place.outside / "secret.json")
    return [place.report(folder)]


KEYS = {
    "evaluate": ("task", "support", "against", "models", "run", "command"),
    "sweep": ("finetuned", "base", "onto", "task", "support", "at_zero", "curves", "run"),
    "fewshot": ("finetuned", "shots", "task", "zero", "curves", "seed", "run"),
    "barrier": ("a", "b", "data", "examples", "question", "curves", "dtype"),
    "verify": (
        "a",
        "via",
        "alignment",
        "difference",
        "tolerance",
        "outputs",
        "equal",
        "shortcuts",
        "parting",
        "reason",
    ),
    "align": ("written", "method", "run"),
}
VALUES: tuple[Any, ...] = (None, 5, "x", [], {}, [5], {"a": [1]}, Raw("NaN"), LONG, DEEP, True)


def made() -> Iterator[Made]:
    number = 0
    for verb, keys in KEYS.items():
        for key in (*keys, "verb", "transfusion"):
            yield Made(f"{verb} without {key}", _less(verb, key), key in ("models", "curves", "outputs"))
            for value in VALUES:
                number += 1
                if number % 6 == 0:
                    title = f"{verb}: {key} = {str(getattr(value, 'text', value))[:20]}"
                    yield Made(title, _each(verb, key, value, alone=bool(number % 8)))
        for turn in range(3):
            for value in (..., None, "x", [], {}, Raw("NaN"), -1):
                number += 1
                yield Made(
                    f"{verb}: inner place {13 * number} = {value}",
                    _inner(verb, 13 * number, value),
                    turn == 0 and value is ...,
                )
        for key in (*keys[:3], "command"):
            yield Made(f"code in {key} of {verb}", _code(verb, key, number % 6))
        yield Made(f"a script in {verb}", _each(verb, "command", "<script>alert(1)</script>"))
    for text in (
        "",
        "{",
        "[]",
        "null",
        DEEP.text,
        LONG.text,
        '{"verb": "evaluate", "verb": "sweep"}',
        b"\xff\xfe",
        "{}",
        '{"verb": "x"}',
        '{"verb": []}',
        '{"verb": {}}',
        '{"verb": null}',
        '{"verb": "verify", "holds": 1, "found": 2, "axes": 3}',
        '{"verb": "verify", "passed": 1, "checks": 3}',
        '{"verb": "evaluate", "task": 1, "models": 2}',
        '{"verb": "sweep", "task": 1, "at_zero": 2, "curves": 3}',
    ):
        yield Made(f"the result is {text[:30]!r}", _text(text), text in (DEEP.text, '{"verb": []}'))
    yield Made("odd files beside the run", _folder(("x.json", "y.json"), DEEP.text))
    yield Made("lists of verbs beside the run", _folder(("x.json", "y.json"), '{"verb": ["evaluate"]}'), True)
    yield Made("second metadata beside the run", _folder(("x.json",), '{"verb": "transport"}'))
    yield Made("a pipe beside the run", _pipe, True)
    yield Made("a link to outside beside the run", _link)


def mutant(place: Place) -> Sequence[Command]:
    verb = place.rng.choice(VERBS)
    text, what = changed_text(json.dumps(info(place, verb)), place.rng, place.canary)
    place.note(f"{verb}: {what}")
    return uses(place, verb, text, alone=place.rng.random() < 0.5)
