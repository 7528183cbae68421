"""Tokens that a fine-tune added, for a B with another vocabulary than A.

The rows of such tokens cannot follow A's. Each is written as a sparse combination of the fine-tune's own rows
of common tokens (orthogonal matching pursuit), and B gets the same combination of its rows of these tokens.
The tokens get the first rows of B that have no token, and B's tables grow if there are too few.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import MismatchError
from transfusion.files.tensor_content import row_blocks
from transfusion.files.tokenizer_files import TokenTable, tokens_in
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY, VocabularyMap
from transfusion.runtime.untrusted_files import path_inside, read_json

ATOMS = 64
"""The largest number of common tokens that a new one is composed of."""
CANDIDATES = 1024
"""The number of common tokens to choose from: those whose rows are nearest to the new one."""
EXACT = 1e-6
"""The share of a row's length that may be left."""
TOKENIZER = "tokenizer.json"


def added_tokens(tuned: Model, base: Model) -> dict[int, str]:
    """Return the tokens that a fine-tune has in rows in which its base has none, as far as both are known."""
    tables = []
    for model in (tuned.original or tuned, base.original or base):
        table, _ = tokens_in(model.tokenizer_folder)
        if table is None:
            return {}
        tables.append(table.resized(model.architecture.sizes[VOCABULARY]).tokens)
    ours, known = tables
    return {
        row: token
        for row, token in enumerate(ours)
        if token is not None and (row >= len(known) or known[row] is None)
    }


@dataclass(frozen=True, eq=False)
class ComposedTokens:
    """New tokens of a fine-tune, and their rows in B."""

    tuned: Model
    """The fine-tune, in B's vocabulary."""
    onto: Model
    vocabulary: VocabularyMap
    stored: Tensor
    """The rows of the tokens in the fine-tune's own tables."""
    tokens: tuple[str, ...]
    first: int
    """The row of the first one in B."""
    _rows: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tuned: Model, base: Model, onto: Model) -> ComposedTokens:
        """Find rows in B for the tokens that a fine-tune added; refuse tokens that are not known."""
        vocabulary, new = base.vocabulary, added_tokens(tuned, base)
        table, _ = tokens_in(onto.tokenizer_folder)
        folder = onto.tokenizer_folder
        assert vocabulary is not None
        if not new:
            raise MismatchError(
                f"{tuned.label} has rows for more tokens than its base, and no tokenizer that names them",
                hint='put its tokenizer.json into its folder, or drop them with `new_tokens="drop"`',
            )
        if table is None or folder is None or not (folder / TOKENIZER).is_file():
            raise MismatchError(
                f"{onto.label} has no {TOKENIZER} that new tokens could be added to",
                hint='put it into its folder, or drop the tokens with `new_tokens="drop"`',
            )
        if len(table.tokens) > vocabulary.size:
            raise MismatchError(
                f"{onto.label} has more tokens than rows: {len(table.tokens)} and {vocabulary.size}",
                hint='drop the new tokens with `new_tokens="drop"`',
            )
        there = _spellings(table)
        kept = {row: token for row, token in new.items() if token not in there}
        return cls(tuned, onto, vocabulary, torch.tensor([*kept]), tuple(kept.values()), len(table.tokens))

    @property
    def growth(self) -> int:
        """The number of rows that B's tables lack."""
        return max(0, self.first + len(self.tokens) - self.vocabulary.size)

    def covers(self, name: str) -> bool:
        """Whether a tensor has a row for every token."""
        layout = self.tuned.architecture.tensors.get(name)
        return layout is not None and layout.dims_with(VOCABULARY) == (0,)

    def rows(self, name: str, arrived: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows of all new tokens in B's basis; ``arrived`` returns rows of the output."""
        if name not in self._rows:
            assert self.tuned.original is not None
            wanted = self.tuned.original.read(name, self.stored).double()
            self._rows[name] = wanted if wanted.ndim == 1 else self._composed(name, wanted, arrived)
        return self._rows[name]

    def _composed(self, name: str, wanted: Tensor, arrived: Callable[[Tensor], Tensor]) -> Tensor:
        nearest = self._nearest(name, wanted)
        made = torch.zeros_like(wanted)
        for place, candidates in enumerate(nearest):
            atoms = self.tuned.read(name, candidates).double()
            chosen, shares = pursue(atoms, wanted[place])
            made[place] = shares @ arrived(candidates[chosen]).double()
        return made

    def _nearest(self, name: str, wanted: Tensor) -> list[Tensor]:
        """Return, for each new token, the rows of the common tokens that are nearest to it, in order."""
        common = torch.zeros(self.vocabulary.size, dtype=torch.bool)
        common[self.vocabulary.shared] = True
        likeness = torch.full((len(wanted), self.vocabulary.size), -1.0, dtype=torch.float64)
        shape = (self.vocabulary.size, *wanted.shape[1:])
        for block in row_blocks(shape):
            rows = self.tuned.read(name, block).double()
            likeness[:, block] = (_directions(wanted) @ _directions(rows).T).abs()
        likeness[:, ~common] = -1.0
        count = min(CANDIDATES, int(common.sum()))
        return [one.topk(count).indices.sort().values for one in likeness]

    def tokenizer(self) -> str:
        """Return B's tokenizer.json with the new tokens in it."""
        folder = self.onto.tokenizer_folder
        own = (self.tuned.original or self.tuned).tokenizer_folder
        assert folder is not None
        assert own is not None
        whole = read_json(path_inside(folder, folder / TOKENIZER))
        known = _entries(read_json(path_inside(own, own / TOKENIZER))) if (own / TOKENIZER).is_file() else {}
        more = [
            {**_PLAIN, **known.get(token, {}), "id": self.first + place, "content": token}
            for place, token in enumerate(self.tokens)
        ]
        return json.dumps({**whole, "added_tokens": [*(whole.get("added_tokens") or []), *more]}, indent=2)


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


def _entries(whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return how a tokenizer.json treats its added tokens: the settings that are true or false."""
    listed = whole.get("added_tokens") or []
    return {
        one["content"]: {key: one[key] for key in _PLAIN if isinstance(one.get(key), bool)}
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("content"), str)
    }


def _spellings(table: TokenTable) -> set[str]:
    return {token for token in table.tokens if token is not None}


def _directions(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths.clamp(min=1e-12)


def pursue(atoms: Tensor, wanted: Tensor, most: int = ATOMS) -> tuple[Tensor, Tensor]:
    """Write a vector as a sparse combination of rows by orthogonal matching pursuit.

    Return the chosen rows and their factors: at most ``most`` rows, fewer if they leave almost nothing.
    """
    directions, left = _directions(atoms), wanted
    chosen: list[int] = []
    factors = torch.zeros(0, dtype=wanted.dtype)
    while len(chosen) < min(most, *atoms.shape):
        likeness = (directions @ left).abs()
        likeness[chosen] = -1.0
        chosen.append(int(likeness.argmax()))
        factors = torch.linalg.lstsq(atoms[chosen].T, wanted[:, None], driver="gelsd").solution[:, 0]
        left = wanted - factors @ atoms[chosen]
        if torch.linalg.vector_norm(left) <= EXACT * torch.linalg.vector_norm(wanted):
            break
    return torch.tensor(chosen, dtype=torch.int64), factors
