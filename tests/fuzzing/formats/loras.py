"""LoRA files in kohya's format: the names of their tensors, the tensors, and the header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, LONG, code, spoilt_tensors
from fuzzing.seeds import WIDTH, drawn

COUNT = 40
MODULE = "lora_te_encoder_layer_{}_attention_attention_query"
"""The ViT of all cases takes the place of a text encoder."""
HEADER = {"ss_base_model_version": "sd_v1", "ss_tag_frequency": '{"a": {"cat": 1}}', "sshs_model_hash": "0"}


def lora_tensors() -> dict[str, np.ndarray]:
    """A LoRA on two modules."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in (MODULE.format(0), MODULE.format(1)):
        shapes |= {f"{module}.lora_down.weight": (2, WIDTH), f"{module}.lora_up.weight": (WIDTH, 2)}
        shapes |= {f"{module}.alpha": ()}
    return {name: np.abs(one) for name, one in drawn(shapes, 7).items()}


def _file(place: Place, tensors: dict[str, np.ndarray], header: dict[str, str]) -> Path:
    path = place.write("lora.safetensors", b"")
    save_file({name: np.asarray(one) for name, one in tensors.items()}, path, header)
    return path


def uses(place: Place, file: Path, names: frozenset[str], *, refused: bool = False) -> list[Command]:
    return [
        place.inspect(file),
        place.transport(file, tensors=names, refused=refused),
        place.transport(file, more=["--merge"], refused=refused),
    ]


def _tensors(change: Any, *, refused: bool = True) -> Build:
    def build(place: Place) -> Sequence[Command]:
        tensors = change(lora_tensors())
        return uses(place, _file(place, tensors, HEADER), frozenset(tensors), refused=refused)

    return build


def _header(key: str, text: str, *, refused: bool = False) -> Build:
    def build(place: Place) -> Sequence[Command]:
        file = _file(place, lora_tensors(), {**HEADER, key: text})
        return uses(place, file, frozenset(lora_tensors()), refused=refused)

    return build


def _code(key: str, number: int) -> Build:
    def build(place: Place) -> Sequence[Command]:
        file = _file(place, lora_tensors(), {**HEADER, key: code(place.canary)[number]})
        return uses(place, file, frozenset(lora_tensors()))

    return build


def _more(name: str, value: np.ndarray | None = None) -> Any:
    return lambda tensors: {**tensors, name: np.ones((2, WIDTH), np.float32) if value is None else value}


def made() -> Iterator[Made]:
    yield Made(
        "nothing is wrong",
        lambda place: [replace(one, done=True) for one in _header("x", "y")(place)],
        True,
    )
    first = MODULE.format(0)
    up = f"{first}.lora_up.weight"
    for what, value in {
        "NaN": np.full((WIDTH, 2), np.nan, np.float32),
        "another rank": np.ones((WIDTH, 3), np.float32),
        "another size": np.ones((WIDTH + 1, 2), np.float32),
        "no rank": np.ones((WIDTH, 0), np.float32),
        "a scalar": np.ones((), np.float32),
        "whole numbers": np.ones((WIDTH, 2), np.int32),
        "five dimensions": np.ones((WIDTH, 2, 1, 1, 1), np.float32),
    }.items():
        refused = what != "five dimensions"
        yield Made(f"a factor with {what}", _tensors(_more(up, value), refused=refused), what == "no rank")
    for value in (np.full((), np.inf), np.ones(2), np.ones((1, 1)), np.zeros(0)):
        wrong = _more(f"{first}.alpha", value.astype(np.float32))
        yield Made(f"an alpha of shape {value.shape}, {value.flat[:1]}", _tensors(wrong))
    yield Made("no second factor", _tensors(lambda t: {k: v for k, v in t.items() if k != up}))
    strays = (
        "x",
        "",
        "lora_te_x.lora_up.weight",
        f"{first}.lora_mid.weight",
        f"{first}.lokr_w1",
        f"{first}.oft_blocks",
        f"{first}.lora_A.weight",
        "lora_unet_x.lora_up.weight",
        f"{MODULE.format(10**9)}.lora_up.weight",
        "a" * 5000 + ".lora_up.weight",
        "_" * 5000 + ".lora_up.weight",
        "lora_te_[/b].lora_up.weight",
        "lora_te_\x1b[2J.alpha",
        ".lora_up.weight",
    )
    for name in strays:
        yield Made(f"a tensor {name[:50]!r} more", _tensors(_more(name)), name in ("x", ""))
    for key in ("ss_tag_frequency", "transfusion.json", "lora_adapter_metadata", "ss_base_model_version"):
        for text in (
            "",
            "{",
            "[]",
            "5",
            '{"a": 5}',
            '{"a": {"b": []}}',
            DEEP.text,
            LONG.text,
            "\x1b[2J",
            "[/b]",
        ):
            yield Made(f"{key} = {text[:20]!r}", _header(key, text), text in ("[]", DEEP.text))
        yield Made(f"code in {key}", _code(key, 0))


def mutant(place: Place) -> Sequence[Command]:
    file = _file(place, lora_tensors(), HEADER)
    spoilt, what = spoilt_tensors(file.read_bytes(), place.rng, place.canary)
    file.write_bytes(spoilt)
    place.note(what)
    return [place.inspect(file), replace(place.transport(file), tensors=None)]
