"""Texts from the model alone: what it writes itself, and tokens that are likely to be frequent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transfusion.data.probes.probed_model import ProbedModel
from transfusion.data.probes.random_inputs import plain_experts

AT_ONCE = 128
"""How many texts a model writes side by side: every step reads all of its weights."""

WORDPIECE = {30522: 999, 28996: 106, 119547: 106}
"""The published vocabularies of BERT by their size, and where their words begin; of their special tokens
the configuration names none but the padding.
"""
CLS, SEP = 101, 102


def generate_texts(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """(count, length): texts that a language model makes up, at temperature 1, without special tokens."""
    parts = [
        _continued(subject, _first(subject, min(AT_ONCE, count - start), generator), generator)
        for start in range(0, count, AT_ONCE)
    ]
    return torch.cat(parts)


def _first(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """The token that starts a text; a frequent one, where the configuration names none."""
    begin = subject.token("bos", "eos")
    return ordinary_tokens(subject, (count, 1), generator) if begin is None else torch.full((count, 1), begin)


def _continued(subject: ProbedModel, ids: Tensor, generator: torch.Generator) -> Tensor:
    forbidden = torch.tensor(sorted(subject.special), dtype=torch.int64)
    past: Any = None
    with torch.no_grad(), plain_experts(subject.module):
        while ids.shape[1] < subject.length:
            new = ids if past is None else ids[:, -1:]
            said = subject.module(input_ids=new, past_key_values=past, use_cache=True, return_dict=True)
            past = getattr(said, "past_key_values", None)
            logits = said.logits[:, -1, : subject.vocabulary].float()
            logits[:, forbidden] = -torch.inf
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn], 1)
    return ids


def frequent_tokens(subject: ProbedModel, count: int, generator: torch.Generator) -> Tensor:
    """(count, length): random frequent tokens, between the special tokens that stand around a text."""
    before, after = _around(subject)
    body = ordinary_tokens(subject, (count, subject.length - len(before) - len(after)), generator)
    around = [torch.tensor(ids, dtype=torch.int64).expand(count, -1) for ids in (before, after)]
    return torch.cat([around[0], body, around[1]], 1)


def ordinary_tokens(subject: ProbedModel, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Tokens by Zipf's law: most vocabularies go from the frequent to the rare."""
    special = {*subject.special, *(id for ids in _around(subject) for id in ids)}
    start = WORDPIECE.get(subject.vocabulary, 0)
    ids = torch.tensor([id for id in range(start, subject.vocabulary) if id not in special])
    flattened = len(ids) / 100  # the very first are often single letters or bytes
    likely = 1 / (torch.arange(len(ids), dtype=torch.float64) + 1 + flattened)
    drawn = torch.multinomial(likely, shape[0] * shape[1], replacement=True, generator=generator)
    return ids[drawn].reshape(shape)


def _around(subject: ProbedModel) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text, as far as the configuration names them."""
    last = subject.vocabulary - 1
    begin, end = subject.token("bos", "cls"), subject.token("eos", "sep")
    if subject.model.family.library == "open_clip":
        pooled = subject.settings.get("eos_id") if subject.settings.get("pool_type") == "eos" else None
        return [last - 1], [last if pooled is None else int(pooled)]
    if subject.model.family.name.startswith("clip") and end in (2, None):
        return [last - 1], [last]  # CLIP's older configurations name others than its tokenizer puts
    if begin is None and end is None and subject.vocabulary in WORDPIECE:
        return [CLS], [SEP]
    ends = end is not None and end not in (begin, subject.token("pad"))
    return [begin] if begin is not None else [], [end] if ends and end is not None else []
