"""Texts: passages of a corpus that ships with the package, and texts that language models generate.

Texts are cut into windows of one length. Nothing is padded: activations of padding would count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import reason_of
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.running.probes.inputs import plain_experts
from transfusion.running.probes.probed_model import ProbedModel, seeded_generator
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import Advance, phase

MAX_UNKNOWN = 0.25
"""Windows with a larger share of unknown tokens are left out."""
GOLDEN = 0.618
"""The fractional parts of its multiples spread the offsets of windows evenly."""


@cache
def corpus() -> dict[str, tuple[str, ...]]:
    """Return the passages that ship with the package, by file."""
    found = (one for one in files("transfusion.running.probes").joinpath("corpus").iterdir())
    texts = {one.name: one.read_text(encoding="utf-8") for one in found if one.name.endswith(".txt")}
    return {
        name: tuple(passage.strip("\n") for passage in text.split("\n\n") if passage.strip())
        for name, text in sorted(texts.items())
    }


def synthetic_texts(subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    """Generate ``count`` texts, under the library's names."""
    ids, about = _drawn(subject, count, seed)
    return text_inputs(subject, ids), about


def text_inputs(subject: ProbedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return tokens under the library's names; an encoder and its decoder get different texts."""
    names = subject.template()
    if "input_ids" not in names:
        return {"decoder_input_ids": _for_a_decoder(subject, ids)}
    inputs = {"input_ids": ids}
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = _for_a_decoder(subject, ids.roll(1, 0))
    if "token_type_ids" in names:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def _for_a_decoder(subject: ProbedModel, ids: Tensor) -> Tensor:
    """Return the texts shifted by one: the start token, then all tokens but the last."""
    start = subject.token("decoder_start", "bos", "pad", "eos") or 0
    begun = bool((ids[:, 0] == start).all())
    return ids if begun else torch.cat([torch.full((len(ids), 1), start), ids[:, :-1]], 1)


def written_texts(subject: ProbedModel, count: int, *, reads: bool) -> int:
    """Return how many texts the model writes itself; ``reads`` if it has a tokenizer for others."""
    return 0 if not subject.writes else count - count // 2 if reads else count


def _drawn(subject: ProbedModel, count: int, seed: int) -> tuple[Tensor, str]:
    """Return tokens (count, length), and a description."""
    tokenizer, reason = tokenizer_of(subject)
    own = written_texts(subject, count, reads=tokenizer is not None)
    read = count - own
    parts, about = [], []
    if tokenizer is not None and read:
        try:
            cut = windows(corpus().values(), tokenizer, subject, read, seed)
            parts.append(cut[torch.arange(read) % len(cut)])
            about.append(f"{read} passages of the bundled corpus")
        except ValueError as error:
            reason = str(error)
    if not parts and read:
        parts.append(frequent_tokens(subject, read, seeded_generator(seed, 3)))
        about.append(f"{read} sequences of random frequent tokens ({reason})")
    if own:
        parts.append(generate_texts(subject, own, seeded_generator(seed, 4)))
        about.append(f"{own} sequences that the model wrote" + ("" if tokenizer else f" ({reason})"))
    mixed = torch.randperm(count, generator=seeded_generator(seed, 5))
    return torch.cat(parts)[mixed], " and ".join(about)


def windows(
    groups: Iterable[Sequence[str]], tokenizer: Tokenizer, subject: ProbedModel, count: int, seed: int
) -> Tensor:
    """Cut texts into at most ``count`` windows; the texts of a group are joined.

    Groups are cut from their first token on, and again from later ones if there are too few windows. Texts
    that the model cannot read raise a ValueError.
    """
    room = subject.length - len(tokenizer.before) - len(tokenizer.after)
    if room < 1:
        raise ValueError(f"the model has {subject.length} positions, too few for a text")
    streams = [[id for text in group for id in tokenizer.encode(text)] for group in groups]
    highest = max((id for stream in streams for id in stream), default=0)
    if highest >= subject.vocabulary:
        raise ValueError(f"the tokenizer has token {highest}, and the model knows {subject.vocabulary}")
    cut: list[list[int]] = []
    for offset in sorted(range(room), key=lambda one: one * GOLDEN % 1):
        if len(cut) >= count:
            break
        cut += _known(streams, offset, room, tokenizer.unknown)
    if not cut:
        raise ValueError(f"there is no text of {room} tokens that the tokenizer knows")
    order = torch.randperm(len(cut), generator=seeded_generator(seed, 6)).tolist()
    return torch.tensor([tokenizer.framed(cut[number]) for number in order[:count]])


def _known(streams: list[list[int]], offset: int, room: int, unknown: int | None) -> list[list[int]]:
    """Return the windows from an offset on, without those that have many unknown tokens."""
    cut = [
        stream[start : start + room]
        for stream in streams
        for start in range(offset, len(stream) - room + 1, room)
    ]
    return [ids for ids in cut if unknown is None or ids.count(unknown) <= MAX_UNKNOWN * room]


# ── Texts without a corpus: generated by the model itself, or random frequent tok… ──────────────────


AT_ONCE = 256
"""Texts that are generated in parallel: every step reads all weights."""
TOGETHER = 40
"""Of these, texts in one pass; always as many, so that digits do not depend on the number of threads."""

WORDPIECE = {30522: 999, 28996: 106, 119547: 106}
"""The published vocabularies of BERT: size, and index of the first word. Their configurations name no special
token but the padding.
"""
CLS, SEP = 101, 102


def generate_texts(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """Sample texts (count, length) from a language model at temperature 1, without special tokens."""
    rounds = range(0, count, AT_ONCE)
    with phase("writing texts", len(rounds) * (subject.length - 1)) as advance:
        firsts = (_first(subject, min(AT_ONCE, count - start), generator) for start in rounds)
        return torch.cat([_continued(subject, first, generator, advance) for first in firsts])


def _first(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """Return the token that starts a text; a frequent one, if the configuration names none."""
    begin = subject.token("bos", "eos")
    return ordinary_tokens(subject, (count, 1), generator) if begin is None else torch.full((count, 1), begin)


def _continued(subject: ProbedModel, ids: Tensor, generator: torch.Generator, advance: Advance) -> Tensor:
    forbidden = torch.tensor(sorted(subject.special | subject.unknown), dtype=torch.int64)
    parts = [_Part(subject, some) for some in torch.split(ids, TOGETHER)]
    with plain_experts(subject.module):
        while ids.shape[1] < subject.length:
            subject.each(lambda number: parts[number].read(), len(parts))
            logits = torch.cat([part.logits for part in parts])
            logits[:, forbidden] = -torch.inf
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn], 1)
            advance("tokens of texts that the model writes")
            for part, some in zip(parts, torch.split(drawn, TOGETHER), strict=True):
                part.ids = torch.cat([part.ids, some], 1)
    return ids


@dataclass
class _Part:
    """Texts that go through the model together, and what it remembers of them."""

    subject: ProbedModel
    ids: Tensor
    past: Any = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the next token."""

    def read(self) -> None:
        """Read the last token, or all of them if nothing is remembered."""
        new = self.ids if self.past is None else self.ids[:, -1:]
        with torch.no_grad():
            output = self.subject.module(
                input_ids=new, past_key_values=self.past, use_cache=True, return_dict=True
            )
        self.past = getattr(output, "past_key_values", None)
        self.logits = output.logits[:, -1, : self.subject.vocabulary].float()


def frequent_tokens(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """Draw frequent tokens (count, length), between the special tokens that enclose a text."""
    before, after = _around(subject)
    body = ordinary_tokens(subject, (count, subject.length - len(before) - len(after)), generator)
    around = [torch.tensor(ids, dtype=torch.int64).expand(count, -1) for ids in (before, after)]
    return torch.cat([around[0], body, around[1]], 1)


def ordinary_tokens(subject: ProbedModel, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw tokens by Zipf's law: most vocabularies are sorted by frequency."""
    special = {*subject.special, *subject.unknown, *(id for ids in _around(subject) for id in ids)}
    start = WORDPIECE.get(subject.vocabulary, 0)
    ids = torch.tensor([id for id in range(start, subject.vocabulary) if id not in special])
    flattened = len(ids) / 100  # the first tokens are often single letters or bytes
    likely = 1 / (torch.arange(len(ids), dtype=torch.float64) + 1 + flattened)
    drawn = torch.multinomial(likely, shape[0] * shape[1], replacement=True, generator=generator)
    return ids[drawn].reshape(shape)


def _around(subject: ProbedModel) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text that the configuration names."""
    last = subject.vocabulary - 1
    begin, end = subject.token("bos", "cls"), subject.token("eos", "sep")
    if subject.model.family.library == "open_clip":
        pooled = subject.settings.get("eos_id") if subject.settings.get("pool_type") == "eos" else None
        return [last - 1], [last if pooled is None else int(pooled)]
    if subject.model.family.name.startswith("clip") and end in (2, None):
        return [last - 1], [last]  # older configurations of CLIP name other tokens than its tokenizer uses
    if begin is None and end is None and subject.vocabulary in WORDPIECE:
        return [CLS], [SEP]
    ends = end is not None and end not in (begin, subject.token("pad"))
    return [begin] if begin is not None else [], [end] if ends and end is not None else []


# ── The tokenizer in a model's folder, or the one that comes with open_clip ─────────────────────────


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

    before, after = _frame(encode(_SENTENCE), list(made(_SENTENCE)["input_ids"]))
    return Tokenizer(encode, before, after, made.unk_token_id)


def _frame(alone: list[int], framed: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


# ── Tokenizers that tell where their tokens end, so that texts can be compared in… ──────────────────


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
