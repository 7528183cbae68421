"""The tokenizer in a model's folder, or the one that comes with open_clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfusion.errors import reason_of
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.optional_libraries import require_library

_SENTENCE = "The sun was low, and we walked home along the river."


@dataclass(frozen=True)
class Tokenizer:
    """Encodes a text; special tokens go before and after."""

    encode: Callable[[str], list[int]]
    """Returns the tokens of a text without special tokens."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    unknown: int | None = None

    def framed(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def without(self, tokens: frozenset[int]) -> Tokenizer:
        """Return the same tokenizer, which leaves out these tokens."""

        def known(ids: Sequence[int]) -> list[int]:
            return [id for id in ids if id not in tokens]

        before, after = (tuple(known(ids)) for ids in (self.before, self.after))
        return Tokenizer(lambda text: known(self.encode(text)), before, after, self.unknown)


def has_tokenizer(subject: ProbedModel) -> bool:
    """Return whether the model has a tokenizer, without loading it."""
    bundled = subject.model.family.library == "open_clip" and not subject.settings.get("hf_tokenizer_name")
    return bundled or _is_in_folder(subject)


def _is_in_folder(subject: ProbedModel) -> bool:
    folder = subject.tokenizer_folder
    return folder is not None and any((folder / name).exists() for name in VOCABULARIES)


def tokenizer_of(subject: ProbedModel) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer; or None and the reason."""
    folder, present = subject.tokenizer_folder, _is_in_folder(subject)
    if not has_tokenizer(subject):
        where = "the model's folder" if folder else f"{subject.model.label}, which is no folder"
        return None, f"no tokenizer in {where}"
    try:
        found = _of_transformers(folder) if present and folder else _of_open_clip()
    except Exception as error:  # the libraries raise many types for a damaged file
        return None, f"the tokenizer cannot be used: {reason_of(error)}"
    highest = max(found.framed(found.encode(_SENTENCE)))
    if highest >= subject.vocabulary:
        return None, f"the tokenizer has token {highest}, and the model knows {subject.vocabulary}"
    if subject.unknown:
        return found.without(subject.unknown), ""
    return found, ""


def _of_transformers(folder: Path) -> Tokenizer:
    made = require_library("transformers").AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )

    def encode(text: str) -> list[int]:
        return list(made(text, add_special_tokens=False, verbose=False)["input_ids"])

    before, after = _around(encode(_SENTENCE), list(made(_SENTENCE)["input_ids"]))
    return Tokenizer(encode, before, after, made.unk_token_id)


def _around(alone: list[int], framed: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens before and after the tokens of a text."""
    if not alone:
        raise ValueError("it makes no tokens of a plain sentence")
    for start in range(len(framed) - len(alone) + 1):
        if framed[start : start + len(alone)] == alone:
            return tuple(framed[:start]), tuple(framed[start + len(alone) :])
    raise ValueError("its special tokens are not around the text")


def _of_open_clip() -> Tokenizer:
    made: Any = require_library("open_clip").SimpleTokenizer()
    return Tokenizer(
        lambda text: list(made.encode(text)), (int(made.sot_token_id),), (int(made.eot_token_id),)
    )
