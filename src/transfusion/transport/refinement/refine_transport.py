"""Refine the output of a transport: build teacher and students, choose a start, train, return the output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from transfusion import __version__
from transfusion.architecture.naming import Naming
from transfusion.errors import SettingError
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.transport.adapters.adapter_transport import AdapterTransport
from transfusion.transport.dense_transport import Action, DenseTransport
from transfusion.transport.finetunes import Finetune
from transfusion.transport.rectangular.rectangular_lora import RectangularLora
from transfusion.transport.refinement.peft_students import (
    adapter_tensors,
    lora_config,
    with_adapter,
    with_lora,
)
from transfusion.transport.refinement.refined_output import RefinedAdapter, RefinedLora, RefinedModel
from transfusion.transport.refinement.refinement_settings import BASE, MOVED, RefinementSettings
from transfusion.transport.refinement.refiner import ADAPTER_RATE, Refiner
from transfusion.transport.transport_plan import TransportPlan

Moved = DenseTransport | AdapterTransport | RectangularLora


@dataclass(frozen=True)
class RefineTransport:
    """The refinement of one fine-tune, after its transport by a plan."""

    plan: TransportPlan
    finetuned: Finetune
    settings: RefinementSettings
    unmoved: Callable[[], Moved]
    """Prepares the same transport with α = 0: B, with the heads of the fine-tune where B has none."""
    progress: Progress = SILENT

    def run(
        self, moved: Moved, checkpoint: Path | None = None
    ) -> RefinedModel | RefinedAdapter | RefinedLora:
        """Refine what was moved. ``checkpoint`` is a file from which an interrupted run goes on."""
        if checkpoint is not None:
            checkpoint = checkpoint.with_stem(f"{checkpoint.stem}-{self._key(moved)}")
        if isinstance(moved, AdapterTransport):
            return self._adapter(moved, checkpoint)
        if isinstance(moved, RectangularLora):
            self._refuse_rank()
            return self._lora(moved.dense, moved.rank, checkpoint, moved.targets)
        if self.settings.rank is not None:
            return self._lora(moved, self.settings.rank, checkpoint)
        return self._model(moved, checkpoint)

    def _key(self, moved: Moved) -> str:
        """A hash of everything that decides the steps, so that no run goes on from the state of another."""
        plan, own = self.plan, self.settings.calibrate and Path(self.settings.calibrate).stat().st_mtime_ns
        dense = moved.dense if isinstance(moved, RectangularLora) else moved
        sources = (dense,) if isinstance(dense, AdapterTransport) else dense.sources
        inputs = [(one.fingerprint, one.alpha.as_json()) for one in sources]
        digests = [plan.a.fingerprint, plan.b.fingerprint, plan.alignment.digest]
        if (vocabulary := plan.a.vocabulary) is not None:
            digests += [vocabulary.source, vocabulary.target]
        text = json.dumps([__version__, asdict(self.settings), own, inputs, digests, type(moved).__name__])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _model(self, moved: DenseTransport, checkpoint: Path | None) -> RefinedModel:
        refiner, starts = self._refiner(moved, checkpoint), self._dense_starts(moved)
        start = self._chosen(refiner, starts)
        student = starts.pop(start).requires_grad_(True)
        starts.clear()
        record = refiner.refine(student, start, checkpoint)
        config = None if hasattr(student, "config") else moved.config()
        return RefinedModel.of(moved, Model.open(student, config=config), record)

    def _lora(
        self,
        moved: DenseTransport,
        rank: int,
        checkpoint: Path | None,
        targets: Collection[str] | None = None,
    ) -> RefinedLora:
        """Refine a LoRA; ``targets`` are the tensors that it changes, all linear layers if it is None."""
        moved.require_config_of_b()
        refiner, starts = self._refiner(moved, checkpoint), self._dense_starts(moved)
        start = self._chosen(refiner, starts)
        naming = Naming(moved.onto.family, live=True)
        student, _ = with_lora(
            starts[start], rank, starts[BASE], moved.names(Action.CARRIED), naming=naming, targets=targets
        )
        record = refiner.refine(student, start, checkpoint, rate=ADAPTER_RATE)
        return RefinedLora(
            moved.lead,
            moved.base,
            moved.onto,
            moved.alignment,
            adapter_tensors(student),
            lora_config(student),
            record,
            moved.dtype,
            moved.output_record,
        )

    def _adapter(self, moved: AdapterTransport, checkpoint: Path | None) -> RefinedAdapter:
        self._refuse_rank()
        refiner = self._refiner(moved, checkpoint)
        adapters = {MOVED: moved}
        if moved.adapter.kind.scalable:
            unmoved = self.unmoved()
            assert isinstance(unmoved, AdapterTransport)
            adapters[BASE] = unmoved
        starts = {name: with_adapter(self._base_of(moved), one) for name, one in adapters.items()}
        start = self._chosen(refiner, starts)
        record = refiner.refine(starts[start], start, checkpoint, rate=ADAPTER_RATE)
        return RefinedAdapter.of(moved, adapter_tensors(starts[start]), record)

    def _refuse_rank(self) -> None:
        if self.settings.rank is not None:
            raise SettingError(
                "`refine_rank`: the fine-tune is an adapter, and keeps its own rank", hint="leave it out"
            )

    def _base_of(self, moved: AdapterTransport) -> nn.Module:
        """Build B in the class that the adapter was trained in, with the heads that the adapter brings."""
        if not moved.carried:
            return build(moved.onto, torch.float32)
        whole = self.plan.transport(
            self.finetuned, alpha=0.0, full=True, trust_base=True, dtype=torch.float32
        )
        assert isinstance(whole, DenseTransport)
        return whole.module().eval()

    def _chosen(self, refiner: Refiner, starts: dict[str, nn.Module]) -> str:
        chosen = refiner.choose(starts)
        if chosen == BASE:
            self.progress.warn(
                "π takes B's answers away from the fine-tune's, so the refinement starts from B"
            )
        return chosen

    def _dense_starts(self, moved: DenseTransport) -> dict[str, nn.Module]:
        unmoved = self.unmoved()
        unmoved = unmoved.dense if isinstance(unmoved, RectangularLora) else unmoved
        assert isinstance(unmoved, DenseTransport)
        return {
            name: replace(one, dtype=torch.float32, changed=set()).module().eval()
            for name, one in ((MOVED, moved), (BASE, unmoved))
        }

    def _refiner(self, moved: Moved, checkpoint: Path | None) -> Refiner:
        with phase("building the models"):
            refiner = self._built(moved, checkpoint)
        threads = self.settings.threads or self.plan.resources.jobs or self._fitting(refiner, checkpoint)
        torch.set_num_threads(threads)
        refiner.settings = replace(self.settings, threads=threads)
        return refiner

    @staticmethod
    def _fitting(refiner: Refiner, checkpoint: Path | None) -> int:
        """Return how many threads are fastest, or were when an interrupted run began."""
        note = checkpoint and checkpoint.with_suffix(".threads")
        if note is not None and note.exists():
            return int(note.read_text())
        found = refiner.fitting_threads(torch.get_num_threads())
        if note is not None:
            note.write_text(str(found))
        return found

    def _built(self, moved: Moved, checkpoint: Path | None) -> Refiner:
        plan = self.plan
        if isinstance(moved, AdapterTransport):
            other_heads = moved.carried
        else:
            assert isinstance(moved, DenseTransport)
            other_heads = [*moved.names(Action.CARRIED), *moved.dropped]
        a = plan.running(plan.a)
        tuned = plan.running(plan.opened(self.finetuned)) if isinstance(self.finetuned, Model) else a
        of_a, of_b = build(a, torch.float32), build(plan.b, torch.float32)
        return Refiner(
            a,
            plan.b,
            tuned,
            partial(plan.expected, tuned.architecture),
            plan.tuned(self.finetuned).module(),
            of_a,
            of_b,
            plan.translation(of_a, of_b),
            self.settings,
            same_class=not other_heads,
            progress=self.progress,
            kept=checkpoint,
        )
