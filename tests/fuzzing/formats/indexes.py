"""Indexes and the files that they name: shards, links, pipes, and what else lies in a model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, TWICE, Raw, changed_text, code, dumps

COUNT = 60
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(place: Place, names: tuple[str, str] = SHARDS) -> tuple[Path, dict[str, str]]:
    """B in two shards, and where its tensors are."""
    from safetensors.torch import load_file

    folder = place.copy("b")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed = {name: names[number % 2] for number, name in enumerate(sorted(tensors))}
    for name in names:
        _save({one: tensors[one] for one in placed if placed[one] == name}, folder / name)
    write(folder, {"metadata": {"total_size": 1}, "weight_map": placed})
    return folder, placed


def _save(tensors: dict[str, Any], file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, file) if file.suffix == ".bin" else save_file(tensors, file, {"format": "pt"})


def write(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(dumps(index))


def _index(change: Callable[[dict[str, str]], Any], *, refused: bool = True) -> Build:
    """Good shards with another index."""

    def build(place: Place) -> Sequence[Command]:
        folder, placed = sharded(place)
        write(folder, change(placed))
        return [place.transport(onto=folder, refused=refused)]

    return build


def _named(first: str, second: str) -> Build:
    """Shards of these names: nothing is wrong with them, so nothing may be lost."""

    def build(place: Place) -> Sequence[Command]:
        folder, _ = sharded(place, (first, second))
        return [place.transport(onto=folder)]

    return build


def _led(lead: Callable[[Place, Path], None], *, refused: bool = True) -> Build:
    """A sharded model of which the second shard is something else."""

    def build(place: Place) -> Sequence[Command]:
        folder, _ = sharded(place)
        (folder / SHARDS[1]).unlink()
        lead(place, folder / SHARDS[1])
        return [place.inspect(folder, refused=refused), place.transport(onto=folder, refused=refused)]

    return build


def _instead(
    name: str, lead: Callable[[Place, Path], None], seed: str = "b", *, refused: bool = False
) -> Build:
    """A model with a file, or another file, of this name."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy(seed)
        (folder / name).unlink(missing_ok=True)
        lead(place, folder / name)
        used = (
            place.transport(folder, refused=refused)
            if seed == "tuned"
            else place.transport(onto=folder, refused=refused)
        )
        return [used]

    return build


def _named_outside(entry: Callable[[Place], str]) -> Build:
    """An index that names the secret model for half of the tensors."""

    def build(place: Place) -> Sequence[Command]:
        folder, placed = sharded(place)
        write(
            folder,
            {
                "weight_map": {
                    name: entry(place) if file == SHARDS[1] else file for name, file in placed.items()
                }
            },
        )
        tuned = place.inputs / "tuned"
        folder.rename(tuned)
        return [place.inspect(tuned, refused=True), place.transport(onto=tuned, refused=True)]

    return build


def _both(*, same: bool, listed: int) -> Build:
    """A tensor that stands in both shards, with the same numbers or others; the index names one of them."""

    def build(place: Place) -> Sequence[Command]:
        from safetensors.torch import load_file

        folder, placed = sharded(place)
        name = next(name for name, file in placed.items() if file == SHARDS[0] and name.endswith("weight"))
        first, second = (load_file(folder / one) for one in SHARDS)
        second[name] = first[name].clone() if same else first[name] + 1
        _save(second, folder / SHARDS[1])
        write(folder, {"weight_map": {**placed, name: SHARDS[listed]}})
        return [place.align(b=folder, refused=not same), place.transport(onto=folder, refused=not same)]

    return build


def _unlisted(place: Place) -> Sequence[Command]:
    folder, placed = sharded(place)
    write(folder, {"weight_map": {name: file for name, file in placed.items() if "bias" not in name}})
    return [place.transport(onto=folder, refused=True)]


def _two_indexes(place: Place) -> Sequence[Command]:
    folder, placed = sharded(place)
    (folder / "a.index.json").write_text(dumps({"weight_map": dict.fromkeys(placed, SHARDS[0])}))
    return [place.transport(onto=folder)]


def _cache(place: Place) -> Sequence[Command]:
    """A folder as the hub's library keeps it: links to files that are named by their content."""
    folder, _ = sharded(place)
    store = place.inputs / "models--org--name"
    (store / "blobs").mkdir(parents=True)
    (store / "snapshots" / "1").mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(store / "blobs" / str(number))
        (store / "snapshots" / "1" / file.name).symlink_to(f"../../blobs/{number}")
    return [place.transport(onto=store / "snapshots" / "1", done=True)]


def _beside_cache(place: Place) -> Sequence[Command]:
    """The same, but for a link that leads out of the cache."""
    _cache(place)
    snapshot = place.inputs / "models--org--name" / "snapshots" / "1"
    (snapshot / SHARDS[1]).unlink()
    (snapshot / SHARDS[1]).symlink_to(place.outside / "model.safetensors")
    return [place.transport(onto=snapshot, refused=True)]


def _link(name: str) -> Callable[[Place, Path], None]:
    return lambda place, path: path.symlink_to(place.outside / name)


def _fifo(place: Place, path: Path) -> None:
    os.mkfifo(path)


def _to(target: str) -> Callable[[Place, Path], None]:
    return lambda place, path: path.symlink_to(target)


def _folder(place: Place, path: Path) -> None:
    path.mkdir()


def _text(text: str | bytes) -> Callable[[Place, Path], None]:
    return lambda place, path: place.write(str(path), text) and None


COLLIDING = (
    ("open_clip_model-00001-of-00002.safetensors", "open_clip_model-00002-of-00002.safetensors"),
    ("p/m.safetensors", "q/m.safetensors"),
    ("pytorch_model-00001.bin", "model-00001.bin"),
    ("w.bin", "w.safetensors"),
    ("pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"),
    ("a/b.safetensors", "a_b.safetensors"),
    ("M.safetensors", "m.safetensors"),
    ("x.pt", "x.pth"),
    ("x.ckpt", "x.bin"),
    ("model.safetensors", "pytorch_model.bin"),
    ("m.safetensors", "./p/../m2.safetensors"),
    (".hidden.safetensors", "hidden.safetensors"),
    ("m.safetensors", "m.safetensors.safetensors"),
    ("a b.safetensors", "a  b.safetensors"),
    ("é.safetensors", "e\u0301.safetensors"),
    ("adapter_model.safetensors", "model2.safetensors"),
    ("[b].safetensors", "[/b].safetensors"),
    ("n" * 230 + ".safetensors", "n" * 231 + ".safetensors"),
)


def made() -> Iterator[Made]:
    for value in (None, 5, "x", [], {}, [["a", "b"]], True, DEEP, LONG, TWICE):
        yield Made(
            f"weight_map = {str(value)[:20]}",
            _index(lambda placed, v=value: {"weight_map": v}),
            value is DEEP,
        )
    for value in (
        None,
        5,
        [],
        ["x"],
        {},
        True,
        1.5,
        "",
        ".",
        "..",
        "/",
        "\x00",
        "x" * 300,
        "nothing.safetensors",
        "a\nb",
        INDEX,
        "config.json",
        "[/b]",
    ):
        yield Made(
            f"one tensor in the file {str(value)[:20]!r}",
            _index(lambda placed, v=value: {"weight_map": {**placed, "classifier.bias": v}}),
            value in (".", []),
        )
    for value in (None, 5, "x", [], DEEP):
        yield Made(f"the index is {str(value)[:20]}", _index(lambda placed, v=value: v))
    for value in (None, 5, "x", [], DEEP, {"total_size": "x"}, {"total_size": LONG}, {"total_size": -1}):
        yield Made(
            f"metadata = {str(value)[:20]}",
            _index(lambda placed, v=value: {"metadata": v, "weight_map": placed}, refused=False),
        )
    yield Made(
        "a tensor that no shard holds",
        _index(lambda placed: {"weight_map": {**placed, "x.weight": SHARDS[0]}}),
    )
    yield Made("a tensor that the index does not name", _unlisted)
    yield Made(
        "a tensor twice in the index",
        _index(
            lambda placed: {
                "weight_map": Raw(f'{json.dumps(placed)[:-1]}, "classifier.bias": "{SHARDS[1]}"}}')
            }
        ),
    )
    yield Made(
        "all tensors in the first shard",
        _index(lambda placed: {"weight_map": dict.fromkeys(placed, SHARDS[0])}),
    )
    yield Made(
        "shards exchanged",
        _index(lambda placed: {"weight_map": {n: SHARDS[f == SHARDS[0]] for n, f in placed.items()}}),
    )
    yield Made("two indexes", _two_indexes)
    for same in (True, False):
        for listed in (0, 1):
            how = "the same" if same else "another"
            yield Made(
                f"a tensor in both shards, {how} copy, {listed} in the index",
                _both(same=same, listed=listed),
                not same,
            )
    for names in COLLIDING:
        yield Made(f"shards {names[0][:60]} and {names[1][:60]}", _named(*names), names in COLLIDING[:5])
    yield Made(
        "a shard by ../",
        _named_outside(
            lambda place: os.path.relpath(place.outside / "model.safetensors", place.inputs / "tuned")
        ),
        True,
    )
    yield Made(
        "a shard by an absolute path",
        _named_outside(lambda place: str(place.outside / "model.safetensors")),
        True,
    )
    yield Made("a shard by a link to a folder", _named_outside(lambda place: f"../link/{_linked(place)}"))
    yield Made("a shard that is a link to outside", _led(_link("model.safetensors")), True)
    yield Made("a shard that is a link to nowhere", _led(_to("nowhere")))
    yield Made("a shard that is a link to itself", _led(_to(SHARDS[1])))
    yield Made("a shard that is a pipe", _led(_fifo), True)
    yield Made("a shard that is a folder", _led(_folder))
    for device in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/dev/null"):
        yield Made(f"a shard that is {device}", _led(_to(device)))
    yield Made("a shard of nothing", _led(_text(b"")))
    yield Made("links of a hub cache", _cache, True)
    yield Made("links of a hub cache that lead out of it", _beside_cache)
    for name in ("model.safetensors", "config.json"):
        outside = _link(name)
        for seed in ("b", "tuned"):
            yield Made(
                f"{name} of {seed} is a link to outside",
                _instead(name, outside, seed, refused=True),
                seed == "b",
            )
        yield Made(f"{name} is a pipe", _instead(name, _fifo, refused=True), True)
        yield Made(f"{name} is a folder", _instead(name, _folder, refused=True))
        yield Made(f"{name} is /dev/zero", _instead(name, _to("/dev/zero"), refused=True))
    for name in (
        "tokenizer.json",
        "README.md",
        "notes.txt",
        "preprocessor_config.json",
        "generation_config.json",
        "LICENSE",
    ):
        yield Made(
            f"{name} is a link to outside", _instead(name, _link("secret.txt")), name == "tokenizer.json"
        )
        yield Made(f"{name} is a pipe", _instead(name, _fifo), name == "tokenizer.json")
    for name in ("README.md", "tokenizer.json", "preprocessor_config.json"):
        yield Made(f"{name} is /dev/zero", _instead(name, _to("/dev/zero")))
        yield Made(f"{name} of bytes that are no text", _instead(name, _text(b"\xff\xfe\x00" * 50)))
        yield Made(f"{name} is a folder", _instead(name, _folder))
    for front in (
        "license: [",
        "license: {a: b}",
        "license: !!python/object/apply:os.system ['id']",
        "- x",
        "license: &a [*a]",
    ):
        yield Made(f"a card that says {front!r}", _instead("README.md", _text(f"---\n{front}\n---\n")))
    yield Made("an index that is a pipe", _instead(INDEX, _fifo, refused=True), True)
    yield Made("an index that is a link to outside", _instead(INDEX, _link("secret.json"), refused=True))
    yield Made("an index that is a folder", _instead(INDEX, _folder, refused=True))
    yield Made("an auxiliary file with an odd name", _instead("[/b]\n.json", _text("{}")))
    yield Made("auxiliary files with hostile names", _hostile)


def _linked(place: Place) -> str:
    if not (place.inputs / "link").exists():
        (place.inputs / "link").symlink_to(place.outside)
    return "model.safetensors"


def _hostile(place: Place) -> Sequence[Command]:
    folder = place.copy("b")
    for number, text in enumerate(code(place.canary)):
        (folder / f"{number}{text.replace('/', '')[:100]}.json").write_text("{}")
    return [place.transport(onto=folder)]


def mutant(place: Place) -> Sequence[Command]:
    folder, _ = sharded(place)
    text, what = changed_text((folder / INDEX).read_text(), place.rng, place.canary)
    place.write(str(folder / INDEX), text)
    place.note(what)
    return [place.rng.choice((place.inspect(folder), place.transport(onto=folder), place.align(b=folder)))]
