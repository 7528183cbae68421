"""Calibration: inputs that the user gives, read from images, texts or tensors; labels are never read."""

from __future__ import annotations

import csv
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from transfusion.dataset import LABELS, Dataset, read_tensors
from transfusion.errors import DataError, listing
from transfusion.live import in_dtype, library
from transfusion.probing.images import image_inputs, normalised, size
from transfusion.probing.subject import Subject, seeded
from transfusion.probing.texts import text_inputs, windows
from transfusion.probing.tokenizers import tokenizer_of

PICTURES = frozenset([".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"])
TEXTS = (".txt", ".jsonl", ".csv")
TENSORS = (".safetensors", ".npz")
FEWEST = 8
"""Fewer examples than this tell nothing about the units of a model."""
_HOW = "give a folder of images, a .txt, .jsonl or .csv of texts, or a .safetensors or .npz of inputs"


def calibrated(path: Path, subject: Subject, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    """At most so many of the user's inputs, in float32, and what they are."""
    if path.is_dir():
        return _pictures(path, subject, count, seed)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder", hint=_HOW)
    if path.suffix in TEXTS:
        return _texts(path, subject, count, seed)
    if path.suffix in TENSORS:
        return _tensors(path, subject, count, seed)
    raise DataError(f"{path}: not a kind of file that can be shown to models", hint=_HOW)


def _require_enough(path: Path, found: int, what: str) -> None:
    if found < FEWEST:
        raise DataError(
            f"{path}: {found} {what}, and {FEWEST} are the least",
            hint="give some hundreds, as varied as what the models are for",
        )


def _some(found: int, count: int, seed: int) -> list[int]:
    """Which of them are taken, in order."""
    chosen: list[int] = torch.randperm(found, generator=seeded(seed, 7))[:count].sort().values.tolist()
    return chosen


def _refuse(path: Path, subject: Subject, what: str) -> NoReturn:
    raise DataError(
        f"{path}: {what}, and {subject.name} reads {listing(subject.model.family.inputs)}",
        hint="give what the model reads",
    )


# ── images ───────────────────────────────────────────────────────────────────────────────────


def _pictures(path: Path, subject: Subject, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    if not subject.takes("image") and not subject.takes("patches"):
        _refuse(path, subject, "a folder of images")
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURES)
    if not found:
        raise DataError(f"{path}: no images in this folder", hint=f"looked for {listing(sorted(PICTURES))}")
    _require_enough(path, len(found), "image(s)")
    frame = size(subject)
    pixels = torch.stack([_picture(found[number], frame) for number in _some(len(found), count, seed)])
    return image_inputs(subject, normalised(subject, pixels)), f"{len(pixels)} images of {path}"


def _picture(file: Path, frame: tuple[int, int, int]) -> Tensor:
    """One image with values between 0 and 1: made so small that it just fills the frame, and cropped."""
    channels, rows, columns = frame
    if channels not in (1, 3):
        raise DataError(
            f"{file}: an image, and the model sees {channels} channels",
            hint="give a .safetensors or .npz with pixel_values",
        )
    pillow, operations = (library(f"PIL.{name}", "images") for name in ("Image", "ImageOps"))
    try:
        with pillow.open(file) as opened:
            image = opened.convert("RGB" if channels == 3 else "L")
    except (OSError, ValueError, SyntaxError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: cannot be read as an image ({reason})", hint="remove or mend it") from error
    fitted = operations.fit(image, (columns, rows), method=pillow.Resampling.BICUBIC)
    values = torch.from_numpy(np.array(fitted, dtype=np.float32) / 255)
    return values.reshape(rows, columns, channels).movedim(-1, 0)


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def _texts(path: Path, subject: Subject, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    if not subject.takes("tokens") and not subject.takes("spectrogram"):
        _refuse(path, subject, "a file of texts")
    lines = [line for line in _lines(path) if line.strip()]
    if not lines:
        raise DataError(f"{path}: there is no text in it", hint="one text a line")
    tokenizer, reason = tokenizer_of(subject)
    if tokenizer is None:
        raise DataError(
            f"{path}: texts cannot be given to {subject.model.label}: {reason}",
            hint="put the model's tokenizer into its folder, or give a .safetensors with input_ids",
        )
    try:
        ids = windows([lines], tokenizer, subject, max(count, FEWEST), seed)
    except ValueError as error:
        raise DataError(f"{path}: {error}", hint="give more text of the kind that it reads") from error
    _require_enough(path, len(ids), f"windows of {subject.length} tokens")
    ids = ids[:count]
    return text_inputs(subject, ids), f"{len(ids)} windows of {path}"


def _lines(path: Path) -> Iterator[str]:
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})", hint="save it as UTF-8") from error
    if path.suffix == ".txt":
        yield from whole.splitlines()
    elif path.suffix == ".jsonl":
        for number, line in enumerate(whole.splitlines(), 1):
            if line.strip():
                yield _of_json(path, number, line)
    else:
        yield from _of_table(path, list(csv.reader(whole.splitlines(keepends=True))))


def _of_json(path: Path, number: int, line: str) -> str:
    """The text of a line: itself, its field "text", or its only field that is a text."""
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}: line {number} is not JSON ({error})", hint="one object a line") from error
    if isinstance(found, str):
        return found
    fields = found if isinstance(found, dict) else {}
    written = [key for key, value in fields.items() if isinstance(value, str)]
    chosen = "text" if "text" in written else written[0] if len(written) == 1 else None
    if chosen is None:
        told = f"several texts ({listing(written)})" if written else "no text"
        raise DataError(f'{path}: line {number} has {told}, and no "text"', hint='name the field "text"')
    return str(fields[chosen])


def _of_table(path: Path, rows: list[list[str]]) -> Iterator[str]:
    """The column "text", or the only one."""
    head = rows[0] if rows else []
    if "text" in head:
        place, rows = head.index("text"), rows[1:]
    elif len(head) == 1:
        place = 0
    elif head:
        raise DataError(f'{path}: no column "text" among {listing(head)}', hint='name the column "text"')
    yield from (row[place] for row in rows if len(row) > place)


# ── tensors ──────────────────────────────────────────────────────────────────────────────────


def _tensors(path: Path, subject: Subject, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    tensors = read_tensors(path)
    tensors.pop(LABELS, None)
    template = subject.template()
    needs = next(iter(template))
    takes = set(template)
    if subject.model.family.library == "transformers":
        takes = set(inspect.signature(subject.module.forward).parameters)
    if len(tensors) == 1 and len(template) == 1 and not takes & tensors.keys():
        tensors = {needs: tensors.popitem()[1]}
    data = Dataset.of(str(path), tensors, None)
    data.require_for(
        subject.name,
        takes=takes,
        needs=needs,
        image=tuple(template["pixel_values"].shape[1:]) if subject.takes("image") else None,
        vocabulary=subject.vocabulary,
    )
    _require_shapes(data, subject, template)
    _require_enough(path, len(data), "example(s)")
    chosen = _some(len(data), count, seed)
    inputs = {name: tensor[chosen] for name, tensor in data.inputs.items()}
    whole = {name: one.long() if name.endswith("input_ids") else one for name, one in inputs.items()}
    if "input_ids" in whole:
        whole = {**text_inputs(subject, whole["input_ids"]), **whole}
    return in_dtype(whole, torch.float32), f"{len(chosen)} examples of {path}"


def _require_shapes(data: Dataset, subject: Subject, template: dict[str, Tensor]) -> None:
    """Refuse inputs with other dimensions, or other sizes where only one will do."""
    fixed = ("input_features",) if subject.takes("spectrogram") else ()
    for name, tensor in data.inputs.items():
        wanted = template.get(name)
        if wanted is None:
            continue
        same = tensor.shape[1:] == wanted.shape[1:] if name in fixed else tensor.ndim == wanted.ndim
        if not same:
            raise DataError(
                f"{data.label}: {name} has shape {tuple(tensor.shape)}, and {subject.name} wants"
                f" {('examples', *wanted.shape[1:])}".replace("'", ""),
                hint="store it as the model's own library prepares it",
            )
