"""The same inputs for two models of different shapes: images in their sizes, texts in their tokens.

Activations of two models are compared where they are about the same thing. A function of places picks those
of one model: it returns activations (batch, tokens, units) as rows, one for each place, or None if they do
not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import Architecture
from transfusion.data.tables import TABLES, read_texts
from transfusion.errors import DataError, MismatchError, listing
from transfusion.model.model import Model
from transfusion.running.live_model import expected_outputs, last_dimension
from transfusion.running.probes import make_probes
from transfusion.running.probes.calibration import read_calibration
from transfusion.running.probes.images import (
    generated_images,
    image_inputs,
    normalisation,
    normalised,
    patch_grid,
    size,
)
from transfusion.running.probes.probed_model import ProbedModel, batched, joined, seeded_generator
from transfusion.running.probes.texts import Tokenizer, corpus, synthetic_texts, text_encoder, text_inputs

Inputs = dict[str, Tensor]
Places: TypeAlias = Callable[[Tensor], Tensor | None]
IMAGES, TEXTS = (("image",), ("patches",)), (("tokens",),)
"""The kinds of inputs of models that can be compared across shapes."""
BATCHES = 10
"""The number of batches, of which some are held out."""
PIECE = 240
"""The characters of a text."""
LEAST = 8
"""The fewest tokens of a text."""
_MASK = "attention_mask"


# ── places ───────────────────────────────────────────────────────────────────────────────────


def every_place(values: Tensor) -> Tensor | None:
    """Return all tokens: both models divide the input alike."""
    return values.reshape(-1, values.shape[-1])  # (batch · tokens, units)


def grid_places(
    patches: tuple[int, int], cells: tuple[int, int], class_token: bool, values: Tensor
) -> Tensor | None:
    """Return patches of images, averaged over the cells of a coarser grid, and the class token if both models
    have one, which is the first.
    """

    def averaged(grid: Tensor) -> Tensor:  # (images, rows, columns, units)
        pooled = nn.functional.adaptive_avg_pool2d(grid.movedim(-1, 1), cells)  # (images, units, *cells)
        return pooled.movedim(1, -1).reshape(-1, grid.shape[-1])  # (images · cells, units)

    if values.ndim == 2:  # a value for every image
        return values
    if values.ndim == 4:  # a convolution
        return averaged(values) if tuple(values.shape[1:3]) == patches else None
    before = values.shape[1] - patches[0] * patches[1]
    if values.ndim != 3 or before < 0 or (class_token and not before):
        return None
    rows = averaged(values[:, before:].reshape(len(values), *patches, values.shape[-1]))
    return torch.cat([values[:, 0], rows]) if class_token else rows


def token_places(tokens: list[list[int]], values: Tensor) -> Tensor | None:
    """Return chosen tokens of every text."""
    if values.ndim not in (2, 3) or len(values) != len(tokens):
        return None
    if values.ndim == 2:
        return values
    return torch.cat([one[chosen] for one, chosen in zip(values, tokens, strict=True)])


# ── inputs of one model for another ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class InputTranslation:
    """Rewrites inputs of one model as inputs of another one."""

    translate: Callable[[Inputs], Inputs]
    same_places: bool = True
    """Whether both models divide an input into the same tokens."""

    def __call__(self, inputs: Inputs) -> Inputs:
        return self.translate(inputs)


SAME_INPUTS = InputTranslation(lambda inputs: inputs)


def input_translation(source: ProbedModel, target: ProbedModel) -> InputTranslation:
    """Return how inputs of one model become those of another one; refuse models of other kinds of inputs."""
    if _both(source, target, IMAGES) and source.takes("image"):
        _require_same_channels(source, target)
        return InputTranslation(_resizing(source, target), same_places=False)
    if _both(source, target, TEXTS):
        encoders = _different_tokenizers(source, target)
        if encoders is None:
            return InputTranslation(partial(_renamed, target))
        return InputTranslation(partial(_retokenized, *encoders, target), same_places=False)
    if _drawn_alike(source, target):
        return SAME_INPUTS
    raise _other_kind(source, target)


@dataclass(frozen=True)
class RunningPair:
    """A and B as they run beside each other: rewrites inputs and outputs of A as those of B."""

    a: Model
    b: Model
    alignment: Alignment
    grown: Mapping[int, int] = field(default_factory=dict)
    """The number of tokens of a fine-tune that added some, and that of A."""

    def shared(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs of A, B or a fine-tune, of logits only those of the tokens that all of them have."""
        if self.a.vocabulary is not None:
            return self.a.vocabulary.shared_logits(outputs)
        logits = {
            name: value[..., : self.grown[value.shape[-1]]]
            for name, value in outputs.items()
            if "logits" in name and value.ndim >= 3 and value.shape[-1] in self.grown
        }
        return {**outputs, **logits}

    def inputs(self, a: nn.Module, b: nn.Module) -> InputTranslation:
        """Return what rewrites inputs of A's module as inputs of B's."""
        if not self.alignment.other_shape:
            return SAME_INPUTS
        return input_translation(ProbedModel(self.a, a), ProbedModel(self.b, b))

    def outputs(self, architecture: Architecture, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that B should have, if a model with A's architecture and heads has these."""
        if not self.alignment.other_shape:
            return expected_outputs(self.alignment, architecture, outputs)
        found: dict[str, Tensor] = {}  # without outputs that B lacks, or whose axis has no map
        for name, value in outputs.items():
            ours, theirs = (one.outputs.get(name, "") for one in (architecture, self.b.architecture))
            if ours == theirs == "":
                found[name] = value
            elif ours and theirs and self.alignment.map_between(theirs, ours) is not None:
                layouts = (last_dimension(id, value.ndim) for id in (ours, theirs))
                found[name] = self.alignment.activations.move(value, *layouts)
        return found


def _resizing(source: ProbedModel, target: ProbedModel) -> Callable[[Inputs], Inputs]:
    """Return what gives images the size and the normalisation of the other model; gradients pass through."""
    (mean, deviation), frame = normalisation(source), size(target)

    def resize(inputs: Inputs) -> Inputs:
        images = inputs["pixel_values"] * deviation + mean
        return image_inputs(target, normalised(target, _resized(images, frame)))

    return resize


def _renamed(target: ProbedModel, inputs: Inputs) -> Inputs:
    """Return the same tokens under the names that the other model's library has for them."""
    made = text_inputs(target, inputs["input_ids"])
    return {**made, _MASK: inputs[_MASK]} if _MASK in inputs else made


def _retokenized(source: Tokenizer, target: Tokenizer, model: ProbedModel, inputs: Inputs) -> Inputs:
    """Return the same texts in the tokens of the other model."""
    ids, mask = target.padded(source.decode(inputs["input_ids"]), model.positions)
    return {**text_inputs(model, ids), _MASK: mask}


def _different_tokenizers(a: ProbedModel, b: ProbedModel) -> tuple[Tokenizer, Tokenizer] | None:
    """Return the tokenizers of both, if they are different ones; refuse others of different sizes."""
    of_a, of_b = text_encoder(a), text_encoder(b)
    if of_a is not None and of_b is not None and of_a.vocabulary != of_b.vocabulary:
        return of_a, of_b
    if a.vocabulary != b.vocabulary:
        raise MismatchError(
            f"{a.model.label} has {a.vocabulary} tokens and {b.model.label} {b.vocabulary}, and not both have"
            " a tokenizer.json in their folders",
            hint="put the tokenizers' files beside the weights",
        )
    return None


def _both(a: ProbedModel, b: ProbedModel, kinds: tuple[tuple[str, ...], ...]) -> bool:
    return all(one.model.family.inputs in kinds for one in (a, b))


def _drawn_alike(a: ProbedModel, b: ProbedModel) -> bool:
    """Return whether the same inputs are drawn for both, by a table that says how; refuse different ones."""
    if a.model.family != b.model.family or not a.model.family.draws_inputs:
        return False
    ours, theirs = a.template(2), b.template(2)
    other = [name for name in ours if name not in theirs or not torch.equal(ours[name], theirs[name])]
    if other or ours.keys() != theirs.keys():
        raise MismatchError(
            f"the inputs that the table draws for {a.model.label} and {b.model.label} differ in"
            f" {listing(other or theirs.keys() - ours.keys())}",
            hint="models of different shapes are compared on the same inputs: draw them of one length and of"
            " the ids that both know",
        )
    return True


def _other_kind(a: ProbedModel, b: ProbedModel) -> MismatchError:
    words = [" and ".join(one.model.family.inputs) for one in (a, b)]
    return MismatchError(
        f"{a.model.label} reads {words[0]}, and {b.model.label} {words[1]}: models of different shapes are"
        " compared only if both read images, or both read texts",
        hint="choose a base of the same shape",
    )


def _require_same_channels(a: ProbedModel, b: ProbedModel) -> None:
    ours, theirs = size(a)[0], size(b)[0]
    if ours != theirs:
        raise MismatchError(
            f"{a.model.label} reads images of {ours} channels, and {b.model.label} of {theirs}",
            hint="choose a base that reads the same kind of images",
        )


def _resized(images: Tensor, frame: tuple[int, int, int]) -> Tensor:
    if tuple(images.shape[2:]) == frame[1:]:
        return images
    resize = nn.functional.interpolate
    return resize(images, size=frame[1:], mode="bilinear", align_corners=False, antialias=True)


# ── probes for both ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ModelProbes:
    """Batches of inputs for one model, with the places that the other model has too."""

    batches: list[Inputs]
    places: list[Places]

    @classmethod
    def of(
        cls, inputs: Inputs, places: Places = every_place, tokens: list[list[int]] | None = None
    ) -> ModelProbes:
        """Divide inputs into batches, with the places of all inputs, or with the chosen tokens of each."""
        count = len(next(iter(inputs.values())))
        step = max(1, count // BATCHES)
        batches = list(batched(inputs, step))
        if tokens is None:
            return cls(batches, [places] * len(batches))
        chosen = [tokens[start : start + step] for start in range(0, count, step)]
        return cls(batches, [partial(token_places, some) for some in chosen])


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
    if _both(a, b, IMAGES):
        return _images(a, b, count, seed, calibrate)
    if _drawn_alike(a, b):
        probes = make_probes(a, count, seed, calibrate)
        both = ModelProbes.of(joined(probes.batches))
        return PairedProbes(both, both, probes.about)
    if not _both(a, b, TEXTS):
        raise _other_kind(a, b)
    encoders = _different_tokenizers(a, b)
    if encoders is not None:
        return _texts_in_both(a, b, encoders, count, seed, calibrate)
    shorter, longer = (a, b) if a.unknown or a.length <= b.length else (b, a)
    inputs, about = (
        synthetic_texts(shorter, count, seed)
        if calibrate is None
        else read_calibration(calibrate, shorter, count, seed)
    )
    given = {id(shorter): inputs, id(longer): _renamed(longer, inputs)}
    return PairedProbes(ModelProbes.of(given[id(a)]), ModelProbes.of(given[id(b)]), about)


def _images(a: ProbedModel, b: ProbedModel, count: int, seed: int, calibrate: Path | None) -> PairedProbes:
    _require_same_channels(a, b)
    if calibrate is not None:
        of_a, about = read_calibration(calibrate, a, count, seed)
        given = of_a, _resizing(a, b)(of_a)
    else:
        frames = size(a), size(b)
        channels, rows, columns = (max(extents) for extents in zip(*frames, strict=True))
        images = generated_images((channels, rows, columns), count, seed)
        of_a, of_b = (
            image_inputs(subject, normalised(subject, _resized(images, frame)))
            for subject, frame in zip((a, b), frames, strict=True)
        )
        given, about = (of_a, of_b), f"{count} images of overlapping shapes and of smooth noise"
    grids = _patches(a), _patches(b)
    cells = min(grids[0][0], grids[1][0]), min(grids[0][1], grids[1][1])
    class_token = _has_class_token(a) and _has_class_token(b)
    first, second = (
        ModelProbes.of(inputs, partial(grid_places, grid, cells, class_token))
        for inputs, grid in zip(given, grids, strict=True)
    )
    return PairedProbes(first, second, about)


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


def _texts_in_both(
    a: ProbedModel,
    b: ProbedModel,
    tokenizers: tuple[Tokenizer, Tokenizer],
    count: int,
    seed: int,
    calibrate: Path | None,
) -> PairedProbes:
    """Encode texts by both tokenizers, and choose the last token of each boundary that both have."""
    if calibrate is None:
        texts, about = _pieces(corpus().values(), count, seed), "passages of the bundled corpus"
    else:
        texts, about = _pieces([_own_texts(calibrate)], count, seed), f"passages of {calibrate}"
    both = [tuple(tokenizer.encode_with_ends(text) for tokenizer in tokenizers) for text in texts]
    rooms = [
        min([subject.length - len(tokenizer.framed([])), *(len(pair[side][0]) for pair in both)])
        for side, (subject, tokenizer) in enumerate(zip((a, b), tokenizers, strict=True))
    ]
    if not both or min(rooms) < LEAST:
        raise DataError(
            "the texts are too few or too short for a comparison", hint="give some hundred sentences"
        )
    class_token = [0] if all(tokenizer.before for tokenizer in tokenizers) else []
    ids: tuple[list[list[int]], list[list[int]]] = [], []
    chosen: tuple[list[list[int]], list[list[int]]] = [], []
    for pair in both:
        ends = [
            {end: place for place, end in enumerate(one[1][:room]) if end}
            for one, room in zip(pair, rooms, strict=True)
        ]
        common = sorted(ends[0].keys() & ends[1].keys())
        for side, tokenizer in enumerate(tokenizers):
            ids[side].append(tokenizer.framed(pair[side][0][: rooms[side]]))
            places = [len(tokenizer.before) + ends[side][end] for end in common]
            chosen[side].append([*class_token, *places])
    of_a, of_b = (
        ModelProbes.of(text_inputs(subject, torch.tensor(tokens)), tokens=some)
        for subject, tokens, some in zip((a, b), ids, chosen, strict=True)
    )
    return PairedProbes(of_a, of_b, f"{len(both)} {about}, in the tokens of both models")


def _own_texts(path: Path) -> list[str]:
    if path.suffix not in TABLES:
        raise DataError(
            f"{path}: A and B have different tokenizers, and these inputs are no texts",
            hint="give a .txt, .jsonl, .csv or .parquet of texts, which are tokenized for both",
        )
    return [line for line in read_texts(path) if line.strip()]


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
    order = torch.randperm(len(found), generator=seeded_generator(seed, 6)).tolist()
    return [found[number] for number in order[:count]]
