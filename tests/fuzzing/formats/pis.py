"""Files of π: their story, their maps, and whether these belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
Story = dict[str, Any]
Change = Callable[[np.ndarray], np.ndarray]


def read(path: Path) -> tuple[Story, dict[str, np.ndarray]]:
    from safetensors.numpy import load_file

    header, _ = split(path.read_bytes())
    return json.loads(header["__metadata__"][KEY]), load_file(path)


def write(path: Path, story: Any, maps: dict[str, np.ndarray] | None = None) -> None:
    """A file of π with another story, and perhaps with other maps."""
    from safetensors.numpy import save_file

    if maps is not None:
        save_file(maps, path, {KEY: ""})
    header, payload = split(path.read_bytes())
    text = story if isinstance(story, str) else dumps(story)
    path.write_bytes(joined({**header, "__metadata__": {KEY: text}}, payload))


def signed(story: Story, maps: dict[str, np.ndarray]) -> Story:
    """A story whose digest is that of these maps: whoever spoils a file can also sign it."""
    import torch

    from transfusion.checkpoint import tensor_digest

    total = hashlib.sha256()
    for id in sorted(maps):
        total.update(f"{id}:{story['kinds'].get(id)}:".encode())
        total.update(tensor_digest(torch.from_numpy(maps[id])))
    return {**story, "digest": total.hexdigest()}


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


def _story(number: int, change: Callable[[Story], Any], *, refused: bool = False, seed: str = "pi") -> Build:
    def build(place: Place) -> Sequence[Command]:
        pi = place.copy(seed)
        story, _ = read(pi)
        write(pi, change(story))
        return uses(place, pi, number, refused=refused)

    return build


def _maps(number: int, change: Change, *, sign: bool = True, refused: bool = True, seed: str = "pi") -> Build:
    """One map is another, and the file is signed anew; it must not be taken for a map."""

    def build(place: Place) -> Sequence[Command]:
        pi = place.copy(seed)
        story, maps = read(pi)
        id = max(maps, key=lambda one: maps[one].shape[-1])
        maps = {**maps, id: np.ascontiguousarray(change(maps[id]))}
        write(pi, signed(story, maps) if sign else story, maps)
        return uses(place, pi, number, refused=refused)

    return build


def _set(path: str, value: Any) -> Callable[[Story], Any]:
    def change(story: Story) -> Any:
        keys = tuple(path.split("."))
        return with_value(story, keys, value) if _has(story, keys) else {**story, path: value}

    return change


def _has(story: Any, keys: tuple[str, ...]) -> bool:
    try:
        at(story, keys)
    except (KeyError, TypeError, IndexError):
        return False
    return True


def _cycle(length: int) -> Callable[[Story], Any]:
    """Axes that are each within the next."""

    def change(story: Story) -> Any:
        ids = sorted(story["sizes"])[:length]
        return {**story, "parents": {**story["parents"], **dict(zip(ids, [*ids[1:], ids[0]], strict=True))}}

    return change


def _cycle_of_maps(story: Story) -> Any:
    ids = sorted(story["kinds"])[:3]
    return {**story, "parents": {**story["parents"], **dict(zip(ids, [*ids[1:], ids[0]], strict=True))}}


KEYS = (
    *("format", "digest", "kinds", "sizes", "parents", "folds", "provenance"),
    *(
        f"provenance.{key}"
        for key in ("family", "architecture", "policy", "method", "options", "seed", "source")
    ),
    *(
        f"provenance.{key}"
        for key in (
            "source_digest",
            "target",
            "target_digest",
            "objective",
            "advice",
            "gap",
            "version",
            "run",
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
                _story(turn, _cycle(length), refused=turn != 3),
                turn == 0,
            )
    yield Made("a cycle among the axes that move", _story(0, _cycle_of_maps, refused=True), True)
    for turn in range(5):
        yield Made(
            f"advice = {{'a': [1]}}, {turn}", _story(turn, _set("provenance.advice", {"a": [1]})), turn < 2
        )
    for key in KEYS:
        for value in VALUES:
            number += 1
            if number % 3 == 0:
                title = f"{key} = {str(getattr(value, 'text', value))[:20]}, {number}"
                yield Made(title, _story(number // 3, _set(key, value)))
        number += 1
        keys = tuple(key.split("."))
        yield Made(
            f"without {key}", _story(number, lambda story, k=keys: without(story, k)), key == "provenance"
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
            f"the story is {text[:20]!r}",
            _story(number, lambda story, t=text: t, refused=number % 5 != 3),
            text == DEEP.text,
        )
    for size in (0, -1, 1, 10**9, "8", 3.5, None, [], LONG):
        change = lambda story, s=size: {**story, "sizes": {**dict.fromkeys(story["sizes"], s)}}  # noqa: E731
        number += 1
        yield Made(f"all sizes = {str(size)[:20]}", _story(number, change, refused=number % 5 != 3))
        one = lambda story, s=size: {**story, "sizes": {**story["sizes"], sorted(story["kinds"])[0]: s}}  # noqa: E731
        yield Made(f"one size = {str(size)[:20]}", _story(number, one, refused=number % 5 != 3))
    for parents in ({"x": "y"}, {"x": "x"}, {"x": 5}, {"x": None}, [], [["a", "b"]]):
        number += 1
        yield Made(f"parents = {parents}", _story(number, _set("parents", parents)))
    for kind in ("plan", "rotation", "x", 5, None, ["permutation"]):
        number += 1
        all_of = lambda story, k=kind: {**story, "kinds": dict.fromkeys(story["kinds"], k)}  # noqa: E731
        yield Made(f"all maps are {kind}", _story(number, all_of, refused=number % 5 != 3))
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
    turned: dict[str, Change] = {
        "NaN": lambda one: one * np.float32("nan"),
        "infinite values": lambda one: one + np.float32("inf"),
        "zeros": lambda one: np.zeros_like(one),
        "what is no rotation": lambda one: one + 1,
        "a row less": lambda one: one[:, :-1],
        "half the numbers": lambda one: one.astype(np.float16),
    }
    for turn, (what, change) in enumerate(turned.items()):
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
        yield Made(f"folds = {value}", _story(1, _set("folds", value), seed="turned"))


def mutant(place: Place) -> Sequence[Command]:
    pi = place.copy(place.rng.choice(("pi", "pi", "turned")))
    if place.rng.random() < 0.3:
        spoilt, what = spoilt_tensors(pi.read_bytes(), place.rng, place.canary)
        pi.write_bytes(spoilt)
    else:
        story, _ = read(pi)
        text, what = changed_text(json.dumps(story), place.rng, place.canary)
        if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
            text = text.encode("utf-8", "replace").decode()
        write(pi, text)
    number = place.rng.randrange(5)
    place.note(f"{number}: {what}")
    return uses(place, pi, number)
