"""Examples to evaluate models on: tables, lines, pictures, tensors, names of classes."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, DEEP_OBJECT, LONG, dumps, spoilt_bytes, spoilt_tensors

COUNT = 120
TEXTS = "text,label\na good film,yes\na bad film,no\nit was good .,yes\n"
LINES = '{"text": "a good film", "label": "yes"}\n{"text": "it was bad", "label": "no"}\n'
SHOWN = "image,label\npictures/bird/0.png,bird\npictures/cat/1.png,cat\n"


def _read(name: str, content: str | bytes, *more: object, refused: bool = False) -> Build:
    """Texts, for a BERT."""
    return lambda place: [
        place.evaluate(place.world.seed("reader"), place.write(name, content), *more, refused=refused)
    ]


def _shown(name: str, content: str | bytes | Callable[[Place], str], *, refused: bool = False) -> Build:
    """A table of pictures, for a ViT."""

    def build(place: Place) -> Sequence[Command]:
        place.copy("pictures")
        text = content(place) if callable(content) else content
        return [place.evaluate(place.world.seed("a"), place.write(name, text), refused=refused)]

    return build


def _tensors(change: Callable[[dict[str, np.ndarray]], dict[str, Any]], *, refused: bool = True) -> Build:
    """Prepared inputs, for a ViT."""

    def build(place: Place) -> Sequence[Command]:
        from safetensors.numpy import save_file

        file = place.inputs / "data.safetensors"
        save_file(change(_valid()), file)
        return [place.evaluate(place.world.seed("a"), file, refused=refused)]

    return build


def _fine(build: Build) -> Build:
    """A case that must succeed."""
    return lambda place: [replace(command, done=True) for command in build(place)]


def _valid() -> dict[str, np.ndarray]:
    images = np.random.default_rng(0).normal(size=(4, 3, 4, 4)).astype(np.float32)
    return {"pixel_values": images, "labels": np.arange(4) % 3}


def _packed(name: str, content: Callable[[Place], bytes]) -> Build:
    return lambda place: [
        place.evaluate(place.world.seed("a"), place.write(name, content(place)), refused=True)
    ]


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


class _Touch:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def _hostile(place: Place) -> bytes:
    objects = np.empty(1, dtype=object)
    objects[0] = _Touch(place.canary)
    return _npz(pixel_values=objects, labels=np.arange(1))


def _pictures(change: Callable[[Place, Path], None], *, refused: bool = False) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("pictures")
        change(place, folder)
        return [place.evaluate(place.world.seed("a"), folder, refused=refused)]

    return build


def _picture(content: bytes, name: str = "x.png") -> Build:
    return _pictures(
        lambda place, folder: place.write(str(folder / "cat" / name), content) and None, refused=True
    )


def _classes(text: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        file = place.write("classes.json", text)
        return [place.evaluate(place.world.seed("a"), place.world.seed("pictures"), "--classes", file)]

    return build


def png(width: int, height: int, chunks: bytes = b"") -> bytes:
    """The beginning of a picture of this size, which ends before its first line."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunks + chunk(b"IDAT", zlib.compress(b"\x00")) + chunk(b"IEND", b"")


def _parquet(change: Callable[[bytes], bytes]) -> Build:
    def build(place: Place) -> Sequence[Command]:
        import pyarrow
        import pyarrow.parquet

        file = place.inputs / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a good film", "bad"], "label": [1, 0]}), file)
        file.write_bytes(change(file.read_bytes()))
        return [place.evaluate(place.world.seed("reader"), file)]

    return build


def _saved(files: dict[str, str]) -> Build:
    """A folder as the library ``datasets`` saves it."""

    def build(place: Place) -> Sequence[Command]:
        for name, text in files.items():
            place.write(f"saved/{name}", text)
        return [place.evaluate(place.world.seed("reader"), place.inputs / "saved", refused=True)]

    return build


def _fifo(place: Place, path: Path) -> None:
    os.mkfifo(path)


def _as_file(where: Callable[[Place], object]) -> Build:
    return lambda place: [place.evaluate(place.world.seed("reader"), where(place), refused=True)]


def _pipe(name: str) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        os.mkfifo(place.inputs / name)
        return place.inputs / name

    return make


def _linked(name: str) -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        (place.inputs / name).symlink_to("/dev/zero")
        return place.inputs / name

    return make


def made() -> Iterator[Made]:
    yield Made("csv: nothing is wrong", _fine(_read("data.csv", TEXTS)), True)
    yield Made("jsonl: nothing is wrong", _fine(_read("data.jsonl", LINES)))
    tables: dict[str, tuple[str | bytes, bool]] = {
        "a column twice": ("text,label,label\na good film,yes,no\nbad,no,yes\n", True),
        "the text twice": ("text,text,label\na good film,bad,yes\nbad,good,no\n", True),
        "ragged rows": ("text,label\na good film\nbad,no,no\n", True),
        "no rows": ("text,label\n", True),
        "nothing": ("", True),
        "one letter": ("x", False),
        "a NUL": ("text,label\na \x00 film,yes\n", False),
        "bytes that are no text": (b"text,label\n\xff\xfe,yes\n", True),
        "an open quote": ('text,label\n"a good film,yes\n', True),
        "a column without a name": (",label\na good film,yes\n", True),
        "only labels": ("label\nyes\n", False),
        "labels beyond the classes": ("text,label\na good film,5\n", True),
        "negative labels": ("text,label\na good film,-1\n", True),
        "labels of many digits": (f"text,label\na good film,{'9' * 5000}\n", True),
        "labels of no class": ("text,label\na good film,maybe\n", True),
        "labels of markup": ("text,label\na good film,[/b]\n", True),
        "a text of a million letters": (f"text,label\n{'a good film ' * 100_000},yes\n", True),
        "an empty text": ("text,label\n,yes\n", False),
        "100,000 columns": (",".join(f"c{n}" for n in range(100_000)) + "\n", True),
        "semicolons": ("text;label\na good film;yes\n", True),
        "a column of markup": ("[/b],[bold]\na,b\n", True),
        "returns": ("text,label\ra good film,yes\r", False),
    }
    for what, (content, refused) in tables.items():
        yield Made(
            f"csv: {what}",
            _read("data.csv", content, refused=refused),
            what in ("a column twice", "ragged rows"),
        )
        content = content.replace(",", "\t") if isinstance(content, str) else content
        yield Made(f"tsv: {what}", _read("data.tsv", content))
    for name in ("x", "text", "text,text", "text,x", "text,label,text", "", "[/b]", "\x00"):
        yield Made(f"--text {name!r}", _read("data.csv", TEXTS, "--text", name))
        yield Made(f"--label {name!r}", _read("data.csv", TEXTS, "--label", name))
    lines: dict[str, str | bytes] = {
        "nested deep": DEEP.text,
        "a text that is nested deep": f'{{"text": {DEEP_OBJECT.text}, "label": "yes"}}\n',
        "a label of many digits": f'{{"text": "good", "label": {LONG.text}}}\n',
        "a list": '["a", "b"]\n',
        "a list of lists": "[[]]\n",
        "a number": "5\n",
        "null": "null\n",
        "a text that is a list": '{"text": ["a"], "label": "yes"}\n',
        "a text that is null": '{"text": null, "label": "yes"}\n',
        "a label that is a list": '{"text": "a", "label": ["yes"]}\n',
        "a label that is an object": '{"text": "a", "label": {"a": 1}}\n',
        "a label that is NaN": '{"text": "a", "label": NaN}\n',
        "a label that is true": '{"text": "a", "label": true}\n',
        "a label of 1e400": '{"text": "a", "label": 1e400}\n',
        "a key twice": '{"text": "a", "text": "b", "label": "yes"}\n',
        "other keys": '{"text": "a", "label": "yes"}\n{"text": "a"}\n',
        "no object": LINES + "[]\n",
        "a half": LINES[:30],
        "bytes that are no text": b"\xff\xfe\n",
        "half a pair": '{"text": "\\ud800", "label": "yes"}\n',
        "a NUL": '{"text": "\\u0000", "label": "yes"}\n',
        "a key of markup": '{"[/b]": "a"}\n',
    }
    for what, content in lines.items():
        fails = what not in ("half a pair", "a NUL", "a number")
        yield Made(
            f"jsonl: {what}",
            _read("data.jsonl", content, refused=fails),
            what in ("nested deep", "a label of many digits"),
        )
    for content in ("", "\n\n", "\x00", "a" * 100_000, b"\xff", "a good film\n" * 3):
        yield Made(f"txt: {content[:10]!r}", _read("data.txt", content))
    yield Made("pictures by a table", _fine(_shown("data.csv", SHOWN)))
    outside: dict[str, Callable[[Place], str]] = {
        "../": lambda place: (
            f"image,label\n{os.path.relpath(place.outside / 'secret.png', place.inputs)},bird\n"
        ),
        "an absolute path": lambda place: f"image,label\n{place.outside / 'secret.png'},bird\n",
    }
    for what, content_of in outside.items():
        yield Made(f"a picture outside, by {what}", _shown("data.csv", content_of, refused=True), True)
    for value in ("/dev/zero", "", "\x00", "nothing.png", "pictures", "data.csv", "x" * 5000, "[/b]"):
        yield Made(
            f"a picture at {value[:20]!r}", _shown("data.csv", f"image,label\n{value},bird\n", refused=True)
        )
    for value in (5, None, [], {"bytes": "x"}, {"path": 5}, {"path": None}, {"bytes": [1]}, {}):
        yield Made(
            f"a picture that is {value}",
            _shown("data.jsonl", dumps({"image": value, "label": "bird"}), refused=True),
        )
    changes: dict[str, Callable[[dict[str, np.ndarray]], dict[str, Any]]] = {
        "no labels": lambda t: {"pixel_values": t["pixel_values"]},
        "only labels": lambda t: {"labels": t["labels"]},
        "fewer labels": lambda t: {**t, "labels": t["labels"][:2]},
        "labels beyond the classes": lambda t: {**t, "labels": t["labels"] + 5},
        "negative labels": lambda t: {**t, "labels": t["labels"] - 5},
        "labels as floats": lambda t: {**t, "labels": t["labels"].astype(np.float32)},
        "labels as truth": lambda t: {**t, "labels": t["labels"] > 1},
        "labels in a matrix": lambda t: {**t, "labels": np.stack([t["labels"]] * 2, 1)},
        "NaN": lambda t: {**t, "pixel_values": t["pixel_values"] * np.float32("nan")},
        "numbers near infinity": lambda t: {**t, "pixel_values": t["pixel_values"] * 0 + np.float32(3e38)},
        "another size": lambda t: {**t, "pixel_values": t["pixel_values"][:, :, :2]},
        "no pictures": lambda t: {**t, "pixel_values": t["pixel_values"][:0], "labels": t["labels"][:0]},
        "a scalar": lambda t: {**t, "pixel_values": np.ones((), np.float32)},
        "whole numbers": lambda t: {**t, "pixel_values": t["pixel_values"].astype(np.int32)},
        "a tensor that is not taken": lambda t: {**t, "x": t["labels"]},
        "an argument that is none": lambda t: {**t, "return_dict": t["labels"]},
        "a name of markup": lambda t: {**t, "[/b]": t["labels"]},
        "half precision": lambda t: {**t, "pixel_values": t["pixel_values"].astype(np.float16)},
        "double precision": lambda t: {**t, "pixel_values": t["pixel_values"].astype(np.float64)},
        "truth": lambda t: {**t, "pixel_values": t["pixel_values"] > 0},
        "unsigned numbers": lambda t: {**t, "labels": t["labels"].astype(np.uint8)},
    }
    fine = (
        "half precision",
        "double precision",
        "unsigned numbers",
        "numbers near infinity",
        "an argument that is none",
    )
    for what, change in changes.items():
        yield Made(
            f"tensors: {what}",
            _tensors(change, refused=what not in fine),
            what == "labels beyond the classes",
        )
    packed: dict[str, Callable[[Place], bytes]] = {
        "a pickle that runs a program": _hostile,
        "nothing": lambda place: b"",
        "zeros": lambda place: bytes(100),
        "half a zip": lambda place: _npz(**_valid())[:200],
        "texts": lambda place: _npz(pixel_values=np.array(["a"]), labels=np.array([1])),
        "complex numbers": lambda place: _npz(
            pixel_values=np.ones((1, 3, 4, 4), complex), labels=np.array([1])
        ),
        "fields": lambda place: _npz(pixel_values=np.zeros(1, dtype=[("a", "f4")]), labels=np.array([1])),
        "dates": lambda place: _npz(pixel_values=np.array(["2020-01-01"], "M8[D]"), labels=np.array([1])),
        "labels of 64 bits without sign": lambda place: _npz(
            pixel_values=_valid()["pixel_values"], labels=np.full(4, 2**64 - 1, np.uint64)
        ),
        "other byte order": lambda place: _npz(
            pixel_values=_valid()["pixel_values"].astype(">f4"), labels=np.arange(4) + 7
        ),
        "a huge shape": lambda place: _huge(),
    }
    for what, content_from in packed.items():
        yield Made(
            f"npz: {what}",
            _packed("data.npz", content_from),
            what in ("a pickle that runs a program", "a huge shape"),
        )
    for width, height in ((4, 4), (1, 1), (0, 0), (2**31 - 1, 2**31 - 1), (60_000, 60_000), (1, 2**31 - 1)):
        yield Made(f"a picture that says {width} × {height}", _picture(png(width, height)), width == 60_000)
    for what, content_ in (
        ("nothing", b""),
        ("text", b"no picture"),
        ("zeros", bytes(500)),
        ("a zip", b"PK\x03\x04"),
        ("half", png(4, 4)[:20]),
    ):
        for name in ("x.png", "x.jpg", "x.gif", "x.tiff", "x.webp", "x.bmp"):
            if what in ("nothing", "half") or name == "x.png":
                yield Made(f"a picture {name} of {what}", _picture(content_, name))
    vector = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n"
    yield Made("a picture that is a program of PostScript", _picture(vector), True)
    yield Made(
        "a picture by link outside",
        _pictures(
            lambda place, folder: (folder / "cat" / "x.png").symlink_to(place.outside / "secret.png"),
            refused=True,
        ),
        True,
    )
    yield Made(
        "a picture that is a pipe",
        _pictures(lambda place, folder: _fifo(place, folder / "cat" / "x.png"), refused=True),
        True,
    )
    yield Made(
        "a picture that is /dev/zero",
        _pictures(lambda place, folder: (folder / "cat" / "x.png").symlink_to("/dev/zero"), refused=True),
    )
    yield Made(
        "a picture that is a folder", _pictures(lambda place, folder: (folder / "cat" / "x.png").mkdir())
    )
    yield Made(
        "a link that leads back",
        _pictures(lambda place, folder: (folder / "cat" / "loop").symlink_to(folder)),
    )
    yield Made(
        "a class of markup",
        _pictures(lambda place, folder: (folder / "cat").rename(folder / "[bold]"), refused=True),
    )
    yield Made(
        "no pictures",
        _pictures(
            lambda place, folder: [file.unlink() for file in folder.rglob("*.png")] and None, refused=True
        ),
    )
    for text in (
        "",
        "{",
        "5",
        "null",
        "[]",
        "{}",
        DEEP.text,
        LONG.text,
        '{"classes": 5}',
        '{"classes": [5, 6]}',
        '{"classes": ["a", "a"]}',
        '{"classes": ["bird", "cat", "dog"], "templates": 5}',
        '{"classes": ["bird", "cat", "dog"], "folders": {"a": 1}}',
        '["a", null]',
        '{"classes": {"a": 1}}',
        '{"classes": ["a", "b"], "classes": ["c"]}',
        '["bird", "cat", "dog"]',
    ):
        yield Made(f"--classes of {text[:30]!r}", _classes(text), text == DEEP.text)
    yield Made("parquet: nothing is wrong", _fine(_parquet(lambda content: content)))
    for what, change_ in (
        ("half", lambda c: c[: len(c) // 2]),
        ("nothing", lambda c: b""),
        ("zeros at the end", lambda c: c[:-12] + bytes(12)),
        ("text", lambda c: b"x"),
    ):
        yield Made(f"parquet: {what}", _parquet(change_))
    for what, files in {
        "an empty state": {"state.json": "{}", "dataset_info.json": "{}"},
        "a state that is a list": {"state.json": "[]", "dataset_info.json": "[]"},
        "files outside": {
            "state.json": json.dumps({"_data_files": [{"filename": "../../../outside/secret.txt"}]}),
            "dataset_info.json": "{}",
        },
        "a state nested deep": {"state.json": DEEP.text, "dataset_info.json": "{}"},
        "splits of the wrong kind": {"dataset_dict.json": '{"splits": 5}'},
        "splits outside": {"dataset_dict.json": '{"splits": ["../../outside"]}'},
    }.items():
        yield Made(f"datasets: {what}", _saved(files))
    for name in ("data.csv", "data.jsonl", "data.txt", "data.parquet", "data.safetensors", "data.npz"):
        yield Made(f"{name} is a pipe", _as_file(_pipe(name)), name == "data.csv")
        yield Made(f"{name} is /dev/zero", _as_file(_linked(name)), name == "data.csv")
    for name in ("no\\[/b] such.csv", "x" * 5000, "a\x00b", "/dev/zero", "[/b]", ""):
        yield Made(f"no data but {name[:20]!r}", _as_file(lambda place, n=name: n))


def _huge() -> bytes:
    """A file that promises more numbers than any machine holds."""
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 3, 4, 4), }"
        text = head.ljust(117) + "\n"
        packed.writestr(
            "pixel_values.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
        )
        packed.writestr("labels.npy", b"")
    return file.getvalue()


def mutant(place: Place) -> Sequence[Command]:
    rng = place.rng
    kind = rng.choice(("csv", "jsonl", "tsv", "png", "safetensors", "npz", "classes"))
    match kind:
        case "csv" | "jsonl" | "tsv":
            content = {"csv": TEXTS, "jsonl": LINES, "tsv": TEXTS.replace(",", "\t")}[kind].encode()
            spoilt, what = spoilt_bytes(content, rng)
            model, data = place.world.seed("reader"), place.write(f"data.{kind}", spoilt)
        case "png":
            folder = place.copy("pictures")
            file = folder / "cat" / "1.png"
            spoilt, what = spoilt_bytes(file.read_bytes(), rng)
            file.write_bytes(spoilt)
            model, data = place.world.seed("a"), folder
        case "safetensors":
            from safetensors.numpy import save

            spoilt, what = spoilt_tensors(save(_valid()), rng, place.canary)
            model, data = place.world.seed("a"), place.write("data.safetensors", spoilt)
        case "npz":
            spoilt, what = spoilt_bytes(_npz(**_valid()), rng)
            model, data = place.world.seed("a"), place.write("data.npz", spoilt)
        case _:
            spoilt, what = spoilt_bytes(b'{"classes": ["bird", "cat", "dog"], "templates": ["a {}."]}', rng)
            place.note(f"{kind}: {what}")
            return [
                place.evaluate(
                    place.world.seed("a"),
                    place.world.seed("pictures"),
                    "--classes",
                    place.write("c.json", spoilt),
                )
            ]
    place.note(f"{kind}: {what}")
    return [place.evaluate(model, data)]
