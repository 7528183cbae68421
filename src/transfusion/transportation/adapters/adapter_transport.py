"""An adapter on its way from A to B; it stays an adapter of the same kind and rank, or is merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Permutation
from transfusion.checkpoint.tensor_files import TensorInfo
from transfusion.errors import AdapterError, SettingError, listing
from transfusion.layouts import ANONYMOUS, Name
from transfusion.model.model import Model
from transfusion.transportation.adapters.adapter import Adapter, AdapterTensor
from transfusion.transportation.adapters.adapter_classes import class_for
from transfusion.transportation.adapters.adapter_formulas import row_norms
from transfusion.transportation.adapters.adapter_kinds import WeightReference
from transfusion.transportation.adapters.adapter_output import AdapterOutput
from transfusion.transportation.adapters.adapter_targets import TensorSlice, as_matrix, as_stored
from transfusion.transportation.adapters.module_settings import WRAPPED
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.norm_folding import NormFolding, safe, scale_of
from transfusion.transportation.output_record import OutputRecord
from transfusion.transportation.task_vector import working

_KEPT = 16
"""How many stacks are kept: the parts of one block's experts."""


@dataclass
class AdapterTransport(AdapterOutput):
    """An adapter, moved tensor by tensor when asked for.

    Whatever carries α is stored as r + change, with r what the base itself has in that place: nothing for a
    factor of a sum, one for a factor of a product, the base's value for what was trained as a whole. It
    becomes r of B + α·π(stored − r of A).
    """

    adapter: Adapter
    base: Model
    onto: Model
    alignment: Alignment
    alpha: Alpha = field(default_factory=Alpha)
    dtype: torch.dtype | None = None
    output_record: OutputRecord = field(default_factory=OutputRecord)
    _stacks: dict[tuple[str, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    """Moved stacks whose members are being asked for."""

    @cached_property
    def factors(self) -> list[AdapterTensor]:
        """Every stored tensor, checked against the bases, π and α."""
        found = self.adapter.factors(self.base)
        self.alpha.require_used([*self.base.architecture.tensors, *(factor.tensor for factor in found)])
        self._require_alpha(found)
        self._require_permutations(found)
        self._require_places(found)
        return found

    @cached_property
    def modules(self) -> dict[str, list[AdapterTensor]]:
        """The stored tensors of every module that the adapter changes."""
        modules: dict[str, list[AdapterTensor]] = {}
        for factor in self.factors:
            if factor.module:
                modules.setdefault(factor.module, []).append(factor)
        return modules

    @property
    def carried(self) -> list[str]:
        """The tensors that only the adapter has, by canonical name: heads, for the most part."""
        return sorted(factor.tensor for factor in self.factors if factor.whole and not self._in_both(factor))

    @property
    def labelled(self) -> list[str]:
        """Those among the carried that have a row for each label."""
        heads = [factor for factor in self.factors if factor.layout.items[:1] == (Name("label"),)]
        return [factor.tensor for factor in heads if factor.tensor in self.carried]

    @property
    def class_name(self) -> str:
        """The class of model that the adapter makes of B."""
        kind = self.onto.config.get("model_type")
        name = class_for(self.adapter.config, {**self.base.config, "model_type": kind})
        if name is None:
            details = self.adapter.config
            task = (details.get("auto_mapping") or {}).get("base_model_class") or details.get("task_type")
            raise AdapterError(
                f"{self.adapter.label} was trained for {task!r:.80}, and a model of type {kind!r:.80} has no"
                f" such class: {listing(self.carried)} cannot become part of one",
                hint="leave the adapter an adapter; or correct task_type in adapter_config.json",
            )
        return name

    @property
    def notes(self) -> list[str]:
        """What the user should know, and is no reason to refuse the adapter."""
        return self.adapter.notes(self.base)

    def amounts(self) -> dict[str, int]:
        """How much there is to do, known from the headers alone."""
        infos = [self.adapter.checkpoint.tensors[factor.key] for factor in self.factors]
        return {
            "tensors": len(infos),
            "moved": len(infos) - len(self.carried),
            "carried": len(self.carried),
            "bytes_to_read": sum(info.nbytes for info in infos)
            + sum(model.checkpoint.nbytes for model in (self.base, self.onto)),
            "bytes_to_write": sum(
                info.nbytes // info.dtype.itemsize * (self.dtype or info.dtype).itemsize for info in infos
            ),
            "memory": 3 * sum(info.nbytes for info in infos),
        }

    # ── as an adapter ────────────────────────────────────────────────────────────────────────

    def tensor(self, factor: AdapterTensor) -> Tensor:
        """One tensor of the adapter, moved."""
        dtype = self.dtype or self.adapter.checkpoint.tensors[factor.key].dtype
        return self.moved(factor).to(dtype).contiguous()

    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """The moved adapter, under its own keys."""
        return {factor.key: partial(self.tensor, factor) for factor in self.factors}

    def moved(self, factor: AdapterTensor) -> Tensor:
        """The tensor in the type that arithmetic is done in; of a stack, what arrives in its place."""
        if not factor.stack:
            return self._arrived(factor)
        if factor.stack not in self._stacks:
            if len(self._stacks) == _KEPT:
                del self._stacks[next(iter(self._stacks))]
            self._stacks[factor.stack] = self._arrived(factor)
        return self._stacks[factor.stack][factor.stack.index(factor.key)]

    def _arrived(self, factor: AdapterTensor) -> Tensor:
        stored = working(self.adapter.read(factor))
        alpha, move = self.alpha.at(factor.tensor), partial(self._turned, factor)
        match factor.part.reference:
            case WeightReference.NONE:
                return move(stored)
            case WeightReference.WHOLE if not self._in_both(factor):
                return move(stored)
            case WeightReference.ZERO:
                return alpha * move(stored)
            case WeightReference.ONE:
                return 1 + alpha * move(stored - 1)
        change = stored - self._reference(factor, self.base).reshape(stored.shape)
        return self._reference(factor, self.onto).reshape(stored.shape) + alpha * move(change)

    def _turned(self, factor: AdapterTensor, value: Tensor) -> Tensor:
        """π of a stored tensor; of what reads through a norm, with that norm's scale in it on the way."""
        name, layout = factor.weight.tensor if factor.weight else factor.tensor, factor.layout
        fold = NormFolding(self.alignment).fold_of(name, layout, self.base.architecture)
        if fold is None or len(layout.inputs) != 1:
            return self.alignment.move(value, layout)
        before, after = (scale_of(model, layout, fold).to(value.dtype) for model in (self.base, self.onto))
        return self.alignment.move(value * before, layout) / safe(after)

    def _reference(self, factor: AdapterTensor, model: Model) -> Tensor:
        """What a model itself has in the place of a stored tensor."""
        weight = working(model.read(factor.tensor))
        match factor.part.reference:
            case WeightReference.NORMS:
                layout, spot = model.architecture.tensors[factor.tensor], TensorSlice(factor.tensor)
                if factor.weight is not None:  # a part, and of a stack all members
                    spot = replace(factor.weight, member=None)
                return row_norms(as_matrix(weight[spot.index(layout, model.architecture.sizes)], layout))
            case WeightReference.ROWS:
                return weight[self.adapter.settings(factor.module).tokens]
        return weight

    def _in_both(self, factor: AdapterTensor) -> bool:
        """Whether both bases have the tensor, in the adapter's shape."""
        shape = self.adapter.checkpoint.tensors[factor.key].shape
        return all(
            factor.tensor in model.architecture.tensors and model.info(factor.tensor).shape == shape
            for model in (self.base, self.onto)
        )

    # ── merged ───────────────────────────────────────────────────────────────────────────────

    @cached_property
    def changed(self) -> list[str]:
        """The tensors of B that the adapter changes, by canonical name."""
        self._require_mergeable()
        wholes = {factor.tensor for factor in self.factors if factor.whole and self._in_both(factor)}
        return sorted(wholes | self._changes.keys())

    @cached_property
    def _changes(self) -> dict[str, list[str]]:
        """For every tensor that is changed, the modules that do it."""
        changes: dict[str, list[str]] = {}
        for module in self.modules:
            for name in self._changed_by(module):
                changes.setdefault(name, []).append(module)
        return changes

    def _changed_by(self, module: str) -> Iterator[str]:
        kind, factors = self.adapter.kind, self.modules[module]
        if WRAPPED in module:
            raise AdapterError(
                f"{self.adapter.label} changes {_spot(factors).tensor} within an attention that is wrapped as"
                " a whole; versions of PEFT disagree whether to add such a change once or twice",
                hint="leave the adapter an adapter, or merge it by the PEFT that it was trained with",
            )
        own = any(factor.part.of == "bias" for factor in factors)
        spot = _spot(factors)
        rows = any(factor.part.reference is WeightReference.ROWS for factor in factors)
        if rows or kind.changed is not None or kind.added is not None:
            if spot.tensor not in self.onto.architecture.tensors:
                raise self._nowhere(spot.tensor, "it cannot be merged")
            yield spot.tensor
        if own or any(_multiplies_outputs(factor) for factor in factors):
            if spot.bias.tensor in self.onto.architecture.tensors:
                yield spot.bias.tensor
            elif own:
                raise AdapterError(
                    f"{self.adapter.label}: {module} gets a bias, and in {self.onto.label} it has none:"
                    " this cannot be merged",
                    hint="leave the adapter an adapter",
                )

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """One tensor of B with the moved adapter in it, in the type that arithmetic is done in.

        Of a tensor that is carried over, the adapter's own, whatever the weight.
        """
        self._require_mergeable()
        whole = next((factor for factor in self.factors if factor.whole and factor.tensor == name), None)
        result = (working(weight) if whole is None else self.moved(whole)).clone()
        for module in self._changes.get(name, ()):
            self._fold(module, name, result)
        return result

    def whole(self, name: str) -> TensorInfo:
        """What the header says about a tensor that the adapter has as a whole."""
        return self.adapter.checkpoint.tensors[self._whole(name).key]

    def own(self, name: str) -> Tensor:
        """A tensor that the adapter has as a whole, moved."""
        return self.moved(self._whole(name))

    def _whole(self, name: str) -> AdapterTensor:
        return next(factor for factor in self.factors if factor.whole and factor.tensor == name)

    def delta(self, name: str) -> Tensor:
        """What the moved adapter adds to one tensor of B; of a sum, without rounding against the tensor."""
        weight = working(self.onto.read(name))
        plain = not any(factor.whole and factor.tensor == name for factor in self.factors)
        if self.adapter.kind.added is not None and plain and not self._rows_of(name):
            return self.merged(name, torch.zeros_like(weight))
        return self.merged(name, weight) - weight

    def _rows_of(self, name: str) -> bool:
        return any(f.tensor == name and f.part.reference is WeightReference.ROWS for f in self.factors)

    def _fold(self, module: str, name: str, into: Tensor) -> None:
        """Put what the adapter does to one module into a tensor."""
        kind, settings, factors = self.adapter.kind, self.adapter.settings(module), self.modules[module]
        layout, spot = self.onto.architecture.tensors[name], _spot(factors)
        mine = into[spot.index(layout, self.onto.architecture.sizes)]
        parts = {factor.part.name: self.moved(factor).to(into.dtype) for factor in factors}
        if tokens := next((f.part for f in factors if f.part.reference is WeightReference.ROWS), None):
            into[settings.tokens] = parts[tokens.name]
        elif name != spot.tensor and kind.bias is not None:
            mine.copy_(kind.bias(mine, parts, settings))
        else:
            layout = spot.layout(layout)
            mine.copy_(as_stored(kind.on_weight(as_matrix(mine, layout), parts, settings), layout, mine))

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> dict[str, Any]:
        """As the adapter's own: moving changes none of them."""
        return dict(self.adapter.config)

    def metadata(self) -> dict[str, Any]:
        """What was done."""
        return {
            **self.output_record.of((self,), self.base, self.onto, self.alignment),
            "kind": "adapter",
            "peft_type": self.adapter.kind.name,
            "dtype": self.dtype and str(self.dtype).removeprefix("torch."),
            "moved": len(self.factors) - len(self.carried),
            "carried": self.carried,
        }

    @property
    def label(self) -> str:
        return self.adapter.label

    @property
    def root(self) -> Path:
        return self.adapter.checkpoint.root

    @property
    def digest(self) -> str:
        return self.adapter.digest

    # ── refusals ─────────────────────────────────────────────────────────────────────────────

    def _require_mergeable(self) -> None:
        if self.adapter.kind.prompt:
            raise AdapterError(
                f"{self.adapter.label}: adapters of kind {self.adapter.kind.name} cannot be merged: they"
                " change what the model reads, and no weight",
                hint="leave the adapter an adapter",
            )

    def _require_alpha(self, found: list[AdapterTensor]) -> None:
        kind = self.adapter.kind
        for factor in found:
            if not (kind.scalable or factor.whole) and (alpha := self.alpha.at(factor.tensor)) != 1:
                raise SettingError(
                    f"alpha = {alpha:g}: a part of a {kind.name} adapter is not an adapter of that kind",
                    hint="move it with alpha = 1",
                )

    def _require_places(self, found: list[AdapterTensor]) -> None:
        """What is measured against B's own weight needs that weight; and all weights must be of one shape."""
        for factor in found:
            if (spot := factor.weight) is None:
                continue
            if spot.tensor in self.onto.architecture.tensors:
                if self.onto.info(spot.tensor).shape != self.base.info(spot.tensor).shape:
                    raise self._nowhere(f"{spot.tensor} in that shape", "the adapter does not fit")
            elif factor.part.reference in (WeightReference.NORMS, WeightReference.ROWS):
                raise self._nowhere(spot.tensor, f"{factor.part.name} has nothing to be measured against")

    def _nowhere(self, tensor: str, consequence: str) -> AdapterError:
        return AdapterError(
            f"{self.adapter.label} changes {tensor}, which {self.onto.label} does not have: {consequence}",
            hint="give a B with the same head as A's",
        )

    def _require_permutations(self, found: list[AdapterTensor]) -> None:
        """Numbers that belong to single units can only go where units go whole."""
        rigid = {factor.module for factor in found if factor.part.rigid}
        for factor in found:
            for name in factor.layout.names() if factor.module in rigid else ():
                map_ = self.alignment.maps.get(name)
                if map_ is not None and not isinstance(map_, Permutation):
                    raise AdapterError(
                        f"{self.adapter.label}: {self.adapter.kind.name} adapters move under permutations"
                        f" only, and this π has a {map_.kind} for {name}",
                        hint="align with a method that finds permutations, such as guarded",
                    )


def _spot(factors: list[AdapterTensor]) -> TensorSlice:
    """Where the weight of a module lies, from any of its stored tensors."""
    return next(factor.weight for factor in factors if factor.weight is not None)


def _multiplies_outputs(factor: AdapterTensor) -> bool:
    """Whether a module's outputs are multiplied, its bias among them."""
    return factor.part.reference is WeightReference.ONE and factor.layout.items[0] != Name(ANONYMOUS)
