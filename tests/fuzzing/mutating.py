"""Changes of valid files: of bytes, of values in JSON, of the headers of safetensors files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Text that stands in JSON as it is: what no value of Python becomes."""

    text: str


DEEP = Raw("[" * 100_000 + "]" * 100_000)
DEEP_OBJECT = Raw('{"a":' * 100_000 + "1" + "}" * 100_000)
LONG = Raw("9" * 5_000)
TWICE = Raw('{"a": 1, "a": 2}')
SURROGATE = Raw('"\\ud800"')

NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    3.5,
    10**9,
    2**63,
    -(2**31),
    1e308,
    Raw("NaN"),
    Raw("Infinity"),
    Raw("-Infinity"),
    LONG,
)
WORDS: tuple[Any, ...] = (
    "",
    "8",
    "x",
    "nan",
    "../x",
    "\x00",
    "[/b]",
    "[bold]",
    "π" * 300,
    "a\nb",
    "<script>alert(1)</script>",
    SURROGATE,
)
SHAPES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"a": [1]},
    {"": None},
    [1, "x"],
    DEEP,
    DEEP_OBJECT,
    TWICE,
)


def code(canary: Path) -> tuple[str, ...]:
    """Texts that would make the canary, if anything executed them."""
    touch = f"touch {canary}"
    return (
        f"""my" + str(__import__("os").system("{touch}")) + \"""",
        f"__import__('os').system('{touch}')",
        f"""x"\nimport os; os.system("{touch}")\n\"""",
        f'"""; __import__("os").system("{touch}"); """',
        f"{{{{ cycler.__init__.__globals__.os.system('{touch}') }}}}",
        f"$({touch})",
        f"; {touch} #",
        f"os.system--{touch}",
        "os:system",
        "{0.__class__.__init__.__globals__}",
        "%(x)s%n",
    )


def odd(canary: Path) -> tuple[Any, ...]:
    """Values that do not belong anywhere."""
    return (*NUMBERS, *WORDS, *SHAPES, *code(canary))


def dumps(value: Any) -> str:
    """JSON with `Raw` texts in it."""
    raws: list[str] = []

    def keep(one: Any) -> Any:
        match one:
            case Raw():
                raws.append(one.text)
                return f"@@{len(raws) - 1}@@"
            case dict():
                return {key: keep(inner) for key, inner in one.items()}
            case list() | tuple():
                return [keep(inner) for inner in one]
        return one

    text = json.dumps(keep(value))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@@{number}@@"', raw)
    return text


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value."""
    inner: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, list):
        inner = iter(enumerate(value))
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = with_value(value[path[0]], path[1:], new)
    return copied


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy that lacks what is at a path."""
    copied = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = without(value[path[0]], path[1:])
    return copied


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(value: Any, rng: random.Random, canary: Path) -> tuple[Any, str]:
    """A value with something else at a random place, and what was done to it."""
    paths = list(places(value))
    path = rng.choice(paths)
    found = at(value, path)
    where = ".".join(map(str, path))
    match rng.randrange(8):
        case 0:
            return without(value, path), f"without {where}"
        case 1:
            other = at(value, rng.choice(paths))
            return with_value(value, path, other), f"{where} = {str(other)[:60]}"
        case 2:
            return with_value(value, path, [found]), f"{where} in a list"
        case 3:
            return with_value(value, path, {"x": found}), f"{where} in an object"
        case 4 if isinstance(found, int | float) and not isinstance(found, bool):
            new = rng.choice([-found, found + 1, found * 2, found / 2, str(found), 0])
            return with_value(value, path, new), f"{where} = {new!r}"
        case _:
            new = rng.choice(odd(canary))
            return with_value(value, path, new), f"{where} = {str(new)[:60]!r}"


def changed_text(text: str, rng: random.Random, canary: Path) -> tuple[str, str]:
    """A JSON text of which a value, or a few letters, are something else."""
    if rng.randrange(5) == 0:
        spoilt, what = spoilt_bytes(text.encode(), rng)
        return spoilt.decode("utf-8", "surrogateescape"), what
    value, titles = json.loads(text), []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not isinstance(value, dict | list) or not value or _has_raw(value):
            break
        value, title = changed(value, rng, canary)
        titles.append(title)
    return dumps(value), "; ".join(titles)


def _has_raw(value: Any) -> bool:
    """Whether a value has texts in it that cannot be looked into."""
    if isinstance(value, dict | list):
        return any(map(_has_raw, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Raw)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────


def spoilt_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Other bytes: some flipped, some gone, some twice, some from elsewhere."""
    size = len(content)
    start = rng.randrange(size)
    stop = min(size, start + rng.choice((1, 4, 16, 256)))
    match rng.randrange(6):
        case 0:
            flipped = bytearray(content)
            for place in rng.sample(range(size), min(size, rng.choice((1, 2, 8)))):
                flipped[place] ^= 1 << rng.randrange(8)
            return bytes(flipped), "flipped bits"
        case 1:
            return content[:start], f"truncated to {start} bytes"
        case 2:
            return content[:start] + content[stop:], f"without bytes {start}–{stop}"
        case 3:
            return content[:stop] + content[start:], f"bytes {start}–{stop} twice"
        case 4:
            return content[:start] + rng.randbytes(stop - start) + content[
                stop:
            ], f"random bytes {start}–{stop}"
        case _:
            filling = rng.choice((b"\x00", b"\xff"))
            return content[:start] + filling * (stop - start) + content[stop:], f"filled bytes {start}–{stop}"


# ── safetensors ──────────────────────────────────────────────────────────────────────────────


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the numbers of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, payload: bytes, length: int | None = None) -> bytes:
    """A safetensors file with this header, whatever it says, and perhaps another length."""
    text = header if isinstance(header, bytes) else dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def spoilt_tensors(content: bytes, rng: random.Random, canary: Path) -> tuple[bytes, str]:
    """A safetensors file with another header, other numbers, or other bytes."""
    header, payload = split(content)
    match rng.randrange(6):
        case 0:
            return spoilt_bytes(content, rng)
        case 1:
            text, what = spoilt_bytes(dumps(header).encode(), rng)
            return joined(text, payload), f"header: {what}"
        case 2 if payload:
            place = 4 * rng.randrange(len(payload) // 4 or 1)
            value = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38, 1e-45))
            return joined(
                header, payload[:place] + struct.pack("<f", value) + payload[place + 4 :]
            ), f"{value} in it"
        case 3:
            names = [name for name in header if name != "__metadata__"]
            one, other = rng.choice(names), rng.choice(names)
            swapped = {**header, one: header[other], other: header[one]}
            return joined(swapped, payload), f"{one} and {other} exchanged"
        case _:
            value, what = changed(header, rng, canary)
            return joined(value, payload), f"header: {what}"
