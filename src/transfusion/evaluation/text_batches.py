"""Texts and pairs of texts as a model's own tokenizer encodes them, padded to one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import DataError
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.tokenizers import Tokenizer, tokenizer_of
from transfusion.runtime.optional_libraries import require_library

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
