"""The same inputs for a model of another shape: images in its size, texts in its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

import torch
from torch import Tensor, nn

from transfusion.data.tables import TABLES, read_texts
from transfusion.errors import DataError, MismatchError
from transfusion.running.probes.audio import FRAMES
from transfusion.running.probes.calibration import read_calibration
from transfusion.running.probes.images import (
    CONTRAST,
    GREY,
    generated_images,
    image_inputs,
    normalisation,
    normalised,
    patch_grid,
    size,
)
from transfusion.running.probes.probed_model import BATCH, ProbedModel, batched
from transfusion.running.probes.texts import TextEncoder, corpus, synthetic_texts, text_encoder, text_inputs

Inputs = dict[str, Tensor]
IMAGES, TEXTS = (("image",), ("patches",)), (("tokens",),)
"""The kinds of inputs of models that can be compared across shapes."""
_MASK = "attention_mask"


class InputTranslation(ABC):
    """Rewrites inputs of one model as inputs of another one."""

    @abstractmethod
    def __call__(self, inputs: Inputs) -> Inputs:
        """Return the same images or texts for the other model."""

    same_places: bool = False
    """Whether both models divide an input into the same tokens."""


class SameInputs(InputTranslation):
    """Both models take the same inputs."""

    same_places = True

    def __call__(self, inputs: Inputs) -> Inputs:
        return inputs


@dataclass(frozen=True)
class ResizedImages(InputTranslation):
    """Images in the size and the normalisation of the other model; gradients pass through."""

    source: ProbedModel
    target: ProbedModel

    def __call__(self, inputs: Inputs) -> Inputs:
        mean, deviation = self._normalisation
        pixels = inputs["pixel_values"] * deviation + mean
        return image_inputs(self.target, normalised(self.target, resized(pixels, self._frame)))

    @cached_property
    def _frame(self) -> tuple[int, int, int]:
        return size(self.target)

    @cached_property
    def _normalisation(self) -> tuple[Tensor, Tensor]:
        channels = size(self.source)[0]
        found = normalisation(self.source) or ([GREY] * channels, [CONTRAST] * channels)
        mean, deviation = (torch.tensor(one).reshape(1, channels, 1, 1) for one in found)
        return mean, deviation


@dataclass(frozen=True)
class RenamedTexts(InputTranslation):
    """The same tokens under the names that the other model's library has for them."""

    target: ProbedModel
    same_places = True

    def __call__(self, inputs: Inputs) -> Inputs:
        made = text_inputs(self.target, inputs["input_ids"])
        return {**made, _MASK: inputs[_MASK]} if _MASK in inputs else made


@dataclass(frozen=True)
class RetokenizedTexts(InputTranslation):
    """The same texts in the tokens of the other model."""

    source: TextEncoder
    target: TextEncoder
    model: ProbedModel

    def __call__(self, inputs: Inputs) -> Inputs:
        made = self.target.padded(self.source.decode(inputs["input_ids"]), self.model.positions)
        return {**text_inputs(self.model, made["input_ids"]), _MASK: made[_MASK]}


def input_translation(source: ProbedModel, target: ProbedModel) -> InputTranslation:
    """Return how inputs of one model become those of another one; refuse models of other kinds of inputs."""
    kinds = [one.model.family.inputs for one in (source, target)]
    if all(one in IMAGES for one in kinds) and source.takes("image"):
        require_same_channels(source, target)
        return ResizedImages(source, target)
    if all(one in TEXTS for one in kinds):
        encoders = text_encoder(source), text_encoder(target)
        if encoders[0] is None or encoders[1] is None or encoders[0].same_tokens(encoders[1]):
            require_same_size(source, target)
            return RenamedTexts(target)
        return RetokenizedTexts(encoders[0], encoders[1], target)
    raise other_kind(source, target)


def other_kind(source: ProbedModel, target: ProbedModel) -> MismatchError:
    """Return the error for two models that do not read the same kind of inputs."""
    words = [" and ".join(one.model.family.inputs) for one in (source, target)]
    return MismatchError(
        f"{source.model.label} reads {words[0]}, and {target.model.label} {words[1]}: models of different"
        " shapes are compared only if both read images, or both read texts",
        hint="choose a base of the same shape",
    )


def require_same_channels(source: ProbedModel, target: ProbedModel) -> None:
    """Refuse models whose images have different numbers of channels."""
    channels = [size(one)[0] for one in (source, target)]
    if channels[0] != channels[1]:
        raise MismatchError(
            f"{source.model.label} reads images of {channels[0]} channels, and {target.model.label} of"
            f" {channels[1]}",
            hint="choose a base that reads the same kind of images",
        )


def require_same_size(source: ProbedModel, target: ProbedModel) -> None:
    """Refuse vocabularies of different sizes that cannot be compared."""
    if source.vocabulary != target.vocabulary:
        raise MismatchError(
            f"{source.model.label} has {source.vocabulary} tokens and {target.model.label}"
            f" {target.vocabulary}, and not both have a tokenizer.json in their folders",
            hint="put the tokenizers' files beside the weights",
        )


def resized(images: Tensor, frame: tuple[int, int, int]) -> Tensor:
    """Return images in another size."""
    if tuple(images.shape[2:]) == frame[1:]:
        return images
    resize = nn.functional.interpolate
    return resize(images, size=frame[1:], mode="bilinear", align_corners=False, antialias=True)


# ── Paired probes: the same images or texts for two models, and the places that c… ──────────────────


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


# ── Places: which activations of two models are about the same thing ────────────────────────────────


class Places(ABC):
    """The places of one model on one batch that have a counterpart in another model."""

    @abstractmethod
    def rows(self, values: Tensor) -> Tensor | None:
        """Return activations (batch, tokens, units) as rows, one for each place; None if they do not fit."""


class EveryPlace(Places):
    """All tokens: both models divide the input alike."""

    def rows(self, values: Tensor) -> Tensor | None:
        return values.reshape(-1, values.shape[-1])


@dataclass(frozen=True)
class GridPlaces(Places):
    """The patches of images, averaged over the cells of a coarser grid, and a class token."""

    patches: tuple[int, int]
    """The rows and columns of this model's patches."""
    cells: tuple[int, int]
    """The rows and columns of the common grid."""
    class_token: bool
    """Whether both models have a class token, which is the first."""

    def rows(self, values: Tensor) -> Tensor | None:
        if values.ndim == 2:  # a value for every image
            return values
        if values.ndim == 4:  # a convolution
            return self._cells(values) if tuple(values.shape[1:3]) == self.patches else None
        count = self.patches[0] * self.patches[1]
        if values.ndim != 3 or values.shape[1] < count:
            return None
        before, grid = values[:, : values.shape[1] - count], values[:, values.shape[1] - count :]
        rows = self._cells(grid.reshape(len(grid), *self.patches, grid.shape[-1]))
        if not self.class_token:
            return rows
        if not before.shape[1]:
            return None
        return torch.cat([before[:, 0], rows])

    def _cells(self, grid: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(grid.movedim(-1, 1), self.cells)
        return pooled.movedim(1, -1).reshape(-1, grid.shape[-1])


@dataclass(frozen=True)
class TokenPlaces(Places):
    """Chosen tokens of every text."""

    tokens: tuple[tuple[int, ...], ...]

    def rows(self, values: Tensor) -> Tensor | None:
        if values.ndim == 2 and len(values) == len(self.tokens):
            return values
        if values.ndim != 3 or len(values) != len(self.tokens):
            return None
        return torch.cat([one[list(chosen)] for one, chosen in zip(values, self.tokens, strict=True)])


# ── Inputs changed by gradient: inverted until a model answers in a wanted way, o… ──────────────────


RATE = 0.2
"""The learning rate, in units of inputs with unit variance."""
SMOOTHNESS = 0.05
"""The weight of the differences between neighbours."""
RANGE = 3.0
"""The largest absolute value of an inverted input."""
REACH = 0.2
"""The largest change of an adversarial input, in the same units."""

Loss = Callable[[Tensor], Tensor]
"""How far the answers to inputs are from the wanted ones, as one number."""


def invert(inputs: Tensor, loss: Loss, steps: int, generator: torch.Generator) -> Tensor:
    """Change inputs by Adam until the loss is small; return values between -`RANGE` and `RANGE`."""
    pixels = inputs.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([pixels], lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(shifted(pixels, generator)) + SMOOTHNESS * roughness(pixels)
        torch.autograd.backward(value, inputs=[pixels])
        optimizer.step()
    return pixels.detach().clamp(-RANGE, RANGE)


def adversarial(inputs: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
    """Change inputs by one step along the sign of the gradient, so that the loss rises."""
    pixels = inputs.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(pixels), pixels)
    reach = REACH * torch.rand(len(inputs), *[1] * (inputs.ndim - 1), generator=generator)
    return inputs + reach * slope.sign()


def shifted(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Shift all inputs alike, by up to an eighth of their size along every dimension of space or time."""
    dims = _extended(inputs)
    shifts = []
    for dim in dims:
        reach = max(1, inputs.shape[dim] // 8)
        shifts.append(int(torch.randint(-reach, reach + 1, (), generator=generator)))
    return torch.roll(inputs, shifts, dims)


def roughness(inputs: Tensor) -> Tensor:
    """Return the mean absolute difference between neighbours, summed over the dimensions."""
    return torch.stack([inputs.diff(dim=dim).abs().mean() for dim in _extended(inputs)]).sum()


def _extended(inputs: Tensor) -> tuple[int, ...]:
    """Return the dimensions of space or time: rows and columns of images, the last one of anything else."""
    return (2, 3) if inputs.ndim == 4 else (inputs.ndim - 1,)


# ── How many inputs are enough: large inputs have many tokens or patches, of whic… ──────────────────


PLENTY = 4
"""Tokens or patches for every sample that is recorded, from which on more inputs are not needed."""


def tokens_of_a_probe(subject: ProbedModel) -> int:
    """Return into how many tokens, patches or frames the model divides one probe, about."""
    counts = [1]
    if subject.takes("image") or subject.takes("patches"):
        grid = patch_grid(subject)
        counts.append(1 + grid[0] * grid[1] if grid else 1)
    if subject.takes("spectrogram"):
        counts.append(int(subject.settings["max_source_positions"]))
    if subject.takes("waveform"):
        counts.append(FRAMES)
    if subject.takes("tokens"):
        counts.append(subject.length)
    return max(counts)


def enough_probes(subject: ProbedModel, asked: int, samples: int) -> int:
    """Return how many of the probes that were asked for are needed for so many samples: whole batches."""
    family = subject.model.family
    if family.probes is not None or family.draws is not None:
        return asked
    needed = ceil(PLENTY * samples / tokens_of_a_probe(subject))
    return min(asked, BATCH * ceil(needed / BATCH))
