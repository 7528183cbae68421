"""Paired probes: the same images or texts for two models, and the places that correspond."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transfusion.data.tables import TABLES, read_texts
from transfusion.errors import DataError, MismatchError
from transfusion.running.probes.calibration import read_calibration
from transfusion.running.probes.input_translation import (
    IMAGES,
    TEXTS,
    RenamedTexts,
    ResizedImages,
    other_kind,
    require_same_channels,
    require_same_size,
    resized,
)
from transfusion.running.probes.places import EveryPlace, GridPlaces, Places, TokenPlaces
from transfusion.running.probes.probed_model import ProbedModel, batched
from transfusion.running.probes.synthetic_images import (
    generated_images,
    image_inputs,
    normalised,
    patch_grid,
    size,
)
from transfusion.running.probes.synthetic_texts import corpus, synthetic_texts, text_inputs
from transfusion.running.probes.text_encoders import TextEncoder, text_encoder

Inputs = dict[str, Tensor]
BATCHES = 10
"""The number of batches, of which some are held out."""
PIECE = 240
"""The characters of a text."""
LEAST = 8
"""The fewest tokens of a text."""


@dataclass(frozen=True)
class ModelProbes:
    """Batches of inputs for one model, with the places that the other model has too."""

    batches: list[Inputs]
    places: list[Places]


@dataclass(frozen=True)
class PairedProbes:
    """The same inputs for two models."""

    of_a: ModelProbes
    of_b: ModelProbes
    about: str


def paired_probes(
    a: ProbedModel, b: ProbedModel, count: int, seed: int, calibrate: Path | None = None
) -> PairedProbes:
    """Generate inputs for two models that may take images of other sizes, or texts in other tokens.

    ``calibrate`` names the user's own inputs.
    """
    kinds = [one.model.family.inputs for one in (a, b)]
    if all(one in IMAGES for one in kinds):
        return _images(a, b, count, seed, calibrate)
    if all(one in TEXTS for one in kinds):
        return _texts(a, b, count, seed, calibrate)
    raise other_kind(a, b)


def _divided(inputs: Inputs) -> list[Inputs]:
    count = len(next(iter(inputs.values())))
    return list(batched(inputs, max(1, count // BATCHES)))


# ── images ───────────────────────────────────────────────────────────────────────────────────


def _images(a: ProbedModel, b: ProbedModel, count: int, seed: int, calibrate: Path | None) -> PairedProbes:
    require_same_channels(a, b)
    if calibrate is not None:
        of_a, about = read_calibration(calibrate, a, count, seed)
        given = of_a, ResizedImages(a, b)(of_a)
    else:
        frames = [size(one) for one in (a, b)]
        channels, rows, columns = (max(extents) for extents in zip(*frames, strict=True))
        images = generated_images((channels, rows, columns), count, seed)
        of_a, of_b = (
            image_inputs(subject, normalised(subject, resized(images, frame)))
            for subject, frame in zip((a, b), frames, strict=True)
        )
        given, about = (of_a, of_b), f"{count} images of overlapping shapes and of smooth noise"
    grids = [_patches(one) for one in (a, b)]
    cells = (min(grid[0] for grid in grids), min(grid[1] for grid in grids))
    class_token = all(_has_class_token(one) for one in (a, b))
    made: list[ModelProbes] = []
    for inputs, grid in zip(given, grids, strict=True):
        batches = _divided(inputs)
        made.append(ModelProbes(batches, [GridPlaces(grid, cells, class_token)] * len(batches)))
    return PairedProbes(made[0], made[1], about)


def _patches(subject: ProbedModel) -> tuple[int, int]:
    """Return the rows and columns of patches that a model divides its images into."""
    found = patch_grid(subject)
    if found is None:
        raise MismatchError(
            f"{subject.model.label}: it is not known how the model divides its images",
            hint="choose a base of the same shape",
        )
    return found


def _has_class_token(subject: ProbedModel) -> bool:
    names = subject.model.architecture.tensors
    return any(name.rpartition(".")[2] in ("cls_token", "class_embedding") for name in names)


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def _texts(a: ProbedModel, b: ProbedModel, count: int, seed: int, calibrate: Path | None) -> PairedProbes:
    first, second = text_encoder(a), text_encoder(b)
    if first is None or second is None or first.same_tokens(second):
        return _same_tokens(a, b, count, seed, calibrate)
    if calibrate is None:
        texts, about = _pieces(corpus().values(), count, seed), "passages of the bundled corpus"
    else:
        texts, about = _pieces([_own_texts(calibrate)], count, seed), f"passages of {calibrate}"
    made = _aligned(texts, (first, second), (a.length, b.length))
    return PairedProbes(
        _batched(a, *made[0]),
        _batched(b, *made[1]),
        f"{len(made[0][0])} {about}, in the tokens of both models",
    )


def _own_texts(path: Path) -> list[str]:
    if path.suffix not in TABLES:
        raise DataError(
            f"{path}: A and B have different tokenizers, and these inputs are no texts",
            hint="give a .txt, .jsonl, .csv or .parquet of texts, which are tokenized for both",
        )
    return [line for line in read_texts(path) if line.strip()]


def _same_tokens(
    a: ProbedModel, b: ProbedModel, count: int, seed: int, calibrate: Path | None
) -> PairedProbes:
    require_same_size(a, b)
    shorter, longer = (a, b) if a.unknown or a.length <= b.length else (b, a)
    if calibrate is None:
        inputs, about = synthetic_texts(shorter, count, seed)
    else:
        inputs, about = read_calibration(calibrate, shorter, count, seed)
    given = {id(shorter): inputs, id(longer): RenamedTexts(longer)(inputs)}
    made = []
    for subject in (a, b):
        batches = _divided(given[id(subject)])
        made.append(ModelProbes(batches, [EveryPlace()] * len(batches)))
    return PairedProbes(made[0], made[1], about)


def _pieces(groups: Iterable[Sequence[str]], count: int, seed: int) -> list[str]:
    """Cut texts into pieces of about one length, at spaces; the texts of a group are joined."""
    found: list[str] = []
    for passages in groups:
        whole = " ".join(" ".join(passage.split()) for passage in passages)
        start = 0
        while start + PIECE < len(whole):
            stop = whole.rfind(" ", start, start + PIECE)
            stop = stop if stop > start else start + PIECE
            found.append(whole[start:stop].strip())
            start = stop + 1
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1000 * seed + 6)).tolist()
    return [found[number] for number in order[:count]]


Encoded = tuple[list[list[int]], list[tuple[int, ...]]]
"""The tokens of every text, all of one length, and the chosen places."""


def _aligned(
    texts: Sequence[str], encoders: tuple[TextEncoder, TextEncoder], lengths: tuple[int, int]
) -> tuple[Encoded, Encoded]:
    """Encode texts by both tokenizers, and choose the last token of each boundary that both have."""
    both = [tuple(encoder.encode(text) for encoder in encoders) for text in texts]
    rooms = [
        min([length - sum(map(len, encoder.frame)), *(len(pair[side][0]) for pair in both)])
        for side, (encoder, length) in enumerate(zip(encoders, lengths, strict=True))
    ]
    made: tuple[Encoded, Encoded] = (([], []), ([], []))
    if not both or min(rooms) < LEAST:
        raise DataError(
            "the texts are too few or too short for a comparison", hint="give some hundred sentences"
        )
    class_token = all(encoder.frame[0] for encoder in encoders)
    for pair in both:
        ends = [
            {end: place for place, end in enumerate(one[1][:room]) if end}
            for one, room in zip(pair, rooms, strict=True)
        ]
        common = sorted(ends[0].keys() & ends[1].keys())
        for side, encoder in enumerate(encoders):
            ids, chosen = made[side]
            before, after = encoder.frame
            ids.append([*before, *pair[side][0][: rooms[side]], *after])
            places = [len(before) + ends[side][end] for end in common]
            chosen.append((*([0] if class_token else []), *places))
    return made


def _batched(subject: ProbedModel, ids: list[list[int]], chosen: list[tuple[int, ...]]) -> ModelProbes:
    batches = _divided(text_inputs(subject, torch.tensor(ids)))
    places: list[Places] = []
    start = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        places.append(TokenPlaces(tuple(chosen[start : start + count])))
        start += count
    return ModelProbes(batches, places)
