"""Bases: the models of a run, if they are still at their recorded places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import exists
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError, TransfusionError
from transfusion.model.bases import differing_shape, in_one_vocabulary
from transfusion.model.model import Model, require_same_shape
from transfusion.report.report_inputs import ReportInputs
from transfusion.transport.adapters.adapter_opening import is_adapter, open_adapter


@dataclass(frozen=True)
class Bases:
    """A, B and the fine-tunes, as far as they can be read and have the recorded weights."""

    a: Model | None = None
    b: Model | None = None
    finetuned: tuple[str, ...] = ()
    """The folders of the fine-tunes; empty unless all exist."""
    notes: tuple[str, ...] = ()
    """The models that could not be read, and why."""

    @classmethod
    def of(cls, inputs: ReportInputs) -> Bases:
        """Open the models that exist on this machine. Nothing is downloaded."""
        metadata, pi, notes = inputs.metadata, inputs.alignment, list[str]()
        config = ((metadata or {}).get("settings") or {}).get("config")
        info = _info(metadata, pi)
        models = {role: _model(info.get(role), config, notes) for role in ("base", "onto")}
        a, b = models["base"], models["onto"]
        if a is not None and b is not None and differing_shape(a, b) is not None:
            return cls(notes=tuple(notes))  # the sections about weights are for models of one shape
        if a is not None and b is not None:
            try:
                a = in_one_vocabulary(a, b, 0.0)
                require_same_shape(a, b)
            except MismatchError as error:
                return cls(notes=(*notes, f"{error.message}."))
        places = [_finetune(one, config, notes) for one in (metadata or {}).get("finetuned", ())]
        there = tuple(place for place in places if place is not None)
        return cls(a, b, there if len(there) == len(places) else (), tuple(notes))


def _info(metadata: Mapping[str, Any] | None, pi: Alignment | None) -> dict[str, Mapping[str, Any]]:
    if metadata is not None:
        return {role: metadata[role] for role in ("base", "onto")}
    if pi is None:
        return {}
    made = pi.provenance
    return {
        "base": {"name": made.source, "path": made.source, "fingerprint": made.source_fingerprint},
        "onto": {"name": made.target, "path": made.target, "fingerprint": made.target_fingerprint},
    }


def _place(info: Mapping[str, Any]) -> str | None:
    named = (str(info[key]) for key in ("path", "name") if info.get(key))
    return next((place for place in named if exists(place)), None)


def _model(info: Mapping[str, Any] | None, config: str | None, notes: list[str]) -> Model | None:
    """Open a model if it is at its place and has the recorded weights."""
    if info is None:
        return None
    place = _place(info)
    if place is None:
        notes.append(f"{info.get('name')} is not at its recorded place.")
        return None
    try:
        model = Model.open(place, config=config)
    except TransfusionError as error:
        notes.append(f"{info['name']} cannot be read: {error.message}.")
        return None
    if model.fingerprint != info["fingerprint"]:
        notes.append(f"{info['name']} has other weights now.")
        return None
    return model


def _finetune(info: Mapping[str, Any], config: str | None, notes: list[str]) -> str | None:
    place = _place(info)
    if place is not None and is_adapter(place):
        if open_adapter(place).fingerprint == info["fingerprint"]:
            return place
        notes.append(f"{info['name']} has other weights now.")
        return None
    return place if _model(info, config, notes) is not None else None
