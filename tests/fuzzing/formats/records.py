"""The metadata of an output, ``transfusion.json``: for ``--from``, and for ``report``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, TWICE, Raw, changed_text, code, dumps, without

COUNT = 110
FILE = "transfusion.json"
Metadata = dict[str, Any]
VALUES: tuple[Any, ...] = (None, 5, "x", [], {}, [5], {"a": [1]}, True, Raw("NaN"), LONG, DEEP, TWICE, -1)
KEYS = (
    *(
        "transfusion",
        "verb",
        "kind",
        "library",
        "command",
        "finetuned",
        "base",
        "onto",
        "alignment",
        "alpha",
        "dtype",
    ),
    *(
        "settings",
        "repeatable",
        "files",
        "run",
        "moved",
        "unchanged",
        "carried",
        "dropped",
        "settings.via",
        "settings.config",
    ),
    *("base.name", "base.path", "base.fingerprint", "base.licence", "onto.name", "onto.fingerprint"),
    *("alignment.blake3", "alignment.method", "alignment.residual", "alignment.inner", "alignment.heads"),
    *("alignment.options", "alignment.seed", "alignment.advice"),
)
MERGED = ("how", "weights", "density", "seed", "alpha", "finetuned", "settings")


def uses(
    place: Place, text: str, number: int, *, refused: bool = False, seed: str = "moved"
) -> list[Command]:
    """Repeat the run from the metadata alone, or report on the output's folder."""
    verb = "merge" if seed == "merged" else "transport"
    if number % 3 == 2:
        folder = place.copy(seed)
        place.write(str(folder / FILE), text)
        return [place.report(folder)]
    if number % 9 == 1:
        return [place.again(place.write(FILE, text), verb, "--dry-run", refused=refused, written=False)]
    return [place.again(place.write(FILE, text), verb, refused=refused)]


def info(place: Place, seed: str = "moved") -> Metadata:
    metadata: Metadata = json.loads((place.world.seed(seed) / FILE).read_text())
    return metadata


def _header(
    number: int, change: Callable[[Metadata], Any], seed: str = "moved", *, refused: bool = False
) -> Build:
    def build(place: Place) -> Sequence[Command]:
        found = change(info(place, seed))
        return uses(
            place, found if isinstance(found, str) else dumps(found), number, seed=seed, refused=refused
        )

    return build


def _set(path: str, value: Any) -> Callable[[Metadata], Any]:
    def change(metadata: Metadata) -> Any:
        keys = tuple(path.split("."))
        if len(keys) == 2:
            return {**metadata, keys[0]: {**metadata[keys[0]], keys[1]: value}}
        return {**metadata, path: value}

    return change


def _less(path: str) -> Callable[[Metadata], Any]:
    def change(metadata: Metadata) -> Any:
        keys = tuple(path.split("."))
        there = keys[0] in metadata and (len(keys) == 1 or keys[1] in metadata[keys[0]])
        return without(metadata, keys) if there else metadata

    return change


def _code(number: int, path: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        text = code(place.canary)[number]
        return uses(place, dumps(_set(path, text)(info(place))), number)

    return build


def _searched(number: int, change: Callable[[Metadata], Any]) -> Build:
    """Metadata whose file of π is gone, so that π is searched again by the settings in the metadata."""

    def build(place: Place) -> Sequence[Command]:
        metadata = info(place)
        metadata = {
            **metadata,
            "settings": {key: value for key, value in metadata["settings"].items() if key != "via"},
        }
        return [place.again(place.write(FILE, dumps(change(metadata))), "transport")]

    return build


def _elsewhere(lead: Callable[[Place, Metadata], Metadata]) -> Build:
    def build(place: Place) -> Sequence[Command]:
        metadata = lead(place, info(place))
        return [place.again(place.write(FILE, dumps(metadata)), "transport", refused=True)]

    return build


def _as_file(where: Callable[[Place], Path]) -> Build:
    return lambda place: [place.again(where(place), "transport", refused=True)]


def _fifo(place: Place) -> Path:
    import os

    os.mkfifo(place.inputs / "pipe")
    return place.inputs / "pipe"


def made() -> Iterator[Made]:
    number = 0
    for key in KEYS:
        for turn in range(2):
            yield Made(
                f"without {key}, {turn}",
                _header(turn * 2, _less(key)),
                turn == 0 and key in ("base", "alignment", "finetuned"),
            )
        for value in VALUES:
            number += 1
            if number % 4 == 0:
                title = f"{key} = {str(getattr(value, 'text', value))[:20]}, {number // 4}"
                yield Made(title, _header(number // 4, _set(key, value)))
    for key in MERGED:
        yield Made(f"a merge without {key}", _header(0, _less(key), "merged"))
        for value in (None, 5, "x", [], [Raw("NaN")], {}, -1):
            number += 1
            yield Made(
                f"a merge with {key} = {value}", _header(0 if number % 4 else 2, _set(key, value), "merged")
            )
    for text in (
        "",
        "{",
        "[]",
        "null",
        DEEP.text,
        LONG.text,
        '{"verb": "transport", "settings": {}}',
        '{"verb": "merge", "settings": {}}',
        '{"verb": "align", "settings": {}}',
        '{"verb": [], "settings": {}}',
        "{}",
    ):
        yield Made(
            f"the metadata is {text[:30]!r}",
            _header(0, lambda metadata, t=text: t, refused=True),
            "transport" in text,
        )
    for key in ("residual", "inner", "heads", "method", "options", "seed", "advice"):
        for value in (
            None,
            5,
            "x",
            [],
            {},
            {"dtype": "x"},
            {"dtype": "load"},
            {"dtype": 5},
            {"dtype": "float32", "x": 1},
        ):
            number += 1
            if number % 4 == 0:
                yield Made(
                    f"searched again with {key} = {value}", _searched(number, _set(f"alignment.{key}", value))
                )
    for value in ("load", "nn", "os", "__class__", "float16", "int8", "hub.load"):
        yield Made(f"dtype = {value}", _header(0, _set("dtype", value)))
    for path in (
        "settings.via",
        "settings.config",
        "settings.new_tokens",
        "settings.full",
        "settings.head",
        "settings.rank",
    ):
        for value in (5, "x", [], {}, True, "\x00", "/dev/zero"):
            yield Made(f"{path} = {value!r}", _header(0, _set(path, value)))
    for path in (
        "base.name",
        "command",
        "alignment.method",
        "library",
        "kind",
        "dtype",
        "verb",
        "transfusion",
    ):
        for index in (0, 1, 2, 4):
            yield Made(f"code {index} in {path}", _code(index, path))
    for role in ("base", "onto"):
        for name in ("", "\x00", "org/name", "x" * 5000, "[/b]", "/dev/zero", ".", "/"):
            both = lambda metadata, r=role, n=name: {**metadata, r: {**metadata[r], "name": n, "path": n}}  # noqa: E731
            yield Made(f"{role} is {name[:20]!r}", _header(0, both, refused=True))
    yield Made(
        "base is the fine-tune",
        _elsewhere(
            lambda place, metadata: {
                **metadata,
                "base": {**metadata["finetuned"][0], "fingerprint": metadata["base"]["fingerprint"]},
            }
        ),
    )
    yield Made("the metadata is a pipe", _as_file(_fifo), True)
    for device in ("/dev/zero", "/dev/null", "/proc/self/mem"):
        yield Made(f"the metadata is {device}", _as_file(lambda place, d=device: Path(d)))
    yield Made("no metadata", _as_file(lambda place: place.inputs))
    yield Made(
        "many fine-tunes", _header(0, lambda metadata: {**metadata, "finetuned": metadata["finetuned"] * 50})
    )
    yield Made("no fine-tune", _header(0, _set("finetuned", []), refused=True), True)


def mutant(place: Place) -> Sequence[Command]:
    seed = place.rng.choice(("moved", "moved", "merged"))
    text, what = changed_text(json.dumps(info(place, seed)), place.rng, place.canary)
    number = place.rng.randrange(9)
    place.note(f"{seed}, {number}: {what}")
    return uses(place, text, number, seed=seed)
