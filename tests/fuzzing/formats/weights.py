"""Files of weights: safetensors whose header or numbers are wrong, and pickles."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, SURROGATE, Raw, dumps, joined, split, spoilt_tensors

COUNT = 170
FILE = "model.safetensors"
FIRST = "classifier.bias"
SECOND = "classifier.weight"


def uses(place: Place, seed: str, folder: Path, *, refused: bool = False) -> list[Command]:
    """Verbs that read a model, by the role that it has."""
    if seed == "tuned":
        return [place.transport(folder, refused=refused)]
    if seed == "b":
        return [place.align(b=folder, refused=refused)]
    return [place.inspect(folder), place.align(a=folder, refused=refused)]


def _header(change: Any, *, refused: bool = True, seed: str = "tuned") -> Build:
    """A file with another header, and the same numbers."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy(seed)
        header, payload = split((folder / FILE).read_bytes())
        (folder / FILE).write_bytes(joined(change(header), payload))
        return uses(place, seed, folder, refused=refused)

    return build


def _entry(key: str, value: Any, *, refused: bool = True) -> Build:
    """A file of which one tensor has something else in the header."""
    return _header(lambda header: {**header, FIRST: {**header[FIRST], key: value}}, refused=refused)


def _content(change: Any, *, refused: bool = True) -> Build:
    """A file with other bytes."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("tuned")
        (folder / FILE).write_bytes(change((folder / FILE).read_bytes()))
        return uses(place, "tuned", folder, refused=refused)

    return build


def _value(value: float, seed: str = "tuned") -> Build:
    """A number that is none in one tensor."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy(seed)
        header, payload = split((folder / FILE).read_bytes())
        start = header[SECOND]["data_offsets"][0]
        spoilt = payload[:start] + struct.pack("<f", value) + payload[start + 4 :]
        (folder / FILE).write_bytes(joined(header, spoilt))
        return [*uses(place, seed, folder, refused=True)]

    return build


def _more(name: Any, entry: dict[str, Any], payload: bytes = b"", *, refused: bool = False) -> Build:
    """A file with one tensor more."""

    def change(content: bytes) -> bytes:
        header, numbers = split(content)
        entry_here = {**entry, "data_offsets": [len(numbers), len(numbers) + len(payload)]}
        text = dumps(header)
        key = name.text if isinstance(name, Raw) else dumps(name)
        text = f"{text[:-1]}, {key}: {dumps(entry_here)}}}"
        return joined(text.encode("utf-8", "surrogatepass"), numbers + payload)

    return _content(change, refused=refused)


def _replaced(**dtypes: str) -> Build:
    """The whole model in another type, of which the sizes are right."""
    width = {"F64": 8, "I32": 4, "BOOL": 1, "F8_E4M3": 1, "I64": 8, "U8": 1, "F16": 2, "BF16": 2}

    def change(content: bytes) -> bytes:
        header, _ = split(content)
        (dtype,) = dtypes.values()
        info, offset = {}, 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            count = (entry["data_offsets"][1] - entry["data_offsets"][0]) // 4 * width[dtype]
            info[name] = {**entry, "dtype": dtype, "data_offsets": [offset, offset + count]}
            offset += count
        return joined(info, bytes(offset))

    return _content(change, refused=dtypes["dtype"] not in ("F64", "F16", "BF16"))


class _Touch:
    """What a hostile pickle holds."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.canary}",)


def _pickle(protocol: int, zipped: bool, wrap: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        import torch

        folder = place.copy("tuned")
        (folder / FILE).unlink()
        hostile: Any = {"state_dict": {"x": _Touch(place.canary)}} if wrap else _Touch(place.canary)
        if zipped:
            torch.save(hostile, folder / "pytorch_model.bin")
        else:
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps(hostile, protocol))
        return uses(place, "tuned", folder, refused=True)

    return build


def _bin(name: str, content: bytes) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("tuned")
        (folder / FILE).unlink()
        (folder / name).write_bytes(content)
        return uses(place, "tuned", folder, refused=True)

    return build


def _odd_name(name: str) -> Build:
    """A model whose folder and file have an odd name."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("tuned")
        (folder.parent / name).parent.mkdir(exist_ok=True)  # a slash in it makes two folders
        named = folder.rename(folder.parent / name)
        return [place.inspect(named), place.transport(named, done=True), place.inspect(f"{named}-not-there")]

    return build


def _not_there(name: str) -> Build:
    return lambda place: [place.inspect(name, refused=True), place.transport(name, refused=True)]


def made() -> Iterator[Made]:
    yield Made("an empty file", _content(lambda content: b""), True)
    yield Made("seven bytes", _content(lambda content: content[:7]))
    for length in (0, 1, 2**60, 2**63, 2**64 - 1, 10**8, 100_000_001):
        yield Made(
            f"a header of {length} bytes", _content(lambda c, n=length: struct.pack("<Q", n) + c[8:]), True
        )
    yield Made("a header longer than the file", _content(lambda c: struct.pack("<Q", len(c)) + c[8:]))
    for text in (b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"{}", b" {}", b'{"a": }', b"\x00" * 16):
        yield Made(f"a header that is {text!r}", _content(lambda c, t=text: joined(t, split(c)[1])))
    for value in (DEEP, LONG):
        yield Made(f"a header that is {value.text[:5]}…", _header(lambda h, v=value: v), True)
    for size in (0.25, 0.5, 0.9, 0.999):
        yield Made(f"truncated to {size:.1%}", _content(lambda c, s=size: c[: int(len(c) * s)]), size == 0.9)
    yield Made("bytes behind the last tensor", _content(lambda c: c + b"\x00" * 64))
    yield Made(
        "a name that stands twice, at one place",
        _content(lambda c: joined(_twice(c, same=True), split(c)[1]), refused=False),
        True,
    )
    yield Made(
        "a name that stands twice, at two places",
        _content(lambda c: joined(_twice(c, same=False), split(c)[1]), refused=False),
        True,
    )
    for offsets in (
        [0, 0],
        [0, 12],
        [-4, 8],
        [12, 0],
        [0, 2**60],
        [2**62, 2**63],
        [0.0, 12.0],
        ["0", "12"],
        [0],
        [],
        5,
        None,
    ):
        yield Made(f"offsets {offsets}", _entry("data_offsets", offsets, refused=False), offsets == [-4, 8])
    for dtype in (
        "F4",
        "I4",
        "F32 ",
        "f32",
        "",
        5,
        None,
        [],
        "F64",
        "BF16",
        "I32",
        "BOOL",
        "C64",
        "U64",
        "F8_E8M0",
    ):
        yield Made(f"dtype {dtype!r}", _entry("dtype", dtype, refused=dtype != "I32"))
    for shape in (
        [],
        [1],
        [-3],
        [3.0],
        ["3"],
        [3, 1],
        [1, 3],
        [2**62],
        [2**32, 2**32],
        [0],
        [0, 3],
        None,
        3,
        [[3]],
        [LONG],
        {},
    ):
        yield Made(f"shape {shape}", _entry("shape", shape))
    for dtype in ("F64", "I32", "BOOL", "F8_E4M3", "I64", "U8", "F16", "BF16"):
        yield Made(f"all tensors as {dtype}", _replaced(dtype=dtype))
    for key in ("dtype", "shape", "data_offsets"):
        yield Made(
            f"an entry without {key}",
            _header(lambda h, k=key: {**h, FIRST: {one: v for one, v in h[FIRST].items() if one != k}}),
        )
    for metadata in (
        None,
        [],
        5,
        {"a": 1},
        {"a": None},
        {"a": {"b": "c"}},
        {"transfusion": "{}"},
        {"transfusion": "x"},
    ):
        yield Made(
            f"metadata {metadata}", _header(lambda h, m=metadata: {**h, "__metadata__": m}, refused=False)
        )
    for value in (float("nan"), float("inf"), -float("inf")):
        yield Made(f"{value} in the fine-tune", _value(value), value != value)
        yield Made(f"{value} in A", _value(value, "a"))
        yield Made(f"{value} in B", _value(value, "b"))
    plain = {"dtype": "F32", "shape": [1]}
    names = (
        "",
        "a/../../b",
        "../x",
        "\x00",
        "[/b]",
        "[bold]x",
        "a\nb",
        "π" * 2000,
        "classifier.weight ",
        "classifier.weight.weight",
    )
    for name in (
        *names,
        SURROGATE,
        "vit.encoder.layer.99.output.dense.bias",
        "vit.encoder.layer.1000000000.output.dense.bias",
    ):
        yield Made(
            f"a tensor called {str(name)[:40]!r} more", _more(name, plain, b"\x00" * 4), name == "[/b]"
        )
    yield Made("a tensor of no size more", _more("x", {"dtype": "F32", "shape": [0]}))
    yield Made("a scalar more", _more("x", {"dtype": "F32", "shape": []}, b"\x00" * 4))
    yield Made("a tensor of 30 dimensions more", _more("x", {"dtype": "F32", "shape": [1] * 30}, b"\x00" * 4))
    yield Made(
        "a tensor of 3000 dimensions more", _more("x", {"dtype": "F32", "shape": [1] * 3000}, b"\x00" * 4)
    )
    yield Made("one tensor less", _header(lambda h: {k: v for k, v in h.items() if k != SECOND}))
    yield Made("no tensors", _header(lambda h: {"__metadata__": {"format": "pt"}}))
    yield Made(
        "a hole between two tensors",
        _content(lambda c: joined({k: v for k, v in split(c)[0].items() if k != SECOND}, split(c)[1])),
    )
    yield Made("10,000 tensors", _content(_many))
    for protocol in (0, 2, 4):
        yield Made(
            f"a pickle of protocol {protocol} that runs a program",
            _pickle(protocol, False, ""),
            protocol == 2,
        )
    yield Made("a zipped pickle that runs a program", _pickle(2, True, ""), True)
    yield Made("a state dict with a pickle that runs a program", _pickle(2, True, "state_dict"))
    for name in ("pytorch_model.bin", "weights.pt", "weights.ckpt"):
        yield Made(f"{name} of zeros", _bin(name, b"\x00" * 100))
        yield Made(f"{name} that begins like a zip", _bin(name, b"PK\x03\x04" + b"\x00" * 100))
    yield Made("an empty pickle", _bin("pytorch_model.bin", b""))
    for name in ("a [/b] b", "a [bold]b[", "π − τ", "-x", "a**b", "n" * 200, "with space\n", "back\\[slash]"):
        yield Made(f"a folder called {name[:20]!r}", _odd_name(name), "\\" in name)
    for name in (
        "no\\[/b] such",
        "[/b]",
        "x" * 5000,
        "a\x00b",
        "\udcff",
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/mem",
        "~nobody/x",
        " ",
    ):
        yield Made(f"no model but {name[:20]!r}", _not_there(name), "\\" in name)


def _twice(content: bytes, *, same: bool) -> bytes:
    header, _ = split(content)
    other = header[FIRST if same else "vit.layernorm.bias"]
    entry = {**header[FIRST], "data_offsets": [other["data_offsets"][0], other["data_offsets"][0] + 12]}
    return f"{dumps(header)[:-1]}, {dumps(FIRST)}: {dumps(entry)}}}".encode()


def _many(content: bytes) -> bytes:
    header, payload = split(content)
    size = len(payload)
    more = {
        f"t{n}": {"dtype": "F32", "shape": [], "data_offsets": [size + 4 * n, size + 4 * n + 4]}
        for n in range(10_000)
    }
    return joined({**header, **more}, payload + bytes(40_000))


def mutant(place: Place) -> Sequence[Command]:
    seed = place.rng.choice(("tuned", "tuned", "a", "b"))
    folder = place.copy(seed)
    spoilt, what = spoilt_tensors((folder / FILE).read_bytes(), place.rng, place.canary)
    (folder / FILE).write_bytes(spoilt)
    place.note(f"{seed}: {what}")
    verbs = [
        lambda: uses(place, seed, folder),
        lambda: [place.inspect(folder)],
        lambda: [place.transport(**{{"tuned": "tuned", "a": "base", "b": "onto"}[seed]: folder})],
        lambda: [place.merge(folder, place.world.seed("tuned"))],
        lambda: [place.apply(a=folder)],
        lambda: [place.transport(folder / FILE, more=["--config", place.world.seed("a") / "config.json"])],
    ]
    return place.rng.choice(verbs)()
