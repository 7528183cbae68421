"""Doing it again: an output's own story is enough to make it once more, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import exists, isdir
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.errors import CheckpointError, MismatchError, SettingError, VerificationError, listing
from transfusion.matching.alignment_run import align
from transfusion.matching.methods import Method
from transfusion.model.model import Model, take_hashes
from transfusion.runtime.run_record import RunRecord
from transfusion.transportation.adapters.adapter import Adapter, is_adapter
from transfusion.transportation.adapters.adapter_output import AdapterOutput
from transfusion.transportation.dense_transport import DenseTransport
from transfusion.transportation.merge_rules import MergeMethod, MergeRule
from transfusion.transportation.output_record import FILE, OutputRecord, read_metadata
from transfusion.transportation.transport_plan import TransportPlan

Aligner = Callable[..., Alignment]


@dataclass(frozen=True)
class Rerun:
    """A story that is to be told again."""

    file: Path
    metadata: Mapping[str, Any]
    moved_to: Mapping[str, str] = field(default_factory=dict)
    """Inputs that lie elsewhere by now, by the names that the story has for them."""
    via: str | None = None
    """Where the file of π is now."""

    @classmethod
    def of(
        cls,
        file: str | Path,
        *,
        finetuned: Sequence[str] = (),
        base: str | None = None,
        onto: str | None = None,
        via: str | None = None,
    ) -> Rerun:
        """Read the story of an output: its ``transfusion.json``, or the folder that has one.

        Inputs that were moved are given by their new places; their content must be what it was.
        """
        path = Path(file) / FILE if isdir(file) else Path(file)
        if not exists(path):
            raise CheckpointError(f"{path}: no such file", hint=f"give the {FILE} that lies beside an output")
        metadata = read_metadata(path)
        if not metadata.get("repeatable", True):
            raise CheckpointError(
                f"{path}: the inputs of this run were in memory", hint="only runs from files can be repeated"
            )
        if finetuned and len(finetuned) != len(metadata["finetuned"]):
            raise SettingError(
                f"{len(finetuned)} fine-tune(s) given, and {path} tells of {len(metadata['finetuned'])}",
                hint="give all of them, in their order, or none",
            )
        now = {one["name"]: place for one, place in zip(metadata["finetuned"], finetuned, strict=False)}
        now |= {metadata[role]["name"]: place for role, place in (("base", base), ("onto", onto)) if place}
        return cls(path, metadata, now, via or metadata["settings"].get("via"))

    @property
    def places(self) -> list[str]:
        """Where the inputs are."""
        metadata = self.metadata
        return [self._place(one) for one in (*metadata["finetuned"], metadata["base"], metadata["onto"])]

    @property
    def alignment(self) -> str | None:
        """The file of π, if it is still there."""
        return self.via if self.via and exists(self.via) else None

    def prepare(self, aligner: Aligner = align) -> DenseTransport | AdapterOutput:
        """The same output, prepared again from the same inputs; others are refused."""
        metadata, settings = self.metadata, self.metadata["settings"]
        record = RunRecord(metadata["verb"])
        config = settings.get("config") and Path(settings["config"])
        base, onto = (Model.open(self._place(metadata[role]), config=config) for role in ("base", "onto"))
        take_hashes(base, onto)
        for model, role in ((base, "base"), (onto, "onto")):
            self._require(model.label, model.digest, metadata[role])
        plan = TransportPlan.between(base, onto, self._alignment(base, onto, aligner))
        finetuned = [self._finetune(one, config) for one in metadata["finetuned"]]
        info = metadata["verb"], metadata["kind"], metadata["command"], settings, metadata.get("output_shift")
        output_record = OutputRecord(*info, record)
        common: dict[str, Any] = {
            "dtype": metadata["dtype"],
            "trust_base": True,  # their content is known
            "output_record": output_record,
        }
        if metadata["verb"] == "transport":
            return plan.transport(
                finetuned[0], alpha=metadata["alpha"], **common, **_given(settings, "new_tokens", "full")
            )
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

    def check(self, files: Mapping[str, str]) -> None:
        """Compare what was written with what had been written then."""
        then = self.metadata["files"]
        differing = [name for name in then if files.get(name) != then[name]]
        if differing:
            raise VerificationError(
                f"{listing(differing)} came out otherwise than {self.file} tells",
                hint="another version of torch or another processor may round differently; the inputs and π"
                " are the same",
            )

    def _place(self, info: Mapping[str, str]) -> str:
        """An input where it is now, or where it was: by the name that was given, or by its full path."""
        if info["name"] in self.moved_to:
            return self.moved_to[info["name"]]
        return info["name"] if exists(info["name"]) or not exists(info["path"]) else info["path"]

    def _finetune(self, info: Mapping[str, str], config: Path | None) -> Model | str:
        place = self._place(info)
        if is_adapter(place):
            self._require(place, Adapter.open(place).digest, info)
            return place
        model = Model.open(place, config=config)
        take_hashes(model)
        self._require(model.label, model.digest, info)
        return model

    def _require(self, label: str, digest: str, info: Mapping[str, str]) -> None:
        if digest != info["sha256"]:
            raise MismatchError(
                f"{label} is not what it was when {self.file} was written: {info['sha256'][:12]}… then,"
                f" {digest[:12]}… now",
                hint="give the original's place beside --from; for a new run, leave out --from",
            )

    def _alignment(self, base: Model, onto: Model, aligner: Aligner) -> Alignment:
        """The same π: from its file, if that is still there, or found again."""
        info = self.metadata["alignment"]
        if self.alignment is not None:
            found = Alignment.load(self.alignment)
        else:
            found = aligner(
                base,
                onto,
                method=self._method(),
                seed=info["seed"],
                dtype=getattr(torch, info["options"]["dtype"]),
                advice=bool(info["advice"]),
            )
        if found.digest != info["sha256"]:
            raise MismatchError(
                f"{self.alignment or 'the alignment found now'} is another π than that of {self.file}:"
                f" {info['sha256'][:12]}… then, {found.digest[:12]}… now",
                hint="give the file of π that was used then as --via",
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
                hint="repeat it with the version that wrote it, or give the file of π as --via",
            ) from error


def _given(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if settings.get(name) is not None}
