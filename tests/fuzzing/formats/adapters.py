"""Adapters: their configuration, and the tensors in their file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, TWICE, Raw, changed_text, code, dumps, spoilt_tensors
from fuzzing.seeds import ADAPTER, WIDTH, adapter_tensors

COUNT = 90
CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
CATASTROPHES = (
    "(a*)*b",
    "(.*)*x",
    "(.*.*.*.*.*.*.*.*.*.*)!",
    "((a|a)*)*$",
    "(\\w+\\s?)*z",
    "((v|vi|vit|[a-z.])+)+Z",
    "(?:(?:[\\w.]+)+)+!",
)
MODULE = "base_model.model.vit.encoder.layer.0.attention.attention.query"
TASKS = (
    "SEQ_CLS",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "CAUSAL_LM",
    "SEQ_2_SEQ_LM",
    "FEATURE_EXTRACTION",
    "",
    "X",
    5,
    None,
    [],
    {},
    "[/b]",
)


def _names(place: Place) -> frozenset[str]:
    return frozenset(adapter_tensors())


def uses(place: Place, folder: Path, *, refused: bool = False, merged: bool = True) -> list[Command]:
    """An adapter that stays one, and one that becomes a model."""
    stays = place.transport(folder, tensors=_names(place), refused=refused)
    return [stays, *([place.transport(folder, more=["--merge"], refused=refused)] if merged else [])]


def _config(change: dict[str, Any], *, refused: bool = False, merged: bool = True) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("adapter")
        place.write(str(folder / CONFIG), dumps({**ADAPTER, **change}))
        return uses(place, folder, refused=refused, merged=merged)

    return build


def _task(task: Any) -> Build:
    """Whatever an adapter was trained for: merged into a model, it is one that loads."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("adapter")
        place.write(str(folder / CONFIG), dumps({**ADAPTER, "task_type": task}))
        return [*uses(place, folder, merged=False), place.transport(folder, more=["--merge"], loads=True)]

    return build


def _text(text: str | bytes) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("adapter")
        place.write(str(folder / CONFIG), text)
        return uses(place, folder, refused=True, merged=False)

    return build


def _tensors(change: Any, *, refused: bool = True) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("adapter")
        save_file(change(adapter_tensors()), folder / FILE, {"format": "pt"})
        return uses(place, folder, refused=refused)

    return build


def _code(key: str, number: int) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("adapter")
        text = code(place.canary)[number]
        value: Any = {"base_model_class": text, "parent_library": "os"} if key == "auto_mapping" else text
        place.write(str(folder / CONFIG), dumps({**ADAPTER, key: value}))
        return uses(place, folder)

    return build


def _linked(name: str, secret: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("adapter")
        (folder / name).unlink()
        (folder / name).symlink_to(place.outside / secret)
        return uses(place, folder, refused=True, merged=False)

    return build


def _odd(value: np.ndarray) -> Any:
    return lambda tensors: {**tensors, f"{MODULE}.lora_A.weight": value}


def made() -> Iterator[Made]:
    yield Made(
        "nothing is wrong", lambda place: [replace(one, done=True) for one in _config({})(place)], True
    )
    numbers = (
        0,
        -1,
        "x",
        "4",
        None,
        True,
        [],
        {},
        Raw("NaN"),
        Raw("Infinity"),
        Raw("-Infinity"),
        10**9,
        1e308,
        LONG,
        3.5,
    )
    for value in numbers:
        senseless = isinstance(value, Raw | str | list | dict | bool)
        info = str(getattr(value, "text", value))[:20]
        yield Made(
            f"lora_alpha = {info}",
            _config({"lora_alpha": value}, refused=senseless),
            info in ("NaN", "x", "Infinity"),
        )
        yield Made(f"r = {info}", _config({"r": value}, refused=value is not None))
    for value in (
        5,
        None,
        True,
        {},
        [5],
        [None],
        [[]],
        "x",
        "",
        DEEP,
        [""],
        ["nothing"],
        "(.*)*x",
        ["query", "query"],
        Raw("NaN"),
    ):
        info = str(getattr(value, "text", value))[:20]
        senseless = value in (5, True, {}, [5], [None], [[]]) or isinstance(value, Raw)
        yield Made(
            f"target_modules = {info}", _config({"target_modules": value}, refused=senseless), value == 5
        )
    for pattern in CATASTROPHES:
        for key in ("rank_pattern", "alpha_pattern"):
            yield Made(
                f"{key} = {pattern}", _config({key: {pattern: 2}}, merged=False), pattern in CATASTROPHES[1:3]
            )
        yield Made(f"target_modules = {pattern}", _config({"target_modules": pattern}, merged=False))
        yield Made(f"exclude_modules = {pattern}", _config({"exclude_modules": pattern}, merged=False))
        yield Made(
            f"layers_pattern = {pattern}",
            _config({"layers_pattern": pattern, "layers_to_transform": [0]}, merged=False),
        )
    yield Made(
        "a pattern of 10,000 letters", _config({"rank_pattern": {"(" * 3000 + ")" * 3000: 2}}, merged=False)
    )
    yield Made(
        "10,000 patterns", _config({"rank_pattern": {f"x{n}(a*)*": 2 for n in range(10_000)}}, merged=False)
    )
    for key in ("rank_pattern", "alpha_pattern"):
        for value in (
            5,
            [],
            "x",
            {"(": 2},
            {"query": "x"},
            {"query": None},
            {"query": []},
            {"query": Raw("NaN")},
            {"query": 0},
            {"query": -1},
            {"query": Raw("Infinity")},
            {"query": LONG},
            {"": 2},
            DEEP,
            TWICE,
            {"query": 5},
        ):
            yield Made(
                f"{key} = {str(value)[:30]}",
                _config({key: value}, merged=False),
                value == {"query": Raw("NaN")},
            )
    for task in TASKS:
        yield Made(f"task_type = {task!r}", _task(task), task in ("SEQ_CLS", "TOKEN_CLS"))
    for kind in (
        "LOHA",
        "IA3",
        "ADALORA",
        "VERA",
        "PROMPT_TUNING",
        "x",
        None,
        5,
        [],
        "",
        "lora",
        "[/b]",
        DEEP,
    ):
        yield Made(
            f"peft_type = {str(kind)[:20]}",
            _config({"peft_type": kind}, refused=kind != "lora", merged=False),
        )
    keys = (
        "bias",
        "modules_to_save",
        "fan_in_fan_out",
        "use_rslora",
        "use_dora",
        "init_lora_weights",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "layers_to_transform",
        "layers_pattern",
        "unknown",
        "exclude_modules",
        "trainable_token_indices",
        "megatron_config",
        "layer_replication",
        "lora_bias",
        "eva_config",
    )
    for key in keys:
        for value in (5, "x", [5], {"a": [1]}, Raw("NaN"), DEEP):
            yield Made(
                f"{key} = {str(getattr(value, 'text', value))[:20]}", _config({key: value}, merged=False)
            )
    for text in (
        "",
        "{",
        "[]",
        "null",
        DEEP.text,
        LONG.text,
        '{"peft_type": "LORA", "peft_type": "IA3"}',
        b"\xff\xfe",
        "{}",
    ):
        yield Made(f"the configuration is {text[:20]!r}", _text(text), text == DEEP.text)
    for key in (
        "auto_mapping",
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "target_modules",
        "revision",
    ):
        for number in (0, 1, 4):
            yield Made(f"code {number} in {key}", _code(key, number))
    single = np.ones((2, WIDTH), np.float32)
    yield Made("NaN in a factor", _tensors(_odd(single * np.float32("nan"))), True)
    yield Made("infinite values in a factor", _tensors(_odd(single * np.float32("inf"))))
    yield Made("a factor of another rank", _tensors(_odd(np.ones((3, WIDTH), np.float32))))
    yield Made("a factor of another size", _tensors(_odd(np.ones((2, WIDTH + 1), np.float32))))
    yield Made("a factor of rank 0", _tensors(_odd(np.ones((0, WIDTH), np.float32))))
    yield Made("a factor that is a scalar", _tensors(_odd(np.ones((), np.float32))))
    yield Made("a factor of whole numbers", _tensors(_odd(np.ones((2, WIDTH), np.int32)), refused=False))
    yield Made(
        "a factor without its partner",
        _tensors(lambda t: {k: v for k, v in t.items() if k != f"{MODULE}.lora_A.weight"}),
    )
    strays = (
        "x",
        "",
        "base_model.model.x.lora_A.weight",
        f"{MODULE}.lora_C.weight",
        f"{MODULE}.lora_A.other.weight",
        "lora_A",
        "a" * 5000 + ".lora_A.weight",
        f"{MODULE}.lora_A.bias",
        "base_model.model.classifier.weight",
        "[/b].lora_A.weight",
    )
    for name in strays:
        yield Made(f"a tensor {name[:50]!r} more", _tensors(lambda t, n=name: {**t, n: single}), name == "x")
    yield Made("no tensors", _tensors(lambda t: {}))
    yield Made(
        "tensors of a huge layer",
        _tensors(lambda t: {k.replace("layer.0", "layer.999999999"): v for k, v in t.items()}),
    )
    for name, secret in ((CONFIG, "secret.json"), (FILE, "model.safetensors")):
        yield Made(f"{name} is a link to outside", _linked(name, secret), True)


def mutant(place: Place) -> Sequence[Command]:
    folder = place.copy("adapter")
    if place.rng.random() < 0.3:
        spoilt, what = spoilt_tensors((folder / FILE).read_bytes(), place.rng, place.canary)
        (folder / FILE).write_bytes(spoilt)
    else:
        text, what = changed_text(json.dumps(ADAPTER), place.rng, place.canary)
        place.write(str(folder / CONFIG), text)
    place.note(what)
    return uses(place, folder, merged=place.rng.random() < 0.5)
