"""An adapter that becomes part of the model: what it changes, as changes of B's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from transfusion.alpha import Alpha
from transfusion.checkpoint import Checkpoint
from transfusion.storage import Stored
from transfusion.transportation.adapters import AdapterTransport
from transfusion.transportation.output import Shape
from transfusion.transportation.sources import Source


@dataclass
class FoldedAdapter(Source):
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
        return {**base, **named, "architectures": [self.moved.class_name]}

    @cached_property
    def names(self) -> Mapping[str, Stored]:
        """With a head of its own, the base model within the base, and that head; other heads are not of its
        kind.
        """
        base = self.moved.base
        if not self.has_heads:
            return base.names
        prefixes = base.family.prefixes
        within = {name: one for name, one in base.names.items() if one.names[0].startswith(prefixes)}
        trunk = within or {name: one.renamed(prefixes[0]) for name, one in base.names.items()}
        return {**trunk, **{name: Stored(((name,),)) for name in self.moved.carried}}

    @property
    def has_heads(self) -> bool:
        return bool(self.moved.carried)

    def owns(self, name: str) -> bool:
        return name in self.moved.carried

    def shape(self, name: str) -> Shape:
        info = self.moved.whole(name)
        return Shape(info.shape, info.dtype)

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


def _numbered(count: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Labels for a head of so many outputs: the base's own if they fit, or numbers."""
    known = config.get("id2label") or {}
    if len(known) == count:
        return {}
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
