"""The tokens of a model's folder, row by row, from the files of its tokenizer.

The files are read as data: no library loads them, and nothing in the folder is executed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from transfusion.errors import CheckpointError
from transfusion.files.tensor_files import Stamp, stamp
from transfusion.runtime.untrusted_files import path_inside, read_json, read_text, require_regular

BYTES, PIECES, WORDPIECE, PLAIN = "byte-level", "sentencepiece", "WordPiece", "plain"
"""The kinds of spelling: ``Ġthe``, ``▁the``, ``the`` before ``##re``, and texts as they are."""
_MOST_ROWS = 2**22
_ADDED = ("added_tokens.json", "tokenizer_config.json")
_MODELS = ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "source.spm")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *_MODELS)
"""The files of which one holds the tokens of a tokenizer."""
_AGAIN = "fetch the tokenizer again"
_SPACE = "▁"
_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The token of a byte, as sentencepiece writes it."""


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a tokenizer, by row; None for a row without a token."""

    tokens: tuple[str | None, ...]
    kind: str
    """How tokens are spelled; tables of one kind are compared by spelling."""
    literal: frozenset[int] = frozenset()
    """The rows of added tokens, which are spelled as they occur in a text."""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all tokens and of the kind of spelling."""
        text = json.dumps([self.kind, self.tokens, sorted(self.literal)])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def resized(self, rows: int) -> TokenTable:
        """Return the table for so many rows: further tokens have no row, and further rows no token."""
        tokens = self.tokens[:rows] + (None,) * (rows - len(self.tokens))
        return TokenTable(tokens, self.kind, frozenset(row for row in self.literal if row < rows))

    def texts(self) -> list[object]:
        """Return what each token stands for, in a form that byte-level and sentencepiece have in common.

        None for a row without a token, and for a token that the other kind cannot have.
        """
        return [None if token is None else self._text(row, token) for row, token in enumerate(self.tokens)]

    def _text(self, row: int, token: str) -> object:
        if row in self.literal:
            return token.encode("utf-8", "surrogatepass")
        if self.kind == BYTES:
            alphabet = _byte_alphabet()
            known = [alphabet[one] for one in token if one in alphabet]
            return bytes(known) if len(known) == len(token) else token.encode("utf-8", "surrogatepass")
        if single := _SINGLE_BYTE.fullmatch(token):
            byte = bytes.fromhex(single[1])
            return byte if byte >= b"\x80" else None  # a letter has a token of its own, too
        return token.replace(_SPACE, " ").encode("utf-8", "surrogatepass")


def tokens_in(folder: Path | None) -> tuple[TokenTable | None, str]:
    """Return the tokens of a folder's tokenizer; or None and the reason."""
    if folder is None:
        return None, "a model without a folder has no tokenizer"
    try:
        return _read(folder, _stamps(folder)), ""
    except CheckpointError as error:
        return None, error.message


def _stamps(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    """Return the files of a tokenizer, and a stamp of each."""
    names = (*VOCABULARIES, "merges.txt", *_ADDED)
    there = (folder / name for name in names if (folder / name).exists())
    return tuple((path.name, stamp(require_regular(path_inside(folder, path)))) for path in there)


@lru_cache(maxsize=8)
def _read(folder: Path, files: tuple[tuple[str, Stamp], ...]) -> TokenTable:
    names = {name for name, _ in files}
    if "tokenizer.json" in names:
        return _of_tokenizer_json(folder / "tokenizer.json")
    if "vocab.txt" in names:
        lines = read_text(folder / "vocab.txt").split("\n")
        tokens = lines[:-1] if lines[-1] == "" else lines
        return _table(dict(enumerate(tokens)), _added_beside(folder, names), WORDPIECE, folder / "vocab.txt")
    if "vocab.json" in names:
        path = folder / "vocab.json"
        kind = BYTES if "merges.txt" in names else PIECES if names & set(_MODELS) else PLAIN
        return _table(_by_row(read_json(path), path), _added_beside(folder, names), kind, path)
    if models := sorted(names & set(_MODELS)):
        raise CheckpointError(
            f"{folder}: {models[0]} has no tokenizer.json beside it",
            hint="save the tokenizer with transformers, which writes a tokenizer.json",
        )
    raise CheckpointError(f"{folder}: no tokenizer in this folder", hint="put its tokenizer.json there")


def _of_tokenizer_json(path: Path) -> TokenTable:
    whole = read_json(path)
    model = whole.get("model")
    found = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(found, list | dict):
        raise CheckpointError(f"{path}: no vocabulary in it", hint=_AGAIN)
    if isinstance(found, list):  # unigram: tokens with their scores
        found = {row: one[0] if isinstance(one, list) and one else None for row, one in enumerate(found)}
    else:
        found = _by_row(found, path)
    listed = whole.get("added_tokens") or []
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
        raise CheckpointError(f"{path}: added_tokens is no list, or an added token has no id", hint=_AGAIN)
    added = {_row(one["id"], path): one.get("content") for one in listed}
    return _table(found, added, _kind(whole, model or {}, found), path)


def _kind(whole: Mapping[str, Any], model: Mapping[str, Any], vocabulary: Mapping[int, Any]) -> str:
    """Return how the tokens of a tokenizer.json are spelled."""
    steps = {name for part in ("pre_tokenizer", "decoder", "normalizer") for name in _types(whole.get(part))}
    if model.get("type") == "WordPiece":
        prefix = model.get("continuing_subword_prefix", "##")
        return WORDPIECE if prefix == "##" else f"{WORDPIECE} with {prefix}"
    if "ByteLevel" in steps:
        suffix = model.get("end_of_word_suffix")
        return f"{BYTES} with {suffix}" if suffix else BYTES
    marked = any(isinstance(token, str) and token.startswith(_SPACE) for token in vocabulary.values())
    return PIECES if "Metaspace" in steps or marked else PLAIN


def _types(part: Any, depth: int = 0) -> Iterator[str]:
    """Yield the types of a step of a tokenizer, and of the steps in it."""
    if isinstance(part, dict) and depth < 8:
        if isinstance(kind := part.get("type"), str):
            yield kind
        for value in part.values():
            for one in value if isinstance(value, list) else [value]:
                yield from _types(one, depth + 1)


def _row(value: object, path: Path) -> int:
    """Return a row of a vocabulary; refuse what is none."""
    if type(value) is not int or not 0 <= value < _MOST_ROWS:
        raise CheckpointError(f"{path}: {value!r:.80} is no row of a vocabulary", hint=_AGAIN)
    return value


def _by_row(vocabulary: Mapping[str, Any], path: Path) -> dict[int, Any]:
    """Return the tokens of a vocabulary by row; refuse two tokens in one row."""
    found: dict[int, Any] = {}
    for token, row in vocabulary.items():
        if _row(row, path) in found:
            raise CheckpointError(f"{path}: {token!r:.80} and {found[row]!r:.80} share a row", hint=_AGAIN)
        found[row] = token
    return found


def _added_beside(folder: Path, names: set[str]) -> dict[int, Any]:
    """Return the tokens that were added to a vocabulary, from the files beside it."""
    found: dict[int, Any] = {}
    listed, settings = (folder / name for name in _ADDED)
    if listed.name in names:
        found |= {_row(row, listed): token for token, row in read_json(listed).items()}
    decoder = read_json(settings).get("added_tokens_decoder") if settings.name in names else None
    for row, token in (decoder if isinstance(decoder, dict) else {}).items():
        if row.isdecimal() and isinstance(token, dict):
            found[_row(int(row) if len(row) < 20 else row, settings)] = token.get("content")
    return found


def _table(vocabulary: Mapping[int, Any], added: Mapping[int, Any], kind: str, path: Path) -> TokenTable:
    found = {**vocabulary, **added}
    if any(not isinstance(token, str) for token in found.values()):
        raise CheckpointError(f"{path}: a token is no text", hint=_AGAIN)
    if not found:
        raise CheckpointError(f"{path}: there is no token in it", hint=_AGAIN)
    tokens = tuple(found.get(row) for row in range(max(found) + 1))
    return TokenTable(tokens, kind, frozenset(added))


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter of byte-level tokens stands for, as GPT-2 chose them."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}
