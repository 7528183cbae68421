"""Transport: B + α·π(τ), a checkpoint that loads where B does, or an adapter for B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion import __version__
from transfusion.adapter import CONFIG as ADAPTER_CONFIG
from transfusion.adapter import Adapter, Factor, is_adapter
from transfusion.alignment import Alignment
from transfusion.errors import AlignmentError, MismatchError, listing
from transfusion.matching import align
from transfusion.model import Model, require_same_shape
from transfusion.task_vector import TaskVector, working
from transfusion.writer import Shards, staged_folder, write_json, write_model, write_shard


def _ignore(name: str) -> None:
    """Nobody is watching."""


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
    stored_as: str
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
    def brings_head(self) -> bool:
        """Whether the fine-tune has tensors that B does not have: then it decides the names."""
        tuned = self.vector.finetuned.architecture
        return any(name not in self.onto.architecture.tensors for name in tuned.heads)

    @cached_property
    def entries(self) -> list[Entry]:
        """The tensors of the output, B's order first."""
        tuned, onto = self.vector.finetuned, self.onto
        names = [*onto.architecture.tensors, *onto.architecture.buffers]
        if self.brings_head:
            names = [name for name in names if name in tuned.names]
            names += [name for name in tuned.architecture.tensors if name not in set(names)]
        stored = tuned.names if self.brings_head else onto.names
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
        return tensor.to(self.dtype or owner.info(name).dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole output in memory, under the names that B's library loads."""
        state = {entry.stored_as: self.tensor(entry) for entry in self.entries}
        self._require_change()
        return state

    def config(self) -> dict[str, Any] | None:
        """B's configuration; with a head from the fine-tune, also what belongs to that head."""
        config = dict(self.onto.checkpoint.config or {}) or None
        theirs = self.vector.finetuned.checkpoint.config
        if config is not None and theirs is not None and self.brings_head:
            for key in ("architectures", "id2label", "label2id", "num_labels", "problem_type"):
                config.pop(key, None)  # a key that they leave out has its default there
                if key in theirs:
                    config[key] = theirs[key]
        if config is not None and self.dtype is not None:
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = str(self.dtype).removeprefix("torch.")
        return config

    def save(self, path: Path, *, force: bool = False, on_tensor: Callable[[str], None] = _ignore) -> Path:
        """Write the output: B's shards, configuration and companions; all of it or nothing."""
        return write_model(
            path,
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
            shards[file][entry.stored_as] = partial(compute, entry)
        return {file: tensors for file, tensors in shards.items() if tensors}

    def story(self) -> dict[str, Any]:
        """What was done, for the file beside the output."""
        self._require_change()
        return {
            **_story(self.vector.finetuned.label, self.vector.base, self.onto, self.alignment, self.alpha),
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


@dataclass
class AdapterTransport:
    """A LoRA adapter on its way from A to B; it stays an adapter of the same rank."""

    adapter: Adapter
    base: Model
    onto: Model
    alignment: Alignment
    alpha: float = 1.0
    dtype: torch.dtype | None = None

    @cached_property
    def factors(self) -> list[Factor]:
        return self.adapter.factors(self.base)

    def tensor(self, factor: Factor) -> Tensor:
        """One tensor of the adapter, moved."""
        stored = self.adapter.read(factor.key)
        result = working(stored)
        if factor.whole:
            result = self._whole(factor, result)
        else:
            result = self.alignment.move(result, factor.layout)
            if factor.scaled:
                result = result * self.alpha
        return result.to(self.dtype or stored.dtype).contiguous()

    def _whole(self, factor: Factor, trained: Tensor) -> Tensor:
        """A tensor that was trained as a whole: its change moves, as in a dense task vector."""
        name = factor.tensor
        in_both = all(
            name in model.architecture.tensors and model.info(name).shape == tuple(trained.shape)
            for model in (self.base, self.onto)
        )
        if not in_both:
            return self.alignment.move(trained, factor.layout)
        difference = trained - working(self.base.read(name))
        return working(self.onto.read(name)) + self.alpha * self.alignment.move(difference, factor.layout)

    def state_dict(self) -> dict[str, Tensor]:
        """The moved adapter, under its own keys."""
        return {factor.key: self.tensor(factor) for factor in self.factors}

    def config(self) -> dict[str, Any]:
        """The adapter's configuration, changed only in the base that it is for."""
        reference, _, revision = self.onto.label.partition("@")
        local = Path(self.onto.label).expanduser()
        return {
            **self.adapter.config,
            "base_model_name_or_path": str(local.resolve()) if local.exists() else reference,
            "revision": None if local.exists() else revision or None,
        }

    def save(self, path: Path, *, force: bool = False, on_tensor: Callable[[str], None] = _ignore) -> Path:
        """Write an adapter folder that PEFT loads on B."""
        with staged_folder(path, force=force) as staged:
            tensors: dict[str, Tensor] = {}
            for factor in self.factors:
                on_tensor(factor.key)
                tensors[factor.key] = self.tensor(factor)
            write_shard(staged / "adapter_model.safetensors", tensors)
            write_json(staged / ADAPTER_CONFIG, self.config())
            write_json(staged / "transfusion.json", self.story())
        return path

    def story(self) -> dict[str, Any]:
        return {
            **_story(self.adapter.label, self.base, self.onto, self.alignment, self.alpha),
            "moved": sum(not factor.whole for factor in self.factors),
            "carried": sorted(factor.tensor for factor in self.factors if factor.whole),
        }


def transport(
    finetuned: Model | str | Path,
    *,
    base: Model | str | Path,
    onto: Model | str | Path,
    via: Alignment | str | Path | None = None,
    alpha: float = 1.0,
    dtype: torch.dtype | None = None,
    trust_base: bool = False,
    **aligning: Any,
) -> Transport | AdapterTransport:
    """
    Prepare B + α·π(τ). Without ``via`` the bases are aligned first, with ``aligning`` passed on.

    >>> moved = transport("tuned", base="a", onto="b")   # doctest: +SKIP
    >>> moved.save(Path("tuned-on-b"))                   # doctest: +SKIP
    """
    a, b = (model if isinstance(model, Model) else Model.open(model) for model in (base, onto))
    require_same_shape(a, b)
    alignment = alignment_between(a, b, via, **aligning)
    story = alignment.provenance
    a, b = a.under(story.residual, story.inner), b.under(story.residual, story.inner)
    if not isinstance(finetuned, Model) and is_adapter(finetuned):
        return AdapterTransport(Adapter.open(finetuned), a, b, alignment, alpha, dtype)
    tuned = finetuned if isinstance(finetuned, Model) else Model.open(finetuned)
    tuned = tuned.under(story.residual, story.inner)
    return Transport(TaskVector.between(tuned, a, trust_base=trust_base), b, alignment, alpha, dtype)


def alignment_between(a: Model, b: Model, via: Alignment | str | Path | None, **aligning: Any) -> Alignment:
    """The given alignment, checked against both models; or a new one."""
    if via is None:
        return align(a, b, **aligning)
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    story = alignment.provenance
    alignment.require_for(a.architecture.under(story.residual, story.inner))
    alignment.require_between(source=a, target=b)
    return alignment


# ── π(A) ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Applied:
    """π(A): A's tensors in B's order of units."""

    alignment: Alignment
    model: Model

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name."""
        tensor = self.model.read(name)
        layout = self.model.architecture.tensors.get(name)
        return tensor if layout is None else self.alignment.move(tensor, layout)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole of it in memory, under A's names."""
        return {stored: self.tensor(name) for name, stored in self.model.names.items()}

    def save(self, path: Path, *, force: bool = False) -> Path:
        """Write it like A: the same files, configuration and companions."""
        shards: Shards = {file: {} for file in self.model.checkpoint.files}
        for name, stored in self.model.names.items():
            shards[self.model.info(name).file][stored] = partial(self.tensor, name)
        return write_model(
            path,
            shards,
            like=self.model.checkpoint,
            config=self.model.checkpoint.config,
            story=lambda: {
                "transfusion": __version__,
                "applied": self.alignment.digest,
                "to": {"name": self.model.label, "sha256": self.model.digest},
            },
            force=force,
        )


def apply(via: Alignment | str | Path, a: Model | str | Path) -> Applied:
    """Prepare π(A), the same function as A; refused where that is not an ordinary checkpoint."""
    alignment = via if isinstance(via, Alignment) else Alignment.load(via)
    story = alignment.provenance
    model = (a if isinstance(a, Model) else Model.open(a)).under(story.residual, story.inner)
    alignment.require_for(model.architecture)
    alignment.require_between(source=model)
    broken = [
        f"{cut.source} → {cut.target}"
        for cut in model.architecture.shortcuts
        if alignment.maps.get(cut.source) != alignment.maps.get(cut.target)
    ]
    if broken:
        raise AlignmentError(
            "π(A) is not an ordinary checkpoint: the residual stream has different maps before and after"
            f" {len(broken)} shortcut(s) ({listing(broken, 2)}), and a plain shortcut cannot turn one into"
            " the other",
            hint="align with --residual tied; 'transport' needs no shortcuts and takes this π as it is",
        )
    return Applied(alignment, model)


def _story(finetuned: str, base: Model, onto: Model, alignment: Alignment, alpha: float) -> dict[str, Any]:
    story = alignment.provenance
    return {
        "transfusion": __version__,
        "finetuned": finetuned,
        "base": {"name": base.label, "sha256": story.source_digest},
        "onto": {"name": onto.label, "sha256": story.target_digest},
        "alignment": {
            "sha256": alignment.digest,
            "method": story.method,
            "residual": story.residual,
            "inner": story.inner,
            "seed": story.seed,
        },
        "alpha": alpha,
    }
