"""The plan of a transport between two bases of different shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.alignment.part_pairs import part_pairs
from transfusion.alignment.provenance import PLANNED, Provenance
from transfusion.architecture.architecture import Architecture, Policy
from transfusion.architecture.layouts import size_of
from transfusion.errors import AdapterError, MismatchError, SettingError, listing
from transfusion.matching.other_shapes import even_paths
from transfusion.model.bases import open_bases
from transfusion.model.model import Model
from transfusion.running.probes.input_translation import InputTranslation, input_translation
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.random_inputs import logits_name
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.adapter_opening import is_adapter, open_adapter
from transfusion.transport.adapters.lora_file import LoraFile
from transfusion.transport.alpha import Alpha, AlphaArgument
from transfusion.transport.alpha_chooser import AlphaChooser
from transfusion.transport.balanced_alpha import AUTO
from transfusion.transport.finetunes import Finetune
from transfusion.transport.move import dense_output
from transfusion.transport.output import Output
from transfusion.transport.output_record import OutputRecord
from transfusion.transport.rectangular.rectangular_lora import rectangular_lora
from transfusion.transport.rectangular.rectangular_source import RectangularSource
from transfusion.transport.task_vector import NewTokens, TaskVector
from transfusion.transport.transport_plan import Base, TransportPlan

LORA = "LORA"
LEAST_DIRECTION = 0.2
"""Between shapes, a change of B's outputs with a smaller cosine to that of A's is refused: on measured pairs,
less than this brought next to nothing and cost B some points of its support."""


@dataclass(frozen=True)
class RectangularPlan(TransportPlan):
    """Two bases of different shapes and the π between them."""

    alignment: Alignment

    @classmethod
    def through(cls, base: Base, onto: Base, via: Alignment) -> RectangularPlan:
        """Return the plan of an alignment, checked against both models."""
        a, b = open_bases(base, onto, other_shapes=True)
        via.require_between(source=a, target=b)
        return cls(a, b, via)

    @classmethod
    def assumed(cls, a: Model, b: Model) -> RectangularPlan:
        """Return a plan for dry runs and early refusals: parts by their roles, with maps of zeros."""
        paths = even_paths(a, b)
        maps: dict[str, Map] = {}
        for pair in part_pairs(a.architecture, b.architecture, paths):
            target, source = pair.target, pair.source
            for name, ours, theirs in (
                (pair.writes, target.output, source.output),
                (pair.reads, target.input, source.input),
            ):
                if name is not None and ours is not None and theirs is not None:
                    shape = size_of(ours, b.architecture.sizes), size_of(theirs, a.architecture.sizes)
                    maps[name] = Map.rectangular(np.zeros(shape, dtype=np.float32))
        inputs = a.label, a.fingerprint, b.label, b.fingerprint
        provenance = Provenance(a.family.name, PLANNED, Policy(), PLANNED, {}, 0, *inputs)
        known, sizes = a.architecture, b.architecture.sizes
        alignment = Alignment(maps, known.sizes, known.parents, provenance, {}, sizes, {}, paths)
        return cls(a, b, alignment)

    def alpha(self, asked: AlphaArgument) -> Alpha:
        """Return α as asked for; patterns are matched against B's tensors."""
        if asked == AUTO:
            return Alpha()
        chosen = Alpha.of(asked)
        chosen.require_used(self.b.architecture.tensors)
        return chosen

    @property
    def _rotates(self) -> bool:
        return True

    @property
    def alpha_choice(self) -> AlphaChooser:
        return AlphaChooser(rotates=True, least_direction=LEAST_DIRECTION, must_measure=True)

    def running(self, model: Model) -> Model:
        return model.to_run

    def expected(self, architecture: Architecture, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that B should have; without those that B lacks, or whose axis has no map."""
        found: dict[str, Tensor] = {}
        for name, value in outputs.items():
            ours, theirs = (one.outputs.get(name, "") for one in (architecture, self.b.architecture))
            if ours is None or theirs is None or bool(ours) != bool(theirs):
                continue
            if not ours or not theirs:
                found[name] = value
            elif (map_ := self.alignment.map_between(theirs, ours)) is not None:
                matrix = torch.from_numpy(map_.matrix[0]).to(value.dtype)
                found[name] = float(map_.read[0]) * (value @ matrix.T)
        ours, theirs = (logits_name(model.family) for model in (self.a, self.b))
        return {theirs if name == ours else name: value for name, value in found.items()}

    def translation(self, a: nn.Module, b: nn.Module) -> InputTranslation:
        return input_translation(ProbedModel(self.running(self.a), a), ProbedModel(self.b, b))

    def source(
        self,
        finetuned: Finetune,
        alpha: Alpha,
        *,
        trust_base: bool = False,
        new_tokens: NewTokens | str = NewTokens.REFUSE,
    ) -> RectangularSource:
        if isinstance(finetuned, str | Path) and is_adapter(finetuned):
            adapter = open_adapter(finetuned)
            folded = Model.open(self.tuned(finetuned).module())
            source = self.source(folded, alpha, trust_base=True, new_tokens=new_tokens)
            content = adapter.fingerprint
            return replace(source, named=adapter.label, origin=adapter.checkpoint, content=content)
        lot = NewTokens(new_tokens)
        if lot is NewTokens.KEEP:
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
        vector = TaskVector.between(tuned, self.a, trust_base=trust_base, new_tokens=lot)
        return RectangularSource(vector, self.alignment, self.b, alpha)

    def untied_for(self, finetuned: Sequence[Finetune]) -> RectangularPlan:
        return self

    def transport(self, finetuned: Finetune, *, full: bool = False, **asked: Any) -> Any:
        """Prepare B + α·π(τ); refuse adapters of other kinds than LoRA."""
        if isinstance(finetuned, str | Path) and is_adapter(finetuned) and not full:
            adapter = open_adapter(finetuned)
            if isinstance(adapter, LoraFile):
                raise AdapterError(
                    f"{adapter.label}: a LoRA file cannot be moved to a model of another shape",
                    hint="`full=True` merges it into the moved model",
                )
            if adapter.kind.name != LORA:
                raise AdapterError(
                    f"{adapter.label}: adapters of kind {adapter.kind.name} cannot be moved to another shape",
                    hint="`full=True` merges it into the moved model",
                )
        return super().transport(finetuned, full=full, **asked)

    def merge(self, finetuned: Sequence[Finetune], *, full: bool = False, **asked: Any) -> Any:
        """Prepare B + α·(the combined changes); refuse to merge adapters into an adapter."""
        adapters = [one for one in finetuned if isinstance(one, str | Path) and is_adapter(one)]
        if finetuned and len(adapters) == len(finetuned) and not full:
            raise SettingError(
                "adapters cannot be merged into one adapter for a model of another shape",
                hint="`full=True` merges them into the moved model",
            )
        return super().merge(finetuned, full=full, **asked)

    def lora(
        self, reference: str | Path, alpha: Alpha, *, trust_base: bool = False
    ) -> tuple[RectangularSource, int, frozenset[str], frozenset[str]]:
        """Return the moved change of a LoRA, its rank, and the tensors of B that it changes and replaces."""
        adapter = open_adapter(reference)
        if not trust_base:
            self._require_named_base(adapter.label, adapter.checkpoint.root)
        source = self.source(reference, alpha, trust_base=True)
        changed, wholes = set[str](), set[str]()
        for factor in adapter.factors(self.running(self.a)):
            (wholes if factor.whole else changed).add(factor.tensor)
        theirs = {name: set(source.moved.sources(name)) for name in source.moved.parts_b}
        kept = frozenset(name for name, sources in theirs.items() if sources & wholes)
        targets = frozenset(name for name, sources in theirs.items() if sources & changed)
        return source, _rank(adapter), targets, kept | source.carried.keys()

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
        source, rank, targets, wholes = self.lora(reference, alpha, trust_base=trust_base)
        dense, unmoved = (
            dense_output((one,), self.a, self.b, self.alignment, record=record)
            for one in (source, replace(source, alpha=Alpha(0.0)))
        )
        return rectangular_lora(
            dense,
            unmoved,
            (source,),
            self.a,
            self.alignment,
            rank=rank,
            targets=targets,
            wholes=wholes,
            dtype=dtype,
            record=record,
        )


def _rank(adapter: Adapter) -> int:
    """Return the largest rank of an adapter's modules."""
    several = adapter.config.get("rank_pattern") or {}
    return int(max([adapter.config["r"], *several.values()]))
