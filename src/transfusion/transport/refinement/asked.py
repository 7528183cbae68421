"""What a language model was asked: texts, and its answers to them, token by token, in a file.

An answer is the distribution of the next token: the most likely tokens that hold nearly all of the mass, and
the rest as one number. The file is all of a fine-tune that a refinement needs. It can be made where the
fine-tune is, and serve every new base.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Required

import torch
from pydantic import Field
from rich.text import Text
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import TypedDict

from transfusion.errors import DataError, listing
from transfusion.files.publishing import write_tensors
from transfusion.files.tokenizer_files import TokenTable
from transfusion.runtime.shown import Shown
from transfusion.runtime.untrusted_files import validate
from transfusion.transport.refinement.inputs import SYNTHETIC

FORMAT, HEADER, TOKENS = "transfusion answers 1", "answers", "tokens"
MASS, MOST = 0.99, 256
"""The mass that the likely tokens of an answer hold, and the most of them."""
AT_ONCE = 1 << 22
"""The most logits that are shortened at a time."""
ROUNDING = 1e-3
"""By how much a log-probability may be above 0."""
PLAIN, RECOMBINED, GIVEN = "plain", "recombined", "given"
"""The texts to learn from: passages and written texts, the same in pieces, and the user's own."""
LEARNED = (PLAIN, RECOMBINED, GIVEN)
_PARTS = ("ids", "counts", "likely", "shares", "chosen", "by_base")
_NAMED = ("finetuned", "base", "label", "shapes")
_AGAIN = "make them again by `transfusion ask`"


class _About(TypedDict, total=False):
    """What a file says of who was asked; what was asked of B says less."""

    finetuned: str
    base: str
    label: str
    shapes: dict[str, Any]
    change: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tokens: Annotated[int, Field(ge=1)] | None
    inputs: Required[list[str]]
    texts: dict[str, Annotated[list[int], Field(min_length=2, max_length=2)]]
    latents: int


class Wanted(NamedTuple):
    """Answers to some texts, with as many likely tokens at every place as at the largest."""

    likely: Tensor
    """Tokens (texts, places, likely)."""
    shares: Tensor
    """Their log-probabilities; minus infinity where there are fewer."""
    rest: Tensor
    """The log-probability of all other tokens together (texts, places)."""
    known: Tensor
    """Whether there is an answer (texts, places)."""
    spans: Tensor | None = None
    """Pieces of which only the whole probability is known: the text, the first token, and the one after the
    last (pieces, 3).
    """
    of_spans: Tensor | None = None
    """Their log-probabilities (pieces)."""
    groups: Tensor | None = None
    """For every token its group, if answers name groups of tokens (vocabulary)."""


@dataclass(frozen=True)
class Answers:
    """Texts of one kind, and the answers to them."""

    ids: Tensor
    """Tokens (texts, tokens)."""
    counts: Tensor
    """The number of likely tokens of every answer (texts, tokens); 0 where there is none."""
    likely: Tensor
    """The likely tokens of all answers (entries), the likeliest first."""
    shares: Tensor
    """Their log-probabilities (entries)."""
    chosen: Tensor | None = None
    """The log-probability of every token after those before it (texts, tokens); 0 for the first."""
    by_base: Tensor | None = None
    """The same by the base of the fine-tune."""
    spans: Tensor | None = None
    """Pieces of texts of which only the whole probability is known (pieces, 3); see `Wanted`."""
    of_spans: Tensor | None = None
    groups: Tensor | None = None
    """For every token of the vocabulary the group that answers name; None if they name tokens."""

    @cached_property
    def _starts(self) -> Tensor:
        ends = self.counts.flatten().cumsum(0, dtype=torch.int64).reshape(self.counts.shape)
        return ends - self.counts  # (texts, tokens)

    def of(self, texts: Tensor) -> Wanted:
        """Return the answers to some texts, given by their numbers."""
        counts, starts = self.counts[texts], self._starts[texts]
        widest = torch.arange(max(1, int(counts.max())))
        filled = widest < counts[..., None]  # (texts, places, likely)
        places = torch.where(filled, starts[..., None] + widest, 0)
        empty = not len(self.likely)
        likely = places if empty else torch.where(filled, self.likely[places].long(), 0)
        shares = self.shares[places].float() if not empty else torch.zeros(places.shape)
        shares = shares.masked_fill(~filled, -torch.inf)
        rest = (1 - shares.exp().sum(-1)).clamp(min=1e-6).log()
        if self.spans is None or self.of_spans is None:
            return Wanted(likely, shares, rest, counts > 0)
        places = torch.full((len(self.ids),), -1)
        places[texts] = torch.arange(len(texts))  # a text that is there twice counts once
        some = places[self.spans[:, 0]] >= 0
        spans = torch.cat([places[self.spans[some, :1]], self.spans[some, 1:]], 1)
        return Wanted(likely, shares, rest, counts > 0, spans, self.of_spans[some], self.groups)

    def within(self, places: int | None) -> Answers:
        """Return the answers to the first so many tokens of every text."""
        if places is None or places >= self.ids.shape[1]:
            return self
        kept = (torch.arange(self.ids.shape[1]) < places).expand_as(self.counts)
        entries = kept.flatten().repeat_interleave(self.counts.flatten())
        chosen, by_base = (one if one is None else one[:, :places] for one in (self.chosen, self.by_base))
        return replace(
            self,
            ids=self.ids[:, :places],
            counts=self.counts[:, :places],
            likely=self.likely[entries],
            shares=self.shares[entries],
            chosen=chosen,
            by_base=by_base,
        )

    def count(self, texts: Tensor) -> int:
        """Return the number of answers to some texts."""
        count = int((self.counts[texts] > 0).sum())
        return count if self.spans is None else count + int(torch.isin(self.spans[:, 0], texts).sum())

    @property
    def excess(self) -> Tensor | None:
        """How much likelier every token is to the fine-tune than to its base, as a logarithm."""
        if self.chosen is None or self.by_base is None:
            return None
        return self.chosen.float() - self.by_base.float()


def shortened(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts (texts, tokens) of likely tokens, these (entries), and their log-probabilities."""
    vocabulary, counts, likely, shares = logits.shape[-1], [], [], []
    for some in torch.split(logits.reshape(-1, vocabulary), max(1, AT_ONCE // vocabulary)):
        share, token = some.float().log_softmax(-1).topk(min(MOST, vocabulary))  # (places, likely)
        kept = share > -torch.inf
        if vocabulary > MOST:
            kept &= share.exp().cumsum(-1) - share.exp() < MASS
        counts.append(kept.sum(-1).int().cpu())
        likely.append(token[kept].int().cpu())
        shares.append(share[kept].half().cpu())
    return torch.cat(counts).reshape(logits.shape[:-1]), torch.cat(likely), torch.cat(shares)


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of a model that was asked, for models that have others."""

    table: TokenTable
    begin: int | None = None
    """The token before a text."""
    ends: Sequence[int] = ()
    """The tokens that end a text."""


@dataclass(frozen=True, repr=False)
class Asked(Shown):
    """Answers by kind of texts: those to learn from, and those that are held out."""

    learned: Mapping[str, Answers]
    held_out: Mapping[str, Answers]
    about: Mapping[str, Any]
    """Who was asked, with fingerprints; descriptions of the texts; the vocabulary."""
    tokens: OwnTokens | None = None
    """The tokens of the texts, if the model has a tokenizer."""

    def __rich__(self) -> Text:
        shapes = self.about["texts"].values()
        texts, tokens = sum(count for count, _ in shapes), sum(count * length for count, length in shapes)
        return Text(f"{self.about['label']} answered {texts} texts of {tokens:,} tokens")

    def within(self, places: int | None) -> Asked:
        """Return the answers to the first so many tokens of every text."""
        learned, held_out = (
            {kind: one.within(places) for kind, one in several.items()}
            for several in (self.learned, self.held_out)
        )
        return replace(self, learned=learned, held_out=held_out)

    def save(self, path: Path) -> None:
        """Write the answers."""
        tensors = {
            f"{group}.{kind}.{part}": value.contiguous()
            for group, several in (("learn", self.learned), ("held", self.held_out))
            for kind, one in several.items()
            for part in _PARTS
            if (value := getattr(one, part)) is not None
        }
        header = {HEADER: json.dumps({"format": FORMAT, **self.about})}
        if (own := self.tokens) is not None:
            table = [own.table.kind, own.table.tokens, sorted(own.table.literal)]
            header[TOKENS] = json.dumps([table, own.begin, list(own.ends)])
        write_tensors(path, tensors, header)

    @classmethod
    def load(cls, path: Path) -> Asked:
        """Read answers; refuse a file that holds none."""
        with reading_answers(path, FORMAT) as (file, about):
            tokens = file.metadata().get(TOKENS)
            own = None if tokens is None else _own_tokens(json.loads(tokens))
            groups: dict[str, dict[str, dict[str, Tensor]]] = {"learn": {}, "held": {}}
            for name in file.keys():  # noqa: SIM118
                group, kind, part = name.split(".")
                groups[group].setdefault(kind, {})[part] = file.get_tensor(name)
            learned, held_out = (
                {kind: Answers(**parts) for kind, parts in several.items()} for several in groups.values()
            )
        every = (*learned.values(), *held_out.values())
        known = PLAIN in learned and SYNTHETIC in held_out and learned.keys() <= set(LEARNED)
        size = about.get("tokens") if own is None else len(own.table.tokens)
        if not (known and all(_are_whole(one, size) for one in every)):
            raise DataError(f"{path}: the answers do not fit the texts", hint=_AGAIN)
        return cls(learned, held_out, about, own)


@contextmanager
def reading_answers(path: Path, format: str | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file of answers, and read who was asked; refuse another file, and errors within the block.

    ``format`` is that of the answers; None for any.
    """
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            known = about.pop("format", None) if isinstance(about, dict) else None
            if not isinstance(known, str) or not known.startswith("transfusion "):
                raise DataError(
                    f"{path} holds no answers of a fine-tune", hint="`transfusion ask` makes such a file"
                )
            if format not in (None, known):
                raise DataError(f"{path} holds answers of another kind of model", hint=_AGAIN)
            schema: Any = _About
            yield file, validate(about, schema, path, hint=_AGAIN, error=DataError)
    except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path}: these answers cannot be read ({error})", hint=_AGAIN) from error


def require_named(about: Mapping[str, Any], path: Path) -> None:
    """Refuse answers that do not say whose they are."""
    if absent := [name for name in _NAMED if name not in about]:
        raise DataError(f"{path}: these answers do not say {listing(absent)}", hint=_AGAIN)


def _own_tokens(info: Any) -> OwnTokens:
    (kind, tokens, literal), begin, ends = info
    rows = {*literal, *ends, *([] if begin is None else [begin])}
    if not all(one is None or isinstance(one, str) for one in tokens) or rows - {*range(len(tokens))}:
        raise ValueError("the tokens are none of a tokenizer")
    return OwnTokens(TokenTable(tuple(tokens), str(kind), frozenset(literal)), begin, ends)


def _are_whole(answers: Answers, size: int | None) -> bool:
    """Whether the parts of answers fit each other, and have so many tokens."""
    ids, counts, likely, shares = answers.ids, answers.counts, answers.likely, answers.shares
    size = size or torch.iinfo(torch.int32).max
    whole = (ids, counts, likely)
    if ids.ndim != 2 or not ids.numel() or counts.shape != ids.shape or likely.ndim != 1:
        return False
    if any(one.is_floating_point() or int(one.min()) < 0 for one in whole if one.numel()):
        return False
    if len(likely) != int(counts.sum(dtype=torch.int64)) or shares.shape != likely.shape:
        return False
    likelihoods = [one for one in (answers.chosen, answers.by_base) if one is not None]
    return (
        answers.chosen is not None
        and all(one.numel() == 0 or int(one.max()) < size for one in (ids, likely))
        and all(one.shape == ids.shape for one in likelihoods)
        and all(bool((one <= ROUNDING).all()) for one in (shares, *likelihoods))
    )
