"""Belonging: which results are about the run that a report is about, and which are about other models."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import exists
from pathlib import Path, PurePath
from typing import Any

from transfusion.reporting.formatting import listed, short
from transfusion.reporting.report_inputs import ReportInputs, Result

_ROLES = ("base", "onto")


def place_of(name: object) -> str:
    """A model by its place, however it was written; by its name, if nothing is there."""
    return str(Path(str(name)).resolve()) if name and exists(str(name)) else str(name or "")


def same(name: object, *known: object) -> bool:
    """Whether a name in a result means a model that is known by these names and places.

    A relative path that leads nowhere from here was written elsewhere: the end of the known place counts.
    """
    if not name:
        return False
    places = {place_of(one) for one in known if one}
    if place_of(name) in places:
        return True
    written = PurePath(str(name))
    if exists(str(name)) or written.is_absolute():
        return False
    end = tuple(part for part in written.parts if part not in ("..", "."))
    return bool(end) and any(PurePath(place).parts[-len(end) :] == end for place in places)


def belongs(material: ReportInputs, result: Result) -> bool:
    """Whether a result is about this run; where there is no run, every result is."""
    metadata, info = material.metadata, result.info
    if metadata is None:
        return True
    match result.verb:
        case "evaluate":
            return own_row(material, info) is not None
        case "sweep" | "fewshot":
            tuned = [one for one in metadata["finetuned"] if _means(info.get("finetuned"), one)]
            return len(tuned) == len(metadata["finetuned"]) == 1 and all(
                _means(info.get(role), metadata[role]) for role in _ROLES
            )
        case "barrier":
            return _means(info.get("a"), metadata["base"]) and _means(info.get("b"), metadata["onto"])
    return True


def own_row(material: ReportInputs, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of an evaluation that is the output of this run."""
    folder = material.folder.resolve()
    return next((one for one in info["models"] if same(one["model"], folder)), None)


def own(material: ReportInputs, verb: str) -> list[Result]:
    """The results of one verb that are about this run."""
    return [result for result in material.of(verb) if belongs(material, result)]


def mark(material: ReportInputs, result: Result) -> str:
    """What to say of a result that is about other models; empty, if it is about this run."""
    return "" if belongs(material, result) else f"About other models: {subject(result)}."


def notes(material: ReportInputs) -> list[str]:
    """A sentence for every result that is about other models."""
    return [
        f"{result.path.name} is about other models: {subject(result)}. Nothing of it is in the headline."
        for result in material.results
        if not belongs(material, result)
    ]


def subject(result: Result) -> str:
    """Which models a result is about."""
    info = result.info
    if result.verb == "evaluate":
        return listed(short(one["model"]) for one in info["models"])
    if result.verb == "barrier":
        return f"{short(info.get('a'))} and {short(info.get('b'))}"
    tuned, a, b = (short(info.get(role, "?")) for role in ("finetuned", *_ROLES))
    return f"{tuned} of {a}, moved onto {b}"


def target(result: Result) -> str:
    """The B that a result is about, if it tells."""
    key = "against" if result.verb == "evaluate" else "onto"
    return str(result.info.get(key) or "")


def targets(material: ReportInputs) -> list[str]:
    """The different B of a folder that has results only, each once, in the order of the results."""
    found: dict[str, str] = {}
    for result in material.results:
        if result.verb in ("evaluate", "sweep", "fewshot") and (b := target(result)):
            found.setdefault(place_of(b), b)
    return list(found.values())


def _means(name: object, model: Mapping[str, Any]) -> bool:
    return same(name, model.get("path"), model.get("name"))
