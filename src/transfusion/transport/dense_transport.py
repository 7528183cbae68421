"""Transport of dense models: B + α·π(τ), tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.tensor_content import row_blocks
from transfusion.files.tokenizer_files import VOCABULARIES
from transfusion.model.model import Model, untied_config
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.running.building import module_of
from transfusion.runtime.engines import Engine
from transfusion.runtime.resources import Resources
from transfusion.transport.adapters.adapter_classes import class_for_type, named_in
from transfusion.transport.changed_settings import ChangedSettings
from transfusion.transport.magnitude_counts import count_magnitudes
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.output_model import (
    COPIES,
    COPIES_OF_A_CHANGE,
    OutputModel,
    OutputShape,
    OutputTensor,
)
from transfusion.transport.output_record import OutputRecord
from transfusion.transport.task_vector import added
from transfusion.transport.task_vector_sources import TaskVectorSource

_HEAD_KEYS = (
    *("architectures", "id2label", "label2id", "num_labels", "problem_type"),
    *("num_classes", "label_names", "label_descriptions"),  # of timm
)


class Action(StrEnum):
    """How one tensor of the output is computed."""

    MOVED = "moved"
    """B + α·π(τ)."""
    CARRIED = "carried"
    """π(A_ft): B has no tensor to add a change to."""
    KEPT = "kept"
    """B's own tensor: the fine-tune does not have it."""


@dataclass(frozen=True)
class TensorAction(OutputTensor):
    """One tensor of the output, and how it is computed."""

    action: Action
    added: int = 0
    """The number of rows at the end that are carried over, for tokens that B does not have."""


@dataclass(repr=False)
class DenseTransport(OutputModel[TensorAction]):
    """B with the task vectors of one or several fine-tunes. Tensors are computed on demand."""

    sources: tuple[TaskVectorSource, ...]
    base: Model
    onto: Model
    alignment: Alignment
    merging: MergeRule = field(default_factory=MergeRule)
    dtype: torch.dtype | None = None
    head: int | None = None
    """The index of the fine-tune that the task heads come from."""
    output_record: OutputRecord = field(default_factory=OutputRecord)
    settings: ChangedSettings = field(default_factory=ChangedSettings)
    """The settings that the fine-tunes changed."""
    changed: set[str] = field(default_factory=set)
    """Tensors computed so far that differ from B's."""

    def __repr__(self) -> str:
        return f"<{listing(source.label for source in self.sources)}, moved onto {self.onto.label}>"

    @property
    def like(self) -> Model:
        return self.onto

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.base, self.onto, *(model for source in self.sources for model in source.models))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return [self.base.checkpoint, self.onto.checkpoint, *(source.checkpoint for source in self.sources)]

    @cached_property
    def lead(self) -> TaskVectorSource:
        """The fine-tune that decides the class of the output: the one with task heads of its own."""
        if self.head is not None:
            return self.sources[self.head]
        with_heads = [source for source in self.sources if source.has_heads]
        with_own = [source for source in with_heads if self._has_own_tensors(source)]
        if len(with_own) > 1:
            raise MismatchError(
                f"{len(with_own)} of the fine-tunes have task heads of their own, which cannot be merged:"
                f" {listing(source.label for source in with_own)}",
                hint="choose which one to keep: `head=1` for that of the first fine-tune, and so on",
            )
        return (*with_own, *with_heads, *self.sources)[0]

    def _has_own_tensors(self, source: TaskVectorSource) -> bool:
        return any(self._action(name, source) is Action.CARRIED for name in source.names)

    @cached_property
    def has_class_of_lead(self) -> bool:
        """Whether the output has the fine-tune's class. With a fine-tune without heads it has B's class."""
        return self.lead.has_heads or not self.onto.architecture.heads

    @cached_property
    def entries(self) -> list[TensorAction]:
        """The tensors of the output: first those of B, in B's order."""
        lead, onto = self.lead, self.onto
        self._require_tokens_of(lead)
        names = [*onto.architecture.tensors, *onto.architecture.buffers]
        if self.has_class_of_lead:
            names = [name for name in names if name in lead.names]
            names += [name for name in lead.names if name not in {*names, *lead.buffers}]
        names = [name for name in names if name not in onto.ties or name in onto.names or lead.owns(name)]
        stored = onto.names if all(name in onto.names for name in names) else lead.names
        own = {name: TensorPieces(((name,),)) for name in onto.ties}  # B stores them as its embedding
        return [self._entry(name, own.get(name) or stored[name]) for name in names]

    def _require_tokens_of(self, lead: TaskVectorSource) -> None:
        """Refuse to keep the new tokens of any fine-tune but the lead."""
        others = [source for source in self.sources if source is not lead]
        grown = [one for one in others if any(one.changes(name) and one.added(name) for name in one.names)]
        if grown:
            raise MismatchError(
                f"{listing(one.label for one in grown)} has new tokens, and only those of {lead.label} can be"
                " kept",
                hint='`head` chooses the fine-tune whose tokens are kept, `new_tokens="drop"` keeps none',
            )

    def _entry(self, name: str, stored: TensorPieces) -> TensorAction:
        action = self._action(name, self.lead)
        if action is Action.CARRIED:
            return TensorAction(name, stored, self._in_dtype(self.lead.shape(name)), action)
        info = self.onto.info(name)
        added = self.lead.added(name) if action is Action.MOVED else 0
        extents = (info.shape[0] + added, *info.shape[1:]) if added else info.shape
        return TensorAction(name, stored, self._in_dtype(OutputShape(extents, info.dtype)), action, added)

    def _in_dtype(self, shape: OutputShape) -> OutputShape:
        floating = shape.dtype.is_floating_point
        return OutputShape(shape.extents, self.dtype) if self.dtype and floating else shape

    def _action(self, name: str, lead: TaskVectorSource) -> Action:
        if name in self.onto.architecture.tensors and any(one.changes(name) for one in self.sources):
            return Action.MOVED
        return Action.CARRIED if lead.owns(name) else Action.KEPT

    @cached_property
    def dropped(self) -> list[str]:
        """Task heads of B that a model of the fine-tune's class does not have."""
        kept = {entry.name for entry in self.entries}
        return [name for name in self.onto.architecture.tensors if name not in kept]

    def names(self, action: Action) -> list[str]:
        return [entry.name for entry in self.entries if entry.action is action]

    def changed_by(self, number: int) -> list[str]:
        """Return the tensors that the fine-tune with this index changes."""
        return [name for name in self.names(Action.MOVED) if self.sources[number].changes(name)]

    @property
    def unchanged(self) -> list[str]:
        """Tensors that no fine-tune changed. Known when everything has been computed."""
        return [name for name in self.names(Action.MOVED) if name not in self.changed]

    # ── costs ────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> dict[str, int]:
        """Return counts of tensors, and bytes to read and write, from headers alone."""
        changes = sum(source.read_bytes() for source in self.sources)
        own = sum(self.onto.info(e.name).nbytes for e in self.entries if e.action is not Action.CARRIED)
        return {
            "tensors": len(self.entries),
            **{str(action): len(self.names(action)) for action in Action},
            "dropped": len(self.dropped),
            "bytes_to_read": changes * self.merging.passes + own,
            "bytes_to_write": sum(entry.shape.nbytes for entry in self.entries),
        }

    def within_memory(self, resources: Resources) -> Resources:
        copies = COPIES + COPIES_OF_A_CHANGE * len(self.sources)
        held = self.held_bytes() + sum(source.held_bytes() for source in self.sources)
        fixed = 2 * self.alignment.nbytes + held
        return resources.within_memory(copies * self.block_bytes(), "one thread", fixed)

    # ── tensors ──────────────────────────────────────────────────────────────────────────────

    def by_rows(self, entry: TensorAction) -> bool:
        match entry.action:
            case Action.KEPT:
                return bool(entry.shape.extents)
            case Action.CARRIED:
                return self.lead.by_rows(entry.name)
        return all(source.by_rows(entry.name) for source in self.sources if source.changes(entry.name))

    def cuts(self, entry: TensorAction) -> Iterator[slice]:
        """Yield the blocks of rows to compute. Rows of new tokens are a block of their own."""
        if not entry.added:
            yield from super().cuts(entry)
            return
        height, *rest = entry.shape.extents
        yield from row_blocks((height - entry.added, *rest))
        yield slice(height - entry.added, height)

    def rows(self, entry: TensorAction, rows: slice) -> Tensor:
        name, extents = entry.name, entry.shape.extents
        if entry.action is Action.CARRIED or (entry.added and rows.stop == extents[0]):
            return self.lead.own(name, rows)
        own = self.onto.raw(name, rows if extents else None)
        change = self._change(name, rows) if entry.action is Action.MOVED else None
        if change is None or _is_zero(change):
            return own
        self.changed.add(name)
        return added(own, change)

    def _change(self, name: str, rows: slice) -> Tensor | None:
        changes = {
            number: source.change(name, rows)
            for number, source in enumerate(self.sources)
            if source.changes(name)
        }
        return self.merging.combine(changes, len(self.sources), name, rows.start)

    def require_finite_inputs(self, entry: TensorAction) -> None:
        for source in self.sources:
            if entry.name in source.names:
                source.require_finite(entry.name)
        if entry.action is not Action.CARRIED:
            self.onto.read(entry.name)

    def prepare(self, engine: Engine | None = None) -> None:
        """Let the merge rule read every change if it needs a threshold (TIES)."""
        self.merging.prepare(
            [partial(count_magnitudes, self, engine, number) for number in range(len(self.sources))]
        )

    def conclude(self) -> None:
        """Refuse a fine-tune that equals its base, and inputs that changed during the run."""
        self.require_unchanged()
        moved = self.names(Action.MOVED)
        wanted = any(s.alpha.at(name) * self.merging.alpha.at(name) for s in self.sources for name in moved)
        if wanted and not self.changed:
            raise MismatchError(
                f"{listing(source.label for source in self.sources)} equals its base {self.base.label}:"
                " there is nothing to move",
                hint="check that FINETUNED is the fine-tune, and not its base",
            )

    def module(self) -> nn.Module:
        """Return the output as a new module of its library, in memory."""
        like = self.lead.module if self.has_class_of_lead else self.onto.checkpoint.module
        label = f"{self.lead.label} on {self.onto.label}"
        return module_of(self.onto.family, self.config(), self.state_dict(), like=like, label=label)

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def config(self) -> dict[str, Any] | None:
        """Return B's configuration, with the head settings of the fine-tune if the output has its class."""
        config = deepcopy(self.onto.checkpoint.config)
        theirs = self.lead.config or {}
        if not config:
            return None
        config = self.settings.into(config, theirs)
        if theirs and self.has_class_of_lead:
            inner, other = config.get("model_args") or {}, theirs.get("model_args") or {}
            for part, origin in ((config, theirs), (inner, other)):
                for key in _HEAD_KEYS:
                    part.pop(key, None)  # a key that the fine-tune lacks has its default there
                    if key in origin:
                        part[key] = origin[key]
            if (name := named_in(config)) is not None:
                types = theirs.get("model_type"), config.get("model_type")
                config["architectures"] = [class_for_type(name, *types)]
        if self._untied:
            config = untied_config(self.onto, config)
        if self._grown:
            for ours, other in ((config, theirs), (config.get("text_config"), theirs.get("text_config"))):
                if ours and other and "vocab_size" in other:
                    ours["vocab_size"] = other["vocab_size"]
        if self.dtype is not None:
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = str(self.dtype).removeprefix("torch.")
        return config

    @property
    def notes(self) -> list[str]:
        tie = f"the output's embedding and {listing(self._untied)} are tensors of their own; B ties them"
        return [*self.settings.notes(), *([tie] if self._untied else [])]

    @property
    def _untied(self) -> list[str]:
        """The heads that B ties, and the output does not."""
        return sorted({entry.name for entry in self.entries} & self.onto.ties.keys())

    def require_config_of_b(self) -> None:
        """Refuse fine-tunes that need another configuration than B's, where the output is no model."""
        if changed := [*self.settings.decisive, *self._untied]:
            raise MismatchError(
                f"{self.lead.label} has other settings or ties than its base {self.base.label}, which an"
                f" adapter cannot have: {listing(changed)}",
                hint="leave out `refine_rank`, and write a model",
            )

    @property
    def _grown(self) -> bool:
        return any(entry.added for entry in self.entries)

    def auxiliary_files(self) -> list[Path]:
        """Return the other files of B's folder. With new tokens the tokenizer is the fine-tune's."""
        ours = {path.name: path for path in self.onto.checkpoint.auxiliary_files()}
        if self._grown:
            ours |= {path.name: path for path in self.lead.auxiliary_files() if _is_tokenizer(path.name)}
        return list(ours.values())

    @property
    def changed_tensors(self) -> set[str]:
        return self.changed

    @property
    def unsaved_pi(self) -> Alignment | None:
        return self.alignment if self.output_record.keeps_pi else None

    def recipe(self) -> dict[str, Any]:
        vocabulary = self.alignment.provenance.vocabulary
        return {
            "finetuned": [source.fingerprint for source in self.sources],
            "alpha": [source.alpha.as_json() for source in self.sources],
            "base": self.base.fingerprint,
            "onto": self.onto.fingerprint,
            "alignment": self.alignment.digest,
            "merging": self.merging.as_json(),
            **({"vocabulary": vocabulary["source"]} if vocabulary.get("moved") else {}),
        }

    def metadata(self) -> dict[str, Any]:
        """Return the run record. Complete when everything has been computed."""
        return {
            **self.output_record.of(self.sources, self.base, self.onto, self.alignment, self.merging),
            "dtype": self.dtype and str(self.dtype).removeprefix("torch."),
            "moved": len(self.changed),
            "unchanged": len(self.unchanged),
            "carried": self.names(Action.CARRIED),
            "dropped": self.dropped,
            "left_out": self.lead.left_out,
            "changed_settings": self.settings.about(),
            "new_tokens": max((entry.added for entry in self.entries), default=0),
            "lost_tokens": max((source.dropped_tokens() for source in self.sources), default=0),
        }

    def texts(self) -> dict[str, str]:
        return self.output_record.texts(self.metadata())


def _is_zero(change: Tensor) -> bool:
    if not change.numel():
        return True
    first = change[:1] if change.dim() else change  # for most changes a look at it is enough
    return not bool(first.any()) and all(end == 0 for end in torch.aminmax(change))


def _is_tokenizer(file: str) -> bool:
    return "token" in file or file in (*VOCABULARIES, "merges.txt")
