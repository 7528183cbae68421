"""Which results are about the run of the report, and which are about other models."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import exists
from pathlib import Path, PurePath
from typing import Any

from transfusion.report.formatting import listed, short
from transfusion.report.report_inputs import ReportInputs, Result

_ROLES = ("base", "onto")


def model_location(name: object) -> str:
    """Return the absolute path of a model, or its name if there is no such path."""
    return str(Path(str(name)).resolve()) if name and exists(str(name)) else str(name or "")


def same(name: object, *known: object) -> bool:
    """Whether a name in a result is one of the known names and paths of a model.

    A relative path that does not exist here was written in another folder: then it matches the end of a path.
    """
    if not name:
        return False
    places = {model_location(one) for one in known if one}
    if model_location(name) in places:
        return True
    written = PurePath(str(name))
    if exists(str(name)) or written.is_absolute():
        return False
    end = tuple(part for part in written.parts if part not in ("..", "."))
    return bool(end) and any(PurePath(place).parts[-len(end) :] == end for place in places)


def belongs(inputs: ReportInputs, result: Result) -> bool:
    """Whether a result is about this run. Without a run, every result is."""
    metadata, info = inputs.metadata, result.info
    if metadata is None:
        return True
    match result.verb:
        case "evaluate":
            return own_row(inputs, info) is not None
        case "sweep" | "fewshot":
            tuned = [one for one in metadata["finetuned"] if _means(info.get("finetuned"), one)]
            return len(tuned) == len(metadata["finetuned"]) == 1 and all(
                _means(info.get(role), metadata[role]) for role in _ROLES
            )
        case "barrier":
            return _means(info.get("a"), metadata["base"]) and _means(info.get("b"), metadata["onto"])
    return True


def own_row(inputs: ReportInputs, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the row of an evaluation that is the output of this run."""
    output = inputs.output.resolve()
    return next((one for one in info["models"] if same(one["model"], output)), None)


def own(inputs: ReportInputs, verb: str) -> list[Result]:
    """Return the results of one verb that are about this run."""
    return [result for result in inputs.of(verb) if belongs(inputs, result)]


def mark(inputs: ReportInputs, result: Result) -> str:
    """Return a note on a result about other models; empty if it is about this run."""
    return "" if belongs(inputs, result) else f"About other models: {subject(result)}."


def notes(inputs: ReportInputs) -> list[str]:
    """Return a sentence for every result about other models."""
    return [
        f"{result.path.name} is about other models: {subject(result)}. It is not used for the main numbers."
        for result in inputs.results
        if not belongs(inputs, result)
    ]


def subject(result: Result) -> str:
    """Describe the models of a result."""
    info = result.info
    if result.verb == "evaluate":
        return listed(short(one["model"]) for one in info["models"])
    if result.verb == "barrier":
        return f"{short(info.get('a'))} and {short(info.get('b'))}"
    tuned, a, b = (short(info.get(role, "?")) for role in ("finetuned", *_ROLES))
    return f"{tuned} of {a}, moved onto {b}"


def target(result: Result) -> str:
    """Return the B of a result, if it is recorded."""
    key = "against" if result.verb == "evaluate" else "onto"
    return str(result.info.get(key) or "")


def targets(inputs: ReportInputs) -> list[str]:
    """Return every B of the results once, in their order."""
    found: dict[str, str] = {}
    for result in inputs.results:
        if result.verb in ("evaluate", "sweep", "fewshot") and (b := target(result)):
            found.setdefault(model_location(b), b)
    return list(found.values())


def _means(name: object, model: Mapping[str, Any]) -> bool:
    return same(name, model.get("path"), model.get("name"))
