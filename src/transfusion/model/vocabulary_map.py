"""The vocabularies of two models, token by token: which row of A's tables a row of B's takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transfusion.architecture.layouts import Index
from transfusion.errors import listing
from transfusion.files.checkpoint import NOWHERE, RowSelection
from transfusion.files.tokenizer_files import BYTES, PIECES, TokenTable

VOCABULARY = "vocab"
"""The axis whose units are tokens, in every table."""
LEAST_SHARE = 0.5
"""The smallest share of common tokens that is accepted unless the user says otherwise."""
NEARLY_SAME = 0.95
"""From this share on, models of different shapes are given the same tokens; below it, the same characters."""
SHOWN = 8
"""How many dropped tokens are named."""


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """For each row of B's vocabulary the row of the same token in A's, or `NOWHERE`."""

    rows: Index
    source_size: int
    """The number of rows of A's tables."""
    source: str
    """The digest of A's tokens."""
    target: str
    """The digest of B's tokens."""
    tokens: tuple[int, int]
    """The number of tokens of A, and of B; rows for padding have none."""
    dropped: tuple[str, ...] = ()
    """The tokens of A that B lacks."""
    comparable: bool = True
    """Whether tokens of these two kinds of tokenizers can be compared."""
    kinds: tuple[str, str] = ("", "")
    folder: Path | None = None
    """The folder with B's tokenizer."""

    @classmethod
    def between(cls, a: TokenTable, b: TokenTable, folder: Path | None = None) -> VocabularyMap:
        """Compare two tables token by token; each has as many rows as the tables of its model."""
        counts = (sum(one is not None for one in a.tokens), sum(one is not None for one in b.tokens))
        digests, kinds = (a.digest, b.digest), (a.kind, b.kind)
        if a.tokens == b.tokens:
            same = np.arange(len(b.tokens))
            return cls(same, len(same), *digests, counts, kinds=kinds, folder=folder)
        names, wanted = _comparable_names(a, b)
        places: dict[object, int] = {}
        for row, name in enumerate(names):
            if name is not None:
                places.setdefault(name, row)
        rows = [NOWHERE if name is None else places.get(name, NOWHERE) for name in wanted]
        taken, comparable = set(rows), bool(places)
        dropped = tuple(t for row, t in enumerate(a.tokens) if t is not None and row not in taken)
        found = np.array(rows, dtype=np.int64)
        return cls(found, len(a.tokens), *digests, counts, dropped, comparable, kinds, folder)

    @property
    def size(self) -> int:
        """The number of rows of B's tables."""
        return len(self.rows)

    @property
    def is_identity(self) -> bool:
        """Whether every token has the same row in both."""
        return self.size == self.source_size and bool((self.rows == np.arange(self.size)).all())

    @cached_property
    def shared(self) -> Tensor:
        """The rows of B whose tokens A has too."""
        return torch.from_numpy(np.flatnonzero(self.rows != NOWHERE))

    @cached_property
    def unshared(self) -> frozenset[int]:
        """The rows of B that A has no row for."""
        return frozenset(np.flatnonzero(self.rows == NOWHERE).tolist())

    @property
    def common(self) -> int:
        """The number of tokens that both have."""
        return max(self.tokens) if self.is_identity else len(self.shared)

    @property
    def share(self) -> float:
        """The common tokens, as a share of the larger vocabulary."""
        return self.common / max(*self.tokens, 1)

    @property
    def nearly_same(self) -> bool:
        """Whether texts have about the same tokens in both, so that A can read those of B."""
        return self.share >= NEARLY_SAME

    @property
    def new(self) -> int:
        """The number of B's tokens that A lacks."""
        return self.tokens[1] - min(self.common, self.tokens[1])

    def selection(self, size: int, dim: int, fill: float = 0.0) -> RowSelection:
        """Return the rows in B's order of a tensor with ``size`` rows in A's; further rows follow at the end.

        A fine-tune may have more rows than A: those of tokens that it added.
        """
        further = torch.arange(self.source_size, size)
        return RowSelection(torch.cat([torch.from_numpy(self.rows), further]), dim, fill)

    def within_target(self) -> VocabularyMap:
        """Return the map from B to itself that leaves out the tokens which A lacks."""
        rows = np.where(self.rows == NOWHERE, NOWHERE, np.arange(self.size))
        return replace(self, rows=rows, source_size=self.size, source=self.target, dropped=())

    def row_of(self, row: int) -> int | None:
        """Return the row in B of a row of A."""
        found = self._rows_in_target.get(row)
        return None if found is None else int(found)

    @cached_property
    def _rows_in_target(self) -> dict[int, int]:
        return {int(row): place for place, row in enumerate(self.rows) if row != NOWHERE}

    def shared_logits(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs, of logits over the vocabulary only those of common tokens.

        Rows of tokens that a fine-tune added, at the end, are left out as well.
        """
        return {
            name: value.index_select(-1, self.shared)
            if "logits" in name and value.ndim >= 3 and value.shape[-1] >= self.size
            else value
            for name, value in outputs.items()
        }

    def about(self) -> dict[str, Any]:
        """Return plain data, for records."""
        return {
            "source": self.source,
            "target": self.target,
            "tokens": list(self.tokens),
            "common": self.common,
            "share": round(self.share, 6),
            "moved": not self.is_identity,
            "dropped": len(self.dropped),
            "dropped_first": list(self.dropped[:SHOWN]),
            "new": self.new,
        }


def describe_vocabulary(about: Mapping[str, Any]) -> str:
    """Return one line about two vocabularies, from the data that `VocabularyMap.about` returns."""
    if not about.get("moved"):
        return "the same tokens in the same rows"
    (of_a, of_b), dropped = about["tokens"], about["dropped"]
    text = f"{about['common']} tokens in common: {_percent(about['common'], of_a)} of A's {of_a},"
    text += f" {_percent(about['common'], of_b)} of B's {of_b}; rows are matched by token"
    if dropped:
        named = listing([repr(token) for token in about["dropped_first"]], SHOWN)
        more = f" and {dropped - SHOWN} more" if dropped > SHOWN else ""
        text += f"; dropped, because B lacks them: {named}{more}"
    return text + (f"; unchanged in B, because A lacks them: {about['new']}" if about["new"] else "")


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.0f} %" if share >= 99.95 or share < 0.05 else f"{share:.3g} %"


def _comparable_names(a: TokenTable, b: TokenTable) -> tuple[Sequence[object], Sequence[object]]:
    """Return what tokens are compared by: their spelling; across kinds, the bytes that they stand for."""
    if a.kind == b.kind:
        return a.tokens, b.tokens
    if {a.kind, b.kind} == {BYTES, PIECES}:
        return a.texts(), b.texts()
    return [None] * len(a.tokens), [None] * len(b.tokens)
