"""Belonging: which results are about the run that a report is about, and which are about other models."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import exists
from pathlib import Path, PurePath
from typing import Any

from transfusion.reporting.reading import Material, Result
from transfusion.reporting.words import listed, short

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


def belongs(material: Material, result: Result) -> bool:
    """Whether a result is about this run; where there is no run, every result is."""
    story, told = material.story, result.told
    if story is None:
        return True
    match result.verb:
        case "evaluate":
            return own_row(material, told) is not None
        case "sweep" | "fewshot":
            tuned = [one for one in story["finetuned"] if _means(told.get("finetuned"), one)]
            return len(tuned) == len(story["finetuned"]) == 1 and all(
                _means(told.get(role), story[role]) for role in _ROLES
            )
        case "barrier":
            return _means(told.get("a"), story["base"]) and _means(told.get("b"), story["onto"])
    return True


def own_row(material: Material, told: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of an evaluation that is the output of this run."""
    folder = material.folder.resolve()
    return next((one for one in told["models"] if same(one["model"], folder)), None)


def own(material: Material, verb: str) -> list[Result]:
    """The results of one verb that are about this run."""
    return [result for result in material.of(verb) if belongs(material, result)]


def mark(material: Material, result: Result) -> str:
    """What to say of a result that is about other models; empty, if it is about this run."""
    return "" if belongs(material, result) else f"About other models: {subject(result)}."


def notes(material: Material) -> list[str]:
    """A sentence for every result that is about other models."""
    return [
        f"{result.path.name} is about other models: {subject(result)}. Nothing of it is in the headline."
        for result in material.results
        if not belongs(material, result)
    ]


def subject(result: Result) -> str:
    """Which models a result is about."""
    told = result.told
    if result.verb == "evaluate":
        return listed(short(one["model"]) for one in told["models"])
    if result.verb == "barrier":
        return f"{short(told.get('a'))} and {short(told.get('b'))}"
    tuned, a, b = (short(told.get(role, "?")) for role in ("finetuned", *_ROLES))
    return f"{tuned} of {a}, moved onto {b}"


def target(result: Result) -> str:
    """The B that a result is about, if it tells."""
    key = "against" if result.verb == "evaluate" else "onto"
    return str(result.told.get(key) or "")


def targets(material: Material) -> list[str]:
    """The different B of a folder that has results only, each once, in the order of the results."""
    found: dict[str, str] = {}
    for result in material.results:
        if result.verb in ("evaluate", "sweep", "fewshot") and (b := target(result)):
            found.setdefault(place_of(b), b)
    return list(found.values())


def _means(name: object, model: Mapping[str, Any]) -> bool:
    return same(name, model.get("path"), model.get("name"))
