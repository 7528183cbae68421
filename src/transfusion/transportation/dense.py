"""A whole model on its way from A to B: B + α·π(τ), tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.alignment import Alignment
from transfusion.errors import MismatchError, OutputError
from transfusion.live import module_of
from transfusion.model import Model
from transfusion.storage import Stored
from transfusion.task_vector import TaskVector, working
from transfusion.transportation.story import nobody_watching, story_of
from transfusion.writer import Shards, write_model


class Action(StrEnum):
    """What becomes of one tensor of the output."""

    MOVED = "moved"
    """B + α·π(τ)."""
    CARRIED = "carried"
    """The fine-tune's own, with its axes moved: B has nothing to add it to."""
    KEPT = "kept"
    """B's own: the fine-tune says nothing about it."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the output."""

    name: str
    """Canonical."""
    stored_as: Stored
    action: Action


@dataclass
class Transport:
    """A fine-tune on its way from A to B. Nothing is computed before a tensor is asked for."""

    vector: TaskVector
    onto: Model
    alignment: Alignment
    alpha: float = 1.0
    dtype: torch.dtype | None = None
    unchanged: set[str] = field(default_factory=set)
    """Tensors, among those computed so far, that the fine-tune had not changed."""

    @cached_property
    def of_its_kind(self) -> bool:
        """Whether the output is a model of the fine-tune's class: it is, if the fine-tune has heads.

        A fine-tune without any says nothing about B's heads, and B keeps them.
        """
        return bool(self.vector.finetuned.architecture.heads) or not self.onto.architecture.heads

    @cached_property
    def entries(self) -> list[Entry]:
        """The tensors of the output, B's order first."""
        tuned, onto = self.vector.finetuned, self.onto
        names = [*onto.architecture.tensors, *onto.architecture.buffers]
        if self.of_its_kind:
            names = [name for name in names if name in tuned.names]
            names += [name for name in tuned.architecture.tensors if name not in set(names)]
        stored = onto.names if all(name in onto.names for name in names) else tuned.names
        return [Entry(name, stored[name], self._action(name)) for name in names]

    @cached_property
    def dropped(self) -> list[str]:
        """Heads of B that the output, being of the fine-tune's kind, has no use for."""
        kept = {entry.name for entry in self.entries}
        return [name for name in self.onto.architecture.tensors if name not in kept]

    def _action(self, name: str) -> Action:
        tuned, onto = self.vector.finetuned.architecture, self.onto
        if name not in tuned.tensors:
            return Action.KEPT
        fits = name in onto.architecture.tensors and self.vector.covers(name)
        if fits and onto.info(name).shape == self.vector.base.info(name).shape:
            return Action.MOVED
        return Action.CARRIED

    def names(self, action: Action) -> list[str]:
        return [entry.name for entry in self.entries if entry.action is action]

    def plan(self) -> dict[str, int]:
        """How much there is to do, known from the headers alone."""
        tuned = self.vector.finetuned
        owners = {Action.CARRIED: tuned, Action.MOVED: self.onto, Action.KEPT: self.onto}
        infos = [owners[entry.action].info(entry.name) for entry in self.entries]
        size = self.dtype.itemsize if self.dtype else None
        return {
            "tensors": len(self.entries),
            **{str(action): len(self.names(action)) for action in Action},
            "dropped": len(self.dropped),
            "bytes": sum(
                info.nbytes // info.dtype.itemsize * (size or info.dtype.itemsize) for info in infos
            ),
        }

    def tensor(self, entry: Entry) -> Tensor:
        """One tensor of the output."""
        if entry.action is Action.KEPT:
            return self._as_stored(self.onto.read(entry.name), self.onto, entry.name)
        layout = self.vector.finetuned.architecture.tensors[entry.name]
        if entry.action is Action.CARRIED:
            tuned = self.vector.finetuned
            return self._as_stored(self.alignment.move(tuned.read(entry.name), layout), tuned, entry.name)
        difference = self.vector.difference(entry.name)
        own = self.onto.read(entry.name)
        if not bool(difference.any()):
            self.unchanged.add(entry.name)
            return self._as_stored(own, self.onto, entry.name)
        result = working(own) + self.alpha * self.alignment.move(difference, layout)
        return self._as_stored(result, self.onto, entry.name)

    def _as_stored(self, tensor: Tensor, owner: Model, name: str) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        stored = tensor.to(self.dtype or owner.info(name).dtype)
        if not bool(torch.isfinite(stored).all()):
            raise OutputError(
                f"{name} has values that {str(stored.dtype).removeprefix('torch.')} cannot hold",
                hint="choose a wider --dtype, or a smaller --alpha",
            )
        return stored

    def state_dict(self) -> dict[str, Tensor]:
        """The whole output in memory, under the names that B's library loads."""
        state: dict[str, Tensor] = {}
        for entry in self.entries:
            state |= entry.stored_as.split(self.tensor(entry))
        self._require_change()
        return state

    def module(self) -> nn.Module:
        """The whole output in memory, as a module of its library; a copy, whatever B is."""
        kind = (self.vector.finetuned if self.of_its_kind else self.onto).checkpoint
        family, label = self.onto.family, f"{self.vector.finetuned.label} on {self.onto.label}"
        return module_of(family, self.config(), self.state_dict(), like=kind.module, label=label)

    def config(self) -> dict[str, Any] | None:
        """B's configuration; in a model of the fine-tune's class, also what belongs to its head."""
        config = dict(self.onto.checkpoint.config or {}) or None
        theirs = self.vector.finetuned.checkpoint.config
        if config is not None and theirs is not None and self.of_its_kind:
            for key in ("architectures", "id2label", "label2id", "num_labels", "problem_type"):
                config.pop(key, None)  # a key that they leave out has its default there
                if key in theirs:
                    config[key] = theirs[key]
        if config is not None and self.dtype is not None:
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = str(self.dtype).removeprefix("torch.")
        return config

    def save(
        self, path: str | Path, *, force: bool = False, on_tensor: Callable[[str], None] = nobody_watching
    ) -> Path:
        """Write the output: B's shards, configuration and companions; all of it or nothing."""
        return write_model(
            Path(path),
            self._shards(on_tensor),
            like=self.onto.checkpoint,
            config=self.config(),
            story=self.story,
            force=force,
        )

    def _shards(self, on_tensor: Callable[[str], None]) -> Shards:
        """B's files with the tensors that go into each; what B does not have joins the last."""

        def compute(entry: Entry) -> Tensor:
            on_tensor(entry.name)
            return self.tensor(entry)

        shards: Shards = {file: {} for file in self.onto.checkpoint.files}
        for entry in self.entries:
            mine = entry.name in self.onto.names
            file = self.onto.info(entry.name).file if mine else self.onto.checkpoint.files[-1]
            for piece, get in entry.stored_as.apart(partial(compute, entry)).items():
                own = self.onto.checkpoint.tensors.get(piece) if mine else None
                shards[own.file if own else file][piece] = get
        return {file: tensors for file, tensors in shards.items() if tensors}

    def story(self) -> dict[str, Any]:
        """What was done, for the file beside the output."""
        self._require_change()
        return {
            **story_of(self.vector.finetuned.label, self.vector.base, self.onto, self.alignment, self.alpha),
            "moved": len(self.names(Action.MOVED)) - len(self.unchanged),
            "unchanged": len(self.unchanged),
            "carried": self.names(Action.CARRIED),
            "dropped": self.dropped,
        }

    def _require_change(self) -> None:
        if self.names(Action.MOVED) and len(self.unchanged) == len(self.names(Action.MOVED)):
            raise MismatchError(
                f"{self.vector.finetuned.label} equals its base {self.vector.base.label}: there is nothing"
                " to move",
                hint="was the base given twice?",
            )
