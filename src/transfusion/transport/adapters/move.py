"""Transport of adapters: from an adapter of A to an adapter of B, of the same kind and rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transfusion.alignment.alignment import Alignment
from transfusion.errors import AdapterError, SettingError
from transfusion.files.selected_rows import CheckpointView, RowSelection
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY, VocabularyMap
from transfusion.transport.adapters.adapter import LABEL, Adapter, AdapterFiles
from transfusion.transport.adapters.kinds import TOKENS, WHOLE, WeightReference, row_norms
from transfusion.transport.adapters.targets import AdapterTensor, TensorSlice, as_matrix, shares
from transfusion.transport.alpha import Alpha
from transfusion.transport.changes import fold_of, safe, scale_of
from transfusion.transport.output import Action, Output, OutputTensor, recipe_of
from transfusion.transport.record import OutputRecord
from transfusion.transport.task_vector import working

_CACHED_STACKS = 16
"""The number of moved stacks to keep: enough for the experts of one block."""


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
    _stacks: dict[tuple[str, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    """A cache of moved stacks, whose members are requested one by one."""

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
        """The canonical names of tensors that only the adapter has, mostly task heads."""
        return sorted(factor.tensor for factor in self.factors if factor.whole and not self.in_both(factor))

    @property
    def unties(self) -> bool:
        """Whether it changes an output head and the embedding that the head is tied to differently."""
        if any(LABEL in factor.layout.names() for factor in self.factors if factor.whole):
            return False  # a task head of its own takes the place of the tied one
        return any(self._differ(head, first) for head, first in self.onto.ties.items())

    def _differ(self, head: str, first: str) -> bool:
        ours, theirs = ([one for one in self.factors if one.tensor == name] for name in (head, first))
        if not ours and all(one.part.reference is WeightReference.ROWS for one in theirs):
            return False  # PEFT ties the trained tokens of an embedding itself
        parts = [{one.part: self.adapter.read(one) for one in some} for some in (ours, theirs)]
        alike = parts[0].keys() == parts[1].keys() <= {WHOLE, TOKENS}
        return not (alike and all(torch.equal(parts[0][part], parts[1][part]) for part in parts[0]))

    # ── tensors ──────────────────────────────────────────────────────────────────────────────

    def moved(self, factor: AdapterTensor) -> Tensor:
        """Return one moved tensor in float32 or float64. A member of a stack is the one at its new place."""
        if not factor.stack:
            return self._computed(factor)
        found = self._stacks.get(factor.stack)
        if found is None:
            found = self._computed(factor)
            while len(self._stacks) >= _CACHED_STACKS:
                oldest = next(iter(tuple(self._stacks)))  # of a copy: other threads may change it meanwhile
                self._stacks.pop(oldest, None)
            self._stacks[factor.stack] = found
        return found[factor.stack.index(factor.key)]

    def _computed(self, factor: AdapterTensor) -> Tensor:
        """Return r(B) + α·π(stored − r(A))."""
        stored = working(self.adapter.read(factor))
        alpha, move = self.alpha_of(factor, self.alpha), partial(self._mapped, factor)
        match factor.part.reference:
            case WeightReference.NONE:
                return move(stored)
            case WeightReference.WHOLE if not self.in_both(factor):
                return move(stored)
            case WeightReference.ZERO:
                return alpha * move(stored)
            case WeightReference.ONE:
                return 1 + alpha * move(stored - 1)
        change = stored - self._reference(factor, self.base).reshape(stored.shape)
        return self._reference(factor, self.onto).reshape(stored.shape) + alpha * move(change)

    def alpha_of(self, factor: AdapterTensor, alpha: Alpha) -> float | Tensor:
        """Return α for a stored tensor; for joined weights with several α, one for every output."""
        found = [alpha.at(factor.tensor_at(spot)) for spot in factor.places]
        if len(set(found)) < 2:
            return alpha.at(factor.tensor)
        alphas = torch.ones(self.adapter.checkpoint.tensors[factor.key].shape)
        for share, one in zip(self.shares(factor), found, strict=True):
            alphas[share] = one
        return alphas

    def shares(self, factor: AdapterTensor) -> list[tuple[slice, ...]]:
        """Return, for every place of the module's weight, the part of a stored tensor that belongs there."""
        tensors, sizes = self.base.architecture.tensors, self.base.architecture.sizes
        return shares([spot.layout(tensors[spot.tensor]) for spot in factor.places], factor.layout, sizes)

    def _mapped(self, factor: AdapterTensor, value: Tensor) -> Tensor:
        """Return π of a stored tensor. Behind a norm, fold in A's scale before, and divide by B's after."""
        name, layout = factor.places[0].tensor if factor.places else factor.tensor, factor.layout
        fold = fold_of(self.alignment, name, layout, self.base.architecture)
        if fold is None or len(layout.inputs) != 1:
            return self.alignment.move(value, layout)
        before, after = (scale_of(model, layout, fold).to(value.dtype) for model in (self.base, self.onto))
        return self.alignment.move(value * before, layout) / safe(after)

    def _reference(self, factor: AdapterTensor, model: Model) -> Tensor:
        """Return the model's own value that a stored tensor is compared with."""
        match factor.part.reference:
            case WeightReference.NORMS:
                # pieces of tensors, for all members of a stack
                spots = factor.places or (TensorSlice(factor.tensor),)
                return torch.cat([_norms(model, replace(spot, member=None)) for spot in spots])
            case WeightReference.ROWS:
                return working(model.read(factor.tensor))[self.adapter.settings(factor.module).tokens]
        return working(model.read(factor.tensor))

    def in_both(self, factor: AdapterTensor) -> bool:
        """Whether both bases have the tensor, in the adapter's shape."""
        shape = self.adapter.checkpoint.tensors[factor.key].shape
        return all(
            factor.tensor in model.architecture.tensors and model.info(factor.tensor).shape == shape
            for model in (self.base, self.onto)
        )

    # ── records ──────────────────────────────────────────────────────────────────────────────

    def fits_as_it_is(self, dtype: torch.dtype | None = None) -> bool:
        """Whether every tensor is the stored one: B has A's units in A's places."""
        stored = self.adapter.checkpoint
        return self.adapter.original is None and all(
            dtype in (None, stored.tensors[factor.key].dtype)
            and torch.equal(self.moved(factor).to(stored.tensors[factor.key].dtype), stored.read(factor.key))
            for factor in self.factors
        )

    @property
    def label(self) -> str:
        return self.adapter.label

    @property
    def root(self) -> Path:
        return self.adapter.checkpoint.root

    @property
    def fingerprint(self) -> str:
        return self.adapter.fingerprint

    # ── refusals ─────────────────────────────────────────────────────────────────────────────

    def _require_alpha(self, found: list[AdapterTensor]) -> None:
        kind = self.adapter.kind
        for factor in found:
            if not (kind.scalable or factor.whole) and (alpha := self.alpha.at(factor.tensor)) != 1:
                raise SettingError(
                    f"alpha = {alpha:g}: a {kind.name} adapter cannot be scaled",
                    hint="move it with alpha = 1",
                )

    def _require_places(self, found: list[AdapterTensor]) -> None:
        """Refuse a B that lacks a weight which a stored tensor refers to, or has it in another shape."""
        for factor in found:
            for spot in factor.places:
                if spot.tensor in self.onto.architecture.tensors:
                    if self.onto.info(spot.tensor).shape != self.base.info(spot.tensor).shape:
                        raise self.absent(f"{spot.tensor} in that shape", "the adapter does not fit")
                elif factor.part.reference in (WeightReference.NORMS, WeightReference.ROWS):
                    raise self.absent(spot.tensor, f"{factor.part.name} has no weight to refer to")

    def absent(self, tensor: str, consequence: str) -> AdapterError:
        """Return the error for a tensor that B does not have."""
        return AdapterError(
            f"{self.adapter.label} changes {tensor}, which {self.onto.label} does not have: {consequence}",
            hint="give a B with the same head as A's",
        )

    def _require_permutations(self, found: list[AdapterTensor]) -> None:
        """Refuse maps other than permutations for tensors whose values belong to single units."""
        rigid = {factor.module for factor in found if factor.part.rigid}
        for factor in found:
            for name in factor.layout.names() if factor.module in rigid else ():
                map_ = self.alignment.maps.get(name)
                if map_ is not None and not map_.permutes:
                    raise AdapterError(
                        f"{self.adapter.label}: {self.adapter.kind.name} adapters move under permutations"
                        f" only, and this π has a {map_.kind} for {name}",
                        hint="align with a method that finds permutations, such as guarded",
                    )


def _norms(model: Model, spot: TensorSlice) -> Tensor:
    """Return the norms of the rows of a weight, in float32 or float64."""
    layout = model.architecture.tensors[spot.tensor]
    weight = working(model.read(spot.tensor))[spot.index(layout, model.architecture.sizes)]
    return row_norms(as_matrix(weight, layout))


# ── outputs ─────────────────────────────────────────────────────────────────────────────────────


def adapter_output(
    moved: MovedAdapter, *, dtype: torch.dtype | None = None, record: OutputRecord | None = None
) -> Output:
    """Return a moved adapter as an output: of the same kind and rank, for B."""
    adapter, record = moved.adapter, record or OutputRecord()
    stored, carried = adapter.checkpoint.tensors, moved.carried
    tensors = {
        factor.key: OutputTensor(
            stored[factor.key].shape,
            dtype or stored[factor.key].dtype,
            partial(_whole, partial(moved.moved, factor)),
            action=Action.CARRIED if factor.tensor in carried else Action.MOVED,
            by_rows=False,
        )
        for factor in moved.factors
    }
    for key in adapter.kept(moved.base):  # those of another model, as they are
        read = partial(_whole, partial(adapter.checkpoint.read_finite, key))
        tensors[key] = OutputTensor(
            stored[key].shape, stored[key].dtype, read, action=Action.KEPT, by_rows=False
        )

    def metadata() -> dict[str, Any]:
        return {
            **record.of((moved,), moved.base, moved.onto, moved.alignment),
            "kind": "adapter",
            "peft_type": adapter.kind.name,
            **adapter.stated_format,
            **adapter.converted,
            "dtype": dtype and str(dtype).removeprefix("torch."),
            "moved": len(moved.factors) - len(carried),
            "carried": carried,
            "fits_as_it_is": moved.fits_as_it_is(dtype),
        }

    return Output(
        f"{adapter.label}, moved onto {moved.onto.label}",
        moved.onto,
        tensors,
        config_for(moved.onto, adapter.config),
        metadata,
        record.texts,
        recipe=partial(recipe_of, (moved,), moved.base, moved.onto, moved.alignment),
        inputs=[adapter.checkpoint, moved.base.checkpoint, moved.onto.checkpoint],
        adapter=adapter.files,
        pi=moved.alignment if record.keeps_pi else None,
        notes=adapter.notes(moved.base),
        moved=moved,
    )


def lora_output(
    label: str,
    dense: Output,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    metadata: Callable[[], dict[str, Any]],
    dtype: torch.dtype | None = None,
) -> Output:
    """Return a LoRA in place of a model's changed weights, by the keys of its file."""
    made = {
        key: OutputTensor(
            tuple(one.shape),
            dtype or torch.float32,
            partial(_whole, partial(tensors.__getitem__, key)),
            by_rows=False,
        )
        for key, one in tensors.items()
    }
    return Output(
        label,
        dense.onto,
        made,
        config_for(dense.onto, settings),
        metadata,
        dense.texts,
        inputs=dense.inputs,
        adapter=AdapterFiles(),
        pi=dense.pi,
    )


def config_for(onto: Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's configuration with B as its base: as the user named it, as PEFT does."""
    reference, _, revision = onto.label.partition("@")
    local = Path(onto.label).expanduser()
    return {
        **settings,
        "base_model_name_or_path": str(local) if local.exists() else reference,
        "revision": None if local.exists() else revision or None,
    }


def _whole(compute: Callable[[], Tensor], _: slice) -> Tensor:
    return compute()


# ── another vocabulary ──────────────────────────────────────────────────────────────────────────


def adapter_in_vocabulary(adapter: Adapter, base: Model) -> Adapter:
    """Return the adapter in the vocabulary that its base is read in; the digest stays.

    Rows of tokens that the other vocabulary lacks are dropped, and new rows change nothing.
    """
    if (vocabulary := base.vocabulary) is None or base.original is None:
        return adapter
    selections = dict[str, RowSelection]()
    for factor in adapter.factors(base.original):
        if factor.part.reference is WeightReference.ROWS:
            selections[factor.key] = _kept_tokens(adapter, factor, vocabulary)
        for dim in factor.layout.dims_with(VOCABULARY):
            _require_rows_apart(adapter, factor)
            fill = 1.0 if factor.part.reference is WeightReference.ONE else 0.0
            size = adapter.checkpoint.tensors[factor.key].shape[dim]
            selections[factor.key] = vocabulary.selection(size, dim, fill)
    config = {key: _in_rows_of(vocabulary, key, value) for key, value in adapter.config.items()}
    checkpoint = CheckpointView.over(adapter.checkpoint, selections)
    return replace(adapter, checkpoint=checkpoint, config=config, original=adapter)


def _kept_tokens(adapter: Adapter, factor: AdapterTensor, vocabulary: VocabularyMap) -> RowSelection:
    """Return the trained tokens that the other vocabulary has; refuse an adapter without any."""
    tokens = adapter.settings(factor.module).tokens
    kept = [place for place, token in enumerate(tokens) if vocabulary.row_of(token) is not None]
    if not kept:
        raise AdapterError(
            f"{adapter.label}: {factor.key} has {len(tokens)} trained token(s), and B's vocabulary has none"
            " of them",
            hint="train these tokens anew on B",
        )
    return RowSelection(torch.tensor(kept))


def _require_rows_apart(adapter: Adapter, factor: AdapterTensor) -> None:
    """Refuse a factor whose value for one token depends on all tokens."""
    if factor.part.name.startswith(adapter.kind.over_all_units):
        raise AdapterError(
            f"{adapter.label}: {factor.key} of a {adapter.kind.name} adapter depends on all tokens together,"
            " and A and B have different ones",
            hint="merge the adapter into its base, and move the merged model",
        )


def _in_rows_of(vocabulary: VocabularyMap, key: str, value: Any) -> Any:
    """Return a setting with the ids of trained tokens in another vocabulary; other settings as they are."""
    if key not in ("token_indices", "trainable_token_indices") or not value:
        return value
    if isinstance(value, Mapping):
        return {name: _in_rows_of(vocabulary, key, tokens) for name, tokens in value.items()}
    return [row for token in value if (row := vocabulary.row_of(int(token))) is not None]
