"""A run that writes an output for B: check early, align, prepare, and write in a staging folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.errors import SettingError, UselessResultError
from transfusion.files.publishing import require_writable
from transfusion.files.references import resolve
from transfusion.files.staging import StagingFolder, open_staging
from transfusion.matching.advice import Verdict
from transfusion.matching.methods import DEFAULT, Method, preset
from transfusion.model.model import Model, input_files
from transfusion.model.pair import Pair
from transfusion.runtime.progress import SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.run_record import COMMAND
from transfusion.transport.adapters.lora_file import is_adapter
from transfusion.transport.alpha import Alpha
from transfusion.transport.finetunes import Finetune
from transfusion.transport.output import Output
from transfusion.transport.refinement.refine import refine
from transfusion.transport.refinement.settings import RefinementSettings
from transfusion.transport.transport_plan import TransportPlan


@dataclass(frozen=True)
class Destination:
    """Where an output goes, if anywhere, and how it is made."""

    output: Path | None = None
    force: bool = False
    dry_run: bool = False
    resources: Resources = LOCAL
    progress: Progress = SILENT

    @classmethod
    def at(cls, output: str | Path | None, **how: Any) -> Destination:
        """Return the destination of a path as users give it."""
        return cls(None if output is None else Path(output), **how)

    def require_writable(self, finetuned: Sequence[Model | str | Path], *others: object) -> None:
        """Refuse, before any work, an output that cannot be written or that holds an input."""
        if self.output is not None:
            adapters = [one if isinstance(one, Model) else resolve(one) for one in finetuned]
            single = self.output.suffix == ".safetensors"
            inputs = input_files(*adapters, *others)
            require_writable(self.output, force=self.force, inputs=inputs, folder=not single)

    def write(self, moved: Output, staging: StagingFolder) -> None:
        """Write an output into its staging folder, with its notes and a bar."""
        for note in moved.notes:
            self.progress.warn(note)
        with self.progress.bar(moved.plan()["tensors"]) as advance:
            moved.write(staging, advance, self.resources)
        moved.keep_pi(staging)


@dataclass(frozen=True)
class OutputRun:
    """One run of `transport` or `merge`."""

    pair: Pair
    via: Alignment | None
    prepare: Callable[[TransportPlan], Output]
    """Prepare the output of a plan. It is also called early, with assumed maps, for refusals and sizes."""
    to: Destination
    aligning: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of `align`, if there is no π."""
    refine: Callable[[TransportPlan, Path | None], Output] | None = None
    """Prepares an output and refines it; the path is a file from which an interrupted refinement goes on."""
    refinable: bool = False
    """Whether the same run could be asked to refine its output."""

    def run(self) -> Output:
        """Align if there is no π, prepare the output, and write it if there is a path for it."""
        if self.to.dry_run:
            moved = self.prepare(TransportPlan.planned(self.pair.a, self.pair.b, self.via, assumed=True))
            moved.within_memory(self.to.resources)
            return moved
        resources = self.to.resources
        with resources.connected():
            if self.via is None:  # refuse whatever can be refused before the search
                early = TransportPlan.planned(self.pair.a, self.pair.b, assumed=True)
                self.prepare(early).within_memory(resources)
            if self.to.output is None:
                return self._prepared(self.via or self._align())
            with open_staging(self.to.output, force=self.to.force) as staging:
                moved = self._prepared(self.via or self._resumed(staging), staging)
                self.to.write(moved, staging)
        return moved

    def _prepared(self, alignment: Alignment, staging: StagingFolder | None = None) -> Output:
        plan = TransportPlan.between(self.pair, alignment)
        if self.refine is not None:
            return self.refine(plan, staging.keep("refinement.safetensors") if staging else None)
        warn_of_doubt(alignment, self.to.progress)
        return self.prepare(plan)

    def _align(self) -> Alignment:
        from transfusion.matching.align import align

        found = align(
            self.pair.a,
            self.pair.b,
            vocabulary_share=0.0,  # compared when both were opened
            resources=self.to.resources,
            progress=self.to.progress,
            **self.aligning,
        )
        method = chosen_method(self.aligning.get("method", DEFAULT))
        decided = "method" in self.aligning and not method.follows_advice  # by the user
        if not decided and not self.aligning["anyway"]:
            self._require_alignable(found.provenance.advice, tried_all=method.follows_advice)
        return found

    def _require_alignable(self, advice: Mapping[str, Any], *, tried_all: bool) -> None:
        """Refuse models that the default method cannot align, or all that were tried; name the command that
        brings more.
        """
        if advice.get("verdict") != Verdict.DOUBT:
            return
        better = [] if tried_all or self.pair.a.architecture.unrotated else ['`method="auto"`']
        better += ["`refine=True`"] if self.refinable else []
        command = COMMAND.get()
        if not better:
            instead = "or fine-tune B itself"
        elif command is None:
            instead = f"give {' and '.join(better)}"
        else:
            instead = f"type this instead: {' '.join([command, *better])}"
        verdict = f"{advice['verdict']}: {advice['text']}"
        raise UselessResultError(
            f"nothing was written: {self.pair.a.label} and {self.pair.b.label} are {verdict}",
            hint=f"`anyway` writes the result nevertheless; {instead}",
        )

    def _resumed(self, staging: StagingFolder) -> Alignment:
        """Align, and keep π in the staging folder until the output is complete."""
        place = staging.keep(f"{self._key()}.safetensors")
        if place.exists():
            self.to.progress.note("note: going on with the π that an interrupted run had found")
            return Alignment.load(place)
        found = self._align()
        found.save(place, force=True)
        return found

    def _key(self) -> str:
        """A hash of everything that decides π."""
        method = chosen_method(self.aligning.get("method", DEFAULT))
        asked = {**self.aligning, "method": asdict(method), "device": self.to.resources.device}
        a, b, vocabulary = self.pair.a, self.pair.b, self.pair.vocabulary
        tokens = [vocabulary["source"], vocabulary["target"]] if vocabulary else []
        text = json.dumps([asked, a.fingerprint, b.fingerprint, *tokens], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def refined_output(
    plan: TransportPlan,
    finetuned: Finetune,
    settings: RefinementSettings,
    prepare: Callable[..., Output],
    checkpoint: Path | None = None,
    progress: Progress = SILENT,
) -> Output:
    """Return the output of a plan after its refinement."""
    adapter = isinstance(finetuned, str | Path) and is_adapter(finetuned)
    targets = None
    full: dict[str, bool] = {}
    output = prepare(plan)
    if plan.alignment.other_shape and adapter and output.adapter is not None:
        if settings.rank is not None:
            raise SettingError(
                "`refine_rank`: the fine-tune is an adapter, and keeps its own rank", hint="leave it out"
            )
        assert isinstance(finetuned, str | Path)
        _, rank, targets, _ = plan.lora(finetuned, Alpha(), trust_base=True)
        settings, full = replace(settings, rank=rank), {"full": True}
        output = prepare(plan, **full)
    scalable = output.moved is None or output.moved.adapter.kind.scalable
    brings = output.moved is not None and output.moved.carried
    whole = (
        plan.transport(finetuned, alpha=0.0, full=True, trust_base=True, dtype=torch.float32)
        if brings
        else None
    )
    return refine(
        output,
        plan.teacher(finetuned),
        plan.b,
        settings,
        unmoved=prepare(plan, 0.0, **full) if scalable else None,
        whole=whole,
        targets=targets,
        checkpoint=checkpoint,
        jobs=plan.resources.jobs,
        progress=progress,
    )


def warn_of_doubt(alignment: Alignment, progress: Progress) -> None:
    """Warn of a π that brings little of a fine-tune."""
    advice = alignment.provenance.advice
    if advice.get("verdict") == Verdict.DOUBT:
        progress.warn(f"{advice['verdict']}: {advice['text']}")


def chosen_method(method: str | Method) -> Method:
    """Return a method by its name, or as it is."""
    return method if isinstance(method, Method) else preset(method)


def accepts_shapes(via: Alignment | None, aligning: Mapping[str, Any]) -> bool:
    """Return whether π, or the method that will find it, serves models of different shapes."""
    if via is not None:
        return via.other_shape
    return chosen_method(aligning.get("method") or DEFAULT).functional is not None


def refuse_beside_via(aligning: Mapping[str, Any]) -> None:
    """Refuse parameters of `align` beside a π that is aligned already."""
    given = [name for name, value in aligning.items() if value is not None]
    if given:
        raise SettingError(
            f"{', '.join(f'`{name}`' for name in given)} says how to align, and `via` is aligned already",
            hint="leave it out; or it is misspelled",
        )


def _refuse_unknown(aligning: Mapping[str, Any]) -> None:
    """Refuse what `align` does not take, before any model is read."""
    if not aligning:
        return
    from transfusion.matching.align import align

    for name in aligning:
        if name in Resources.__dataclass_fields__:
            raise SettingError(
                f"there is no parameter {name!r}", hint=f"give resources=transfusion.Resources({name}=…)"
            )
        if name not in signature(align).parameters:
            close = get_close_matches(name, signature(align).parameters, 1)
            raise SettingError(
                f"there is no parameter {name!r}",
                hint=f"did you mean {close[0]!r}?" if close else "help(transfusion.align) shows all",
            )


def calibrated(
    calibrate: str | Path | None, via: object, aligning: Mapping[str, Any], *, used: bool = False
) -> dict[str, Any]:
    """Return the parameters of `align`, with the user's own inputs for a method that runs models.

    Refuse inputs that nothing would use: neither the method, nor the caller (``used``).
    """
    _refuse_unknown(aligning)
    if calibrate is None:
        return dict(aligning)
    method = chosen_method(aligning.get("method") or DEFAULT)
    runs = via is None and method.functional is not None
    if not (runs or used):
        raise SettingError(
            "`calibrate`: nothing would use these inputs",
            hint='leave it out, or choose `method="functional"`, `method="auto"`, `alpha="auto"` or'
            " `keep_support`",
        )
    changed = {"method": method.changed(calibrate=str(Path(calibrate).resolve()))} if runs else {}
    return {**aligning, **changed}
