"""The formats of files from outside, each with its cases: known attacks, made by hand, and random changes.

A case copies a valid file or folder, spoils one file in it, and runs command lines that read it. What must be true
of all of them is in `checking`; some cases also say that they must be refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import load_file, save, save_file

from fuzzing.cases import MUTANTS, Build, Case, Command, Made, Place
from fuzzing.mutating import (
    DEEP,
    LONG,
    Raw,
    changed_text,
    code,
    dumps,
    joined,
    places,
    split,
    spoilt_bytes,
    spoilt_tensors,
    with_value,
    without,
)
from fuzzing.seeds import WIDTH, adapter_tensors, drawn

Change: TypeAlias = Callable[[Place, Path], object]
"""Spoils the file at a path, or puts something else there."""
Use: TypeAlias = Callable[[Place, Path], list[Command]]
"""The command lines that read a file or a folder."""
WEIGHTS, CONFIG, RECORD = "model.safetensors", "config.json", "transfusion.json"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def spoilt(seed: str, file: str, change: Change, use: Use, *, refused: bool = True) -> Build:
    """A copy of a seed in which one file is changed; all command lines must refuse it, or may not."""

    def build(place: Place) -> Sequence[Command]:
        root = place.copy(seed)
        change(place, root / file if file else root)
        return [replace(command, refused=refused) for command in use(place, root)]

    return build


def fine(build: Build) -> Build:
    """A case that must succeed."""
    return lambda place: [replace(command, done=True, refused=False) for command in build(place)]


# ── changes that every format shares ─────────────────────────────────────────────────────────


def text(content: str | bytes) -> Change:
    return lambda place, path: place.write(str(path), content)


def put(*keys: Any, value: Any) -> Change:
    """Another value in a file of JSON, or none: ``...``."""

    def change(place: Place, path: Path) -> None:
        found = json.loads(path.read_text())
        known = keys in set(places(found)) or len(keys) > 1
        new = {**found, keys[0]: value} if not known else with_value(found, keys, value)
        place.write(str(path), dumps(without(found, keys) if value is ... else new))

    return change


def link(target: str) -> Change:
    """A link to a file outside, or to a device."""

    def change(place: Place, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target if target.startswith("/") else place.outside / target)

    return change


def pipe(place: Place, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def content(change: Callable[[bytes], bytes]) -> Change:
    return lambda place, path: path.write_bytes(change(path.read_bytes()))


def header(change: Callable[[Any], Any]) -> Change:
    """Another header of a safetensors file, with the same numbers."""
    return content(lambda found: joined(change(split(found)[0]), split(found)[1]))


def tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Other tensors in a safetensors file, with the same metadata."""

    def rewrite(place: Place, path: Path) -> None:
        metadata = split(path.read_bytes())[0].get("__metadata__")
        save_file(change(load_file(path)), path, metadata)

    return rewrite


class Touch:
    """What a hostile pickle holds."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def mutated(place: Place, path: Path, kind: str = "json") -> None:
    """A random change: of JSON, of a safetensors file, or of bytes."""
    found = path.read_bytes()
    if kind == "json":
        new, what = changed_text(found.decode(), place.rng, place.canary)
        place.write(str(path), new)
    elif kind == "tensors":
        changed, what = spoilt_tensors(found, place.rng, place.canary)
        path.write_bytes(changed)
    else:
        changed, what = spoilt_bytes(found, place.rng)
        path.write_bytes(changed)
    place.note(f"{path.name}: {what}")


# ── uses ─────────────────────────────────────────────────────────────────────────────────────


def as_finetune(place: Place, root: Path) -> list[Command]:
    return [place.transport(root)]


def as_a(place: Place, root: Path) -> list[Command]:
    return [place.inspect(root), place.align(a=root)]


def as_b(place: Place, root: Path) -> list[Command]:
    return [place.align(b=root), place.transport(onto=root)]


def as_onto(place: Place, root: Path) -> list[Command]:
    return [place.transport(onto=root)]


def inspected(place: Place, root: Path) -> list[Command]:
    return [place.inspect(root)]


def proposed(place: Place, root: Path) -> list[Command]:
    return [place.propose(root)]


# ── weights and their index ──────────────────────────────────────────────────────────────────


def _with_nan(found: bytes) -> bytes:
    return found[:-4] + struct.pack("<f", float("nan"))


def _name_twice(found: bytes) -> bytes:
    head, payload = split(found)
    start = head["vit.layernorm.bias"]["data_offsets"][0]
    entry = {**head["classifier.bias"], "data_offsets": [start, start + 12]}
    return joined(f'{dumps(head)[:-1]}, "classifier.bias": {dumps(entry)}}}'.encode(), payload)


def _pickled(*, zipped: bool) -> Change:
    def change(place: Place, path: Path) -> None:
        import torch

        path.unlink()
        file = path.with_name("pytorch_model.bin")
        hostile = {"state_dict": {"x": Touch(place.canary)}}
        torch.save(hostile, file) if zipped else file.write_bytes(pickle.dumps(hostile, 2))

    return change


def _odd_folder(place: Place) -> Sequence[Command]:
    named = place.copy("tuned").rename(place.inputs / "back\\[slash] [bold]")
    return [place.inspect(named), place.transport(named, done=True), place.inspect(f"{named}-not-there")]


def made_weights() -> Iterator[Made]:
    changes: dict[str, Change] = {
        "an empty file": text(b""),
        "a header of 2^63 bytes": content(lambda found: struct.pack("<Q", 2**63) + found[8:]),
        "a header of 100,000,001 bytes": content(lambda found: struct.pack("<Q", 100_000_001) + found[8:]),
        "a header nested deep": header(lambda found: DEEP),
        "a header of many digits": header(lambda found: LONG),
        "half a file": content(lambda found: found[: len(found) // 2]),
        "a name that stands twice": content(_name_twice),
        "NaN": content(_with_nan),
        "a tensor less": header(lambda found: {k: v for k, v in found.items() if k != "classifier.weight"}),
        "a pickle that runs a program": _pickled(zipped=False),
        "a zipped pickle that runs a program": _pickled(zipped=True),
        "a pipe": pipe,
        "a link to outside": link(WEIGHTS),
    }
    quick = (
        "a header of 2^63 bytes",
        "a name that stands twice",
        "NaN",
        "a zipped pickle that runs a program",
    )
    for what, change in changes.items():
        yield Made(what, spoilt("tuned", WEIGHTS, change, as_finetune), what in quick)
    all_nan = tensors(lambda found: {name: one * np.float32("nan") for name, one in found.items()})
    yield Made("NaN in A", spoilt("a", WEIGHTS, all_nan, lambda place, root: [place.align(a=root)]))
    yield Made("a folder with an odd name", _odd_folder, True)


def mutant_weights(place: Place) -> Sequence[Command]:
    seed, use = place.rng.choice((("tuned", as_finetune), ("a", as_a), ("b", as_b)))
    root = place.copy(seed)
    mutated(place, root / WEIGHTS, "tensors")
    return use(place, root)


def shard(root: Path, names: Sequence[str] = SHARDS) -> dict[str, str]:
    """Divide a model into two shards; return where its tensors are."""
    import torch
    from safetensors.torch import load_file, save_file

    found = load_file(root / WEIGHTS)
    (root / WEIGHTS).unlink()
    placed = {name: names[number % 2] for number, name in enumerate(sorted(found))}
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        part = {one: found[one] for one in placed if placed[one] == name}
        torch.save(part, root / name) if name.endswith(".bin") else save_file(part, root / name)
    (root / INDEX).write_text(dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    return placed


def sharded(change: Callable[[Place, Path, dict[str, str]], object], *, refused: bool = True) -> Build:
    """B in two shards, of which something is changed."""
    return spoilt("b", "", lambda place, root: change(place, root, shard(root)), as_onto, refused=refused)


def _other_place(where: Callable[[Place], str]) -> Build:
    """An index that names a file elsewhere for half of the tensors."""

    def change(place: Place, root: Path, placed: dict[str, str]) -> None:
        new = {name: where(place) if file == SHARDS[1] else file for name, file in placed.items()}
        (root / INDEX).write_text(dumps({"weight_map": new}))

    return sharded(change)


def _in_both(place: Place, root: Path, placed: dict[str, str]) -> None:
    """A tensor that stands in both shards, with other numbers."""
    name = next(name for name, file in placed.items() if file == SHARDS[0])
    first, second = (load_file(root / one) for one in SHARDS)
    save_file({**second, name: first[name] + 1}, root / SHARDS[1])


def _hub_cache(place: Place) -> Sequence[Command]:
    """A folder as the hub's library keeps it: links to files that are named by their content."""
    root = place.copy("b")
    shard(root)
    store = place.inputs / "models--org--name"
    (store / "blobs").mkdir(parents=True)
    (store / "snapshots" / "1").mkdir(parents=True)
    for number, file in enumerate(sorted(root.iterdir())):
        file.rename(store / "blobs" / str(number))
        (store / "snapshots" / "1" / file.name).symlink_to(f"../../blobs/{number}")
    return [place.transport(onto=store / "snapshots" / "1", done=True)]


def made_indexes() -> Iterator[Made]:
    for value in (None, [], {"classifier.bias": "."}, {"classifier.bias": []}, DEEP):
        write = lambda place, root, placed, v=value: text(dumps({"weight_map": v}))(place, root / INDEX)  # noqa: E731
        yield Made(f"weight_map = {str(value)[:30]}", sharded(write), value is DEEP)
    for names in (
        ("p/m.safetensors", "q/m.safetensors"),
        ("w.bin", "w.safetensors"),
        ("M.safetensors", "m.safetensors"),
        ("[b].safetensors", "[/b].safetensors"),
    ):
        named: Change = lambda place, root, n=names: shard(root, n)  # noqa: E731
        yield Made(f"shards {names}", spoilt("b", "", named, as_onto, refused=False), "w.bin" in names)
    yield Made("a tensor in both shards", sharded(_in_both), True)
    up = "../../outside/model.safetensors"
    yield Made("a shard by ../", _other_place(lambda place: f"../{up}"), True)
    yield Made("a shard by its path", _other_place(lambda place: str(place.outside / WEIGHTS)), True)
    instead = {"a link to outside": link(WEIGHTS), "a pipe": pipe, "/dev/zero": link("/dev/zero")}
    for what, change in instead.items():
        there = lambda place, root, placed, c=change: c(place, root / SHARDS[1])  # noqa: E731
        yield Made(f"a shard that is {what}", sharded(there), what == "a pipe")
        yield Made(f"a configuration that is {what}", spoilt("b", CONFIG, change, as_onto))
        yield Made(f"an index that is {what}", spoilt("b", INDEX, change, as_onto))
        for name in ("tokenizer.json", "README.md"):
            yield Made(
                f"{name} that is {what}", spoilt("b", name, change, as_onto, refused=False), what == "a pipe"
            )
    card = "---\nlicense: !!python/object/apply:os.system ['id']\n---\n"
    yield Made("a card with code", spoilt("b", "README.md", text(card), as_onto, refused=False))
    yield Made("links of a hub cache", _hub_cache, True)


def mutant_index(place: Place) -> Sequence[Command]:
    root = place.copy("b")
    shard(root)
    mutated(place, root / INDEX)
    return place.rng.choice((inspected, as_onto))(place, root)


# ── configurations of models ─────────────────────────────────────────────────────────────────


def _code(seed: str, file: str, key: str, number: int, use: Use) -> Build:
    """Code as the text of a setting."""

    def change(place: Place, path: Path) -> None:
        value = code(place.canary)[number]
        put(key, value=[value] if key == "architectures" else value)(place, path)

    return spoilt(seed, file, change, use, refused=False)


def made_configs() -> Iterator[Made]:
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        for value in (0, -1, "8", 3.5, 10**9, [], Raw("NaN"), LONG):
            title = f"{key} = {str(getattr(value, 'text', value))[:20]!r}"
            quick = (key, value) in (("head_dim", 3.5), ("num_hidden_layers", 10**9))
            yield Made(title, spoilt("llama", CONFIG, put(key, value=value), inspected), quick)
    twice = content(lambda found: found.rstrip()[:-1] + b', "num_attention_heads": 4}')
    yield Made("num_attention_heads twice", spoilt("a", CONFIG, twice, inspected), True)
    for whole in ("", "[]", b"\xff\xfe{}", DEEP.text, LONG.text, "{}"):
        yield Made(
            f"the file is {whole[:20]!r}", spoilt("a", CONFIG, text(whole), inspected), whole == DEEP.text
        )
    for number in range(6):
        for key in ("model_type", "architectures"):
            yield Made(f"code {number} in {key}", _code("llama", CONFIG, key, number, proposed), number == 0)
    for key in ("auto_map", "hidden_act", "torch_dtype"):
        verified: Use = lambda place, root: [place.verify(root)]  # noqa: E731
        yield Made(f"code in {key}, verified", _code("a", CONFIG, key, 1, verified))


def mutant_config(place: Place) -> Sequence[Command]:
    seed = place.rng.choice(("a", "a", "llama"))
    root = place.copy(seed)
    mutated(place, root / CONFIG)
    verbs: list[Use] = [inspected, lambda place, root: [place.align(root, root)]]
    if seed == "a":
        verbs += [lambda place, root: [place.transport(base=root)], lambda place, root: [place.verify(root)]]
        verbs += [lambda place, root: [place.evaluate(root, place.world.seed("pictures"))]]
    return place.rng.choice(verbs)(place, root)


# ── adapters and LoRA files ──────────────────────────────────────────────────────────────────

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
FACTOR = "base_model.model.vit.encoder.layer.0.attention.attention.query.lora_A.weight"
MODULE = "lora_te_encoder_layer_{}_attention_attention_query"
"""The ViT of all cases takes the place of a text encoder."""


def as_adapter(place: Place, root: Path) -> list[Command]:
    return [
        place.transport(root, tensors=frozenset(adapter_tensors())),
        place.transport(root, more=["--full"], loads=True),
    ]


def made_adapters() -> Iterator[Made]:
    yield Made("nothing is wrong", fine(spoilt("adapter", "", lambda place, root: None, as_adapter)), True)
    for key, value in (
        *(("lora_alpha", value) for value in ("x", [], Raw("NaN"), Raw("Infinity"), LONG)),
        *(("r", value) for value in (0, -1, "4", Raw("NaN"), 10**9)),
        *(("target_modules", value) for value in (5, {}, [5], [None], DEEP)),
        ("rank_pattern", {"query": Raw("NaN")}),
        ("peft_type", "x"),
    ):
        change = put(key, value=value)
        title = f"{key} = {str(getattr(value, 'text', value))[:20]}"
        yield Made(title, spoilt("adapter", ADAPTER_CONFIG, change, as_adapter), title == "lora_alpha = NaN")
    for pattern in ("(.*)*x", "((a|a)*)*$", "(?:(?:[\\w.]+)+)+!"):
        for key in ("rank_pattern", "target_modules", "exclude_modules"):
            change = put(key, value={pattern: 2} if key == "rank_pattern" else pattern)
            made = spoilt("adapter", ADAPTER_CONFIG, change, as_adapter, refused=False)
            yield Made(f"{key} = {pattern}", made, pattern == "(.*)*x" and key == "rank_pattern")
    for task in ("SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", 5, "[/b]"):
        change = put("task_type", value=task)
        yield Made(
            f"task_type = {task}", spoilt("adapter", ADAPTER_CONFIG, change, as_adapter, refused=False)
        )
    ones = np.ones((2, WIDTH), np.float32)
    for what, value in (
        ("NaN", ones * np.float32("nan")),
        ("another rank", np.ones((3, WIDTH), np.float32)),
        ("rank 0", ones[:0]),
        ("no dimension", np.ones((), np.float32)),
    ):
        change = tensors(lambda found, v=value: {**found, FACTOR: v})
        yield Made(
            f"a factor with {what}", spoilt("adapter", ADAPTER_FILE, change, as_adapter), what == "NaN"
        )
    for name in ("x", "", "a" * 5000 + ".lora_A.weight", "[/b].lora_A.weight"):
        change = tensors(lambda found, n=name: {**found, n: ones})
        yield Made(
            f"a tensor {name[:20]!r} more", spoilt("adapter", ADAPTER_FILE, change, as_adapter), name == "x"
        )
    for name, secret in ((ADAPTER_CONFIG, "secret.json"), (ADAPTER_FILE, WEIGHTS)):
        yield Made(f"{name} is a link to outside", spoilt("adapter", name, link(secret), as_adapter))
    for number in (0, 1, 4):
        yield Made(
            f"code {number}", _code("adapter", ADAPTER_CONFIG, "base_model_name_or_path", number, as_adapter)
        )


def mutant_adapter(place: Place) -> Sequence[Command]:
    root = place.copy("adapter")
    whole = place.rng.random() < 0.7
    mutated(place, root / (ADAPTER_CONFIG if whole else ADAPTER_FILE), "json" if whole else "tensors")
    return as_adapter(place, root)[:1] if place.rng.random() < 0.5 else as_adapter(place, root)


def lora_tensors() -> dict[str, np.ndarray]:
    """A LoRA in kohya's format, on two modules."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in (MODULE.format(0), MODULE.format(1)):
        shapes |= {f"{module}.lora_down.weight": (2, WIDTH), f"{module}.lora_up.weight": (WIDTH, 2)}
        shapes |= {f"{module}.alpha": ()}
    return {name: np.asarray(np.abs(one)) for name, one in drawn(shapes, 7).items()}


def lora(change: Callable[[dict[str, Any]], dict[str, Any]], *, refused: bool = True, **about: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        found = change(lora_tensors())
        known = {"ss_base_model_version": "sd_v1", "ss_tag_frequency": '{"a": {"cat": 1}}', **about}
        file = place.write("lora.safetensors", save(found, known))
        moved = place.transport(file, tensors=frozenset(found), refused=refused)
        return [place.inspect(file), moved, place.transport(file, more=["--full"], refused=refused)]

    return build


def made_loras() -> Iterator[Made]:
    yield Made("nothing is wrong", fine(lora(lambda found: found)), True)
    up, alpha = f"{MODULE.format(0)}.lora_up.weight", f"{MODULE.format(0)}.alpha"
    for name, value in (
        (up, np.full((WIDTH, 2), np.nan, np.float32)),
        (up, np.ones((WIDTH, 3), np.float32)),
        (up, np.ones((WIDTH, 0), np.float32)),
        (up, np.ones((), np.float32)),
        (alpha, np.full((), np.inf, np.float32)),
        (alpha, np.ones(2, np.float32)),
    ):
        made = lora(lambda found, n=name, v=value: {**found, n: v})
        yield Made(f"{name[-14:]}: {value.flat[:1]}, {value.shape}", made, value.shape == (WIDTH, 0))
    for name in (
        "x",
        "",
        f"{MODULE.format(0)}.lora_mid.weight",
        "lora_te_[/b].lora_up.weight",
        "lora_te_\x1b[2J.alpha",
    ):
        more = lora(lambda found, n=name: {**found, n: np.ones((2, WIDTH), np.float32)})
        yield Made(f"a tensor {name[:40]!r} more", more, name == "x")
    for key in ("ss_tag_frequency", RECORD, "ss_base_model_version"):
        for value in ("[]", "5", '{"a": {"b": []}}', DEEP.text, "\x1b[2J[/b]"):
            about = lora(lambda found: found, refused=False, **{key: value})
            yield Made(f"{key} = {value[:20]!r}", about, value == DEEP.text)


def mutant_lora(place: Place) -> Sequence[Command]:
    file = place.write("lora.safetensors", save(lora_tensors(), {"ss_base_model_version": "sd_v1"}))
    mutated(place, file, "tensors")
    return [place.inspect(file), replace(place.transport(file), tensors=None)]


# ── our own formats: π, α, metadata and results ──────────────────────────────────────────────


def in_header(change: Callable[[Any], Any]) -> Change:
    """Another text in the metadata of a file of π."""

    def rewrite(found: Any) -> Any:
        new = change(json.loads(found["__metadata__"]["transfusion"]))
        return {**found, "__metadata__": {"transfusion": new if isinstance(new, str) else dumps(new)}}

    return header(rewrite)


def as_pi(place: Place, pi: Path) -> list[Command]:
    return [place.inspect(pi), place.transport(via=pi)]


def _cycle(found: Any) -> Any:
    """Axes that are each within the next."""
    ids = sorted(found["sizes"])[:3]
    return {**found, "parents": {**found["parents"], **dict(zip(ids, [*ids[1:], ids[0]], strict=True))}}


def largest(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Another map of the largest axis."""

    def rewrite(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        id = max(found, key=lambda one: found[one].shape[-1])
        return {**found, id: np.ascontiguousarray(change(found[id]))}

    return tensors(rewrite)


def made_pis() -> Iterator[Made]:
    changes: dict[str, Change] = {
        "a cycle in parents": in_header(_cycle),
        "no provenance": in_header(lambda found: without(found, ("provenance",))),
        "advice of another kind": in_header(
            lambda found: with_value(found, ("provenance", "advice"), {"a": [1]})
        ),
        "sizes of 10^9": in_header(lambda found: {**found, "sizes": dict.fromkeys(found["sizes"], 10**9)}),
        "metadata nested deep": in_header(lambda found: DEEP.text),
        "another format": in_header(lambda found: {**found, "format": 1}),
        "an index beyond the size": largest(lambda one: one + 1),
        "an index twice": largest(np.zeros_like),
        "one index less": largest(lambda one: one[:, :-1]),
        "no number": largest(lambda one: np.zeros((), np.int32)),
    }
    for what, change in changes.items():
        quick = what in ("a cycle in parents", "metadata nested deep", "an index beyond the size")
        yield Made(what, spoilt("pi", "", change, as_pi), quick)
    for what, turn in (("NaN", lambda one: one * np.float32("nan")), ("no rotation", lambda one: one + 1)):
        yield Made(f"a rotation that is {what}", spoilt("turned", "", largest(turn), as_pi))


def mutant_pi(place: Place) -> Sequence[Command]:
    pi = place.copy(place.rng.choice(("pi", "pi", "turned")))
    if place.rng.random() < 0.3:
        mutated(place, pi, "tensors")
    else:
        known = split(pi.read_bytes())[0]["__metadata__"]["transfusion"]
        new, what = changed_text(known, place.rng, place.canary)
        place.note(what)
        in_header(lambda found: new.encode("utf-8", "replace").decode())(place, pi)
    verbs = [place.inspect(pi), place.transport(via=pi), place.apply(pi), place.verify(via=pi)]
    return [place.rng.choice([*verbs, place.report(place.world.seed("moved"), "--via", pi)])]


ALPHA = '{"default": 1.0, "encoder.layer.0.*": 0.5, "classifier.*": 2}'


def alpha(change: Change, *, refused: bool = True) -> Build:
    def build(place: Place) -> Sequence[Command]:
        file = place.write("alpha.json", ALPHA)
        change(place, file)
        return [place.transport(more=["--alpha", file], refused=refused)]

    return build


def made_alphas() -> Iterator[Made]:
    yield Made("nothing is wrong", fine(alpha(lambda place, path: None)), True)
    for whole in ("", "[]", "NaN", DEEP.text, LONG.text, '{"default": 1, "default": 2}', b"\xff\xfe"):
        yield Made(f"the file is {whole[:20]!r}", alpha(text(whole)), whole == DEEP.text)
    for value in (None, True, "1", [], Raw("NaN"), Raw("Infinity"), -1, Raw("1e400"), LONG):
        title = f"default = {str(getattr(value, 'text', value))[:20]}"
        yield Made(title, alpha(put("default", value=value)), value is LONG)
    for pattern in ("", "nothing", "[", "a\x00", "*a" * 40 + "b"):
        yield Made(f"the pattern {pattern[:20]!r}", alpha(text(dumps({pattern: 1}))), pattern[:2] == "*a")
    for what, change in (("a pipe", pipe), ("/dev/zero", link("/dev/zero"))):
        yield Made(f"the file is {what}", alpha(change), what == "a pipe")


def mutant_alpha(place: Place) -> Sequence[Command]:
    return alpha(mutated, refused=False)(place)


def again(place: Place, root: Path) -> list[Command]:
    return [place.again(root / RECORD, "transport")]


def reported(place: Place, root: Path) -> list[Command]:
    return [place.report(root)]


def made_records() -> Iterator[Made]:
    for key in ("base", "alignment", "finetuned", "settings", "verb"):
        yield Made(f"without {key}", spoilt("moved", RECORD, put(key, value=...), again), key == "base")
    for key in ("base", "alignment", "finetuned", "settings"):
        for value in (None, 5, [], {}, DEEP):
            change = put(key, value=value)
            refused = (key, value) != ("settings", {})
            made = spoilt("moved", RECORD, change, again, refused=refused)
            yield Made(f"{key} = {str(value)[:20]}", made, value is DEEP and key == "base")
            yield Made(
                f"{key} = {str(value)[:20]}, reported",
                spoilt("moved", RECORD, change, reported, refused=refused),
            )
    for name in ("\x00", "org/name", "[/b]", "/dev/zero"):

        def change(place: Place, path: Path, name: str = name) -> None:
            put("onto", "name", value=name)(place, path)
            put("onto", "path", value=name)(place, path)

        yield Made(f"B is {name!r}", spoilt("moved", RECORD, change, again))
    for whole in (
        "",
        "[]",
        DEEP.text,
        '{"verb": "transport", "settings": {}}',
        '{"verb": [], "settings": {}}',
    ):
        yield Made(f"the file is {whole[:30]!r}", spoilt("moved", RECORD, text(whole), again))
    for number in (0, 1, 4):
        yield Made(f"code {number}", _code("moved", RECORD, "command", number, reported), number == 0)
    yield Made("the file is a pipe", spoilt("moved", RECORD, pipe, again), True)


def mutant_record(place: Place) -> Sequence[Command]:
    root = place.copy(place.rng.choice(("moved", "moved", "merged")))
    mutated(place, root / RECORD)
    verb = "merge" if root.name == "merged" else "transport"
    return [place.rng.choice((place.again(root / RECORD, verb), place.report(root)))]


RESULTS = ("evaluate", "sweep", "fewshot", "barrier", "verify", "align")


def made_results() -> Iterator[Made]:
    needed = {
        "evaluate": "models",
        "sweep": "curves",
        "fewshot": "zero",
        "barrier": "curves",
        "verify": "outputs",
    }
    for verb, key in needed.items():
        file = f"{verb}.json"
        alone: Use = lambda place, root, name=file: [place.report(root / name)]  # noqa: E731
        for value in (..., None, 5, [[]], Raw("NaN"), DEEP):
            made = spoilt("results", file, put(key, value=value), alone)
            yield Made(f"{verb}: {key} = {str(value)[:20]}", made, value is ... and verb == "sweep")
        script = put("command", value="<script>alert(1)</script>")
        yield Made(
            f"a script in {verb}", spoilt("results", file, script, alone, refused=False), verb == "sweep"
        )
    for whole in (DEEP.text, '{"verb": ["evaluate"]}', "[]", b"\xff"):
        made = spoilt("results", "other.json", text(whole), reported, refused=False)
        yield Made(f"a file beside the run: {whole[:20]!r}", made, whole == DEEP.text)
    yield Made("a pipe beside the run", spoilt("results", "pipe.json", pipe, reported, refused=False), True)
    yield Made("a link to outside", spoilt("results", "evaluate.json", link("secret.json"), reported))


def mutant_result(place: Place) -> Sequence[Command]:
    root = place.copy("results")
    file = root / f"{place.rng.choice(RESULTS)}.json"
    mutated(place, file)
    return [place.report(root) if place.rng.random() < 0.5 else place.report(file)]


# ── examples ─────────────────────────────────────────────────────────────────────────────────

TEXTS = "text,label\na good film,yes\na bad film,no\nit was good .,yes\n"
LINES = '{"text": "a good film", "label": "yes"}\n{"text": "it was bad", "label": "no"}\n'


def read_by(model: str, name: str, write: Change, *, refused: bool = True) -> Build:
    """Data of this name, for a model."""

    def build(place: Place) -> Sequence[Command]:
        place.copy("pictures")
        write(place, place.inputs / name)
        return [place.evaluate(place.world.seed(model), place.inputs / name, refused=refused)]

    return build


def pictures() -> dict[str, np.ndarray]:
    images = np.random.default_rng(0).normal(size=(4, 3, 4, 4)).astype(np.float32)
    return {"pixel_values": images, "labels": np.arange(4) % 3}


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _hostile_npz(place: Place, path: Path) -> None:
    objects = np.empty(1, dtype=object)
    objects[0] = Touch(place.canary)
    path.write_bytes(_npz(pixel_values=objects, labels=np.arange(1)))


def _huge_npz(place: Place, path: Path) -> None:
    """A file that promises more numbers than any machine holds."""
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 3, 4, 4), }".ljust(117) + "\n"
    with zipfile.ZipFile(path, "w") as packed:
        start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head))
        packed.writestr("pixel_values.npy", start + head.encode())
        packed.writestr("labels.npy", b"")


def png(width: int, height: int) -> bytes:
    """The beginning of a picture of this size, which ends before its first line."""

    def chunk(name: bytes, inside: bytes) -> bytes:
        return struct.pack(">I", len(inside)) + name + inside + struct.pack(">I", zlib.crc32(name + inside))

    size = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + chunk(b"IDAT", zlib.compress(b"\x00")) + chunk(b"IEND", b"")


def made_data() -> Iterator[Made]:
    yield Made("csv: nothing is wrong", fine(read_by("reader", "data.csv", text(TEXTS))), True)
    tables = {
        "a column twice": "text,label,label\na good film,yes,no\nbad,no,yes\n",
        "ragged rows": "text,label\na good film\nbad,no,no\n",
        "no rows": "text,label\n",
        "labels of no class": "text,label\na good film,[/b]\n",
        "labels of many digits": f"text,label\na good film,{'9' * 5000}\n",
        "100,000 columns": ",".join(f"c{n}" for n in range(100_000)) + "\n",
    }
    for what, table in tables.items():
        yield Made(f"csv: {what}", read_by("reader", "data.csv", text(table)), what == "a column twice")
    for what, line in {
        "nested deep": DEEP.text,
        "a label of many digits": f'{{"text": "good", "label": {LONG.text}}}\n',
        "a list": '["a", "b"]\n',
        "a key twice": '{"text": "a", "text": "b", "label": "yes"}\n',
        "half": LINES[:30],
    }.items():
        yield Made(f"jsonl: {what}", read_by("reader", "data.jsonl", text(line)), what == "nested deep")
    outside = lambda place, path: path.write_text(f"image,label\n{place.outside / 'secret.png'},bird\n")  # noqa: E731
    yield Made("a picture outside", read_by("a", "data.csv", outside), True)
    for what, change in {
        "labels beyond the classes": lambda found: {**found, "labels": found["labels"] + 5},
        "fewer labels": lambda found: {**found, "labels": found["labels"][:2]},
        "NaN": lambda found: {**found, "pixel_values": found["pixel_values"] * np.float32("nan")},
    }.items():
        yield Made(f"tensors: {what}", read_by("a", "data.safetensors", text(save(change(pictures())))))
    yield Made("npz: a pickle that runs a program", read_by("a", "data.npz", _hostile_npz), True)
    yield Made("npz: a huge shape", read_by("a", "data.npz", _huge_npz), True)
    picture = "cat/x.png"
    vector = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n"
    shown: Use = lambda place, root: [place.evaluate(place.world.seed("a"), root)]  # noqa: E731
    for what, write in {
        "of 60,000 × 60,000": text(png(60_000, 60_000)),
        "of nothing": text(b""),
        "that is a program of PostScript": text(vector),
        "that is a link to outside": link("secret.png"),
        "that is a pipe": pipe,
        "that is /dev/zero": link("/dev/zero"),
    }.items():
        yield Made(
            f"a picture {what}",
            spoilt("pictures", picture, write, shown),
            "60,000" in what or "program" in what,
        )
    for name in ("data.csv", "data.jsonl", "data.parquet", "data.safetensors", "data.npz"):
        yield Made(f"{name} is a pipe", read_by("reader", name, pipe), name == "data.csv")
        yield Made(f"{name} is /dev/zero", read_by("reader", name, link("/dev/zero")))


def mutant_data(place: Place) -> Sequence[Command]:
    kinds = {
        "csv": TEXTS.encode(),
        "jsonl": LINES.encode(),
        "safetensors": save(pictures()),
        "npz": _npz(**pictures()),
    }
    kind = place.rng.choice((*kinds, "png"))
    if kind == "png":
        folder = place.copy("pictures")
        mutated(place, folder / "cat" / "1.png", "bytes")
        return [place.evaluate(place.world.seed("a"), folder)]
    file = place.write(f"data.{kind}", kinds[kind])
    mutated(place, file, "tensors" if kind == "safetensors" else "bytes")
    return [place.evaluate(place.world.seed("reader" if kind in ("csv", "jsonl") else "a"), file)]


# ── faults on purpose ────────────────────────────────────────────────────────────────────────

WITNESS = "witness"
"""No format: faults made by the one file that may do anything, a table given as ``--architecture``."""
DEEDS = {
    "waits for ever": ("import time; time.sleep(1000)", "hangs"),
    "computes for ever": ("while True: pass", "hangs"),
    "ends the process": ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "the process ended: -7"),
    "runs a program": ("import os; os.system('true')", "code ran: os.system"),
    "makes the canary": ("open({canary!r}, 'w').close()", "code ran: the canary is there"),
    "reads outside": ("open({outside!r} + '/secret.txt').read()", "read outside"),
    "maps a file outside": (
        "import safetensors; safetensors.safe_open({outside!r} + '/model.safetensors', 'np')",
        "read outside: model.safetensors",
    ),
    "changes an input": ("open('table.py', 'a').write('#')", "changed or made where nothing may be written"),
    "writes beside the inputs": ("open('new', 'w').close()", "changed or made where nothing may be written"),
    "raises what is no exception": ("raise BaseException('panic')", "raised BaseException: panic"),
    "says that it was not expected": (
        "import sys; print('unexpected: KeyError', file=sys.stderr)",
        "an unexpected error",
    ),
    "leaves something behind": (
        "open({outputs!r} + '/x', 'w').close(); raise ValueError",
        "left behind after an error: x",
    ),
    "exits with another code": ("raise SystemExit(5)", "exit code 5"),
    "exits without a hint": ("raise SystemExit(1)", "an error without a hint"),
    "fails": ("raise SystemExit(2)", "refused, although nothing is wrong with it"),
    "takes all memory": ("bytearray(2**32)", "refused, although nothing is wrong with it"),
}


def made_witnesses() -> Iterator[Made]:
    def does(deed: str) -> Build:
        def build(place: Place) -> Sequence[Command]:
            where = {"canary": place.canary, "outside": place.outside, "outputs": place.outputs}
            table = place.write("table.py", deed.format(**{key: str(path) for key, path in where.items()}))
            return [place.transport(more=["--architecture", table], done=True)]

        return build

    for title, (deed, _) in DEEDS.items():
        yield Made(title, does(deed))


# ── all of them ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Format:
    """Cases made by hand, and how many random changes there are of what kind."""

    made: Callable[[], Iterator[Made]]
    mutant: Build = lambda place: []
    count: int = 0


FORMATS = {
    "safetensors": Format(made_weights, mutant_weights, 150),
    "index": Format(made_indexes, mutant_index, 60),
    "config": Format(made_configs, mutant_config, 150),
    "adapter": Format(made_adapters, mutant_adapter, 100),
    "lora": Format(made_loras, mutant_lora, 40),
    "pi": Format(made_pis, mutant_pi, 130),
    "alpha": Format(made_alphas, mutant_alpha, 50),
    "metadata": Format(made_records, mutant_record, 120),
    "result": Format(made_results, mutant_result, 150),
    "data": Format(made_data, mutant_data, 120),
}


@cache
def cases(format: str) -> list[Case]:
    """All cases of a format, by their numbers."""
    known = Format(made_witnesses) if format == WITNESS else FORMATS[format]
    made = [Case(format, number, *one) for number, one in enumerate(known.made())]
    return made + [Case(format, MUTANTS + n, "a random change", known.mutant) for n in range(known.count)]


def case(format: str, number: int) -> Case:
    """One case."""
    return next(one for one in cases(format) if one.number == number)
