"""Doing it again: an output's own story is enough to make it once more, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import exists, isdir
from pathlib import Path
from typing import Any

import torch

from transfusion.adapter import Adapter, is_adapter
from transfusion.alignment import Alignment
from transfusion.errors import CheckpointError, MismatchError, SettingError, VerificationError, listing
from transfusion.matching import align
from transfusion.methods import Method
from transfusion.model import Model, take_hashes
from transfusion.record import Record
from transfusion.transportation.account import FILE, Account, read_story
from transfusion.transportation.adapter_output import AdapterOutput
from transfusion.transportation.dense import Transport
from transfusion.transportation.journey import Journey
from transfusion.transportation.merging import How, Merging

Aligner = Callable[..., Alignment]


@dataclass(frozen=True)
class Rerun:
    """A story that is to be told again."""

    file: Path
    story: Mapping[str, Any]
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
        story = read_story(path)
        if not story.get("repeatable", True):
            raise CheckpointError(
                f"{path}: the inputs of this run were in memory", hint="only runs from files can be repeated"
            )
        if finetuned and len(finetuned) != len(story["finetuned"]):
            raise SettingError(
                f"{len(finetuned)} fine-tune(s) given, and {path} tells of {len(story['finetuned'])}",
                hint="give all of them, in their order, or none",
            )
        now = {one["name"]: place for one, place in zip(story["finetuned"], finetuned, strict=False)}
        now |= {story[role]["name"]: place for role, place in (("base", base), ("onto", onto)) if place}
        return cls(path, story, now, via or story["settings"].get("via"))

    @property
    def places(self) -> list[str]:
        """Where the inputs are."""
        story = self.story
        return [self._place(one) for one in (*story["finetuned"], story["base"], story["onto"])]

    @property
    def alignment(self) -> str | None:
        """The file of π, if it is still there."""
        return self.via if self.via and exists(self.via) else None

    def prepare(self, aligner: Aligner = align) -> Transport | AdapterOutput:
        """The same output, prepared again from the same inputs; others are refused."""
        story, settings = self.story, self.story["settings"]
        record = Record(story["verb"])
        config = settings.get("config") and Path(settings["config"])
        base, onto = (Model.open(self._place(story[role]), config=config) for role in ("base", "onto"))
        take_hashes(base, onto)
        for model, role in ((base, "base"), (onto, "onto")):
            self._require(model.label, model.digest, story[role])
        journey = Journey.between(base, onto, self._alignment(base, onto, aligner))
        finetuned = [self._finetune(one, config) for one in story["finetuned"]]
        told = story["verb"], story["kind"], story["command"], settings, story.get("arrival")
        account = Account(*told, record)
        common: dict[str, Any] = {
            "dtype": story["dtype"],
            "trust_base": True,  # their content is known
            "account": account,
        }
        if story["verb"] == "transport":
            return journey.transport(
                finetuned[0], alpha=story["alpha"], **common, **_given(settings, "new_tokens", "full")
            )
        merging = Merging(
            How.named(story["how"]),
            tuple(story["weights"]),
            story["density"] or 0.2,
            story["seed"] or 0,
            journey.alpha(story["alpha"]),
        )
        return journey.merge(
            finetuned, merging=merging, **common, **_given(settings, "head", "full", "rank", "new_tokens")
        )

    def check(self, files: Mapping[str, str]) -> None:
        """Compare what was written with what had been written then."""
        then = self.story["files"]
        differing = [name for name in then if files.get(name) != then[name]]
        if differing:
            raise VerificationError(
                f"{listing(differing)} came out otherwise than {self.file} tells",
                hint="another version of torch or another processor may round differently; the inputs and π"
                " are the same",
            )

    def _place(self, told: Mapping[str, str]) -> str:
        """An input where it is now, or where it was: by the name that was given, or by its full path."""
        if told["name"] in self.moved_to:
            return self.moved_to[told["name"]]
        return told["name"] if exists(told["name"]) or not exists(told["path"]) else told["path"]

    def _finetune(self, told: Mapping[str, str], config: Path | None) -> Model | str:
        place = self._place(told)
        if is_adapter(place):
            self._require(place, Adapter.open(place).digest, told)
            return place
        model = Model.open(place, config=config)
        take_hashes(model)
        self._require(model.label, model.digest, told)
        return model

    def _require(self, label: str, digest: str, told: Mapping[str, str]) -> None:
        if digest != told["sha256"]:
            raise MismatchError(
                f"{label} is not what it was when {self.file} was written: {told['sha256'][:12]}… then,"
                f" {digest[:12]}… now",
                hint="give the original's place beside --from; for a new run, leave out --from",
            )

    def _alignment(self, base: Model, onto: Model, aligner: Aligner) -> Alignment:
        """The same π: from its file, if that is still there, or found again."""
        told = self.story["alignment"]
        if self.alignment is not None:
            found = Alignment.load(self.alignment)
        else:
            found = aligner(
                base,
                onto,
                method=self._method(),
                seed=told["seed"],
                dtype=getattr(torch, told["options"]["dtype"]),
                advice=bool(told["advice"]),
            )
        if found.digest != told["sha256"]:
            raise MismatchError(
                f"{self.alignment or 'the alignment found now'} is another π than that of {self.file}:"
                f" {told['sha256'][:12]}… then, {found.digest[:12]}… now",
                hint="give the file of π that was used then as --via",
            )
        return found

    def _method(self) -> Method:
        told = self.story["alignment"]
        policy = {key: told[key] for key in ("residual", "inner", "heads")}
        try:
            return Method.recalled(told["method"], told["options"], policy)
        except (SettingError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.file}: alignment.options: {str(error).splitlines()[0]}",
                hint="repeat it with the version that wrote it, or give the file of π as --via",
            ) from error


def _given(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if settings.get(name) is not None}
