"""Answers in the tokens of another tokenizer: texts are what two tokenizers have in common.

Every text is written in B's tokens. Where both tokenizers have a boundary at the same place, the next token
is compared by groups: a token that only one of them has counts as the longest common token that it begins
with. Up to the next common boundary, a piece that is not one token in both keeps its probability as a whole,
the product of those of A's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from transfusion.errors import MismatchError
from transfusion.files.tokenizer_files import PIECES
from transfusion.model.vocabulary_map import VocabularyMap
from transfusion.runtime.progress import phase
from transfusion.transport.refinement.asked import Answers, Asked, OwnTokens

NONE = -1


@dataclass
class _Text:
    """One text in B's tokens, and the boundaries that it has in both tokenizers."""

    ids: list[int] = field(default_factory=list)
    boundaries: list[tuple[int, int]] = field(default_factory=list)
    """After how many tokens of A, and of B."""
    loose: set[tuple[int, int]] = field(default_factory=set)
    """Boundaries before a space that only one of the tokenizers writes."""


class Translation:
    """From A's tokens to B's."""

    def __init__(
        self, a: OwnTokens, b: OwnTokens, encode: Callable[[str], list[int]], longest: int | None = None
    ) -> None:
        """``encode`` returns B's tokens of a text, without special tokens; ``longest`` is the most that B
        reads.
        """
        self.a, self.b, self.encode, self.longest = a, b, encode, longest
        known = VocabularyMap.between(a.table, b.table)
        if not known.comparable:
            raise MismatchError(
                f"tokens of these two kinds of tokenizers cannot be compared: {a.table.kind}, {b.table.kind}",
                hint="fine-tune B itself",
            )
        self.of_a, self.of_b = _pieces(a), _pieces(b)
        self.rows = np.full(len(a.table.tokens), NONE)  # B's row of every token of A
        there = known.rows >= 0
        self.rows[known.rows[there]] = np.flatnonzero(there)
        for end in a.ends:
            self.rows[end] = b.ends[0] if b.ends else NONE
        self.groups_of_a, self.groups_of_b = self._groups()

    def _groups(self) -> tuple[np.ndarray, Tensor]:
        """Return the groups of A's tokens, or `NONE`, and of B's; each has the number of A's common token."""
        common = np.flatnonzero(self.rows != NONE)
        texts = {text: row for row in common.tolist() if (text := self.of_a[row])}

        def group(text: bytes | None) -> int:
            starts = (text[:length] for length in range(len(text or b""), 0, -1)) if text else ()
            return next((texts[start] for start in starts if start in texts), NONE)

        of_a, of_b = (np.array([group(text) for text in several]) for several in (self.of_a, self.of_b))
        of_b[self.rows[common]] = common
        of_a[common] = of_b[self.rows[common]]  # a token that is there twice has one group
        return of_a, torch.from_numpy(np.where(of_b == NONE, len(of_a), of_b))

    def text(self, ids: Sequence[int]) -> _Text:
        """Write a text in B's tokens, up to the first piece that B cannot write."""
        made, place = _Text(), 0
        starts = ids[0] == self.a.begin or ids[0] in self.a.ends
        if self.b.begin is not None:
            made.ids.append(self.b.begin)
        made.boundaries.append((int(starts), len(made.ids)))
        place = int(starts)
        while place < len(ids):
            if self.of_a[ids[place]] is None:  # a special token
                if (row := int(self.rows[ids[place]])) != NONE:
                    made.ids.append(row)
                place += 1
                made.boundaries.append((place, len(made.ids)))
                continue
            stop = next((at for at in range(place, len(ids)) if self.of_a[ids[at]] is None), len(ids))
            if not self._piece(made, ids, place, stop):
                break
            place = stop
        while self.longest is not None and made.boundaries[-1][1] > self.longest:
            made.boundaries.pop()
        made.ids = made.ids[: self.longest]
        return made

    def _piece(self, made: _Text, ids: Sequence[int], start: int, stop: int) -> bool:
        """Add a part of a text that has no special tokens; False if it cannot be written in whole."""
        parts = [self.of_a[id] or b"" for id in ids[start:stop]]
        whole, spaced = b"".join(parts), self.a.table.kind == PIECES and parts[0].startswith(b" ")
        whole = whole[int(spaced) :]
        try:
            text = whole.decode()
        except UnicodeDecodeError as error:
            text = whole[: error.start].decode()
        found = self.encode(text)
        pieces = [self.of_b[id] for id in found]
        written = b"".join(one or b"" for one in pieces)
        extra = len(written) - len(text.encode())
        if None in pieces or extra not in (0, 1) or written[extra:] != text.encode():
            return False
        ends_of_a = np.cumsum([len(one) for one in parts]) - int(spaced)
        ends_of_b = np.cumsum([len(one or b"") for one in pieces]) - extra
        first = made.boundaries[-1]
        if spaced or extra:
            made.loose.add(first)
        both, at_a, at_b = np.intersect1d(ends_of_a, ends_of_b, return_indices=True)
        begun = len(made.ids)
        made.ids += found
        made.boundaries += [
            (start + int(i) + 1, begun + int(j) + 1)
            for end, i, j in zip(both, at_a, at_b, strict=True)
            if end > 0
        ]
        return len(text.encode()) == len(whole)

    def answers(self, given: Answers) -> Answers:
        """Return the answers to the same texts in B's tokens."""
        starts = (given.counts.flatten().cumsum(0, dtype=torch.int64) - given.counts.flatten()).reshape(
            given.counts.shape
        )
        chosen = given.chosen
        assert chosen is not None
        texts = [self.text(row) for row in given.ids.tolist()]
        width = max(1, *(len(one.ids) for one in texts))
        ids = torch.zeros(len(texts), width, dtype=torch.int32)
        counts = torch.zeros(len(texts), width, dtype=torch.int32)
        likely: list[Tensor] = []
        shares: list[Tensor] = []
        spans: list[tuple[int, int, int]] = []
        of_spans: list[float] = []
        for number, text in enumerate(texts):
            ids[number, : len(text.ids)] = torch.tensor(text.ids, dtype=torch.int32)
            for before, after in zip(text.boundaries, text.boundaries[1:], strict=False):
                (i, j), (stop_a, stop_b) = before, after
                if i < 1 or j < 1 or stop_b == j or stop_a == i:
                    continue
                of_a, of_b = self.groups_of_a[int(given.ids[number, i])], self.groups_of_b[text.ids[j]]
                compared = before not in text.loose and of_a == of_b
                if compared:
                    first = int(starts[number, i - 1])
                    some = slice(first, first + int(given.counts[number, i - 1]))
                    groups, share = self._grouped(given.likely[some], given.shares[some])
                    counts[number, j - 1] = len(groups)
                    likely.append(groups)
                    shares.append(share)
                if not compared or stop_a - i > 1 or stop_b - j > 1:
                    spans.append((number, j, stop_b))
                    of_spans.append(float(chosen[number, i:stop_a].float().sum()))
        return Answers(
            ids,
            counts,
            torch.cat(likely) if likely else torch.zeros(0, dtype=torch.int32),
            torch.cat(shares) if shares else torch.zeros(0, dtype=torch.float16),
            spans=torch.tensor(spans, dtype=torch.int64).reshape(-1, 3),
            of_spans=torch.tensor(of_spans),
            groups=self.groups_of_b,
        )

    def _grouped(self, likely: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return the groups of likely tokens, the likeliest first, and their log-probabilities."""
        known = self.groups_of_a[likely.numpy()]
        there = known != NONE
        groups, members = np.unique(known[there], return_inverse=True)
        found = np.bincount(members, shares.float().exp().numpy()[there], len(groups))
        order = np.argsort(-found)
        share = torch.from_numpy(found[order]).clamp(max=1).log()
        return torch.from_numpy(groups[order]).int(), share.to(shares.dtype)


def _pieces(of: OwnTokens) -> list[bytes | None]:
    """Return the bytes of every token in a text; None for tokens that stand in no text."""
    texts, special = of.table.texts(), {of.begin, *of.ends}
    return [
        text if isinstance(text, bytes) and row not in special else None for row, text in enumerate(texts)
    ]


def translated(asked: Asked, translation: Translation, tokens: int) -> Asked:
    """Return what a fine-tune was asked in the tokens of B, which has so many."""
    with phase("writing the answers in B's tokens"):
        learned, held_out = (
            {kind: translation.answers(one) for kind, one in several.items()}
            for several in (asked.learned, asked.held_out)
        )
    if not all(
        any(one.count(torch.arange(len(one.ids))) for one in group.values()) for group in (learned, held_out)
    ):
        raise MismatchError(
            f"B's tokenizer writes none of the texts of {asked.about['label']} as they are: no answers can be"
            " compared",
            hint="fine-tune B itself",
        )
    about: Mapping[str, object] = {**asked.about, "tokens": tokens}
    return replace(asked, learned=learned, held_out=held_out, about=about)
