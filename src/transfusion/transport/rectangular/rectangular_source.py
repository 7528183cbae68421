"""A fine-tune of A as changes to a base B of another shape, and the heads that it brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.part_pairs import block_behind
from transfusion.architecture.layouts import Name
from transfusion.errors import MismatchError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.staging import TensorShape
from transfusion.model.model import Model
from transfusion.model.part_roles import Role, TensorPart, moves, place_of, tensor_parts
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.transport.adapters.adapter_classes import class_prefix, named_in, with_prefix
from transfusion.transport.alpha import Alpha
from transfusion.transport.rectangular.rectangular_change import CarriedHead, RectangularChange
from transfusion.transport.task_vector import TaskVector
from transfusion.transport.task_vector_sources import TaskVectorSource


@dataclass
class RectangularSource(TaskVectorSource):
    """The task vector of a model, moved by rectangular maps."""

    vector: TaskVector
    alignment: Alignment
    onto: Model
    alpha: Alpha = field(default_factory=Alpha)
    named: str | None = None
    """What the user gave, if that is an adapter which was folded into A."""
    origin: Checkpoint | None = None
    """The files of that adapter."""
    content: str | None = None
    """The fingerprint of that adapter."""
    _last: tuple[str, Tensor] | None = field(default=None, repr=False)
    """The latest tensor: it is computed as a whole."""

    @property
    def model(self) -> Model:
        return self.vector.finetuned

    @property
    def label(self) -> str:
        return self.named or self.model.label

    @property
    def fingerprint(self) -> str:
        return self.content or self.model.fingerprint

    @property
    def checkpoint(self) -> Checkpoint:
        return self.origin or self.model.checkpoint

    @cached_property
    def moved(self) -> RectangularChange:
        return RectangularChange(self.vector, self.alignment, self.onto)

    # ── the class of the output ──────────────────────────────────────────────────────────────

    @property
    def has_heads(self) -> bool:
        return bool(self.carried)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The fine-tune's configuration; with the class of B, where B has the heads already."""
        own, theirs = self.model.checkpoint.config, self.onto.checkpoint.config
        if own is None or self._new:
            return own
        return {**own, "architectures": (theirs or {}).get("architectures")}

    @cached_property
    def names(self) -> Mapping[str, TensorPieces]:
        """The tensors of B; with heads of the fine-tune's own, without B's."""
        known = self.onto.architecture
        names = {name: self.onto.names[name] for name in (*known.tensors, *known.buffers)}
        if not self.carried:
            return names
        names = {name: one for name, one in names.items() if name not in known.heads or self._has(name)}
        if not self._new:
            return names
        prefixes = self.onto.family.prefixes
        class_name = named_in(self.model.config) or ""
        prefix = class_prefix(class_name, self.onto.config, prefixes)
        bare = not any(one.names[0].startswith(prefixes) for one in names.values()) if prefixes else False
        inside = {
            name: with_prefix(one, prefix, prefixes) if bare or one.names[0].startswith(prefixes) else one
            for name, one in names.items()
        }
        return {**inside, **{name: self.model.names[name] for name in self._new}}

    @property
    def _new(self) -> list[str]:
        """The carried tensors that B has no name for."""
        return [name for name in self.carried if name not in self.onto.names]

    def _has(self, name: str) -> bool:
        return self.changes(name) or self.owns(name)

    @property
    def buffers(self) -> frozenset[str]:
        return self.onto.architecture.buffers

    # ── heads of its own ─────────────────────────────────────────────────────────────────────

    @cached_property
    def carried(self) -> dict[str, CarriedHead]:
        """By their names on B: the heads of the fine-tune that B has none to add a change to."""
        moved = {source for target in self.moved.parts_b for source in self.moved.sources(target)}
        heads = self.model.architecture.heads
        found: dict[str, CarriedHead] = {}
        for role, part in tensor_parts(self.model.architecture).items():
            if part.tensor not in heads or part.tensor in moved or VOCABULARY in part.layout.names():
                continue
            layout = part.layout.rename(partial(self._axis_on_b, part))
            folds = self._folds.get(str(part.input), (None, None)) if part.is_weight else (None, None)
            found[self._name_on_b(role, part)] = CarriedHead(part, layout, *folds)
        return found

    def _name_on_b(self, role: Role, part: TensorPart) -> str:
        """Return the name of a head on B: that of the same role, or the same name in the same family."""
        block = block_behind(self.alignment.paths, role.stack, role.block)
        theirs = tensor_parts(self.onto.architecture).get(replace(role, block=block))
        if theirs is not None and theirs.index is None and theirs.tensor in self.onto.architecture.heads:
            return theirs.tensor
        if self.onto.family.name == self.model.family.name:
            return part.tensor
        raise MismatchError(
            f"{self.label} has the head {part.tensor} ({role}), and {self.onto.label}, a"
            f" {self.onto.family.name}, has none of this kind",
            hint="give a B with a head for the same task",
        )

    def _axis_on_b(self, part: TensorPart, id: str) -> str:
        """Return B's name of an axis of a head; refuse an axis that moves and has no map."""
        if not moves(self.model.architecture, Name(id)):
            return id
        stack, block, axis = place_of(id)
        number = block_behind(self.alignment.paths, stack, block)
        target = ".".join(str(one) for one in (stack, number, axis) if one not in ("", None))
        if self.alignment.map_between(target, id) is not None:
            return target
        raise MismatchError(
            f"{self.label}: the head {part.tensor} has the axis {id}, which A and B do not have in common",
            hint="give bases with the parts that the head reads, such as a pooler",
        )

    @cached_property
    def _folds(self) -> dict[str, tuple[Any, Any]]:
        """By point of A's stream: the norms before it in A and in B."""
        found: dict[str, tuple[Any, Any]] = {}
        for pair in self.alignment.pairs(self.vector.base.architecture, self.onto.architecture):
            folds = (
                self.alignment.folds.get(pair.source.tensor),
                self.alignment.folds_b.get(pair.target.tensor),
            )
            if not pair.source.is_weight and folds != (None, None):
                found[str(pair.source.output)] = folds
        return found

    def owns(self, name: str) -> bool:
        return name in self.carried

    def shape(self, name: str) -> TensorShape:
        head = self.carried[name]
        info = self.model.info(head.part.tensor)
        items = zip(head.layout.items, head.part.layout.items, strict=True)
        maps = [self.alignment.map_between(target, source) for target, source in items]
        extents = (one.size if one else extent for one, extent in zip(maps, info.shape, strict=True))
        return tuple(extents), info.dtype

    def own(self, name: str, rows: slice) -> Tensor:
        return self._whole(f"own {name}", lambda: self._own(name))[rows]

    def _own(self, name: str) -> Tensor:
        head = self.carried[name]
        value = self.moved.carried(head)
        weight = self.carried.get(f"{name.rpartition('.')[0]}.weight")
        if name.endswith(".bias") and weight is not None and weight.part.is_weight:
            value = value + self.moved.shift_of(weight, self.moved.carried(weight))
        return value

    # ── changes of B's tensors ───────────────────────────────────────────────────────────────

    @property
    def left_out(self) -> list[str]:
        return self.moved.left_out

    def changes(self, name: str) -> bool:
        return self.moved.covers(name)

    def by_rows(self, name: str) -> bool:
        return bool(self.onto.info(name).shape if name in self.onto.names else True)

    def change(self, name: str, rows: slice) -> Tensor:
        whole = self._whole(name, lambda: self.alpha.at(name) * self.moved.of(name))
        return whole[rows] if whole.ndim else whole

    def _whole(self, key: str, compute: Any) -> Tensor:
        last = self._last
        if last is None or last[0] != key:
            self._last = last = (key, compute())
        return last[1]

    def auxiliary_files(self) -> list[Path]:
        return self.model.checkpoint.auxiliary_files()
