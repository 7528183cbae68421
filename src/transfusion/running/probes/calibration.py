"""Calibration data: the user's images, texts or tensors. Labels are never read."""

from __future__ import annotations

import inspect
from os.path import isdir, isfile
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from transfusion.data.dataset import LABELS, Dataset, read_tensors
from transfusion.data.examples import IMAGE_SUFFIXES, ImageFile, find_images
from transfusion.data.tables import TABLES, read_texts
from transfusion.errors import DataError, listing
from transfusion.running.probes.images import fitted, image_inputs, normalised, size
from transfusion.running.probes.inputs import in_dtype
from transfusion.running.probes.probed_model import ProbedModel, seeded_generator
from transfusion.running.probes.texts import text_inputs, tokenizer_of, windows

TENSORS = (".safetensors", ".npz")
FEWEST = 8
"""The fewest examples from which units can be compared."""
LARGEST = 1e15
"""Numbers beyond this are refused, in inputs and in activations: their products do not fit into float32."""
_HOW = "give a folder of images, a .txt, .jsonl, .csv or .parquet of texts, or a file of tensors"


def read_calibration(
    path: Path, subject: ProbedModel, count: int, seed: int
) -> tuple[dict[str, Tensor], str]:
    """Read at most ``count`` inputs in float32, and describe them."""
    if isdir(path):
        return _images(path, subject, count, seed)
    if not isfile(path):
        raise DataError(f"{path}: no such file or folder", hint=_HOW)
    if path.suffix in TABLES:
        return _texts(path, subject, count, seed)
    if path.suffix in TENSORS:
        return _tensors(path, subject, count, seed)
    raise DataError(f"{path}: not a kind of file that can be calibration data", hint=_HOW)


def _require_enough(path: Path, found: int, what: str) -> None:
    if found < FEWEST:
        raise DataError(
            f"{path}: {found} {what}, and {FEWEST} are the least",
            hint="give some hundreds, as varied as what the models are for",
        )


def _some(found: int, count: int, seed: int) -> list[int]:
    """Return the indices of a random choice, in order."""
    return sorted(torch.randperm(found, generator=seeded_generator(seed, 7))[:count].tolist())


def _refuse(path: Path, subject: ProbedModel, what: str) -> NoReturn:
    raise DataError(
        f"{path}: {what}, and {subject.name} reads {listing(subject.model.family.inputs)}",
        hint="give inputs of a kind that the model reads",
    )


# ── images ───────────────────────────────────────────────────────────────────────────────────


def _images(path: Path, subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    if not subject.takes("image") and not subject.takes("patches"):
        _refuse(path, subject, "a folder of images")
    found = find_images(path)
    if not found:
        raise DataError(
            f"{path}: no images in this folder", hint=f"looked for {listing(sorted(IMAGE_SUFFIXES))}"
        )
    _require_enough(path, len(found), "image(s)")
    frame = size(subject)
    colours = {1: "L", 3: "RGB"}.get(frame[0])
    if colours is None:
        raise DataError(
            f"{path}: images, and the model takes {frame[0]} channels",
            hint="give a .safetensors or .npz with pixel_values",
        )
    chosen = [ImageFile.at(found[number]) for number in _some(len(found), count, seed)]
    pixels = torch.stack([fitted(one.opened(colours), frame) for one in chosen])
    return image_inputs(subject, normalised(subject, pixels)), f"{len(pixels)} images of {path}"


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def _texts(path: Path, subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    if not subject.takes("tokens") and not subject.takes("spectrogram"):
        _refuse(path, subject, "a file of texts")
    texts = [line for line in read_texts(path) if line.strip()]
    if not texts:
        raise DataError(f"{path}: there is no text in it", hint="one text a line")
    tokenizer, reason = tokenizer_of(subject)
    if tokenizer is None:
        raise DataError(
            f"{path}: texts cannot be given to {subject.model.label}: {reason}",
            hint="put the model's tokenizer into its folder, or give a .safetensors with input_ids",
        )
    try:
        ids = windows([texts], tokenizer, subject, max(count, FEWEST), seed)
    except ValueError as error:
        raise DataError(f"{path}: {error}", hint="give more text of the kind that it reads") from error
    _require_enough(path, len(ids), f"windows of {subject.length} tokens")
    ids = ids[:count]
    return text_inputs(subject, ids), f"{len(ids)} windows of {path}"


# ── tensors ──────────────────────────────────────────────────────────────────────────────────


def _tensors(path: Path, subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    tensors = read_tensors(path)
    tensors.pop(LABELS, None)
    if subject.model.vocabulary is not None and any(name.endswith("input_ids") for name in tensors):
        raise DataError(
            f"{path}: token ids, which mean different tokens in A and B",
            hint="give a file of texts, which are tokenized for both",
        )
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
    _require_fitting(data, subject, template)
    _require_enough(path, len(data), "example(s)")
    chosen = _some(len(data), count, seed)
    inputs = {name: tensor[chosen] for name, tensor in data.inputs.items()}
    whole = {name: one.long() if name.endswith("input_ids") else one for name, one in inputs.items()}
    if "input_ids" in whole:
        whole = {**text_inputs(subject, whole["input_ids"]), **whole}
    return in_dtype(whole, torch.float32), f"{len(chosen)} examples of {path}"


def _require_fitting(data: Dataset, subject: ProbedModel, template: dict[str, Tensor]) -> None:
    """Refuse inputs with another number of dimensions, with another size where the size is fixed, and with
    numbers that are too large.
    """
    fixed = ("input_features",) if subject.takes("spectrogram") else ()
    for name, tensor in data.inputs.items():
        wanted = template.get(name)
        if wanted is None:
            continue
        if tensor.is_floating_point() and (tensor.abs() > LARGEST).any():
            raise DataError(
                f"{data.label}: {name} has numbers beyond {LARGEST:g}, too large for a model to compute with",
                hint="store it as the model's own library prepares it",
            )
        same = tensor.shape[1:] == wanted.shape[1:] if name in fixed else tensor.ndim == wanted.ndim
        if not same:
            raise DataError(
                f"{data.label}: {name} has shape {tuple(tensor.shape)}, and {subject.name} wants"
                f" {('examples', *wanted.shape[1:])}".replace("'", ""),
                hint="store it as the model's own library prepares it",
            )
