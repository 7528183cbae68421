"""An adapter that becomes part of the model: what it changes, as changes of B's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from transfusion.checkpoint.checkpoint import Checkpoint
from transfusion.errors import AdapterError, listing
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.transportation.adapters.adapter_classes import ENCODERS, PREFIXES
from transfusion.transportation.adapters.adapter_transport import AdapterTransport
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.output_model import OutputShape
from transfusion.transportation.task_vector_sources import TaskVectorSource


@dataclass
class FoldedAdapter(TaskVectorSource):
    """A moved adapter, folded into the weights that it belongs to."""

    moved: AdapterTransport
    _last: tuple[str, Tensor] | None = field(default=None, repr=False)
    """The change that was asked for last: a product of factors, of which blocks of rows are wanted."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what is only remembered, which other processes find themselves."""
        moved = copy(self.moved)
        moved._stacks = {}
        return {**self.__dict__, "_last": None, "moved": moved}

    @property
    def alpha(self) -> Alpha:  # type: ignore[override]
        return self.moved.alpha

    @property
    def label(self) -> str:
        return self.moved.label

    @property
    def digest(self) -> str:
        return self.moved.digest

    @property
    def checkpoint(self) -> Checkpoint:
        return self.moved.adapter.checkpoint

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The base's, as a model of the class that the adapter was trained in."""
        base = self.moved.base.checkpoint.config
        if base is None or not self.has_heads:
            return base
        labels = next((self.shape(name).extents[0] for name in self.moved.labelled), None)
        named = {} if labels is None else _numbered(labels, base)
        kept = {key: value for key, value in base.items() if key not in ("num_labels", "problem_type")}
        return {**kept, **named, "architectures": [self.moved.class_name]}

    @cached_property
    def names(self) -> Mapping[str, TensorPieces]:
        """With a head of its own, the base model within the base, and that head with what it reads through;
        other heads are not of its kind.
        """
        base, class_name = self.moved.base, self.moved.class_name if self.has_heads else None
        if class_name is None:
            return base.names
        prefixes, own = base.family.prefixes, self.moved.carried
        through = self.moved.adapter.read_through(base, own)
        self._require(through)
        bare = not any(one.names[0].startswith(prefixes) for one in base.names.values())
        prefix = _prefix(class_name, self.moved.onto.config, prefixes)
        kept = {}
        for name, one in base.names.items():
            inside = bare or one.names[0].startswith(prefixes)
            if name in through or (inside and not self._is_head(name)):
                kept[name] = _within(one, prefix, prefixes) if inside else one
        if class_name in ENCODERS:
            kept = {name: one for name, one in kept.items() if not name.startswith("decoder.")}
        return {**kept, **{name: self._own_name(name, prefix) for name in own}}

    def _own_name(self, name: str, prefix: str) -> TensorPieces:
        """What a file calls a tensor of the adapter's own: a pooler may lie within the base model."""
        live = self.moved.whole(name).name.removeprefix("base_model.").removeprefix("model.")
        inside = live.startswith(self.moved.base.family.prefixes)
        return TensorPieces(((prefix + name if inside else name,),))

    def _is_head(self, name: str) -> bool:
        """Whether a tensor of the base belongs to a head; what lies on axes of the trunk alone does not."""
        known = self.moved.base.architecture
        if name not in known.heads:
            return False
        layout = known.tensors[name]
        return layout.arrow is not None or not set(layout.names()) <= set(known.backbone_spaces)

    def _require(self, through: frozenset[str]) -> None:
        onto = self.moved.onto
        if absent := sorted(through - onto.architecture.tensors.keys()):
            raise AdapterError(
                f"the head of {self.label} reads through {listing(absent)}, which {onto.label} does not have",
                hint="give a B with the same parts as A",
            )

    @property
    def has_heads(self) -> bool:
        return bool(self.moved.carried)

    def owns(self, name: str) -> bool:
        return name in self.moved.carried

    def shape(self, name: str) -> OutputShape:
        info = self.moved.whole(name)
        return OutputShape(info.shape, info.dtype)

    def changes(self, name: str) -> bool:
        return name in self._changed

    @cached_property
    def _changed(self) -> frozenset[str]:
        return frozenset(self.moved.changed)

    def by_rows(self, name: str) -> bool:
        return True

    def change(self, name: str, rows: slice) -> Tensor:
        last = self._last
        if last is None or last[0] != name:
            self._last = last = (name, self.moved.delta(name))
        return last[1][rows] if last[1].ndim else last[1]

    def own(self, name: str, rows: slice) -> Tensor:
        return self.moved.own(name)[rows]

    def blame(self, name: str) -> None:
        self.moved.base.read(name) if name in self.moved.base.names else self.moved.own(name)

    def holds(self) -> int:
        """A change is a product of factors, made as a whole: with the weight, and while two are made."""
        onto, floats = self.moved.onto, 8
        largest = max((prod(onto.info(name).shape) for name in self._changed), default=0)
        return 4 * floats * largest + self.reads()

    def reads(self) -> int:
        return self.moved.amounts()["bytes_to_read"]


def _prefix(class_name: str, config: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """What a class puts before the names of the base model."""
    by_type = f"{config.get('model_type')}.".replace("-", "_")
    usual = by_type if by_type in known else next(iter(known), "")
    return PREFIXES.get(class_name, usual)


def _within(stored: TensorPieces, prefix: str, known: tuple[str, ...]) -> TensorPieces:
    """A tensor of the base model under a class's prefix; one that is as good as that stays as it is."""
    before = next((one for one in known if stored.names[0].startswith(one)), "")
    alike = before and not {prefix, before} & set(PREFIXES.values())
    return stored if alike else stored.renamed(prefix, before)


def _numbered(count: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Labels for a head of so many outputs: the base's own if they fit, or numbers."""
    known = config.get("id2label")
    if isinstance(known, Mapping) and len(known) == count:
        return {}
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
