"""Texts: passages of a corpus that ships with the package, and texts that language models generate.

Texts are cut into windows of one length. Nothing is padded: activations of padding would count as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from transfusion.running.probes.generated_texts import frequent_tokens, generate_texts
from transfusion.running.probes.probed_model import ProbedModel, seeded_generator
from transfusion.running.probes.tokenizers import Tokenizer, tokenizer_of

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
