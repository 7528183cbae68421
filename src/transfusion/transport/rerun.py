"""The function `rerun`: repeat a run from the metadata of its output, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.errors import CheckpointError, MismatchError, SettingError, VerificationError, listing
from transfusion.files.references import resolve
from transfusion.files.staging import StagingFolder, open_staging
from transfusion.files.tensor_files import header_metadata
from transfusion.matching.alignment_run import align
from transfusion.matching.methods import Method
from transfusion.model.model import Model, take_hashes
from transfusion.runtime.progress import SILENT, Progress, followed
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.adapters.adapter_merging import MergedAdapters
from transfusion.transport.adapters.adapter_opening import is_adapter, open_adapter
from transfusion.transport.adapters.adapter_transport import AdapterTransport
from transfusion.transport.adapters.lora_file import OtherParts
from transfusion.transport.choose_plan import plan_through
from transfusion.transport.dense_transport import DenseTransport
from transfusion.transport.merge_rules import MergeMethod, MergeRule
from transfusion.transport.output_record import FILE, HEADER, OutputRecord, kept_pi, read_metadata
from transfusion.transport.output_run import Destination, warn_of_doubt
from transfusion.transport.rectangular.rectangular_lora import RectangularLora
from transfusion.transport.refinement.refine_transport import RefineTransport
from transfusion.transport.refinement.refined_output import RefinedLora
from transfusion.transport.refinement.refinement_settings import RefinementSettings
from transfusion.transport.transport_plan import TransportPlan


@followed
def rerun(
    file: str | Path,
    *,
    finetuned: Sequence[str | Path] = (),
    base: str | Path | None = None,
    onto: str | Path | None = None,
    via: str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
) -> DenseTransport | AdapterTransport | MergedAdapters | RefinedLora | RectangularLora:
    """Repeat a run of `transport` or `merge` from its metadata, bit for bit.

    ``file`` is the ``transfusion.json`` of an output, the output's folder, or a LoRA file that was moved.
    ``finetuned``, ``base``, ``onto`` and ``via`` are the new places of inputs that were moved; their content
    must be the same.
    ``output`` is the folder to write; the files are compared with the recorded hashes, and a difference is a
    `VerificationError`. With ``force``, an existing output is replaced.
    ``dry_run`` prepares the output and writes nothing.
    ``resources`` are engine, threads, memory and device; ``progress`` follows the run.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> again = transfusion.rerun(moved.save("models/first"), output="models/second")
    """
    to = Destination.at(output, force=force, resources=resources, progress=progress)
    past = Rerun.of(file, finetuned=finetuned, base=base, onto=onto, via=via)
    to.require_writable([], *map(resolve, past.places))
    if to.output is None or dry_run:
        return past.prepare(resources, progress)
    if past.alignment is None:
        progress.note("note: the file of π does not exist any more, so A and B are aligned again")
    with open_staging(to.output, force=force) as staging:
        moved = past.prepare(resources, progress)
        to.write(moved, staging)
        if (made := _recorded(staging)) is not None:
            past.check(read_metadata(made)["files"])
    progress.note(f"the same as {past.file} records, bit for bit")
    return moved


@dataclass(frozen=True)
class Rerun:
    """A run to repeat, as its metadata describes it."""

    file: Path
    metadata: Mapping[str, Any]
    moved_to: Mapping[str, str] = field(default_factory=dict)
    """New places of inputs, by their recorded names."""
    via: str | None = None
    """The file of π."""

    @classmethod
    def of(
        cls,
        file: str | Path,
        *,
        finetuned: Sequence[str | Path] = (),
        base: str | Path | None = None,
        onto: str | Path | None = None,
        via: str | Path | None = None,
    ) -> Rerun:
        """Read the metadata of an output, and note the new places of inputs that were moved."""
        path = Path(file) / FILE if isdir(file) else Path(file)
        if not exists(path):
            raise CheckpointError(f"{path}: no such file", hint=f"give the {FILE} beside an output")
        metadata = read_metadata(path)
        if not metadata.get("repeatable", True):
            raise CheckpointError(
                f"{path}: the inputs of this run were in memory", hint="only runs from files can be repeated"
            )
        if finetuned and len(finetuned) != len(metadata["finetuned"]):
            raise SettingError(
                f"{len(finetuned)} fine-tune(s) given, and {path} records {len(metadata['finetuned'])}",
                hint="give all of them, in their order, or none",
            )
        now = {one["name"]: str(place) for one, place in zip(metadata["finetuned"], finetuned, strict=False)}
        now |= {metadata[role]["name"]: str(to) for role, to in (("base", base), ("onto", onto)) if to}
        place = via or metadata["settings"].get("via") or kept_pi(metadata, path.parent)
        return cls(path, metadata, now, str(place) if place else None)

    @property
    def places(self) -> list[str]:
        """The references of all models and adapters, as they are now."""
        metadata = self.metadata
        return [self._place(one) for one in (*metadata["finetuned"], metadata["base"], metadata["onto"])]

    @property
    def alignment(self) -> str | None:
        """The file of π, if it still exists."""
        return self.via if self.via and exists(self.via) else None

    def prepare(
        self, resources: Resources = LOCAL, progress: Progress = SILENT
    ) -> DenseTransport | AdapterTransport | MergedAdapters | RefinedLora | RectangularLora:
        """Prepare the same output again; refuse inputs whose content has changed."""
        metadata, settings = self.metadata, self.metadata["settings"]
        record = RunRecord(metadata["verb"])
        config = settings.get("config") and Path(settings["config"])
        base, onto = (Model.open(self._place(metadata[role]), config=config) for role in ("base", "onto"))
        take_hashes(base, onto)
        for model, role in ((base, "base"), (onto, "onto")):
            self._require(model.label, model.digest, metadata[role])
        alignment = self._alignment(base, onto, resources, progress)
        if settings.get("refinement") is None:
            warn_of_doubt(alignment, progress)
        plan = plan_through(base, onto, alignment)
        plan = replace(plan, other_parts=OtherParts(settings.get("other_parts") or OtherParts.REFUSE))
        finetuned = [self._finetune(one, config) for one in metadata["finetuned"]]
        info = metadata["verb"], metadata["kind"], metadata["command"], settings, metadata.get("output_shift")
        output_record = OutputRecord(*info, record)
        common: dict[str, Any] = {
            "dtype": metadata["dtype"],
            "trust_base": True,  # the content has been compared
            "output_record": output_record,
        }
        if metadata["verb"] == "transport":
            common |= _given(settings, "new_tokens", "full")
            moved = plan.transport(finetuned[0], alpha=metadata["alpha"], **common)
            return self._refined(plan, finetuned[0], moved, common, resources, progress)
        merging = MergeRule(
            MergeMethod.named(metadata["how"]),
            tuple(metadata["weights"]),
            metadata["density"] or 0.2,
            metadata["seed"] or 0,
            plan.alpha(metadata["alpha"]),
        )
        return plan.merge(
            finetuned, merging=merging, **common, **_given(settings, "head", "full", "rank", "new_tokens")
        )

    def _refined(
        self,
        plan: TransportPlan,
        finetuned: Model | str,
        moved: DenseTransport | AdapterTransport,
        common: Mapping[str, Any],
        resources: Resources,
        progress: Progress,
    ) -> DenseTransport | AdapterTransport | RefinedLora:
        """Refine the output again, if it was refined."""
        asked = self.metadata["settings"].get("refinement")
        if asked is None:
            return moved
        unmoved = partial(plan.transport, finetuned, alpha=0.0, **common)
        refinement = RefinementSettings(**asked)
        with resources.in_process():
            plan = replace(plan, resources=resources)
            return RefineTransport(plan, finetuned, refinement, unmoved, progress).run(moved)

    def check(self, files: Mapping[str, str]) -> None:
        """Compare the hashes of written files with the recorded ones."""
        then = self.metadata["files"]
        differing = [name for name in then if files.get(name) != then[name]]
        if differing:
            raise VerificationError(
                f"{listing(differing)} differ from the files that {self.file} records",
                hint="another version of torch or another processor may round differently; the inputs and π"
                " are the same",
            )

    def _place(self, info: Mapping[str, str]) -> str:
        """Return the new place of an input, its recorded reference, or its recorded absolute path."""
        if info["name"] in self.moved_to:
            return self.moved_to[info["name"]]
        return info["name"] if exists(info["name"]) or not exists(info["path"]) else info["path"]

    def _finetune(self, info: Mapping[str, str], config: Path | None) -> Model | str:
        place = self._place(info)
        if is_adapter(place):
            self._require(place, open_adapter(place).digest, info)
            return place
        model = Model.open(place, config=config)
        take_hashes(model)
        self._require(model.label, model.digest, info)
        return model

    def _require(self, label: str, digest: str, info: Mapping[str, str]) -> None:
        if digest != info["blake3"]:
            raise MismatchError(
                f"{label} is not what it was when {self.file} was written: {info['blake3'][:12]}… then,"
                f" {digest[:12]}… now",
                hint="give the place of the original; a run with other inputs is a new transport or merge",
            )

    def _alignment(self, base: Model, onto: Model, resources: Resources, progress: Progress) -> Alignment:
        """Load π from its file, or align again; refuse another π."""
        info = self.metadata["alignment"]
        if self.alignment is not None:
            found = Alignment.load(self.alignment)
        else:
            found = align(
                base,
                onto,
                method=self._method(),
                seed=info["seed"],
                dtype=info["options"]["dtype"],
                advice=bool(info["advice"]),
                vocabulary_share=self.metadata["settings"].get("vocabulary_share"),
                anyway=True,  # it was found then
                resources=resources,
                progress=progress,
            )
        if found.digest != info["blake3"]:
            raise MismatchError(
                f"{self.alignment or 'the alignment found now'} is another π than that of {self.file}:"
                f" {info['blake3'][:12]}… then, {found.digest[:12]}… now",
                hint="give the file of π that was used then as `via`",
            )
        return found

    def _method(self) -> Method:
        info = self.metadata["alignment"]
        policy = {key: info[key] for key in ("residual", "inner", "heads")}
        try:
            return Method.from_json(info["method"], info["options"], policy)
        except (SettingError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.file}: alignment.options: {str(error).splitlines()[0]}",
                hint="repeat it with the version that wrote it, or give the file of π as `via`",
            ) from error


def _recorded(staging: StagingFolder) -> Path | None:
    """Return the file of a new output that says how it was made: a model in a single file has none."""
    beside, single = staging.output / FILE, staging.output / staging.path.name
    if beside.exists():
        return beside
    return single if single.is_file() and HEADER in header_metadata(single) else None


def _given(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if settings.get(name) is not None}
