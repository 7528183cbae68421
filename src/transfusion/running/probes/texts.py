"""Texts: passages of a corpus that ships with the package, and texts that language models generate.

Texts are cut into windows of one length. Nothing is padded: activations of padding would count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.errors import reason_of
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.running.probes.inputs import placed, plain_experts
from transfusion.running.probes.probed_model import ProbedModel, seeded_generator
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import Advance, Pace, phase, warn

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


def synthetic_texts(subject: ProbedModel, count: int, seed: int) -> tuple[dict[str, Tensor], str]:
    """Generate ``count`` texts under the library's names, and describe them.

    They are passages of the corpus, or frequent tokens without a tokenizer; half of them, or all, are texts
    that the model writes itself, if it does.
    """
    tokenizer, reason = tokenizer_of(subject)
    read = (0 if tokenizer is None else count // 2) if subject.writes else count
    own = count - read  # texts that the model writes itself
    parts, about = [], []
    if tokenizer is not None and read:
        try:
            cut = windows(corpus().values(), tokenizer, subject, read, seed)
            parts.append(cut[torch.arange(read) % len(cut)])
            about.append(f"{read} passages of the bundled corpus")
        except ValueError as error:
            reason = str(error)
    if not parts:
        poor = "texts that it writes itself" if own else "random tokens, which say little about what it does"
        warn(f"{subject.model.label}: {reason}: its inputs are {poor}; give your own with `calibrate`")
    if not parts and read:
        parts.append(frequent_tokens(subject, read, seeded_generator(seed, 3)))
        about.append(f"{read} sequences of random frequent tokens ({reason})")
    if own:
        parts.append(generate_texts(subject, own, seeded_generator(seed, 4)))
        about.append(f"{own} sequences that the model wrote" + ("" if tokenizer else f" ({reason})"))
    mixed = torch.randperm(count, generator=seeded_generator(seed, 5))
    return text_inputs(subject, torch.cat(parts)[mixed]), " and ".join(about)  # (count, length)


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
    unknown = -1 if tokenizer.unknown is None else tokenizer.unknown
    for offset in sorted(range(room), key=lambda one: one * GOLDEN % 1):
        if len(cut) >= count:
            break
        for stream in streams:
            pieces = [stream[at : at + room] for at in range(offset, len(stream) - room + 1, room)]
            cut += [ids for ids in pieces if ids.count(unknown) <= MAX_UNKNOWN * room]
    if not cut:
        raise ValueError(f"there is no text of {room} tokens that the tokenizer knows")
    order = torch.randperm(len(cut), generator=seeded_generator(seed, 6)).tolist()
    return torch.tensor([tokenizer.framed(cut[number]) for number in order[:count]])


# ── without a corpus: written by the model itself, or random frequent tokens ─────────────────

AT_ONCE = 256
"""Texts that are generated in parallel: every step reads all weights."""
CACHE, CACHE_SHARE = 1 << 26, 0.1
"""The bytes of the KV cache of texts that are generated in parallel: a fixed part, a share of the weights."""
TOGETHER = 40
"""Of these, texts in one pass; always as many, so that digits do not depend on the number of threads."""


LONGEST, ENDLESS = 256, 128
"""The most tokens of a text whose length the model decides, and the tokens if it is not known how it ends
texts.
"""
ENDED = 0.9
"""The share of a model's texts that have ended by the length that is taken."""


def natural_length(subject: ProbedModel, seed: int) -> int:
    """Return how many tokens a language model's texts have until it ends most of them itself, or the most
    that are read.
    """
    most = longest_length(subject)
    if not subject.ends or most <= subject.length or chat_form(subject) is not None:
        return most
    written = generate_texts(replace(subject, window=most), TOGETHER, seeded_generator(seed, 9))
    ended = torch.isin(written[:, 1:], torch.tensor(subject.ends)).int()  # (texts, tokens)
    lengths = torch.where(ended.any(1), ended.argmax(1) + 2, most)
    return max(subject.length, int(lengths.float().quantile(ENDED)))


def longest_length(subject: ProbedModel) -> int:
    """Return the most tokens of a text whose length the model decides."""
    most = LONGEST if subject.ends else ENDLESS
    return max(subject.length, most if subject.positions is None else min(most, subject.positions))


@dataclass(frozen=True)
class ChatForm:
    """How a chat model's texts look: what stands before a question, and the tokens that mark turns."""

    opening: list[int]
    marks: frozenset[int]


def chat_form(subject: ProbedModel) -> ChatForm | None:
    """Return the form of a chat model's texts by its tokenizer's template; None if it has no usable one."""
    tokenizer, _ = tokenizer_of(subject)
    library = None if tokenizer is None else tokenizer.library
    if not getattr(library, "chat_template", None):
        return None
    assert library is not None
    question, answer = ({"role": role, "content": _SENTENCE} for role in ("user", "assistant"))
    try:
        turn, whole = (
            library.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
            for turns in ([question], [question, answer])
        )
    except Exception:  # a template may raise anything, and refuse any conversation
        return None
    opening = library(turn.partition(_SENTENCE)[0], add_special_tokens=False, verbose=False)["input_ids"]
    if not opening or _SENTENCE not in turn or max(opening) >= subject.vocabulary:
        return None
    ids = library(whole, add_special_tokens=False, verbose=False)["input_ids"]
    return ChatForm(list(opening), frozenset(ids) & frozenset(library.all_special_ids))


def generate_texts(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """Sample texts (count, length) from a language model at temperature 1.

    A text starts with the token that the configuration names, or with a frequent one. There are no special
    tokens, but for ends of texts where the length is the model's own; behind an end the next text begins.
    Where it is, half of a chat model's texts are conversations: it writes questions and answers them.
    """
    begin, parts = subject.token("bos", "eos"), []
    chat = None if subject.window is None else chat_form(subject)
    if chat is not None and len(chat.opening) < subject.length:
        talks = count // 2
        parts.append((torch.tensor(chat.opening).expand(talks, -1), chat.marks))
        count -= talks
    shape = count, 1
    first = ordinary_tokens(subject, shape, generator) if begin is None else torch.full(shape, begin)
    parts.append((first, frozenset()))
    most = _texts_at_once(subject)
    with phase(
        "writing texts", sum(-(-len(ids) // most) * (subject.length - ids.shape[1]) for ids, _ in parts)
    ) as advance:
        texts = [
            _continued(subject, some, generator, advance, marks)
            for ids, marks in parts
            for some in torch.split(ids, most)
            if len(some)
        ]
    return torch.cat(texts)


def _texts_at_once(subject: ProbedModel) -> int:
    """Return how many texts are written in parallel: what the KV cache holds of them stays small beside the
    weights.
    """
    known = subject.settings
    layers, heads, width = (
        next((known[name] for name in names if isinstance(known.get(name), int)), None)
        for names in (
            ("num_hidden_layers", "n_layer", "num_layers"),
            ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads"),
            ("hidden_size", "n_embd", "d_model"),
        )
    )
    if not (layers and heads and width):
        return AT_ONCE
    queries = known.get("num_attention_heads") or known.get("n_head") or heads
    of_head = known.get("head_dim") or -(-width // queries)
    weights = sum(one.numel() * one.element_size() for one in subject.module.parameters())
    of_text = 2 * layers * heads * of_head * subject.length * next(subject.module.parameters()).element_size()
    return max(1, min(AT_ONCE, int((CACHE + CACHE_SHARE * weights) / of_text)))


def _continued(
    subject: ProbedModel,
    ids: Tensor,
    generator: torch.Generator,
    advance: Advance,
    marks: frozenset[int] = frozenset(),
) -> Tensor:
    """Continue texts; those of a chat may have ``marks`` of turns, and go on behind them."""
    ends = torch.tensor([] if subject.window is None else subject.ends, dtype=torch.int64)
    begin = None if marks else subject.token("bos")
    forbidden = torch.tensor(
        sorted((subject.special - {*ends.tolist()} - marks) | subject.unknown), dtype=torch.int64
    )
    rows = torch.split(torch.arange(len(ids)), TOGETHER)  # of the texts that go through the model together
    caches: list[Any] = [None] * len(rows)
    logits = [torch.empty(0)] * len(rows)

    def read(part: int) -> None:
        """Read the last token of some texts, or all of them if there is no KV cache."""
        some = ids[rows[part]] if caches[part] is None else ids[rows[part], -1:]
        with torch.no_grad():
            given = placed(subject.module, {"input_ids": some})
            output = subject.module(**given, past_key_values=caches[part], use_cache=True, return_dict=True)
        caches[part] = getattr(output, "past_key_values", None)
        logits[part] = output.logits[:, -1, : subject.vocabulary].float().cpu()

    pace = Pace()
    with plain_experts(subject.module):
        while ids.shape[1] < subject.length:
            subject.each(read, len(rows))
            every = torch.cat(logits)  # (texts, vocabulary)
            every[:, forbidden] = -torch.inf
            following = torch.multinomial(every.softmax(-1), 1, generator=generator)
            if begin is not None and begin not in ends:
                following = torch.where(torch.isin(ids[:, -1:], ends), begin, following)
            ids = torch.cat([ids, following], 1)
            advance(f"tokens of texts that the model writes, {pace.after(len(ids))}")
    return ids


def frequent_tokens(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """Draw frequent tokens (count, length), between the special tokens that enclose a text."""
    before, after = _around(subject)
    body = ordinary_tokens(subject, (count, subject.length - len(before) - len(after)), generator)
    around = [torch.tensor(ids, dtype=torch.int64).expand(count, -1) for ids in (before, after)]
    return torch.cat([around[0], body, around[1]], 1)


def ordinary_tokens(subject: ProbedModel, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw tokens by Zipf's law: most vocabularies are sorted by frequency."""
    special = {*subject.special, *subject.unknown, *(id for ids in _around(subject) for id in ids)}
    ids = torch.tensor([id for id in range(subject.vocabulary) if id not in special])
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
    ends = end is not None and end not in (begin, subject.token("pad"))
    return [begin] if begin is not None else [], [end] if ends and end is not None else []


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────

_SENTENCE = "The sun was low, and we walked home along the river."


@dataclass(frozen=True)
class Tokenizer:
    """Encodes a text; special tokens go before and after."""

    encode: Callable[[str], list[int]]
    """Returns the tokens of a text without special tokens."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    unknown: int | None = None
    library: Any = None
    """The tokenizer of transformers, if it is one."""

    def framed(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def without(self, tokens: frozenset[int]) -> Tokenizer:
        """Return the same tokenizer, which leaves out these tokens."""

        def known(ids: Sequence[int]) -> list[int]:
            return [id for id in ids if id not in tokens]

        before, after = (tuple(known(ids)) for ids in (self.before, self.after))
        return Tokenizer(lambda text: known(self.encode(text)), before, after, self.unknown)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.library.get_vocab())

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the characters at which they end."""
        found = self.library(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(found["input_ids"]), [end for _, end in found["offset_mapping"]]

    def decode(self, ids: Tensor) -> list[str]:
        """Return the texts of some tokens."""
        return [self.library.decode(row, skip_special_tokens=True) for row in ids.tolist()]

    def padded(self, texts: list[str], length: int | None) -> tuple[Tensor, Tensor]:
        """Return the tokens of texts and their mask, at most so many; all as long as the longest one."""
        rows = [self.framed(self.encode(text)) for text in texts]
        if length is not None:
            kept = length - len(self.after)
            rows = [row if len(row) <= length else [*row[:kept], *self.after] for row in rows]
        widest = max(1, *(len(row) for row in rows))
        fill = self.library.pad_token_id or 0
        ids = torch.tensor([row + [fill] * (widest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (widest - len(row)) for row in rows])
        return ids, mask


def tokenizer_of(subject: ProbedModel) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer in a model's folder, or the one that comes with open_clip; or None and why."""
    folder = subject.tokenizer_folder
    present = folder is not None and any((folder / name).exists() for name in VOCABULARIES)
    bundled = subject.model.family.library == "open_clip" and not subject.settings.get("hf_tokenizer_name")
    if not present and not bundled:
        where = "the model's folder" if folder else f"{subject.model.label}, which is no folder"
        return None, f"no tokenizer in {where}"
    try:
        found = _of_transformers(folder) if present and folder else _of_open_clip()
    except Exception as error:  # the libraries raise many types for a damaged file
        return None, f"the tokenizer cannot be used: {reason_of(error)}"
    highest = max(found.framed(found.encode(_SENTENCE)))
    if highest >= subject.vocabulary:
        return None, f"the tokenizer has token {highest}, and the model knows {subject.vocabulary}"
    return found.without(subject.unknown) if subject.unknown else found, ""


def text_encoder(subject: ProbedModel) -> Tokenizer | None:
    """Return the tokenizer of a model's folder, if it tells the places of its tokens."""
    folder = subject.tokenizer_folder
    if folder is None or not (folder / "tokenizer.json").exists():
        return None
    found = _of_transformers(folder)
    return found if found.library.is_fast else None


def _of_transformers(folder: Path) -> Tokenizer:
    made = require_library("transformers").AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )

    def encode(text: str) -> list[int]:
        return list(made(text, add_special_tokens=False, verbose=False)["input_ids"])

    alone, framed = encode(_SENTENCE), list(made(_SENTENCE)["input_ids"])
    if not alone:
        raise ValueError("it makes no tokens of a plain sentence")
    for start in range(len(framed) - len(alone) + 1):
        stop = start + len(alone)
        if framed[start:stop] == alone:
            return Tokenizer(encode, tuple(framed[:start]), tuple(framed[stop:]), made.unk_token_id, made)
    raise ValueError("its special tokens are not around the text")


def _of_open_clip() -> Tokenizer:
    made: Any = require_library("open_clip").SimpleTokenizer()
    return Tokenizer(
        lambda text: list(made.encode(text)), (int(made.sot_token_id),), (int(made.eot_token_id),)
    )
