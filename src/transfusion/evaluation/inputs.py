"""Examples as batches of a model's inputs: tensors as they are, tokenized texts, prepared images."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
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


class Batches(ABC):
    """Examples that become the model's inputs batch by batch."""

    label: str
    labels: Tensor | None
    """The class of every example; None if examples have no class of their own."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def chosen(self, indices: Sequence[int]) -> Batches:
        """Return the examples with these indices."""

    @abstractmethod
    def batch(self) -> Batch:
        """Return all examples as one batch."""

    def batches(self, size: int) -> Iterator[Batch]:
        """Iterate over the batches, in order."""
        for start in range(0, len(self), size):
            yield self.chosen(range(start, min(start + size, len(self)))).batch()

    def heaviest(self) -> Batch:
        """Return the example that needs the most memory; of tensors and images, any one."""
        return self.chosen([0]).batch()


@dataclass(frozen=True)
class TensorBatches(Batches):
    """Examples that are the model's inputs already."""

    data: Dataset

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.data.label

    @property
    def labels(self) -> Tensor | None:  # type: ignore[override]
        """The class of every example; None if positions have classes."""
        known = self.data.labels
        return known if known is not None and known.ndim == 1 else None

    def __len__(self) -> int:
        return len(self.data)

    def chosen(self, indices: Sequence[int]) -> TensorBatches:
        """Return the examples with these indices."""
        return TensorBatches(self.data.chosen(indices))

    def batch(self) -> Batch:
        """Return all examples as one batch; without labels, the texts themselves are the targets."""
        inputs = self.data.inputs
        if self.data.labels is not None:
            return Batch(inputs, self.data.labels)
        name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        ids, mask = inputs[name].long(), inputs.get(name.replace("input_ids", "attention_mask"))
        return Batch(inputs, ids if mask is None else ids.masked_fill(mask == 0, IGNORED))


# ── texts ────────────────────────────────────────────────────────────────────────────────────

Tokens = dict[str, list[int]]
"""The tokens of one example and, for pairs, the text that each belongs to."""


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes texts for a model."""

    name: str
    encode: Callable[[tuple[str, ...]], Tokens]
    shorten: Callable[[tuple[str, ...], int], Tokens]
    """Encodes a text and truncates it to so many tokens."""
    max_length: int | None
    """The largest number of tokens that the model takes."""
    pad: int
    full: bool
    """Whether every text is padded to the largest length, as in the training of some models."""
    masked: bool
    """Whether the model takes a mask of the padding."""
    extra_inputs: frozenset[str]
    """Inputs beside tokens and mask."""

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
            tokens = self.encode(text)
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
                tokens, cut = self.shorten(text, self.max_length), cut + 1
            found.append(tokens)
        return found, cut

    def inputs(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Return the model's inputs for a batch of texts."""
        long = max(len(one["input_ids"]) for one in tokens)
        if self.full and self.max_length is not None:
            long = self.max_length
        ids = [one["input_ids"] + [self.pad] * (long - len(one["input_ids"])) for one in tokens]
        inputs = {"input_ids": torch.tensor(ids, dtype=torch.int64)}
        if self.masked:
            real = torch.tensor([len(one["input_ids"]) for one in tokens])
            inputs["attention_mask"] = (torch.arange(long)[None] < real[:, None]).long()
        if "token_type_ids" in self.extra_inputs:
            kinds = [one.get("token_type_ids") or [0] * len(one["input_ids"]) for one in tokens]
            inputs["token_type_ids"] = torch.tensor([one + [0] * (long - len(one)) for one in kinds])
        return inputs


def _bundled(subject: ProbedModel) -> bool:
    """Whether the tokenizer is the one that comes with open_clip."""
    folder = subject.folder
    present = folder is not None and any((folder / name).exists() for name in VOCABULARIES)
    return subject.model.family.library == "open_clip" and not present


def _open_clip(subject: ProbedModel, tokenizer: Tokenizer) -> TextTokenizer:
    def encode(text: tuple[str, ...]) -> Tokens:
        return {"input_ids": tokenizer.framed(tokenizer.encode(_one(text)))}

    def shorten(text: tuple[str, ...], room: int) -> Tokens:
        end = len(tokenizer.after)
        return {"input_ids": [*encode(text)["input_ids"][: room - end], *tokenizer.after]}

    pad = int(subject.settings.get("pad_id") or 0)
    return TextTokenizer(subject.name, encode, shorten, subject.positions, pad, True, False, frozenset())


def _one(text: tuple[str, ...]) -> str:
    """Join a pair, for models that take one text."""
    return " ".join(text)


def _transformers(subject: ProbedModel, owner: ProbedModel) -> TextTokenizer:
    made: Any = require_library("transformers").AutoTokenizer.from_pretrained(
        str(owner.folder), local_files_only=True, trust_remote_code=False
    )
    siglip = subject.model.family.name.startswith("siglip")
    of_transformers = subject.model.family.library == "transformers"
    info: set[str] = set(made("a")) & {"token_type_ids"} if of_transformers else set()
    if int(subject.settings.get("type_vocab_size") or 0) < 1:
        info = set()
    single = not of_transformers or siglip or subject.model.family.name.startswith("clip")

    def call(text: tuple[str, ...], **more: Any) -> Tokens:
        given = (_one(text),) if single else text
        found = made(*given, verbose=False, **more)
        return {name: list(found[name]) for name in ("input_ids", "token_type_ids") if name in found}

    room = subject.positions
    limit = int(made.model_max_length)
    if limit < 1_000_000:  # the library has a huge number if there is no limit
        room = limit if room is None else min(room, limit)
    of_tokenizer, of_config = made.pad_token_id, subject.token("pad")
    pads = (of_tokenizer, of_config) if single else (of_config, of_tokenizer)
    pad = next((one for one in pads if one is not None), subject.token("eos"))
    return TextTokenizer(
        subject.name,
        call,
        lambda text, room: call(text, truncation=True, max_length=room),
        room,
        pad or 0,
        siglip or not of_transformers,
        of_transformers and not siglip,
        frozenset(info),
    )


@dataclass(frozen=True)
class TextBatches(Batches):
    """Tokenized texts that are padded batch by batch."""

    label: str
    tokens: Sequence[Tokens]
    tokenizer: TextTokenizer
    takes: frozenset[str]
    """The arguments of the model's forward method."""
    labels: Tensor | None
    """None if the texts themselves are the targets."""

    def __len__(self) -> int:
        return len(self.tokens)

    def chosen(self, indices: Sequence[int]) -> TextBatches:
        """Return the texts with these indices."""
        labels = None if self.labels is None else self.labels[list(indices)]
        return replace(self, tokens=[self.tokens[index] for index in indices], labels=labels)

    def batch(self) -> Batch:
        """Return all texts, padded to the longest."""
        inputs = self.tokenizer.inputs(self.tokens)
        given = {name: one for name, one in inputs.items() if name in self.takes}
        if self.labels is not None:
            return Batch(given, self.labels)
        ids = inputs["input_ids"]  # (texts, tokens)
        real = torch.tensor([len(one["input_ids"]) for one in self.tokens])
        return Batch(given, ids.masked_fill(torch.arange(ids.shape[1])[None] >= real[:, None], IGNORED))

    def heaviest(self) -> Batch:
        """Return the longest text."""
        longest = max(range(len(self)), key=lambda one: len(self.tokens[one]["input_ids"]))
        return self.chosen([longest]).batch()


def accepted_inputs(module: nn.Module) -> frozenset[str]:
    """Return the names of the inputs that a module takes."""
    found = inspect.signature(module.forward).parameters
    info = {name for name, one in found.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset({"input_ids", "attention_mask"} | info)


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

    def inputs(self, images: list[ImageFile]) -> dict[str, Tensor]:
        """Return the model's inputs for a batch of images."""
        frame = size(self.subject)
        opened = [image.opened("RGB" if frame[0] == 3 else "L") for image in images]
        if self.transform is None:
            pixels = normalised(self.subject, torch.stack([fitted(one, frame) for one in opened]))
        else:
            pixels = self._transformed(self.transform, images, opened)
        return image_inputs(self.subject, pixels)

    def _transformed(self, transform: Transform, images: list[ImageFile], opened: list[Any]) -> Tensor:
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


@dataclass(frozen=True)
class ImageBatches(Batches):
    """Images that are opened and prepared batch by batch."""

    label: str
    images: Sequence[ImageFile]
    processor: ImageProcessor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def chosen(self, indices: Sequence[int]) -> ImageBatches:
        """Return the images with these indices."""
        images = [self.images[index] for index in indices]
        return replace(self, images=images, labels=self.labels[list(indices)])

    def batch(self) -> Batch:
        """Open and prepare all images."""
        return Batch(self.processor.inputs(list(self.images)), self.labels)
