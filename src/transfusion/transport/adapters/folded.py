"""Moved adapters folded into weights: what an adapter does to the tensors of B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transfusion.architecture.layouts import ANONYMOUS, Name
from transfusion.errors import AdapterError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.staging import TensorShape
from transfusion.files.tensor_files import TensorInfo
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.transport.adapters.adapter import LABEL
from transfusion.transport.adapters.classes import (
    ENCODERS,
    class_for,
    class_prefix,
    with_prefix,
)
from transfusion.transport.adapters.kinds import Factors, WeightReference
from transfusion.transport.adapters.move import MovedAdapter
from transfusion.transport.adapters.settings import WRAPPED
from transfusion.transport.adapters.targets import AdapterTensor, TensorSlice, as_matrix, as_stored
from transfusion.transport.alpha import Alpha
from transfusion.transport.changes import TaskVectorSource
from transfusion.transport.task_vector import working


@dataclass
class FoldedAdapter(TaskVectorSource):
    """A moved adapter as changes to B's weights, equal to PEFT's ``merge_and_unload`` on B."""

    moved: MovedAdapter
    _last: tuple[str, Tensor] | None = field(default=None, repr=False)
    """The latest change: it is computed as a whole, and read in blocks of rows."""

    @property
    def alpha(self) -> Alpha:  # type: ignore[override]
        return self.moved.alpha

    @property
    def label(self) -> str:
        return self.moved.label

    @property
    def fingerprint(self) -> str:
        return self.moved.fingerprint

    @property
    def checkpoint(self) -> Checkpoint:
        return self.moved.adapter.checkpoint

    # ── the class of the model ───────────────────────────────────────────────────────────────

    @property
    def has_heads(self) -> bool:
        return bool(self.moved.carried)

    @property
    def class_name(self) -> str:
        """The class of B with the adapter's own heads; refused if B's type has no such class."""
        moved, adapter = self.moved, self.moved.adapter
        model_type = moved.onto.config.get("model_type")
        name = class_for(adapter.config, {**moved.base.config, "model_type": model_type})
        if name is None:
            mapping = adapter.config.get("auto_mapping") or {}
            task = mapping.get("base_model_class") or adapter.config.get("task_type")
            raise AdapterError(
                f"{self.label} was trained for {task!r:.80}, and a model of type {model_type!r:.80} has no"
                f" such class: {listing(moved.carried)} cannot become part of one",
                hint="leave the adapter an adapter; or correct task_type in adapter_config.json",
            )
        return name

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The base's configuration, for the class that the adapter was trained in."""
        base = self.moved.base.checkpoint.config
        if base is None or not self.has_heads:
            return base
        heads = (one for one in self.moved.factors if one.layout.items[:1] == (Name(LABEL),))
        carried = (one.tensor for one in heads if self.owns(one.tensor))
        labels = next((self.shape(name)[0][0] for name in carried), None)
        named = {} if labels is None else _numbered(labels, base)
        kept = {key: value for key, value in base.items() if key not in ("num_labels", "problem_type")}
        return {**kept, **named, "architectures": [self.class_name]}

    @cached_property
    def names(self) -> Mapping[str, TensorPieces]:
        """The base's tensors. With a head of its own: the backbone, that head, and what it reads through."""
        base = self.moved.base
        if not self.has_heads:
            return base.names
        class_name, prefixes, own = self.class_name, base.family.prefixes, self.moved.carried
        through = self.moved.adapter.read_through(base, own)
        if absent := sorted(through - self.moved.onto.architecture.tensors.keys()):
            raise AdapterError(
                f"the head of {self.label} reads through {listing(absent)}, which {self.moved.onto.label}"
                " does not have",
                hint="give a B with the same parts as A",
            )
        bare = not any(one.names[0].startswith(prefixes) for one in base.names.values())
        prefix = class_prefix(class_name, self.moved.onto.config, prefixes)
        kept = {}
        for name, one in base.names.items():
            inside = bare or one.names[0].startswith(prefixes)
            if name in through or (inside and not self._is_head(name)):
                kept[name] = with_prefix(one, prefix, prefixes) if inside else one
        if class_name in ENCODERS:
            kept = {name: one for name, one in kept.items() if not name.startswith("decoder.")}
        return {**kept, **{name: self._own_name(name, prefix) for name in own}}

    def _own_name(self, name: str, prefix: str) -> TensorPieces:
        """Return the name in files of one of the adapter's own tensors. A pooler may be in the base model."""
        live = self._info(name).name.removeprefix("base_model.").removeprefix("model.")
        inside = live.startswith(self.moved.base.family.prefixes)
        return TensorPieces(((prefix + name if inside else name,),))

    def _is_head(self, name: str) -> bool:
        """Whether a tensor of the base belongs to a task head. A vector on backbone axes does not."""
        known = self.moved.base.architecture
        if name not in known.heads:
            return False
        layout = known.tensors[name]
        return layout.arrow is not None or not set(layout.names()) <= set(known.backbone_spaces)

    # ── tensors of its own ───────────────────────────────────────────────────────────────────

    def owns(self, name: str) -> bool:
        return name in self.moved.carried

    def shape(self, name: str) -> TensorShape:
        info = self._info(name)
        return info.shape, info.dtype

    def own(self, name: str, rows: slice) -> Tensor:
        return self.moved.moved(self._wholes[name])[rows]

    def _info(self, name: str) -> TensorInfo:
        return self.checkpoint.tensors[self._wholes[name].key]

    @cached_property
    def _wholes(self) -> dict[str, AdapterTensor]:
        return {factor.tensor: factor for factor in reversed(self.moved.factors) if factor.whole}

    # ── changes of B's tensors ───────────────────────────────────────────────────────────────

    def changes(self, name: str) -> bool:
        return name in self.changed

    @cached_property
    def changed(self) -> frozenset[str]:
        """The tensors of B that the adapter changes, by canonical name."""
        self._require_foldable()
        wholes = {name for name, factor in self._wholes.items() if self.moved.in_both(factor)}
        return frozenset(wholes | self._modules.keys())

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        """For every tensor that is changed, the modules that change it."""
        modules: dict[str, list[str]] = {}
        for module in self.moved.modules:
            for name in dict.fromkeys(self._changed_by(module)):  # two places may be in one tensor
                modules.setdefault(name, []).append(module)
        return modules

    def _changed_by(self, module: str) -> Iterator[str]:
        kind, factors = self.moved.adapter.kind, self.moved.modules[module]
        onto, places = self.moved.onto, factors[0].places
        if WRAPPED in module:
            raise AdapterError(
                f"{self.label} changes {places[0].tensor} within an attention that is wrapped as a whole;"
                " versions of PEFT disagree whether to add such a change once or twice",
                hint="leave the adapter an adapter, or merge it with the PEFT that it was trained with",
            )
        rows = any(factor.part.reference is WeightReference.ROWS for factor in factors)
        own = any(factor.part.of == "bias" for factor in factors)
        scaled = own or any(_multiplies_outputs(factor) for factor in factors)
        for place in places:
            if rows or kind.changed is not None or kind.added is not None:
                if place.tensor not in onto.architecture.tensors:
                    raise self.moved.absent(place.tensor, "it cannot be merged")
                yield place.tensor
            if scaled and place.bias.tensor in onto.architecture.tensors:
                yield place.bias.tensor
            elif own:
                raise AdapterError(
                    f"{self.label}: {module} gets a bias, and in {onto.label} it has none: this cannot be"
                    " merged",
                    hint="leave the adapter an adapter",
                )

    def by_rows(self, name: str) -> bool:
        return True

    def change(self, name: str, rows: slice) -> Tensor:
        last = self._last
        if last is None or last[0] != name:
            self._last = last = (name, self.delta(name))
        return last[1][rows] if last[1].ndim else last[1]

    def delta(self, name: str) -> Tensor:
        """Return the change of one tensor of B. For additive kinds it is not rounded against the weight."""
        weight = working(self.moved.onto.read(name))
        rows = any(
            one.tensor == name and one.part.reference is WeightReference.ROWS for one in self.moved.factors
        )
        if self.moved.adapter.kind.added is not None and name not in self._wholes and not rows:
            return self.merged(name, torch.zeros_like(weight))
        return self.merged(name, weight) - weight

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of B with the moved adapter folded in, in float32 or float64."""
        self._require_foldable()
        whole = self._wholes.get(name)
        result = (working(weight) if whole is None else self.moved.moved(whole)).clone()
        for module in self._modules.get(name, ()):
            self._fold(module, name, result)
        return result

    def _fold(self, module: str, name: str, into: Tensor) -> None:
        """Apply the adapter's formula for one module to a tensor, in place."""
        moved, factors = self.moved, self.moved.modules[module]
        kind, settings = moved.adapter.kind, moved.adapter.settings(module)
        if tokens := next((one for one in factors if one.part.reference is WeightReference.ROWS), None):
            into[settings.tokens] = moved.moved(tokens).to(into.dtype)
            return
        whole = moved.onto.architecture.tensors[name]
        for spot, parts in self._parts(module, name):
            mine = into[spot.index(whole, moved.onto.architecture.sizes)]
            here = {part: value.to(into.dtype) for part, value in parts.items()}
            if name != spot.tensor and kind.bias is not None:
                mine.copy_(kind.bias(mine, here, settings))
            else:
                layout = spot.layout(whole)
                mine.copy_(as_stored(kind.on_weight(as_matrix(mine, layout), here, settings), layout, mine))

    def _parts(self, module: str, name: str) -> Iterator[tuple[TensorSlice, dict[str, Tensor]]]:
        """Yield the places of a module in a tensor, and what the module's moved tensors have for each."""
        moved, factors = self.moved, self.moved.modules[module]
        places = [
            (number, spot)
            for number, spot in enumerate(factors[0].places)
            if name in (spot.tensor, spot.bias.tensor)
        ]
        parts = {factor.part.name: moved.moved(factor) for factor in factors}
        for number, spot in places:
            yield spot, {one.part.name: parts[one.part.name][moved.shares(one)[number]] for one in factors}

    def factors(self, name: str) -> Factors | None:
        """Return the change of a weight matrix as a product of low rank; None if it is not known as one."""
        modules = self._modules.get(name, [])
        if name in self._wholes or not modules or self.moved.onto.architecture.tensors[name].arrow is None:
            return None
        found = [one for module in modules for one in self._low_rank(module, name)]
        if None in found:
            return None
        lefts, rights = zip(*filter(None, found), strict=True)
        return torch.cat(lefts, dim=1), torch.cat(rights)

    def _low_rank(self, module: str, name: str) -> Iterator[Factors | None]:
        """Yield the factors of the change at every place of a module, with zeros elsewhere."""
        moved, kind = self.moved, self.moved.adapter.kind
        rows = any(one.part.reference is WeightReference.ROWS for one in moved.modules[module])
        whole, shape = moved.onto.architecture.tensors[name], moved.onto.info(name).shape
        if kind.factors is None or rows:
            yield None
            return
        for spot, parts in self._parts(module, name):
            product = kind.factors(parts, moved.adapter.settings(module))
            if product is None or spot.member is not None or (spot.piece is not None and len(shape) != 2):
                yield None
            elif spot.piece is None:
                yield product
            else:
                cuts = spot.index(whole, moved.onto.architecture.sizes)
                (outputs,), (inputs,) = whole.outputs, whole.inputs
                left = product[0].new_zeros(shape[outputs], product[0].shape[1])
                right = product[1].new_zeros(len(product[1]), shape[inputs])
                left[cuts[outputs]], right[:, cuts[inputs]] = product
                yield left, right

    def _require_foldable(self) -> None:
        kind = self.moved.adapter.kind
        if kind.prompt:
            raise AdapterError(
                f"{self.label}: adapters of kind {kind.name} cannot be merged: they change the model's"
                " inputs, and no weight",
                hint="leave the adapter an adapter",
            )


def _multiplies_outputs(factor: AdapterTensor) -> bool:
    """Whether a factor multiplies the outputs of its module, and so its bias too."""
    return factor.part.reference is WeightReference.ONE and factor.layout.items[0] != Name(ANONYMOUS)


def _numbered(count: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbered labels for a head of this size; nothing if the base's own labels fit."""
    known = config.get("id2label")
    if isinstance(known, Mapping) and len(known) == count:
        return {}
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
