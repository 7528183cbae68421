"""Moving a model: B + α·π(τ), tensor by tensor, for the changes of one or several fine-tunes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError, listing
from transfusion.files.sentence_modules import SentenceModules
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.model.model import Model, untied_config
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.runtime.engines import Threads
from transfusion.transport.adapters.classes import class_for_type, named_in
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.changed_settings import ChangedSettings, token_counts
from transfusion.transport.changes import DenseChange
from transfusion.transport.merge_rules import MergeRule, magnitude_histogram
from transfusion.transport.model_card import pipeline_tag
from transfusion.transport.output import Action, Output, OutputTensor, recipe_of
from transfusion.transport.record import OutputRecord, class_of
from transfusion.transport.sentences import modules_moved, notes_on_heads
from transfusion.transport.task_vector import added

Change: TypeAlias = DenseChange | MovedAdapter
"""One fine-tune in B's basis: changes to B's tensors, and tensors that B does not have."""
_HEAD_KEYS = (
    *("architectures", "id2label", "label2id", "num_labels", "problem_type"),
    *("num_classes", "label_names", "label_descriptions"),  # of timm
)
PARTS = 64
"""The number of parts that a change is split into to count its magnitudes. The counts of each take 512 kB."""


def dense_output(
    sources: Sequence[Change],
    base: Model,
    onto: Model,
    alignment: Alignment,
    *,
    merging: MergeRule | None = None,
    dtype: torch.dtype | None = None,
    head: int | None = None,
    record: OutputRecord | None = None,
) -> Output:
    """Return B with the changes of one or several fine-tunes; refuse fine-tunes that have no place in B.

    ``head`` is the index of the fine-tune that the task heads come from, ``dtype`` the type to store.
    """
    record, merging = record or OutputRecord(), merging or MergeRule()
    lead = _lead(sources, onto, head)
    sentence = _sentence_modules(lead, onto, alignment)
    settings = ChangedSettings.of(sources, base, onto)
    moved = MovedSum(tuple(sources), onto, lead, merging)
    tensors = {
        name: moved.tensor(name, stored).in_dtype(dtype) for name, stored in _names(lead, onto).items()
    }
    _require_tokens_of(lead, sources)
    untied = sorted(tensors.keys() & onto.ties.keys())
    grown = max((one.added for one in tensors.values()), default=0)
    dropped = [name for name in onto.architecture.tensors if name not in tensors]
    config = _config(lead, onto, settings, untied=bool(untied), grown=bool(grown), dtype=dtype)

    def metadata() -> dict[str, Any]:
        all_moved = [name for name, one in tensors.items() if one.action is Action.MOVED]
        return {
            **record.of(sources, base, onto, alignment, merging),
            "class": class_of(config),
            **({"modules": [one.name for one in sentence.modules]} if sentence else {}),
            **({"loaded_by": sentence.loaded_by} if sentence else {}),
            "dtype": dtype and str(dtype).removeprefix("torch."),
            "pipeline_tag": pipeline_tag(onto.family.library, config),
            "moved": len(moved.changed),
            "unchanged": sum(name not in moved.changed for name in all_moved),
            "carried": [name for name, one in tensors.items() if one.action is Action.CARRIED],
            "dropped": dropped,
            "left_out": list(lead.left_out),
            "changed_settings": settings.about(),
            "new_tokens": grown,
            "lost_tokens": max((source.dropped_tokens for source in sources), default=0),
        }

    config = _config(lead, onto, settings, untied=bool(untied), grown=bool(grown), dtype=dtype)
    labels = listing(source.label for source in sources)
    wanted = any(
        source.alpha.at(name) * merging.alpha.at(name)
        for source in sources
        for name, one in tensors.items()
        if one.action is Action.MOVED
    )
    tie = f"the output's embedding and {listing(untied)} are tensors of their own; B ties them"
    has_class = _has_class_of(lead, onto)
    return Output(
        f"{labels}, moved onto {onto.label}",
        onto,
        tensors,
        config,
        metadata,
        record.texts,
        partial(recipe_of, sources, base, onto, alignment, merging),
        inputs=[base.checkpoint, onto.checkpoint, *(source.checkpoint for source in sources)],
        copied=_copied(lead, onto, grown=bool(grown)),
        pi=alignment if record.keeps_pi else None,
        sentence=sentence,
        notes=[*settings.notes(), *([tie] if untied else []), *notes_on_heads(sentence)],
        dropped=dropped,
        decisive=[*settings.decisive, *untied],
        like=lead.module if has_class else onto.checkpoint.module,
        no_change_error=f"{labels} equals its base {base.label}: there is nothing to move" if wanted else "",
        prepare=partial(moved.prepare, tensors),
        changed=moved.changed,
    )


@dataclass(frozen=True)
class MovedSum:
    """B plus the combined changes of fine-tunes, some rows at a time."""

    sources: tuple[Change, ...]
    onto: Model
    lead: Change
    merging: MergeRule
    changed: set[str] = field(default_factory=set)
    """The tensors that were found to differ from B's."""

    def tensor(self, name: str, stored: TensorPieces) -> OutputTensor:
        """Return one tensor of the output, to be computed on demand."""
        action = _action(name, self.lead, self.sources, self.onto)
        if action is Action.CARRIED:
            shape, dtype = self.lead.shape(name)
            compute = partial(self.lead.own, name)
            by_rows = self.lead.by_rows(name)
            return OutputTensor(shape, dtype, compute, stored, action, by_rows=by_rows)
        info = self.onto.info(name)
        if action is Action.KEPT:
            return OutputTensor(info.shape, info.dtype, partial(self._own, name), stored, action)
        grown = self.lead.added(name)
        shape = (info.shape[0] + grown, *info.shape[1:]) if grown else info.shape
        by_rows = all(source.by_rows(name) for source in self.sources if source.changes(name))
        return OutputTensor(shape, info.dtype, partial(self.rows, name), stored, action, grown, by_rows)

    def _own(self, name: str, rows: slice) -> Tensor:
        return self.onto.raw(name, rows if self.onto.info(name).shape else None)

    def _height(self, name: str) -> int:
        """Return the number of B's own rows."""
        return (*self.onto.info(name).shape, 1)[0]

    def rows(self, name: str, rows: slice) -> Tensor:
        """Compute some rows of B + α·π(τ). Rows behind B's are those of new tokens."""
        if rows.start >= (height := self._height(name)):
            return self.lead.own(name, rows)
        here = slice(rows.start, min(rows.stop, height))
        own, change = self._own(name, here), self._change(name, here)
        if change is not None and not _is_zero(change):
            self.changed.add(name)
            own = added(own, change)
        if rows.stop <= height:
            return own
        new = self.lead.own(name, slice(height, rows.stop))
        return torch.cat([own.to(torch.promote_types(own.dtype, new.dtype)), new])

    def _change(self, name: str, rows: slice) -> Tensor | None:
        changes = {
            number: source.change(name, rows)
            for number, source in enumerate(self.sources)
            if source.changes(name)
        }
        return self.merging.combine(changes, len(self.sources), name, rows.start)

    def prepare(self, tensors: Mapping[str, OutputTensor], threads: Threads | None) -> None:
        """Let the merge rule read every change if it needs a threshold (TIES)."""
        self.merging.prepare([partial(self._count, tensors, threads, source) for source in self.sources])

    def _count(
        self,
        tensors: Mapping[str, OutputTensor],
        threads: Threads | None,
        source: Change,
        high: int | None,
    ) -> Tensor:
        """Count the magnitudes of one fine-tune's change, as `magnitude_histogram` does."""
        names = [name for name, one in tensors.items() if one.action is Action.MOVED and source.changes(name)]

        def changes(names: Sequence[str]) -> Iterator[Tensor]:
            """Yield the change of B's own rows (new tokens excluded), block by block."""
            for name in names:
                height = self._height(name)
                for rows in tensors[name].blocks():
                    if rows.start < height:
                        yield source.change(name, slice(rows.start, min(rows.stop, height)))

        def count(names: Sequence[str]) -> Tensor:
            return magnitude_histogram(changes(names), high)

        parts = [names[start::PARTS] for start in range(min(PARTS, len(names)))] or [[]]
        return torch.stack(threads.map(count, parts) if threads else list(map(count, parts))).sum(0)


# ── the class of the output ──────────────────────────────────────────────────────────────────


def _lead(sources: Sequence[Change], onto: Model, head: int | None) -> Change:
    """Return the fine-tune that decides the class of the output: the one with task heads of its own."""
    if head is not None:
        return sources[head]
    with_heads = [source for source in sources if source.has_heads]
    with_own = [
        source
        for source in with_heads
        if any(_action(name, source, sources, onto) is Action.CARRIED for name in source.names)
    ]
    if len(with_own) > 1:
        raise MismatchError(
            f"{len(with_own)} of the fine-tunes have task heads of their own, which cannot be merged:"
            f" {listing(source.label for source in with_own)}",
            hint="choose which one to keep with `head`, which counts from 1 on the command line and from 0 in"
            " Python",
        )
    return (*with_own, *with_heads, *sources)[0]


def _action(name: str, lead: Change, sources: Sequence[Change], onto: Model) -> Action:
    if name in onto.architecture.tensors and any(source.changes(name) for source in sources):
        return Action.MOVED
    return Action.CARRIED if lead.owns(name) else Action.KEPT


def _has_class_of(lead: Change, onto: Model) -> bool:
    """Whether the output has the fine-tune's class. With a fine-tune without heads it has B's class."""
    return lead.has_heads or _own_modules(lead) is not None or not onto.architecture.task_heads


def _own_modules(lead: Change) -> SentenceModules | None:
    """Return the modules behind the encoder of a fine-tune that is a model."""
    if isinstance(lead, MovedAdapter) or lead.adapter is not None:
        return None
    return lead.checkpoint.sentence


def _sentence_modules(lead: Change, onto: Model, alignment: Alignment) -> SentenceModules | None:
    """Return the modules behind the output's encoder: those of the class that the output has."""
    if _own_modules(lead) is not None:
        return modules_moved(lead.checkpoint, alignment)
    theirs = onto.checkpoint.sentence
    return None if lead.has_heads or (theirs and theirs.odd) else theirs


def _names(lead: Change, onto: Model) -> dict[str, TensorPieces]:
    """Return the tensors of the output with their names in files: first those of B, in B's order.

    Those that the library leaves unread are B's own, whichever class the output has.
    """
    unread = onto.architecture.unread
    names = [*onto.architecture.tensors, *onto.architecture.buffers]
    if _has_class_of(lead, onto):
        names = [name for name in names if name in lead.names or name in unread]
        names += [name for name in lead.names if name not in {*names, *lead.buffers, *lead.unread}]
    names = [name for name in names if name not in onto.ties or name in onto.names or lead.owns(name)]
    stored = onto.names if all(name in onto.names for name in names) else {**onto.names, **lead.names}
    own = {name: TensorPieces(((name,),)) for name in onto.ties}  # B stores them as its embedding
    return {name: own.get(name) or stored[name] for name in names}


def _require_tokens_of(lead: Change, sources: Sequence[Change]) -> None:
    """Refuse to keep the new tokens of any fine-tune but the lead."""
    others = [source for source in sources if source is not lead]
    grown = [one for one in others if any(one.changes(name) and one.added(name) for name in one.names)]
    if grown:
        raise MismatchError(
            f"{listing(one.label for one in grown)} has new tokens, and only those of {lead.label} can be"
            " kept",
            hint='`head` chooses the fine-tune whose tokens are kept, `new_tokens="drop"` keeps none',
        )


def _config(
    lead: Change,
    onto: Model,
    settings: ChangedSettings,
    *,
    untied: bool,
    grown: bool,
    dtype: torch.dtype | None,
) -> dict[str, Any] | None:
    """Return B's configuration, with the head settings of the fine-tune if the output has its class."""
    config = deepcopy(onto.checkpoint.config)
    theirs = lead.config or {}
    if not config:
        return None
    config = settings.into(config, theirs)
    if theirs and _has_class_of(lead, onto):
        inner, other = config.get("model_args") or {}, theirs.get("model_args") or {}
        for part, origin in ((config, theirs), (inner, other)):
            for key in _HEAD_KEYS:
                part.pop(key, None)  # a key that the fine-tune lacks has its default there
                if key in origin:
                    part[key] = origin[key]
        if (name := named_in(config)) is not None:
            types = theirs.get("model_type"), config.get("model_type")
            config["architectures"] = [class_for_type(name, *types)]
    if untied:
        config = untied_config(onto, config)
    for name, count in token_counts(lead, onto.checkpoint.config or {}).items() if grown else ():
        *sections, key = name.split(".")
        reduce(lambda part, section: part[section], sections, config)[key] = count
    if dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = str(dtype).removeprefix("torch.")
    return config


def _copied(lead: Change, onto: Model, *, grown: bool) -> list[Path]:
    """Return the other files of B's folder. With new tokens the tokenizer is the fine-tune's."""
    ours = {path.name: path for path in onto.checkpoint.auxiliary_files()}
    if grown:
        ours |= {path.name: path for path in lead.auxiliary_files if _is_tokenizer(path.name)}
    return list(ours.values())


def _is_tokenizer(file: str) -> bool:
    return "token" in file or file in (*VOCABULARIES, "merges.txt")


def _is_zero(change: Tensor) -> bool:
    if not change.numel():
        return True
    first = change[:1] if change.dim() else change  # for most changes a look at it is enough
    return not bool(first.any()) and all(end == 0 for end in torch.aminmax(change))
