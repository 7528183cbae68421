"""Files of π: their metadata, their maps, and whether these belong together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import (
    DEEP,
    DEEP_OBJECT,
    LONG,
    TWICE,
    Raw,
    at,
    changed_text,
    dumps,
    joined,
    split,
    spoilt_tensors,
    with_value,
    without,
)

COUNT = 130
KEY = "transfusion"
Metadata = dict[str, Any]
Change = Callable[[np.ndarray], np.ndarray]


def read(path: Path) -> tuple[Metadata, dict[str, np.ndarray]]:
    from safetensors.numpy import load_file

    header, _ = split(path.read_bytes())
    return json.loads(header["__metadata__"][KEY]), load_file(path)


def write(path: Path, metadata: Any, maps: dict[str, np.ndarray] | None = None) -> None:
    """A file of π with other metadata, and perhaps with other maps."""
    from safetensors.numpy import save_file

    if maps is not None:
        save_file(maps, path, {KEY: ""})
    header, payload = split(path.read_bytes())
    text = metadata if isinstance(metadata, str) else dumps(metadata)
    path.write_bytes(joined({**header, "__metadata__": {KEY: text}}, payload))


def signed(metadata: Metadata, maps: dict[str, np.ndarray]) -> Metadata:
    """Metadata with the digest of these maps: whoever changes a file can also sign it."""
    import torch

    from transfusion.files.tensor_content import tensor_digest

    total = blake3()
    for id in sorted(maps):
        total.update(f"{id}:{metadata['kinds'].get(id)}:".encode())
        total.update(tensor_digest(torch.from_numpy(maps[id])))
    return {**metadata, "digest": total.hexdigest()}


def uses(place: Place, pi: Path, number: int, *, refused: bool = False) -> list[Command]:
    """Verbs that read a π, in turn."""
    verbs: list[Callable[[], Command]] = [
        lambda: place.inspect(pi, refused=refused),
        lambda: place.transport(via=pi, refused=refused),
        lambda: place.apply(pi, refused=refused),
        lambda: place.verify(via=pi),
        lambda: place.report(place.world.seed("moved"), "--via", pi, refused=refused),
    ]
    return [verbs[number % 5](), *([verbs[(number + 1) % 5]()] if number % 5 < 2 else [])]


def _header(
    number: int, change: Callable[[Metadata], Any], *, refused: bool = False, seed: str = "pi"
) -> Build:
    def build(place: Place) -> Sequence[Command]:
        pi = place.copy(seed)
        metadata, _ = read(pi)
        write(pi, change(metadata))
        return uses(place, pi, number, refused=refused)

    return build


def _maps(number: int, change: Change, *, sign: bool = True, refused: bool = True, seed: str = "pi") -> Build:
    """One map is another, and the file is signed anew; it must not be taken for a map."""

    def build(place: Place) -> Sequence[Command]:
        pi = place.copy(seed)
        metadata, maps = read(pi)
        id = max(maps, key=lambda one: maps[one].shape[-1])
        maps = {**maps, id: np.ascontiguousarray(change(maps[id]))}
        write(pi, signed(metadata, maps) if sign else metadata, maps)
        return uses(place, pi, number, refused=refused)

    return build


def _set(path: str, value: Any) -> Callable[[Metadata], Any]:
    def change(metadata: Metadata) -> Any:
        keys = tuple(path.split("."))
        return with_value(metadata, keys, value) if _has(metadata, keys) else {**metadata, path: value}

    return change


def _has(metadata: Any, keys: tuple[str, ...]) -> bool:
    try:
        at(metadata, keys)
    except (KeyError, TypeError, IndexError):
        return False
    return True


def _cycle(length: int) -> Callable[[Metadata], Any]:
    """Axes that are each within the next."""

    def change(metadata: Metadata) -> Any:
        ids = sorted(metadata["sizes"])[:length]
        return {
            **metadata,
            "parents": {**metadata["parents"], **dict(zip(ids, [*ids[1:], ids[0]], strict=True))},
        }

    return change


def _cycle_of_maps(metadata: Metadata) -> Any:
    ids = sorted(metadata["kinds"])[:3]
    return {**metadata, "parents": {**metadata["parents"], **dict(zip(ids, [*ids[1:], ids[0]], strict=True))}}


KEYS = (
    *("format", "digest", "kinds", "sizes", "parents", "folds", "provenance"),
    *(
        f"provenance.{key}"
        for key in ("family", "architecture", "policy", "method", "options", "seed", "source")
    ),
    *(
        f"provenance.{key}"
        for key in (
            "source_fingerprint",
            "target",
            "target_fingerprint",
            "objective",
            "advice",
            "gap",
            "version",
            "run",
            "source_sample",
            "target_sample",
        )
    ),
    *("provenance.policy.residual", "provenance.policy.inner", "provenance.policy.heads"),
)
VALUES: tuple[Any, ...] = (
    None,
    5,
    -1,
    "x",
    [],
    {},
    {"a": [1]},
    [1],
    True,
    3.5,
    Raw("NaN"),
    LONG,
    DEEP,
    TWICE,
    "[/b]",
)


def made() -> Iterator[Made]:
    number = 0
    for length in (1, 2, 3):
        for turn in range(5):
            yield Made(
                f"a cycle of {length} in parents, {turn}",
                _header(turn, _cycle(length), refused=turn != 3),
                turn == 0,
            )
    yield Made("a cycle among the axes that move", _header(0, _cycle_of_maps, refused=True), True)
    for turn in range(5):
        yield Made(
            f"advice = {{'a': [1]}}, {turn}", _header(turn, _set("provenance.advice", {"a": [1]})), turn < 2
        )
    for key in KEYS:
        for value in VALUES:
            number += 1
            if number % 3 == 0:
                title = f"{key} = {str(getattr(value, 'text', value))[:20]}, {number}"
                yield Made(title, _header(number // 3, _set(key, value)))
        number += 1
        keys = tuple(key.split("."))
        yield Made(
            f"without {key}",
            _header(number, lambda metadata, k=keys: without(metadata, k)),
            key == "provenance",
        )
    for text in (
        "",
        "{",
        "[]",
        "null",
        "5",
        DEEP.text,
        DEEP_OBJECT.text,
        LONG.text,
        '{"format": 1, "format": 1}',
        '{"format": 1}',
        '{"format": 2}',
    ):
        number += 1
        yield Made(
            f"the metadata is {text[:20]!r}",
            _header(number, lambda metadata, t=text: t, refused=number % 5 != 3),
            text == DEEP.text,
        )
    for size in (0, -1, 1, 10**9, "8", 3.5, None, [], LONG):
        change = lambda metadata, s=size: {**metadata, "sizes": {**dict.fromkeys(metadata["sizes"], s)}}  # noqa: E731
        number += 1
        yield Made(f"all sizes = {str(size)[:20]}", _header(number, change, refused=number % 5 != 3))

        def one(metadata: dict[str, Any], size: Any = size) -> dict[str, Any]:
            return {**metadata, "sizes": {**metadata["sizes"], sorted(metadata["kinds"])[0]: size}}

        yield Made(f"one size = {str(size)[:20]}", _header(number, one, refused=number % 5 != 3))
    for parents in ({"x": "y"}, {"x": "x"}, {"x": 5}, {"x": None}, [], [["a", "b"]]):
        number += 1
        yield Made(f"parents = {parents}", _header(number, _set("parents", parents)))
    for kind in ("plan", "rotation", "x", 5, None, ["permutation"]):
        number += 1
        all_of = lambda metadata, k=kind: {**metadata, "kinds": dict.fromkeys(metadata["kinds"], k)}  # noqa: E731
        yield Made(f"all maps are {kind}", _header(number, all_of, refused=number % 5 != 3))
    spoilt: dict[str, Change] = {
        "an index beyond the size": lambda one: one + 1,
        "a negative index": lambda one: one - 1,
        "an index twice": lambda one: np.zeros_like(one),
        "a huge index": lambda one: np.where(one == 0, 2**31 - 1, one).astype(np.int32),
        "one index less": lambda one: one[:, :-1],
        "one row less": lambda one: one[:0],
        "one row more": lambda one: np.concatenate([one, one]),
        "as float": lambda one: one.astype(np.float32),
        "as int64": lambda one: one.astype(np.int64),
        "as one number": lambda one: np.zeros((), np.int32),
        "with a dimension more": lambda one: one[None],
        "with no dimension": lambda one: one.reshape(-1),
    }
    for turn, (what, change) in enumerate(spoilt.items()):
        other = what not in ("as int64", "with no dimension")  # which are the same map, written otherwise
        yield Made(
            f"a map with {what}", _maps(turn, change, refused=other), what == "an index beyond the size"
        )
        yield Made(f"a map with {what}, unsigned", _maps(turn + 1, change, sign=False, refused=other))
    rotated: dict[str, Change] = {
        "NaN": lambda one: one * np.float32("nan"),
        "infinite values": lambda one: one + np.float32("inf"),
        "zeros": lambda one: np.zeros_like(one),
        "what is no rotation": lambda one: one + 1,
        "a row less": lambda one: one[:, :-1],
        "half the numbers": lambda one: one.astype(np.float16),
    }
    for turn, (what, change) in enumerate(rotated.items()):
        for verb in (0, 1, 3):
            yield Made(
                f"a rotation of {what}, {turn}, {verb}",
                _maps(verb, change, seed="turned"),
                what == "NaN" and verb == 1,
            )
    for value in (
        5,
        [],
        {"x": 5},
        {"x": {"norm": 5}},
        {"x": {"norm": "y", "offset": "z"}},
        {"x": {"a": 1}},
        {"x": {"norm": "y", "offset": Raw("NaN")}},
    ):
        yield Made(f"folds = {value}", _header(1, _set("folds", value), seed="turned"))


def mutant(place: Place) -> Sequence[Command]:
    pi = place.copy(place.rng.choice(("pi", "pi", "turned")))
    if place.rng.random() < 0.3:
        spoilt, what = spoilt_tensors(pi.read_bytes(), place.rng, place.canary)
        pi.write_bytes(spoilt)
    else:
        metadata, _ = read(pi)
        text, what = changed_text(json.dumps(metadata), place.rng, place.canary)
        if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
            text = text.encode("utf-8", "replace").decode()
        write(pi, text)
    number = place.rng.randrange(5)
    place.note(f"{number}: {what}")
    return uses(place, pi, number)
