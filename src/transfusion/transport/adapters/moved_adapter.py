"""Moved adapters: their own tensors on B, and what they do to B's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.layouts import ANONYMOUS, Name
from transfusion.errors import AdapterError, SettingError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.publishing import TensorShape
from transfusion.files.tensor_files import TensorInfo
from transfusion.model.model import Model
from transfusion.model.pair import are_kin, common_parts
from transfusion.model.tensor_pieces import TensorPieces
from transfusion.runtime.optional_libraries import require_library
from transfusion.transport.adapters.adapter import LABEL, Adapter, AdapterTensor, by_module
from transfusion.transport.adapters.classes import ENCODERS, class_for, class_prefix, in_class, named_in
from transfusion.transport.adapters.kinds import (
    TOKENS,
    WHOLE,
    Factors,
    WeightReference,
    changed_bias,
    changed_weight,
    is_added,
    lora_factors,
    row_norms,
)
from transfusion.transport.adapters.places import Place, as_matrix, as_stored, shares
from transfusion.transport.adapters.settings import WRAPPED
from transfusion.transport.alpha import Alpha
from transfusion.transport.changes import fold_of, safe, scale_of
from transfusion.transport.task_vector import working

_LEAVE = "leave the adapter an adapter"
_CACHED_STACKS = 16  # the number of moved stacks to keep: enough for the experts of one block


@dataclass
class MovedAdapter:
    """A moved adapter. Its tensors are computed on demand.

    A stored tensor that α scales is r(A) + change, where the reference r(A) is 0 for a factor of a sum, 1 for
    a factor of a product, and A's own value for a tensor that was trained as a whole. It becomes
    r(B) + α·π(stored − r(A)).
    """

    adapter: Adapter
    base: Model
    onto: Model
    alignment: Alignment
    alpha: Alpha = field(default_factory=Alpha)
    _last: tuple[str, Tensor] | None = field(default=None, init=False, repr=False)
    """The latest change of a weight: it is computed as a whole, and read in blocks of rows."""
    buffers: ClassVar[frozenset[str]] = frozenset()
    module: ClassVar[None] = None
    dropped_tokens: ClassVar[int] = 0
    token_counts: ClassVar[frozenset[tuple[int, int]]] = frozenset()
    auxiliary_files: ClassVar[tuple[Path, ...]] = ()

    @cached_property
    def factors(self) -> list[AdapterTensor]:
        """Every stored tensor, checked against the bases, π and α."""
        left_out = set(self.left_out)
        found = [one for one in self.adapter.factors(self.base) if _name(one) not in left_out]
        if left_out and not found:
            raise self.adapter.error(
                f"{self.onto.label}, a {self.onto.family.name}, has none of the modules that it changes",
                "give a B with some of the same modules",
            )
        self.alpha.require_used([*self.base.architecture.tensors, *(factor.tensor for factor in found)])
        rigid = {factor.module for factor in found if factor.part.rigid}
        for factor in found:
            self._require_movable(factor, rigid=factor.module in rigid)
        return found

    @cached_property
    def left_out(self) -> list[str]:
        """The modules that a B of another family lacks, and that may be left out; refused if they may not."""
        if not are_kin(self.base, self.onto):
            return []
        theirs, found = set(common_parts(self.base, self.onto)), self.adapter.factors(self.base)
        absent = {_name(one) for one in found if not _tensors(one) <= theirs}
        torn = [_name(one) for one in found if _name(one) in absent and _tensors(one) & theirs]
        if absent and (torn or not self.adapter.drops_absent):
            why = f", and of {listing(sorted(set(torn)))} a part" if torn else ""
            dropping = (
                '`other_parts="drop"` leaves them out' if isinstance(self.adapter.files.lora, str) else ""
            )
            raise self.adapter.error(
                f"{len(absent)} of {len({_name(one) for one in found})} modules change parts of"
                f" {self.base.label} that {self.onto.label}, a {self.onto.family.name}, does not have"
                f" in that shape{why}: {listing(sorted(absent))}",
                "save it without them" if torn or not dropping else dropping,
            )
        return sorted(absent)

    @cached_property
    def modules(self) -> dict[str, dict[str, AdapterTensor]]:
        """The stored tensors of every module that the adapter changes, by the names of their parts."""
        return by_module(self.factors)

    @cached_property
    def carried(self) -> list[str]:
        """The canonical names of tensors that only the adapter has, mostly task heads."""
        return sorted(factor.tensor for factor in self.factors if factor.whole and not self.in_both(factor))

    @property
    def unties(self) -> bool:
        """Whether it changes an output head and the embedding that the head is tied to differently."""
        if any(LABEL in factor.layout.names() for factor in self.factors if factor.whole):
            return False  # a task head of its own takes the place of the tied one
        for tied in self.onto.ties.items():
            ours, theirs = ({one.part: one for one in self.factors if one.tensor == name} for name in tied)
            if not ours and theirs.keys() <= {TOKENS}:
                continue  # PEFT ties the trained tokens of an embedding itself
            pairs = [
                [self.adapter.read(one[part]) for one in (ours, theirs)] for part in ours if part in theirs
            ]
            alike = ours.keys() == theirs.keys() <= {WHOLE, TOKENS}
            if not alike or not all(torch.equal(*pair) for pair in pairs):
                return True
        return False

    # ── its own tensors ──────────────────────────────────────────────────────────────────────

    def on_b(self, factor: AdapterTensor) -> Tensor:
        """Return one moved tensor in float32 or float64. A member of a stack is the one at its new place."""
        if not factor.stack:
            return self._computed(factor)
        return self._stacks(factor.stack[0])[factor.stack.index(factor.key)]

    @cached_property
    def _stacks(self) -> Callable[[str], Tensor]:
        """Moves a stack, by the key of its first member; the members are requested one by one."""
        factors = {factor.key: factor for factor in self.factors if factor.stack}
        return lru_cache(_CACHED_STACKS)(lambda key: self._computed(factors[key]))

    def _computed(self, factor: AdapterTensor) -> Tensor:
        """Return r(B) + α·π(stored − r(A)), or π(stored) of a tensor that α does not scale."""
        stored = working(self.adapter.read(factor))
        if factor.part.reference is WeightReference.NONE or (factor.whole and not self.in_both(factor)):
            return self._mapped(factor, stored)
        of_a, of_b = (self._reference(factor, model, stored) for model in (self.base, self.onto))
        return of_b + self.alpha_of(factor, self.alpha) * self._mapped(factor, stored - of_a)

    def _reference(self, factor: AdapterTensor, model: Model, like: Tensor) -> Tensor:
        """Return the model's own value that a stored tensor is compared with."""
        match factor.part.reference:
            case WeightReference.ZERO:
                return torch.zeros(())
            case WeightReference.ONE:
                return torch.ones(())
            case WeightReference.NORMS:  # of all members of a stack together
                places = (replace(place, member=None) for place in factor.places)
                return torch.cat([_norms(model, place) for place in places]).reshape(like.shape)
        value = working(model.read(factor.tensor))
        return value[self.adapter.settings(factor.module).tokens] if factor.part is TOKENS else value

    def alpha_of(self, factor: AdapterTensor, alpha: Alpha) -> float | Tensor:
        """Return α for a stored tensor; for joined weights with several α, one for every output."""
        found = [alpha.at(factor.tensor_at(place)) for place in factor.places]
        if len(set(found)) < 2:
            return alpha.at(factor.tensor)
        alphas = torch.ones(self.adapter.checkpoint.tensors[factor.key].shape)
        for share, one in zip(self.shares(factor), found, strict=True):
            alphas[share] = one
        return alphas

    def shares(self, factor: AdapterTensor) -> list[tuple[slice, ...]]:
        """Return, for every place of the module's weight, the part of a stored tensor that belongs there."""
        tensors, sizes = self.base.architecture.tensors, self.base.architecture.sizes
        return shares([place.layout(tensors[place.tensor]) for place in factor.places], factor.layout, sizes)

    def _mapped(self, factor: AdapterTensor, value: Tensor) -> Tensor:
        """Return π of a stored tensor. Behind a norm, fold in A's scale before, and divide by B's after."""
        name, layout = factor.places[0].tensor if factor.places else factor.tensor, factor.layout
        fold = fold_of(self.alignment, name, layout, self.base.architecture)
        if fold is None or len(layout.inputs) != 1:
            return self.alignment.move(value, layout)
        before, after = (scale_of(model, layout, fold).to(value.dtype) for model in (self.base, self.onto))
        return self.alignment.move(value * before, layout) / safe(after)

    def in_both(self, factor: AdapterTensor) -> bool:
        """Whether both bases have the tensor, in the adapter's shape."""
        shape = self.adapter.checkpoint.tensors[factor.key].shape
        return all(
            factor.tensor in model.architecture.tensors and model.info(factor.tensor).shape == shape
            for model in (self.base, self.onto)
        )

    # ── folded into B's weights, as PEFT's merge_and_unload does ─────────────────────────────

    def changes(self, name: str) -> bool:
        """Whether it has a change to B's tensor of this name."""
        return name in self.changed

    @cached_property
    def changed(self) -> frozenset[str]:
        """The tensors of B that the adapter changes, by canonical name."""
        wholes = {name for name, factor in self._wholes.items() if self.in_both(factor)}
        return frozenset(wholes | self._modules_by_tensor.keys())

    @cached_property
    def _modules_by_tensor(self) -> dict[str, list[str]]:
        """For every tensor that is changed, the modules that change it."""
        kind = self.adapter.kind
        if kind.prompt:
            raise self.adapter.error(
                f"adapters of kind {kind.name} cannot be merged: they change the model's inputs, no weight",
                _LEAVE,
            )
        modules: dict[str, list[str]] = {}
        for module in self.modules:
            for name in dict.fromkeys(self._changed_by(module)):  # two places may be in one tensor
                modules.setdefault(name, []).append(module)
        return modules

    def _changed_by(self, module: str) -> Iterator[str]:
        factors, onto = list(self.modules[module].values()), self.onto
        places = factors[0].places
        if WRAPPED in module:
            raise AdapterError(
                f"{self.label} changes {places[0].tensor} within an attention that is wrapped as a whole;"
                " versions of PEFT disagree whether to add such a change once or twice",
                hint=f"{_LEAVE}, or merge it with the PEFT that it was trained with",
            )
        own = any(factor.part.of == "bias" for factor in factors)
        scaled = own or any(_multiplies_outputs(factor) for factor in factors)
        for place in places:
            if any(factor.part.of == "weight" for factor in factors):
                if place.tensor not in onto.architecture.tensors:
                    raise self._absent(place.tensor, "it cannot be merged")
                yield place.tensor
            if scaled and place.bias.tensor in onto.architecture.tensors:
                yield place.bias.tensor
            elif own:
                raise self.adapter.error(
                    f"{module} gets a bias, and in {onto.label} it has none: this cannot be merged", _LEAVE
                )

    def by_rows(self, name: str) -> bool:
        """Whether a tensor can be computed in blocks of rows: a change is kept while its rows are read."""
        return True

    def added(self, name: str) -> int:
        """Return the number of rows for new tokens: an adapter has none."""
        return 0

    def change(self, name: str, rows: slice) -> Tensor:
        """Return some rows of the change of one tensor of B."""
        last = self._last
        if last is None or last[0] != name:
            self._last = last = (name, self.delta(name))
        return last[1][rows] if last[1].ndim else last[1]

    def delta(self, name: str) -> Tensor:
        """Return the change of one tensor of B. If it is added, it is not rounded against the weight."""
        weight, modules = working(self.onto.read(name)), self._modules_by_tensor.get(name, ())
        if name not in self._wholes and all(is_added(self.modules[one].keys()) for one in modules):
            return self.merged(name, torch.zeros_like(weight))
        return self.merged(name, weight) - weight

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of B with the moved adapter folded in, in float32 or float64."""
        modules, whole = self._modules_by_tensor.get(name, ()), self._wholes.get(name)
        result = (working(weight) if whole is None else self.on_b(whole)).clone()
        for module in modules:
            self._fold(module, name, result)
        return result

    def _fold(self, module: str, name: str, into: Tensor) -> None:
        """Apply the adapter's formula for one module to a tensor, in place."""
        settings, onto = self.adapter.settings(module), self.onto.architecture
        if tokens := self.modules[module].get(TOKENS.name):
            into[settings.tokens] = self.on_b(tokens).to(into.dtype)
            return
        whole = onto.tensors[name]
        for place, parts in self._parts(module, name, into.dtype):
            mine = into[place.index(whole, onto.sizes)]
            if name != place.tensor:
                mine.copy_(changed_bias(mine, parts, settings))
            else:
                layout = place.layout(whole)
                parts |= {"diff": as_matrix(parts["diff"], layout)} if "diff" in parts else {}
                made = changed_weight(as_matrix(mine, layout), parts, settings)  # (outputs, inputs)
                mine.copy_(as_stored(made, layout, mine))

    def _parts(self, module: str, name: str, dtype: torch.dtype) -> Iterator[tuple[Place, dict[str, Tensor]]]:
        """Yield the places of a module in a tensor, and what the module's moved tensors have for each."""
        factors = self.modules[module]
        moved = {part: self.on_b(factor).to(dtype) for part, factor in factors.items()}
        for number, place in enumerate(next(iter(factors.values())).places):
            if name in (place.tensor, place.bias.tensor):
                shares = {part: self.shares(factor)[number] for part, factor in factors.items()}
                yield place, {part: moved[part][share] for part, share in shares.items()}

    def product(self, name: str) -> Factors | None:
        """Return the change of a weight matrix as a product of low rank; None if it is not known as one."""
        onto = self.onto
        whole, shape = onto.architecture.tensors[name], onto.info(name).shape
        found: list[Factors] = []
        for module in self._modules_by_tensor.get(name, ()):
            for place, parts in self._parts(module, name, torch.float32):
                product = lora_factors(parts, self.adapter.settings(module))
                piece = place.piece is not None
                if product is None or place.member is not None or (piece and len(shape) != 2):
                    return None
                if piece:  # with zeros elsewhere
                    cuts = place.index(whole, onto.architecture.sizes)
                    (outputs,), (inputs,) = whole.outputs, whole.inputs
                    left = product[0].new_zeros(shape[outputs], product[0].shape[1])
                    right = product[1].new_zeros(len(product[1]), shape[inputs])
                    left[cuts[outputs]], right[:, cuts[inputs]] = product
                    product = left, right
                found.append(product)
        if not found or name in self._wholes or whole.arrow is None:
            return None
        lefts, rights = zip(*found, strict=True)
        return torch.cat(lefts, dim=1), torch.cat(rights)  # (outputs, ranks), (ranks, inputs)

    # ── the class of the model ───────────────────────────────────────────────────────────────

    @property
    def has_heads(self) -> bool:
        return bool(self.carried)

    @property
    def unread(self) -> frozenset[str]:
        """The base's tensors that the library leaves unread."""
        return self.base.architecture.unread

    @cached_property
    def class_of_b(self) -> str | None:
        """The class of B with the adapter's own heads; None if B's type has no such class."""
        model_type = self.onto.config.get("model_type")
        return class_for(self.adapter.config, {**self.base.config, "model_type": model_type})

    @cached_property
    def labels(self) -> int | None:
        """The number of classes of the adapter's own head."""
        heads = [one.tensor for one in self.factors if one.layout.items[:1] == (Name(LABEL),)]
        return next((self.shape(name)[0][0] for name in heads if self.owns(name)), None)

    @cached_property
    def _class_name(self) -> str:
        """The class of B with the adapter's own heads; refused if B's type has no such class."""
        if (name := self.class_of_b) is None:
            model_type = self.onto.config.get("model_type")
            mapping = self.adapter.config.get("auto_mapping") or {}
            task = mapping.get("base_model_class") or self.adapter.config.get("task_type")
            raise AdapterError(
                f"{self.label} was trained for {task!r:.80}, and a model of type {model_type!r:.80} has no"
                f" such class: {listing(self.carried)} cannot become part of one",
                hint=f"{_LEAVE}; or correct task_type in adapter_config.json",
            )
        if name != named_in(self.base.config):
            require_library("transformers")  # only it knows whether there is such a class
        return name

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The base's configuration, for the class that the adapter was trained in."""
        base = self.base.checkpoint.config
        if base is None or not self.has_heads:
            return base
        kept = {key: value for key, value in base.items() if key not in ("num_labels", "problem_type")}
        count = self.labels
        if count is not None and len(base.get("id2label") or ()) != count:
            labels = {str(number): f"LABEL_{number}" for number in range(count)}
            kept |= {"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}
        return {**kept, "architectures": [self._class_name]}

    @cached_property
    def names(self) -> Mapping[str, TensorPieces]:
        """The base's tensors. With a head of its own: the backbone, that head, and what it reads through."""
        base = self.base
        if not self.has_heads:
            return base.names
        own, prefixes = self.carried, base.family.prefixes
        of_class = self._class_name, self.onto.config, prefixes
        through = self.adapter.read_through(base, own)
        if absent := sorted(through - self.onto.architecture.tensors.keys()):
            raise AdapterError(
                f"the head of {self.label} reads through {listing(absent)}, which {self.onto.label}"
                " does not have",
                hint="give a B with the same parts as A",
            )
        inside = {name for name, one in base.names.items() if one.names[0].startswith(prefixes)}
        kept = {
            name: one
            for name, one in in_class(base.names, *of_class).items()
            if name in through or (name in (inside or base.names) and not self._is_head(name))
            if self._class_name not in ENCODERS or not name.startswith("decoder.")
        }
        return {**kept, **{name: self._own_name(name, class_prefix(*of_class)) for name in own}}

    def _own_name(self, name: str, prefix: str) -> TensorPieces:
        """Return the name in files of one of the adapter's own tensors. A pooler may be in the base model."""
        live = self._info(name).name.removeprefix("base_model.").removeprefix("model.")
        inside = live.startswith(self.base.family.prefixes)
        return TensorPieces(((prefix + name if inside else name,),))

    def _is_head(self, name: str) -> bool:
        """Whether a tensor of the base belongs to a task head. A vector on backbone axes does not."""
        known = self.base.architecture
        if name not in known.task_heads:
            return False
        layout = known.tensors[name]
        return layout.arrow is not None or not set(layout.names()) <= set(known.backbone_spaces)

    def owns(self, name: str) -> bool:
        return name in self.carried

    def shape(self, name: str) -> TensorShape:
        info = self._info(name)
        return info.shape, info.dtype

    def own(self, name: str, rows: slice) -> Tensor:
        return self.on_b(self._wholes[name])[rows]

    def _info(self, name: str) -> TensorInfo:
        return self.checkpoint.tensors[self._wholes[name].key]

    @cached_property
    def _wholes(self) -> dict[str, AdapterTensor]:
        return {factor.tensor: factor for factor in reversed(self.factors) if factor.whole}

    # ── records ──────────────────────────────────────────────────────────────────────────────

    def fits_as_it_is(self, dtype: torch.dtype | None = None) -> bool:
        """Whether every tensor is the stored one: B has A's units in A's places."""
        stored = self.adapter.checkpoint
        return self.adapter.original is None and all(
            dtype in (None, stored.tensors[factor.key].dtype)
            and torch.equal(self.on_b(factor).to(stored.tensors[factor.key].dtype), stored.read(factor.key))
            for factor in self.factors
        )

    @property
    def label(self) -> str:
        return self.adapter.label

    @property
    def checkpoint(self) -> Checkpoint:
        return self.adapter.checkpoint

    @property
    def fingerprint(self) -> str:
        return self.adapter.fingerprint

    # ── refusals ─────────────────────────────────────────────────────────────────────────────

    def _require_movable(self, factor: AdapterTensor, *, rigid: bool) -> None:
        """Refuse an α, a B or a π that a stored tensor cannot be moved with."""
        kind, onto = self.adapter.kind, self.onto
        if not (kind.scalable or factor.whole) and (alpha := self.alpha.at(factor.tensor)) != 1:
            raise SettingError(
                f"alpha = {alpha:g}: a {kind.name} adapter cannot be scaled", hint="move it with alpha = 1"
            )
        for tensor in (place.tensor for place in factor.places):
            if tensor in onto.architecture.tensors:
                if onto.info(tensor).shape != self.base.info(tensor).shape:
                    raise self._absent(f"{tensor} in that shape", "the adapter does not fit")
            elif factor.part.reference in (WeightReference.NORMS, WeightReference.ROWS):
                raise self._absent(tensor, f"{factor.part.name} has no weight to refer to")
        for name in factor.layout.names() if rigid else ():
            if (map_ := self.alignment.maps.get(name)) is not None and not map_.permutes:
                raise self.adapter.error(
                    f"{kind.name} adapters move under permutations only, and this π has a {map_.kind} for"
                    f" {name}",
                    "align with a method that finds permutations, such as guarded",
                )

    def _absent(self, tensor: str, consequence: str) -> AdapterError:
        """Return the error for a tensor that B does not have."""
        return AdapterError(
            f"{self.label} changes {tensor}, which {self.onto.label} does not have: {consequence}",
            hint="give a B with the same head as A's",
        )


def _name(factor: AdapterTensor) -> str:
    """Return the module that a stored tensor belongs to, or the tensor that it replaces."""
    return factor.module or factor.tensor


def _tensors(factor: AdapterTensor) -> set[str]:
    """Return the tensors of the base that a stored tensor is about."""
    return {place.tensor for place in factor.places} or {factor.tensor}


def _norms(model: Model, place: Place) -> Tensor:
    """Return the norms of the rows of a weight, in float32 or float64."""
    layout = model.architecture.tensors[place.tensor]
    weight = working(model.read(place.tensor))[place.index(layout, model.architecture.sizes)]
    return row_norms(as_matrix(weight, layout))


def _multiplies_outputs(factor: AdapterTensor) -> bool:
    """Whether a factor multiplies the outputs of its module, and so its bias too."""
    return factor.part.reference is WeightReference.ONE and factor.layout.items[0] != Name(ANONYMOUS)
