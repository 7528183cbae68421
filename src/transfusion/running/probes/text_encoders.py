"""Tokenizers that tell where their tokens end, so that texts can be compared in the tokens of two models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.optional_libraries import require_library

_WORDS = "the river"


@dataclass(frozen=True)
class TextEncoder:
    """The tokenizer of a model's folder."""

    tokenizer: Any

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())

    def same_tokens(self, other: TextEncoder) -> bool:
        return self.vocabulary == other.vocabulary

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before and after a text."""
        alone, framed = self.encode(_WORDS)[0], list(self.tokenizer(_WORDS)["input_ids"])
        for start in range(len(framed) - len(alone) + 1):
            if framed[start : start + len(alone)] == alone:
                return tuple(framed[:start]), tuple(framed[start + len(alone) :])
        return (), ()

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text without special tokens, and the characters at which they end."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(found["input_ids"]), [end for _, end in found["offset_mapping"]]

    def decode(self, ids: Tensor) -> list[str]:
        """Return the texts of some tokens."""
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids.tolist()]

    def padded(self, texts: list[str], length: int | None) -> dict[str, Tensor]:
        """Return the tokens of texts with special tokens, as long as the longest one, and their mask."""
        rows = [[*self.frame[0], *self.encode(text)[0], *self.frame[1]] for text in texts]
        if length is not None:
            kept = length - len(self.frame[1])
            rows = [row if len(row) <= length else [*row[:kept], *self.frame[1]] for row in rows]
        widest = max(1, *(len(row) for row in rows))
        fill = self.tokenizer.pad_token_id
        ids = torch.full((len(rows), widest), 0 if fill is None else int(fill))
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row, dtype=ids.dtype)
            mask[place, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}


def text_encoder(subject: ProbedModel) -> TextEncoder | None:
    """Return the tokenizer of a model's folder, if it tells the places of its tokens."""
    folder = subject.tokenizer_folder
    if folder is None or not (folder / "tokenizer.json").exists():
        return None
    made: Any = require_library("transformers").AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    return TextEncoder(made) if made.is_fast else None
