"""The plan of a transport: two bases and one alignment, the same for every fine-tune of A.

A model moves tensor by tensor (`changes`, `model_output`). A LoRA takes one of two routes. Where A and B have
the same shape, its two factors are moved, and it stays a LoRA of its rank (`adapters.moved_adapter`). Where
their shapes differ, it is folded into A, the whole change is moved, and the result is factored again by a
singular value decomposition (`adapters.factoring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from transfusion.alignment.alignment import Alignment, part_pairs, random_maps
from transfusion.alignment.maps import Map
from transfusion.alignment.provenance import PLANNED, Provenance
from transfusion.architecture.architecture import Policy
from transfusion.architecture.layouts import parse, size_of
from transfusion.errors import AdapterError, ArchitectureError, MismatchError, SettingError, listing
from transfusion.files.checkpoint import HeadersOnly
from transfusion.files.tensor_files import as_dtype
from transfusion.matching.other_shapes import even_paths
from transfusion.model.model import Model, Reference, untied_config
from transfusion.model.pair import Pair, are_kin, differing_shape, require_rows_of
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.building import build
from transfusion.running.probes.pairs import RunningPair
from transfusion.running.streaming import RunConfig
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.conversions import adapter_in_vocabulary
from transfusion.transport.adapters.drift import adapter_drift, strength_alpha
from transfusion.transport.adapters.factoring import lora_between_shapes
from transfusion.transport.adapters.kinds import LORA
from transfusion.transport.adapters.lora_file import LoraFile
from transfusion.transport.adapters.merging import merged_adapter_output
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.adapters.outputs import adapter_output
from transfusion.transport.alpha import AUTO, Alpha, AlphaArgument, balanced_alpha
from transfusion.transport.alpha_on_probes import AlphaSearch, measured_alpha
from transfusion.transport.changes import DenseChange
from transfusion.transport.finetunes import Finetune
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.model_output import Change, dense_output
from transfusion.transport.output import Output
from transfusion.transport.record import OutputRecord, recorded_base
from transfusion.transport.refinement.teaching import Teacher
from transfusion.transport.task_vector import NewTokens, TaskVector, added_tokens

Base: TypeAlias = Model | Reference


@dataclass(frozen=True)
class TransportPlan:
    """Two bases and the π between them. Every fine-tune of A moves by the same plan."""

    a: Model
    b: Model
    alignment: Alignment
    resources: Resources = LOCAL
    """Of runs that choose α, and of comparing B's weights with π(A)'s."""

    @classmethod
    def between(cls, pair: Pair, alignment: Alignment) -> TransportPlan:
        """Return the plan of an alignment, checked against both models."""
        plan = cls.planned(pair.a, pair.b, alignment)
        plan.alignment.require_between(source=pair.a, target=pair.b)
        return plan

    @classmethod
    def planned(
        cls,
        a: Model,
        b: Model,
        alignment: Alignment | None = None,
        *,
        assumed: bool = False,
    ) -> TransportPlan:
        """Return the plan of an alignment, whose fingerprints are not compared.

        Without an alignment every map is the identity, as for the fine-tune on A itself; with ``assumed``, a
        random permutation, for dry runs and early refusals. Only headers are read, and samples of tensors.
        """
        inputs = a.label, a.fingerprint, b.label, b.fingerprint
        made = Provenance(a.family.name, PLANNED, Policy(), PLANNED, {}, 0, *inputs)
        if differing_shape(a, b) is not None:
            return cls(a, b, alignment or _assumed_between(a, b, made))
        if alignment is not None:
            if alignment.other_shape:
                raise MismatchError(
                    f"this π is one between models of different shapes, and {a.label} and {b.label} have the"
                    " same",
                    hint="give the π that belongs to these models",
                )
            alignment = alignment.fitted(a.architecture.under(alignment.provenance.policy))
            alignment.require_vocabulary(a)
        else:
            architecture = a.architecture.under(made.policy)
            maps = random_maps(architecture, 0) if assumed else {}
            alignment = Alignment.of(maps, architecture, replace(made, architecture=architecture.digest()))
        alignment.require_for(a.architecture.under(alignment.provenance.policy))
        policy = alignment.provenance.policy
        return cls(a.under(policy), b.under(policy), alignment)

    def alpha(self, asked: AlphaArgument) -> Alpha:
        """Return α as asked for; refuse patterns that match no tensor.

        ``"auto"`` goes by the weights alone here. Rotated units have B's scale already, so their α is 1.
        """
        if asked == AUTO:
            common = Pair(self.a, self.b).with_common_tokens
            return Alpha() if self._rotates else balanced_alpha(common.a, common.b)
        chosen = Alpha.of(asked)
        chosen.require_used((self.b if self.alignment.other_shape else self.a).architecture.tensors)
        return chosen

    @property
    def _rotates(self) -> bool:
        """Whether π has rotations: maps from activations, whose errors are spread over all units."""
        return self.alignment.rotates

    @property
    def _compares_weights(self) -> bool:
        """Whether B's weights can be compared with π(A)'s, one by one and within the memory."""
        known = self.alignment.provenance.method != PLANNED
        there = not isinstance(self.a.checkpoint, HeadersOnly)
        return known and there and not self._rotates and self.resources.memory is None

    def change(
        self,
        finetuned: Finetune,
        alpha: Alpha | None = None,
        *,
        trust_base: bool = False,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
    ) -> Change:
        """Return α·π(τ) of a fine-tune. Onto another shape, an adapter is folded into A before."""
        alpha, lot = alpha or Alpha(), NewTokens(new_tokens)
        if isinstance(finetuned, Adapter):
            if not self.alignment.other_shape:
                return self.adapter(finetuned.on_base(self.a).to_merge(), alpha, trust_base=trust_base)
            if not trust_base:
                self._require_named_base(finetuned)
            folded = Model.open(self.on_a((finetuned,)).module())
            return replace(self._dense_change(folded, alpha, True, lot), adapter=finetuned)
        return self._dense_change(finetuned, alpha, trust_base, lot)

    def _dense_change(
        self, finetuned: Model, alpha: Alpha, trust_base: bool, new_tokens: NewTokens
    ) -> DenseChange:
        tuned, other_shape = self.in_b_vocabulary(finetuned), self.alignment.other_shape
        if not trust_base:
            self._require_named_base(tuned)
        if other_shape:
            self._require_between_shapes(tuned, new_tokens)
        else:
            tuned = tuned.under(self.alignment.provenance.policy)
        vector = TaskVector.between(tuned, self.a, trust_base=trust_base, new_tokens=new_tokens)
        if not other_shape and tuned.vocabulary is not None and new_tokens is not NewTokens.DROP:
            self._refuse_new_tokens(tuned)
        return DenseChange(vector, self.alignment, self.b, alpha)

    def _require_between_shapes(self, tuned: Model, new_tokens: NewTokens) -> None:
        """Refuse what has no place on a B of another shape: new tokens, and a head apart from its tie."""
        if new_tokens is NewTokens.KEEP:
            raise SettingError(
                '`new_tokens="keep"`: new tokens cannot be kept between models of different shapes',
                hint='`new_tokens="drop"` drops them',
            )
        if self.a.is_tied and any(head in tuned.names for head in self.a.ties):
            raise MismatchError(
                f"{tuned.label} has {listing(self.a.ties)} apart from its embedding, and {self.a.label} ties"
                " them: this cannot be moved between models of different shapes",
                hint="leave the embedding as it is, or train it with the output head tied to it",
            )

    def untied_for(self, finetuned: Sequence[Finetune]) -> TransportPlan:
        """Return the plan of an output in which all of these have a place: if one of them changes the output
        head apart from the embedding that it is tied to, both become tensors of their own.
        """
        if self.alignment.other_shape or not (self.a.is_tied and any(map(self._unties, finetuned))):
            return self
        a, b = self.a.untied(), self.b.untied()
        untied_config(b, b.checkpoint.config or {})
        return replace(self, a=a, b=b)

    def _unties(self, finetuned: Finetune) -> bool:
        if isinstance(finetuned, Adapter):
            merged = finetuned.on_base(self.a).to_merge()
            return self.b.writes_tokens and self.adapter(merged, trust_base=True).unties
        return any(head in self.in_b_vocabulary(finetuned).architecture.tensors for head in self.a.ties)

    def _refuse_new_tokens(self, tuned: Model) -> None:
        """Refuse tokens that a fine-tune added, where B has another vocabulary than A."""
        grown = tuned.architecture.sizes[VOCABULARY] - self.a.architecture.sizes[VOCABULARY]
        if (found := added_tokens(tuned, self.a)) or grown > 0:
            names = f": {listing(map(repr, found.values()))}" if found else ""
            raise MismatchError(
                f"{tuned.label} has {len(found) or grown} token(s) that its base {self.a.label} lacks{names};"
                " a B with another vocabulary has no place for them",
                hint='`new_tokens="drop"` drops them',
            )

    def in_b_vocabulary(self, tuned: Model) -> Model:
        """Return a fine-tuned model; in B's vocabulary, if that is another one than A's."""
        if self.a.vocabulary is None or tuned.vocabulary is not None:
            return tuned
        return tuned.in_vocabulary(self.a.vocabulary, self.b.checkpoint.config)

    def adapter(
        self, adapter: Adapter, alpha: Alpha | None = None, *, trust_base: bool = False
    ) -> MovedAdapter:
        """Return an adapter in B's basis, where A and B have one shape."""
        if not trust_base:
            self._require_named_base(adapter)
        if adapter.checkpoint.root.is_dir():
            require_rows_of(self.a, adapter.label, adapter.checkpoint.root)
        adapter = adapter_in_vocabulary(adapter.on_base(self.a), self.a)
        a, b = (self.a.untied(), self.b.untied()) if self.b.writes_tokens else (self.a, self.b)
        return MovedAdapter(adapter, a, b, self.alignment, alpha or Alpha())

    def lora(
        self, adapter: Adapter, alpha: Alpha, *, trust_base: bool = False
    ) -> tuple[DenseChange, int, frozenset[str], frozenset[str]]:
        """Return the change of a LoRA for a B of another shape, its rank, and the tensors of B that it
        changes and replaces.
        """
        change = self.change(adapter, alpha, trust_base=trust_base)
        assert isinstance(change, DenseChange)
        changed, wholes = set[str](), set[str]()
        for factor in adapter.factors(self.running(self.a)):
            (wholes if factor.whole else changed).add(factor.tensor)
        theirs = {name: {pair.source.tensor for pair in pairs} for name, pairs in change.pairs.items()}
        kept = frozenset(name for name, sources in theirs.items() if sources & wholes)
        targets = frozenset(name for name, sources in theirs.items() if sources & changed)
        carried = frozenset(name for name in change.names if change.owns(name))
        several = adapter.config.get("rank_pattern") or {}
        return change, max([int(adapter.config["r"]), *several.values()]), targets, kept | carried

    def _require_named_base(self, tuned: Finetune) -> None:
        """Refuse a fine-tune whose own metadata names a base with other weights."""
        info = recorded_base(tuned.checkpoint.root)
        if info is not None and info["fingerprint"] != self.a.fingerprint:
            raise MismatchError(
                f"{tuned.label} was moved onto {info['name']} ({info['fingerprint'][:12]}…), and its base is"
                f" said to be {self.a.label} ({self.a.fingerprint[:12]}…), which has other weights",
                hint=f"give {info['name']} as `base`, or `trust_base=True` if you are sure",
            )

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def move(
        self,
        finetuned: Sequence[Finetune],
        alpha: Alpha | None = None,
        rule: MergeRule | None = None,
        *,
        full: bool = False,
        head: int | None = None,
        rank: int | None = None,
        dtype: torch.dtype | str | None = None,
        trust_base: bool = False,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
        record: OutputRecord | None = None,
        by_weights: bool = False,
    ) -> Output:
        """Return B + α·π(τ) of one fine-tune, or of several that a ``rule`` combines.

        Of adapters alone it is an adapter, unless ``full``. ``by_weights`` chooses the α of an adapter that
        keeps its strength relative to what the base makes of its inputs.
        """
        alpha, stored = alpha or Alpha(), as_dtype(dtype)
        record = record or OutputRecord("transport" if rule is None else "merge")
        adapters = [one for one in finetuned if isinstance(one, Adapter)]
        if rule is not None:
            rule.require_for(len(finetuned))
            rule = replace(rule, alpha=alpha)  # a copy: the thresholds of TIES belong to one basis
        if head is not None and not 0 <= head < len(finetuned):
            raise SettingError(f"head = {head}: there are {len(finetuned)} fine-tunes", hint="count from 0")
        if len(adapters) == len(finetuned) and not full:
            if rule is None:
                return self._moved_adapter(adapters[0], alpha, stored, record, trust_base, by_weights)
            if self.alignment.other_shape:
                raise SettingError(
                    "adapters cannot be merged into one adapter for a model of another shape",
                    hint="`full=True` merges them into the moved model",
                )
            moved = tuple(self.adapter(one, trust_base=trust_base) for one in adapters)
            return merged_adapter_output(moved, rule, rank=rank, head=head, dtype=stored, record=record)
        if rank is not None:
            raise SettingError("`rank`: the result is a model", hint="only merged adapters have a rank")
        plan, each = self.untied_for(finetuned), alpha if rule is None else Alpha()
        changes = tuple(
            plan.change(one, each, trust_base=trust_base, new_tokens=new_tokens) for one in finetuned
        )
        return dense_output(
            changes, plan.a, plan.b, plan.alignment, merging=rule, dtype=stored, head=head, record=record
        )

    def _moved_adapter(
        self,
        adapter: Adapter,
        alpha: Alpha,
        dtype: torch.dtype | None,
        record: OutputRecord,
        trust_base: bool,
        by_weights: bool,
    ) -> Output:
        """Return a moved adapter, with what B changed where it acts in its record."""
        if self.alignment.other_shape:
            change, rank, targets, wholes = self.lora(adapter, alpha, trust_base=trust_base)
            dense, unmoved = (
                dense_output((one,), self.a, self.b, self.alignment, record=record)
                for one in (change, replace(change, alpha=Alpha(0.0)))
            )
            planned = self.alignment.provenance.method == PLANNED
            return lora_between_shapes(dense, unmoved, (rank, targets, wholes), dtype, planned=planned)
        moved = self.adapter(adapter, alpha, trust_base=trust_base)
        if self._compares_weights and (drift := adapter_drift(moved, self.resources.jobs)) is not None:
            record = replace(record, drift=drift)
            moved = replace(moved, alpha=strength_alpha(drift)) if by_weights else moved
        return adapter_output(moved, dtype=dtype, record=record)

    def on_a(self, finetuned: Sequence[Finetune], rule: MergeRule | None = None, **how: Any) -> Output:
        """Return the fine-tunes on A itself, as a whole model."""
        a = self.running(self.a)
        tuned = [
            one if isinstance(one, Adapter) else self.running(self.in_b_vocabulary(one)) for one in finetuned
        ]
        full = any(isinstance(one, Adapter) for one in finetuned)
        return TransportPlan.planned(a, a).move(tuned, rule=rule, full=full, trust_base=True, **how)

    # ── choosing α ───────────────────────────────────────────────────────────────────────────

    def choose_alpha(
        self,
        asked: AlphaArgument | None,
        finetuned: Sequence[Finetune],
        record: OutputRecord,
        rule: MergeRule | None = None,
        *,
        head: int | None = None,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
        calibrate: str | Path | None = None,
        keep_support: float | None = None,
        force_unrelated: bool = False,
    ) -> tuple[Alpha, OutputRecord]:
        """Return α for fine-tunes, and the record with what was measured in B's outputs, if anything was.

        Without ``asked`` it is 1; less if π rotates, and B's outputs would move far in another direction than
        A's did; refused if they would move in an unrelated one, unless ``force_unrelated``.
        """
        known = self.alignment.provenance.method != PLANNED
        scalable = all(isinstance(one, Model) or one.kind.scalable for one in finetuned)
        if known and (
            asked == AUTO or keep_support is not None or (asked is None and self._rotates and scalable)
        ):
            lot = new_tokens if rule is None else NewTokens.DROP  # no probe has a new token
            search = partial(
                self.alpha_search, finetuned, rule, head=head, new_tokens=lot, calibrate=calibrate
            )
            asked, shift = measured_alpha(
                asked,
                keep_support,
                search,
                rotates=self._rotates,
                other_shape=self.alignment.other_shape,
                force_unrelated=force_unrelated,
                refinable=rule is None,
            )
            record = replace(record, output_shift=shift)
        return self.alpha(1.0 if asked is None else asked), record

    def alpha_search(
        self,
        finetuned: Sequence[Finetune],
        rule: MergeRule | None = None,
        *,
        calibrate: str | Path | None = None,
        **how: Any,
    ) -> AlphaSearch:
        """Return a search for α that runs the fine-tunes on A and on B, on probes."""
        if are_kin(self.a, self.b):
            raise ArchitectureError(
                f"a {self.a.family.name} and a {self.b.family.name} have different inputs",
                hint="the weights alone tell α, or give a number",
            )
        full = any(isinstance(one, Adapter) for one in finetuned)

        return AlphaSearch(
            self._running_pair(finetuned),
            partial(self._tuned, finetuned, rule, **how),
            partial(self.move, finetuned, rule=rule, full=full, trust_base=True, **how),
            calibrate=Path(calibrate) if calibrate else None,
            seed=self.alignment.provenance.seed + 1,  # probes that π has not learned from
            run_config=RunConfig.within(self.resources),
            resources=self.resources,
        )

    def _tuned(
        self, finetuned: Sequence[Finetune], rule: MergeRule | None = None, **how: Any
    ) -> Model | Output:
        """Return the fine-tunes of A as one model."""
        (first, *others) = finetuned
        if isinstance(first, Model) and not others and rule is None:
            return self.running(self.in_b_vocabulary(first))
        return self.on_a(finetuned, rule, **how)

    def running(self, model: Model) -> Model:
        """Return a model of A's architecture as it is run; between shapes with its own tokens."""
        return model.to_run if self.alignment.other_shape else model

    def _running_pair(self, finetuned: Sequence[Finetune]) -> RunningPair:
        """Return A and B as they run beside these fine-tunes, which may have added tokens."""
        a = self.running(self.a)
        tuned = [self.running(self.in_b_vocabulary(one)) for one in finetuned if isinstance(one, Model)]
        counts = [
            (one.architecture.sizes, a.architecture.sizes, id)
            for one in tuned
            for id in a.architecture.token_axes
        ]
        grown = {now[id]: was[id] for now, was, id in counts if now.get(id, 0) > was[id]}
        return RunningPair(a, self.b, self.alignment, grown)

    def teacher(self, finetuned: Finetune) -> Teacher:
        """Return the fine-tune beside A, as the teacher of a refinement."""
        pair, made = self._running_pair((finetuned,)), self._tuned((finetuned,))
        tuned = made if isinstance(made, Model) else pair.a
        device = self.resources.device
        whole = build(made if isinstance(made, Model) else made.model(), torch.float32).to(device)
        return Teacher(pair, build(pair.a, torch.float32).to(device), tuned, whole)


def require_lora(adapter: Adapter) -> None:
    """Refuse adapters of other kinds than LoRA, which have no counterpart on a B of another shape."""
    if isinstance(adapter, LoraFile):
        why = "a LoRA file cannot be moved to a model of another shape"
    elif adapter.kind is not LORA:
        why = f"adapters of kind {adapter.kind.name} cannot be moved to another shape"
    else:
        return
    raise AdapterError(f"{adapter.label}: {why}", hint="`full=True` merges it into the moved model")


def _assumed_between(a: Model, b: Model, made: Provenance) -> Alignment:
    """Return a π between shapes for dry runs and early refusals: parts by their roles, with maps of zeros."""
    ours, theirs, paths, maps = a.architecture, b.architecture, even_paths(a, b), dict[str, Map]()
    for pair in part_pairs(ours, theirs, paths):
        for name in pair.maps:
            target, source = (parse(item).items[0] for item in name.split(" <- "))
            shape = size_of(target, theirs.sizes), size_of(source, ours.sizes)
            maps[name] = Map.rectangular(np.zeros(shape, dtype=np.float32))
    return Alignment(maps, ours.sizes, ours.parents, made, {}, theirs.sizes, {}, paths)
