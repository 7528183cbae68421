"""Examples as batches of a model's inputs: tensors as they are, tokenized texts, prepared images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from transfusion.data.dataset import Dataset
from transfusion.data.examples import ImageFile
from transfusion.errors import DataError, reason_of
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.running.probes.images import fitted, image_inputs, normalised, size
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.texts import Tokenizer, tokenizer_of
from transfusion.runtime.optional_libraries import require_library

IGNORED = -100
"""The label that does not count, as in torch."""


@dataclass(frozen=True)
class Batch:
    """The model's inputs by name, and the targets."""

    inputs: Mapping[str, Tensor]
    targets: Tensor


@dataclass(frozen=True)
class Batches:
    """Examples that become a model's inputs batch by batch."""

    label: str
    """The source, for messages."""
    examples: Sequence[Any]
    """Numbers of rows of tensors, tokens of texts, or images."""
    inputs: Callable[[Sequence[Any]], Mapping[str, Tensor]]
    """Makes the model's inputs of some examples."""
    targets: Tensor | None
    """By example, or by example and position; None if the texts themselves are the targets."""

    def __len__(self) -> int:
        return len(self.examples)

    def chosen(self, indices: Sequence[int]) -> Batches:
        """Return the examples with these indices."""
        targets = None if self.targets is None else self.targets[list(indices)]
        return replace(self, examples=[self.examples[index] for index in indices], targets=targets)

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over the batches, in order."""
        for start in range(0, len(self), size):
            inputs = self.inputs(self.examples[start : start + size])
            known = self.targets
            yield Batch(inputs, _texts_in(inputs) if known is None else known[start : start + size])


def _texts_in(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the tokens of texts as targets; padding does not count."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, mask = inputs[name].long(), inputs.get(name.replace("input_ids", "attention_mask"))
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)  # (texts, tokens)


def tensor_batches(data: Dataset) -> Batches:
    """Return examples that are the model's inputs already."""
    return Batches(data.label, range(len(data)), lambda rows: data.chosen(rows).inputs, data.labels)


# ── texts ────────────────────────────────────────────────────────────────────────────────────

Tokens = dict[str, list[int]]
"""The tokens of one example and, for pairs, the text that each belongs to."""


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes texts for a model."""

    name: str
    encode: Callable[[tuple[str, ...], int | None], Tokens]
    """Encodes a text, and truncates it to so many tokens."""
    max_length: int | None
    """The largest number of tokens that the model takes."""
    pad: int
    full: bool
    """Whether every text is padded to the largest length, as in the training of some models."""
    takes: frozenset[str]
    """The inputs beside the tokens: a mask of the padding, the text that each token belongs to."""

    @classmethod
    def of(cls, subject: ProbedModel, *others: ProbedModel) -> TextTokenizer:
        """Return the tokenizer of a model; if it has none, that of another model with the same tokens."""
        reasons = []
        for one in (subject, *others):
            tokenizer, reason = tokenizer_of(one)
            if tokenizer is not None:
                return _open_clip(subject, tokenizer) if _bundled(one) else _transformers(subject, one)
            reasons.append(reason)
        raise DataError(
            f"{subject.model.label}: texts cannot be given to it: {reasons[0]}",
            hint="put the model's tokenizer into its folder, or give a .safetensors with input_ids",
        )

    def read(
        self, texts: Sequence[tuple[str, ...]], label: str, *, truncate: bool, what: str = "example"
    ) -> tuple[list[Tokens], int]:
        """Encode texts and return how many were truncated; without ``truncate``, refuse long ones."""
        found, cut = [], 0
        for number, text in enumerate(texts, 1):
            tokens = self.encode(text, None)
            length = len(tokens["input_ids"])
            if not length:
                raise DataError(f"{label}: {what} {number} has no tokens", hint="remove empty texts")
            if self.max_length is not None and length > self.max_length:
                if not truncate:
                    raise DataError(
                        f"{label}: {what} {number} has {length} tokens, and {self.name} takes"
                        f" {self.max_length}",
                        hint="truncate such texts with `truncate=True`, or remove them",
                    )
                tokens, cut = self.encode(text, self.max_length), cut + 1
            found.append(tokens)
        return found, cut

    def inputs(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Return the model's inputs (texts, tokens) for a batch of texts, padded to the longest."""
        lengths = torch.tensor([len(one["input_ids"]) for one in tokens])
        long = self.max_length if self.full and self.max_length is not None else int(lengths.max())

        def padded(rows: list[list[int]], value: int) -> Tensor:
            return torch.tensor([row + [value] * (long - len(row)) for row in rows])

        inputs = {"input_ids": padded([one["input_ids"] for one in tokens], self.pad)}
        if "attention_mask" in self.takes:
            inputs["attention_mask"] = (torch.arange(long)[None] < lengths[:, None]).long()
        if "token_type_ids" in self.takes:
            kinds = [one.get("token_type_ids") or [0] * len(one["input_ids"]) for one in tokens]
            inputs["token_type_ids"] = padded(kinds, 0)
        return inputs


def _bundled(subject: ProbedModel) -> bool:
    """Whether the tokenizer is the one that comes with open_clip."""
    folder = subject.folder
    present = folder is not None and any((folder / name).exists() for name in VOCABULARIES)
    return subject.model.family.library == "open_clip" and not present


def _open_clip(subject: ProbedModel, tokenizer: Tokenizer) -> TextTokenizer:
    def encode(text: tuple[str, ...], room: int | None) -> Tokens:
        ids = tokenizer.framed(tokenizer.encode(" ".join(text)))
        if room is not None:
            ids = [*ids[: room - len(tokenizer.after)], *tokenizer.after]
        return {"input_ids": ids}

    pad = int(subject.settings.get("pad_id") or 0)
    return TextTokenizer(subject.name, encode, subject.positions, pad, True, frozenset())


def _transformers(subject: ProbedModel, owner: ProbedModel) -> TextTokenizer:
    made: Any = require_library("transformers").AutoTokenizer.from_pretrained(
        str(owner.folder), local_files_only=True, trust_remote_code=False
    )
    family = subject.model.family
    of_transformers, siglip = family.library == "transformers", family.name.startswith("siglip")
    single = not of_transformers or siglip or family.name.startswith("clip")  # takes one text, not pairs

    def encode(text: tuple[str, ...], room: int | None) -> Tokens:
        given = (" ".join(text),) if single else text
        found = made(*given, verbose=False, truncation=room is not None, max_length=room)
        return {name: list(found[name]) for name in ("input_ids", "token_type_ids") if name in found}

    takes = {"attention_mask"} if of_transformers and not siglip else set()
    if of_transformers and int(subject.settings.get("type_vocab_size") or 0) > 0:
        takes |= set(made("a")) & {"token_type_ids"}
    known = (subject.positions, int(made.model_max_length))
    limits = [one for one in known if one is not None and one < 1_000_000]  # a huge one means none
    of_tokenizer, of_config = made.pad_token_id, subject.token("pad")
    pads = (of_tokenizer, of_config) if single else (of_config, of_tokenizer)
    pad = next((one for one in pads if one is not None), subject.token("eos"))
    full = siglip or not of_transformers
    room = min(limits) if limits else None
    return TextTokenizer(subject.name, encode, room, pad or 0, full, frozenset(takes))


def text_batches(
    label: str, tokens: Sequence[Tokens], tokenizer: TextTokenizer, module: nn.Module
) -> Batches:
    """Return texts, padded batch by batch, as the inputs that a module takes; they are their own targets."""
    takes = {"input_ids", "attention_mask", *inspect.signature(module.forward).parameters}

    def inputs(some: Sequence[Tokens]) -> dict[str, Tensor]:
        return {name: one for name, one in tokenizer.inputs(some).items() if name in takes}

    return Batches(label, tokens, inputs, None)


# ── images ───────────────────────────────────────────────────────────────────────────────────

Transform: TypeAlias = Callable[[Any], Tensor]
"""From a Pillow image to (channels, rows, columns)."""
SQUARE = "{label}: images are made square for it, where its own library keeps their proportions"
ASSUMED = (
    "{label}: nothing in its folder says how images are prepared; they are cropped to the frame and scaled"
    " as synthetic images are"
)


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for one model."""

    subject: ProbedModel
    transform: Transform | None
    """The library's own; None if the model's folder does not describe it."""

    @classmethod
    def of(cls, subject: ProbedModel) -> ImageProcessor:
        """Build the transform that the model's folder describes."""
        if size(subject)[0] not in (1, 3):
            raise DataError(
                f"{subject.model.label}: takes {size(subject)[0]} channels, and images have 1 or 3",
                hint="give a .safetensors or .npz with pixel_values",
            )
        build = {"open_clip": _of_open_clip, "timm": _of_timm}.get(
            subject.model.family.library, _of_transformers
        )
        try:
            return cls(subject, build(subject))
        except (AssertionError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise DataError(
                f"{subject.model.label}: the preparation of images that its folder asks for is not"
                f" understood ({reason_of(error)})",
                hint="look at preprocessor_config.json, or at the image settings of the model's config",
            ) from error

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for users if images are prepared otherwise than by the model's own library."""
        if self.transform:
            return ()
        text = SQUARE if self.subject.takes("patches") else ASSUMED
        return (text.format(label=self.subject.model.label),)

    def inputs(self, images: Sequence[ImageFile]) -> dict[str, Tensor]:
        """Return the model's inputs for a batch of images."""
        frame = size(self.subject)
        opened = [image.opened("RGB" if frame[0] == 3 else "L") for image in images]
        if self.transform is None:
            pixels = normalised(self.subject, torch.stack([fitted(one, frame) for one in opened]))
        else:
            pixels = self._transformed(self.transform, images, opened)
        return image_inputs(self.subject, pixels)

    def _transformed(self, transform: Transform, images: Sequence[ImageFile], opened: list[Any]) -> Tensor:
        pixels: list[Tensor] = []
        for image, one in zip(images, opened, strict=True):
            try:
                pixels.append(transform(one))
            except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
                raise DataError(
                    f"{image.name}: cannot be prepared for {self.subject.model.label} ({reason_of(error)})",
                    hint="look at the image, and at the preparation that the model's folder asks for",
                ) from error
            if pixels[-1].shape != pixels[0].shape:
                raise DataError(
                    f"{image.name}: {tuple(pixels[-1].shape)} when prepared, and {images[0].name} is"
                    f" {tuple(pixels[0].shape)}",
                    hint="the model's preparation does not resize; give images of one size",
                )
        return torch.stack(pixels)


def _of_open_clip(subject: ProbedModel) -> Transform:
    """The transform of ``preprocess_cfg``, at the model's size."""
    transforms = require_library("open_clip.transform", "open-clip")
    config = (subject.model.checkpoint.config or {}).get("preprocess_cfg") or {}
    known = ("mean", "std", "interpolation", "resize_mode")
    built: Transform = transforms.image_transform(
        size(subject)[1:],
        is_train=False,
        fill_color=config.get("fill_color") or 0,
        **{key: config[key] for key in known if key in config},
    )
    return built


def _of_timm(subject: ProbedModel) -> Transform | None:
    """The transform of ``pretrained_cfg`` for tests, at the model's size."""
    timm = require_library("timm.data", "timm")
    config = {**(getattr(subject.module, "pretrained_cfg", None) or {})}
    config |= (subject.model.checkpoint.config or {}).get("pretrained_cfg") or {}
    if not config.get("mean"):
        return None
    chosen = timm.resolve_data_config({"input_size": size(subject)}, config, use_test_size=True)
    built: Transform = timm.create_transform(**chosen, is_training=False)
    return built


def _of_transformers(subject: ProbedModel) -> Transform | None:
    """The image processor that the folder names, computed with Pillow; no code of the folder is run."""
    files = [subject.info(name) for name in ("processor_config.json", "preprocessor_config.json")]
    config = files[0].get("image_processor") or files[1] or files[0]
    if subject.takes("patches") or ("size" not in config and config.get("do_resize") is not False):
        return None
    transformers = require_library("transformers")
    pillow = {"backend": "pil"} if hasattr(transformers, "ViTImageProcessorPil") else {"use_fast": False}
    processor = transformers.AutoImageProcessor.from_pretrained(
        str(subject.folder),
        config=getattr(subject.module, "config", None),
        local_files_only=True,
        trust_remote_code=False,
        **pillow,
    )
    processor.do_convert_rgb = False  # images are opened with the model's channels

    def transform(image: Any) -> Tensor:
        found = processor(image, return_tensors="pt")["pixel_values"]
        if not isinstance(found, Tensor) or found.ndim != 4:
            raise ValueError(f"{type(processor).__name__} does not make one tensor of an image")
        return found[0]

    return transform
