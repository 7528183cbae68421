"""The plan of a transport: two bases and one alignment, the same for every fine-tune of A.

A model moves tensor by tensor (`move`). A LoRA takes one of two routes. Where A and B have the same shape,
its two factors are moved, and it stays a LoRA of its rank (`adapters.move`). Where their shapes differ, it is
folded into A, the whole change is moved, and the result is factored again by a singular value decomposition
(`adapters.lora_between_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.maps import Map
from transfusion.alignment.part_pairs import part_pairs
from transfusion.alignment.provenance import PLANNED, Provenance
from transfusion.architecture.architecture import Architecture, Policy
from transfusion.architecture.layouts import parse, size_of
from transfusion.errors import AdapterError, MismatchError, SettingError, listing
from transfusion.files.tensor_files import as_dtype
from transfusion.matching.other_shapes import even_paths
from transfusion.model.model import Model, Reference, untied_config
from transfusion.model.pair import Pair, differing_shape, require_rows_of
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.building import build
from transfusion.running.live_model import HowToRun, expected_outputs, last_dimension
from transfusion.running.probes.inputs import logits_name
from transfusion.running.probes.pairs import InputTranslation, SameInputs, input_translation
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.adapters.drift import adapter_drift, strength_alpha
from transfusion.transport.adapters.folded import FoldedAdapter
from transfusion.transport.adapters.kinds import LORA
from transfusion.transport.adapters.lora_between_shapes import lora_between_shapes
from transfusion.transport.adapters.lora_file import LoraFile, OtherParts, is_adapter, open_adapter
from transfusion.transport.adapters.merging import merged_adapter_output
from transfusion.transport.adapters.move import MovedAdapter, adapter_in_vocabulary, adapter_output
from transfusion.transport.alpha import AUTO, Alpha, AlphaArgument, balanced_alpha
from transfusion.transport.alpha_on_probes import AlphaChooser, AlphaSearch, RunnableFinetune
from transfusion.transport.changes import DenseSource, TaskVectorSource
from transfusion.transport.finetunes import Finetune
from transfusion.transport.merge_rules import MergeRule
from transfusion.transport.move import dense_output
from transfusion.transport.output import Output
from transfusion.transport.record import OutputRecord, recorded_base
from transfusion.transport.refinement.training import Teacher
from transfusion.transport.task_vector import NewTokens, TaskVector, added_tokens

Base: TypeAlias = Model | Reference
LEAST_DIRECTION = 0.2
"""Between shapes, a change of B's outputs with a smaller cosine to that of A's is refused: on measured pairs,
less than this brought next to nothing and cost B some points of its support."""


@dataclass(frozen=True)
class TransportPlan:
    """Two bases and the π between them. Every fine-tune of A moves by the same plan."""

    a: Model
    b: Model
    alignment: Alignment
    resources: Resources = LOCAL
    """For models that are run to choose α."""
    other_parts: OtherParts = OtherParts.REFUSE
    """What becomes of the parts of a LoRA file that change another model than A, such as a text encoder."""

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
        return cls._along(a, b, alignment)

    @classmethod
    def _along(cls, a: Model, b: Model, alignment: Alignment) -> TransportPlan:
        policy = alignment.provenance.policy
        return cls(a.under(policy), b.under(policy), alignment)

    @property
    def alone(self) -> TransportPlan:
        """The plan for one model: parts that may be kept beside it are left out of it."""
        keeps = self.other_parts is OtherParts.KEEP
        return replace(self, other_parts=OtherParts.DROP) if keeps else self

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
        return known and not self._rotates and self.resources.memory is None

    def source(
        self,
        finetuned: Finetune,
        alpha: Alpha,
        *,
        trust_base: bool = False,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
    ) -> TaskVectorSource:
        """Return the change of a fine-tune in B's basis: of a model, or of an adapter."""
        if self.alignment.other_shape:
            return self._source_between(finetuned, alpha, trust_base, NewTokens(new_tokens))
        if isinstance(finetuned, str | Path) and is_adapter(finetuned):
            return FoldedAdapter(self.alone.adapter(finetuned, alpha, trust_base=trust_base, exact=True))
        tuned = self.opened(finetuned).under(self.alignment.provenance.policy)
        if not trust_base:
            self._require_named_base(tuned.label, tuned.checkpoint.root)
        lot = NewTokens(new_tokens)
        vector = TaskVector.between(tuned, self.a, trust_base=trust_base, new_tokens=lot)
        if self.a.vocabulary is not None and lot is not NewTokens.DROP:
            self._refuse_new_tokens(tuned)
        return DenseSource(vector, self.alignment, self.b, alpha)

    def _source_between(
        self, finetuned: Finetune, alpha: Alpha, trust_base: bool, new_tokens: NewTokens
    ) -> DenseSource:
        """Return the change of a fine-tune for a B of another shape; an adapter is folded into A before."""
        if isinstance(finetuned, str | Path) and is_adapter(finetuned):
            folded = Model.open(self.tuned(finetuned).module())
            source = self._source_between(folded, alpha, True, new_tokens)
            return replace(source, adapter=open_adapter(finetuned))
        if new_tokens is NewTokens.KEEP:
            raise SettingError(
                '`new_tokens="keep"`: new tokens cannot be kept between models of different shapes',
                hint='`new_tokens="drop"` drops them',
            )
        tuned = self.opened(finetuned)
        if not trust_base:
            self._require_named_base(tuned.label, tuned.checkpoint.root)
        if self.a.is_tied and any(head in tuned.names for head in self.a.ties):
            raise MismatchError(
                f"{tuned.label} has {listing(self.a.ties)} apart from its embedding, and {self.a.label} ties"
                " them: this cannot be moved between models of different shapes",
                hint="leave the embedding as it is, or train it with the output head tied to it",
            )
        vector = TaskVector.between(tuned, self.a, trust_base=trust_base, new_tokens=new_tokens)
        return DenseSource(vector, self.alignment, self.b, alpha)

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
        if isinstance(finetuned, str | Path) and is_adapter(finetuned):
            return self.b.writes_tokens and self.alone.adapter(finetuned, Alpha(), trust_base=True).unties
        return any(head in self.opened(finetuned).architecture.tensors for head in self.a.ties)

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

    def opened(self, finetuned: Finetune) -> Model:
        """Open a fine-tuned model; in B's vocabulary, if that is another one than A's."""
        tuned = finetuned if isinstance(finetuned, Model) else Model.open(finetuned)
        if self.a.vocabulary is None or tuned.vocabulary is not None:
            return tuned
        return tuned.in_vocabulary(self.a.vocabulary, self.b.checkpoint.config)

    def adapter(
        self,
        reference: str | Path,
        alpha: Alpha,
        *,
        trust_base: bool = False,
        exact: bool = False,
    ) -> MovedAdapter:
        """Return an adapter in B's basis; ``exact``, if it becomes part of a model."""
        adapter = open_adapter(reference, self.other_parts, exact=exact)
        if not trust_base:
            self._require_named_base(adapter.label, adapter.checkpoint.root)
        if adapter.checkpoint.root.is_dir():
            require_rows_of(self.a, adapter.label, adapter.checkpoint.root)
        adapter = adapter_in_vocabulary(adapter, self.a)
        a, b = (self.a.untied(), self.b.untied()) if self.b.writes_tokens else (self.a, self.b)
        return MovedAdapter(adapter, a, b, self.alignment, alpha)

    def adapter_output(
        self,
        reference: str | Path,
        alpha: Alpha,
        dtype: torch.dtype | None,
        record: OutputRecord,
        *,
        trust_base: bool = False,
        by_weights: bool = False,
    ) -> Output:
        """Return a moved adapter, with what B changed where it acts in its record.

        ``by_weights`` chooses the α that keeps its strength relative to what the base makes of the inputs.
        """
        if self.alignment.other_shape:
            source, rank, targets, wholes = self.lora(reference, alpha, trust_base=trust_base)
            dense, unmoved = (
                dense_output((one,), self.a, self.b, self.alignment, record=record)
                for one in (source, replace(source, alpha=Alpha(0.0)))
            )
            lora = rank, targets, wholes
            return lora_between_shapes(dense, unmoved, source, self.a, self.alignment, lora, dtype, record)
        moved = self.adapter(reference, alpha, trust_base=trust_base)
        if self._compares_weights and (drift := adapter_drift(moved, self.resources.jobs)) is not None:
            record = replace(record, drift=drift)
            moved = replace(moved, alpha=strength_alpha(drift)) if by_weights else moved
        return adapter_output(moved, dtype=dtype, record=record)

    def lora(
        self, reference: str | Path, alpha: Alpha, *, trust_base: bool = False
    ) -> tuple[DenseSource, int, frozenset[str], frozenset[str]]:
        """Return the change of a LoRA for a B of another shape, its rank, and the tensors of B that it
        changes and replaces.
        """
        adapter = open_adapter(reference)
        if not trust_base:
            self._require_named_base(adapter.label, adapter.checkpoint.root)
        source = self._source_between(reference, alpha, True, NewTokens.REFUSE)
        changed, wholes = set[str](), set[str]()
        for factor in adapter.factors(self.running(self.a)):
            (wholes if factor.whole else changed).add(factor.tensor)
        theirs = {name: {pair.source.tensor for pair in pairs} for name, pairs in source.pairs.items()}
        kept = frozenset(name for name, sources in theirs.items() if sources & wholes)
        targets = frozenset(name for name, sources in theirs.items() if sources & changed)
        carried = frozenset(name for name in source.names if source.owns(name))
        several = adapter.config.get("rank_pattern") or {}
        return source, max([int(adapter.config["r"]), *several.values()]), targets, kept | carried

    def _require_lora(self, reference: Finetune) -> None:
        """Refuse adapters of other kinds than LoRA, which have no counterpart on a B of another shape."""
        assert isinstance(reference, str | Path)
        adapter = open_adapter(reference)
        hint = "`full=True` merges it into the moved model"
        if isinstance(adapter, LoraFile):
            why = f"{adapter.label}: a LoRA file cannot be moved to a model of another shape"
            raise AdapterError(why, hint=hint)
        if adapter.kind is not LORA:
            raise AdapterError(
                f"{adapter.label}: adapters of kind {adapter.kind.name} cannot be moved to another shape",
                hint=hint,
            )

    def _require_named_base(self, label: str, root: Path) -> None:
        """Refuse a fine-tune whose own metadata names a base with other weights."""
        info = recorded_base(root)
        if info is not None and info["fingerprint"] != self.a.fingerprint:
            raise MismatchError(
                f"{label} was moved onto {info['name']} ({info['fingerprint'][:12]}…), and its base is said"
                f" to be {self.a.label} ({self.a.fingerprint[:12]}…), which has other weights",
                hint=f"give {info['name']} as `base`, or `trust_base=True` if you are sure",
            )

    def transport(
        self,
        finetuned: Finetune,
        *,
        alpha: AlphaArgument | None = 1.0,
        dtype: torch.dtype | str | None = None,
        full: bool = False,
        trust_base: bool = False,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
        keep_support: float | None = None,
        calibrate: str | Path | None = None,
        output_record: OutputRecord | None = None,
        force_unrelated: bool = False,
    ) -> Output:
        """Prepare B + α·π(τ). With ``full``, an adapter becomes part of the model.

        Without ``alpha`` it is 1; less if π rotates, and B's outputs would move far in another direction than
        A's did; refused if they would move in an unrelated one, unless ``force_unrelated``.
        """
        adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
        if full and not adapter:
            raise SettingError("`full`: the fine-tune is a whole model already", hint="leave it out")
        if self.alignment.other_shape and adapter and not full:
            self._require_lora(finetuned)
        search = partial(self.alpha_search, finetuned, calibrate=calibrate, new_tokens=new_tokens)
        chosen, output_record = self.choose_alpha(
            alpha,
            (finetuned,),
            search,
            output_record or OutputRecord(),
            keep_support,
            force_unrelated=force_unrelated,
        )
        if isinstance(finetuned, str | Path) and adapter and not full:
            by_weights = alpha == AUTO and "not_tried" in (output_record.output_shift or {})
            return self.adapter_output(
                finetuned,
                chosen,
                as_dtype(dtype),
                output_record,
                trust_base=trust_base,
                by_weights=by_weights,
            )
        plan = self.untied_for((finetuned,))
        source = plan.source(finetuned, chosen, trust_base=trust_base, new_tokens=new_tokens)
        return dense_output(
            (source,), plan.a, plan.b, plan.alignment, dtype=as_dtype(dtype), record=output_record
        )

    def alpha_search(
        self,
        finetuned: Finetune,
        *,
        calibrate: str | Path | None = None,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
    ) -> AlphaSearch:
        """Return a search for α that runs the fine-tune on A and on B, on probes."""
        adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)

        def moved() -> RunnableFinetune:
            whole = self.transport(finetuned, full=adapter, trust_base=True, new_tokens=new_tokens)
            return RunnableFinetune(whole, self.resources)

        return self.search_between(partial(self.tuned, finetuned), moved, calibrate)

    def search_between(
        self,
        tuned: Callable[[], RunnableFinetune],
        moved: Callable[[], RunnableFinetune],
        calibrate: str | Path | None = None,
    ) -> AlphaSearch:
        """Return a search for α between a fine-tune of A and the same on B with α = 1, both yet to build."""
        own = Path(calibrate) if calibrate else None
        seed = self.alignment.provenance.seed + 1  # probes that π has not learned from
        return AlphaSearch(
            self.running(self.a),
            self.b,
            tuned,
            moved,
            expected=partial(self.expected, self.a.architecture),
            translated=self.translation,
            calibrate=own,
            seed=seed,
            how=HowToRun.within(self.resources),
        )

    def choose_alpha(
        self,
        asked: AlphaArgument | None,
        finetuned: Sequence[Finetune],
        search: Callable[[], AlphaSearch],
        output_record: OutputRecord,
        keep_support: float | None = None,
        **choosing: bool,
    ) -> tuple[Alpha, OutputRecord]:
        """Return α for fine-tunes, and the record with what was measured in B's outputs, if anything was.

        ``choosing`` are further parameters of `AlphaChooser.choose`.
        """
        known = self.alignment.provenance.method != PLANNED
        checked = asked is None and self._rotates and all(map(_can_be_scaled, finetuned))
        if known and (asked == AUTO or keep_support is not None or checked):
            choice = self.alpha_choice.choose(asked, keep_support, search, **choosing)
            asked, output_record = choice.alpha, replace(output_record, output_shift=choice.output_shift)
        return self.alpha(1.0 if asked is None else asked), output_record

    @property
    def alpha_choice(self) -> AlphaChooser:
        """How an α is chosen by running models."""
        if self.alignment.other_shape:
            return AlphaChooser(rotates=True, least_direction=LEAST_DIRECTION, must_measure=True)
        return AlphaChooser(rotates=self._rotates)

    def running(self, model: Model) -> Model:
        """Return a model of A's architecture as it is run; between shapes with its own tokens."""
        return model.to_run if self.alignment.other_shape else model

    def expected(self, architecture: Architecture, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that B should have, if a model with A's architecture and heads has these."""
        if not self.alignment.other_shape:
            return expected_outputs(self._reading, architecture, outputs)
        found: dict[str, Tensor] = {}  # without outputs that B lacks, or whose axis has no map
        for name, value in outputs.items():
            ours, theirs = (one.outputs.get(name, "") for one in (architecture, self.b.architecture))
            if ours == theirs == "":
                found[name] = value
            elif ours and theirs and self.alignment.map_between(theirs, ours) is not None:
                layouts = (last_dimension(id, value.ndim) for id in (ours, theirs))
                found[name] = self.alignment.activations.move(value, *layouts)
        before, after = (logits_name(model.family) for model in (self.a, self.b))
        return {after if name == before else name: value for name, value in found.items()}

    @cached_property
    def _reading(self) -> Alignment:
        return self.alignment.reading

    def translation(self, a: nn.Module, b: nn.Module) -> InputTranslation:
        """Return what rewrites inputs of A as inputs of B."""
        if self.alignment.other_shape:
            return input_translation(ProbedModel(self.running(self.a), a), ProbedModel(self.b, b))
        return SameInputs()

    def tuned(self, finetuned: Finetune) -> RunnableFinetune:
        """Return the fine-tune of A; an adapter is folded into A."""
        if isinstance(finetuned, str | Path) and is_adapter(finetuned):
            own = TransportPlan.planned(self.running(self.a), self.running(self.a))
            folded = replace(own, other_parts=self.other_parts).transport(
                finetuned, full=True, trust_base=True
            )
            return RunnableFinetune(folded, self.resources)
        return RunnableFinetune(self.running(self.opened(finetuned)), self.resources)

    def teacher(self, finetuned: Finetune) -> Teacher:
        """Return the fine-tune beside A, as the teacher of a refinement."""
        a = self.running(self.a)
        tuned = self.running(self.opened(finetuned)) if isinstance(finetuned, Model) else a
        expected = partial(self.expected, tuned.architecture)
        whole = self.tuned(finetuned).module()
        return Teacher(a, build(a, torch.float32), tuned, whole, expected, self.translation)

    def merge(
        self,
        finetuned: Sequence[Finetune],
        *,
        merging: MergeRule,
        head: int | None = None,
        full: bool = False,
        rank: int | None = None,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
        dtype: torch.dtype | str | None = None,
        trust_base: bool = False,
        output_record: OutputRecord | None = None,
    ) -> Output:
        """Prepare B + α·(the combined changes); of adapters alone, an adapter."""
        merging.require_for(len(finetuned))
        if head is not None and not 0 <= head < len(finetuned):
            raise SettingError(f"head = {head}: there are {len(finetuned)} fine-tunes", hint="count from 0")
        info = output_record or OutputRecord("merge")
        adapters = [one for one in finetuned if isinstance(one, str | Path) and is_adapter(one)]
        if len(adapters) == len(finetuned) and not full:
            if self.alignment.other_shape:
                raise SettingError(
                    "adapters cannot be merged into one adapter for a model of another shape",
                    hint="`full=True` merges them into the moved model",
                )
            moved = tuple(self.adapter(one, Alpha(), trust_base=trust_base) for one in adapters)
            return merged_adapter_output(
                moved, merging, rank=rank, head=head, dtype=as_dtype(dtype), record=info
            )
        if rank is not None:
            raise SettingError("`rank`: the result is a model", hint="only merged adapters have a rank")
        if full and not adapters:
            raise SettingError("`full`: the fine-tunes are whole models already", hint="leave it out")
        plan = self.untied_for(finetuned)
        sources = tuple(
            plan.source(one, Alpha(), trust_base=trust_base, new_tokens=new_tokens) for one in finetuned
        )
        return dense_output(
            sources,
            plan.a,
            plan.b,
            plan.alignment,
            merging=merging,
            dtype=as_dtype(dtype),
            head=head,
            record=info,
        )


def _assumed_between(a: Model, b: Model, made: Provenance) -> Alignment:
    """Return a π between shapes for dry runs and early refusals: parts by their roles, with maps of zeros."""
    ours, theirs, paths, maps = a.architecture, b.architecture, even_paths(a, b), dict[str, Map]()
    for pair in part_pairs(ours, theirs, paths):
        for name in pair.maps:
            target, source = (parse(item).items[0] for item in name.split(" <- "))
            shape = size_of(target, theirs.sizes), size_of(source, ours.sizes)
            maps[name] = Map.rectangular(np.zeros(shape, dtype=np.float32))
    return Alignment(maps, ours.sizes, ours.parents, made, {}, theirs.sizes, {}, paths)


def _can_be_scaled(finetuned: Finetune) -> bool:
    """Whether α can be chosen: not for adapters of some kinds."""
    if isinstance(finetuned, str | Path) and is_adapter(finetuned):
        return open_adapter(finetuned).kind.scalable
    return True
