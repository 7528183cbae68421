"""Asking a language model: it writes texts, and answers them token by token.

Only one model is in memory, in the type that it is stored in. A fine-tune is asked first; then its base says
how likely it finds the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Family
from transfusion.errors import DataError
from transfusion.files.tokenizer_files import tokens_in
from transfusion.model.model import Model
from transfusion.running.probes.changed_inputs import recombined_texts
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.probed_model import ProbedModel, seeded_generator
from transfusion.runtime.progress import Pace, phase
from transfusion.transport.refinement.asked import (
    GIVEN,
    PLAIN,
    RECOMBINED,
    Answers,
    Asked,
    OwnTokens,
    shortened,
)
from transfusion.transport.refinement.inputs import OWN_HELD_OUT, TOKENS, RefinementInputs

PASS = 1 << 23
"""The most logits of one pass."""

Inputs = dict[str, Tensor]
Logits = Callable[[Tensor], Tensor]


def writes_texts(model: Model, module: nn.Module) -> bool:
    """Whether a model is one that writes texts, and can be asked by texts alone."""
    return ProbedModel(model, module).writes


def ask(
    model: Model,
    module: nn.Module,
    about: dict[str, Any],
    *,
    seed: int,
    tokens: int | None = None,
    calibrate: Path | None = None,
    kept: Path | None = None,
    base: Callable[[], AbstractContextManager[nn.Module]] | None = None,
) -> Asked:
    """Let a language model write texts and answer them; ``base`` opens the base of a fine-tune afterwards.

    ``tokens`` is the number of tokens that it shares with its base; ``kept`` a file name for texts of an
    interrupted run, which goes on with them.
    """
    module.eval().requires_grad_(False)
    source = RefinementInputs(model, module, seed, kept, tokens)
    if calibrate is not None:
        source.read_own(calibrate)
        _require_unpadded(source, calibrate)
    texts = _texts(source)
    size, out = source.subject.vocabulary, source.subject.unknown
    held_out = {kind: inputs[TOKENS] for kind, inputs in source.held_out().items()}
    found = {
        group: _answered(several, logits_of(model.family, module, size, out))
        for group, several in (("learned", texts), ("held out", held_out))
    }
    tokens_of, made_of = own_tokens(source.subject), source.about
    del module, source  # a fine-tune makes room for its base
    if base is not None:
        with base() as of_base:
            logits = logits_of(model.family, of_base, size, out)
            found["learned"] = {
                kind: replace(one, by_base=_likelihoods(one.ids.long(), logits, size))
                for kind, one in found["learned"].items()
            }
    lengths = {kind: list(one.ids.shape) for kind, one in found["learned"].items()}
    about = {**about, "inputs": made_of, "texts": lengths}
    return Asked(found["learned"], found["held out"], about, tokens_of)


def _require_unpadded(source: RefinementInputs, path: Path) -> None:
    """Refuse texts that are padded: what follows padding would be learned as well."""
    mask = None if source.own is None else source.own.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise DataError(
            f"{path}: some texts are padded, by their attention_mask",
            hint="give a file of texts, one a line, or token ids of texts of one length",
        )


def own_tokens(subject: ProbedModel) -> OwnTokens | None:
    """Return the tokens of a model, from the files of its tokenizer."""
    table, _ = tokens_in(subject.tokenizer_folder)
    if table is None:
        return None
    return OwnTokens(table.resized(subject.vocabulary), subject.token("bos", "eos"), subject.ends)


def _texts(source: RefinementInputs) -> dict[str, Tensor]:
    """Return the texts to learn from: plain ones, the same in pieces, and the user's own."""
    plain = source.pool[TOKENS]
    mixed = recombined_texts(source.subject, plain, seeded_generator(source.seed, 10))[TOKENS]
    found = {PLAIN: plain, RECOMBINED: mixed}
    if source.own is not None and TOKENS in source.own:
        own = source.own[TOKENS]
        found[GIVEN] = own[torch.arange(len(own)) % OWN_HELD_OUT != 0]
    return found


def logits_of(family: Family, module: nn.Module, size: int, unknown: frozenset[int]) -> Logits:
    """Return what computes the logits of texts over the tokens that all models have."""
    left_out = torch.tensor(sorted(unknown), dtype=torch.int64)

    def logits(ids: Tensor) -> Tensor:  # (texts, tokens, vocabulary)
        found = run_model(module, family, {TOKENS: ids}, double=False)["logits"][..., :size]
        return found.index_fill(-1, left_out.to(found.device), -torch.inf) if len(left_out) else found

    return logits


def _answered(texts: dict[str, Tensor], logits: Logits) -> dict[str, Answers]:
    found: dict[str, Answers] = {}
    pace = Pace()
    with phase("answering texts", sum(len(ids) for ids in texts.values())) as advance:
        for kind, ids in texts.items():
            made, chosen = [], []
            for some, given in _passes(ids, logits):
                made.append(shortened(given))
                chosen.append(_chosen(some, given))
                for text in some:
                    advance(f"texts that the model answers, {pace.after(len(text))}")
            counts, likely, shares = (torch.cat(parts) for parts in zip(*made, strict=True))
            found[kind] = Answers(ids.int(), counts, likely, shares, torch.cat(chosen))
    return found


def _likelihoods(ids: Tensor, logits: Logits, size: int) -> Tensor:
    with phase("asking the base how likely it finds them"):
        return torch.cat([_chosen(some, given) for some, given in _passes(ids, logits)])


def _passes(ids: Tensor, logits: Logits) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some texts and their logits, as many as a pass may have."""
    first = logits(ids[:1])
    yield ids[:1], first
    for some in torch.split(ids[1:], max(1, PASS // first.numel())):
        if len(some):
            yield some, logits(some)


def _chosen(ids: Tensor, logits: Tensor) -> Tensor:
    """Return the log-probability of every token after those before it (texts, tokens)."""
    following = ids[:, 1:, None].to(logits.device)
    known = logits[:, :-1].float()
    found = known.gather(-1, following)[..., 0] - known.logsumexp(-1)
    return nn.functional.pad(found, (1, 0)).half().cpu()
