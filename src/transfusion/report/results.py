"""The inputs of a report: a run, the results beside it and from single files, and π."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import exists
from pathlib import Path, PurePath
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.errors import AlignmentError, CheckpointError, DataError, MismatchError, listing
from transfusion.report.formats import FORMATS, PROOFS, RUNS, Equivalence, Evaluation, ScoredModel
from transfusion.report.parts import listed, short
from transfusion.runtime.untrusted_files import path_inside, read_json, validate
from transfusion.transport.record import FILE, kept_pi, read_metadata

LORA = ".safetensors"
"""The end of a LoRA file's name. A moved one has the metadata in its header."""


@dataclass(frozen=True)
class Result:
    """One result and its file."""

    path: Path
    verb: str
    info: Any
    """The result in its format; of a transport or a merge, the metadata as it is written."""
    own: bool = True
    """Whether it is about the run of the report, and not about other models."""

    @property
    def subject(self) -> str:
        """The models of a result, in words."""
        info = self.info
        if self.verb == "evaluate":
            return listed(short(one.model) for one in info.models)
        if self.verb == "barrier":
            return f"{short(info.a)} and {short(info.b)}"
        return f"{short(info.finetuned)} of {short(info.base)}, moved onto {short(info.onto)}"

    @property
    def target(self) -> str:
        """The B of a result, if it is recorded."""
        return str((self.info.against if self.verb == "evaluate" else self.info.onto) or "")


@dataclass(frozen=True)
class Inputs:
    """The inputs of a report."""

    run: Path
    metadata: Mapping[str, Any] | None
    """The metadata of the transport or merge; None if there are only results."""
    results: Sequence[Result]
    alignment: Alignment | None
    ceiling: str | None = None
    """B fine-tuned itself, if it was given."""
    notes: Sequence[str] = ()
    """What is not shown, or not about this run, and why."""

    @property
    def digest(self) -> str | None:
        """The digest of this run's π, if it is known."""
        return self.alignment.digest if self.alignment else recorded(self.metadata, "alignment", "blake3")

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run if self.run.is_dir() else self.run.parent

    def files(self, via: object = None) -> list[Path]:
        """All local files that were read, which no page may overwrite: run, results, π and models."""
        metadata = self.metadata or {}
        models = [*metadata.get("finetuned", ()), *(metadata[one] for one in ("base", "onto") if metadata)]
        named = [
            self.run,
            *(one.path for one in self.results),
            self.ceiling,
            recorded(metadata, "settings", "via"),
        ]
        named += [via] if isinstance(via, str | Path) else []
        named += [one.info.written for one in self.of("align")]
        named += [one.get("path") or one.get("name") for one in models]
        roots = [Path(one) for one in named if one is not None and exists(one)]
        inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
        return [*roots, *(path for path in inside if path.suffix != ".html")]

    def of(self, verb: str) -> list[Result]:
        """Return the results of one verb."""
        return [result for result in self.results if result.verb == verb]

    def own_row(self, info: Evaluation) -> ScoredModel | None:
        """Return the row of an evaluation that is the output of this run."""
        output = self.run if self.run.suffix == LORA else self.folder
        rows = info.models if self.metadata is not None else []
        return next((one for one in rows if same(one.model, output.resolve())), None)

    def targets(self) -> list[str]:
        """Return every B of the results once, in their order."""
        targets = [one.target for one in self.results if one.verb in ("evaluate", "sweep", "fewshot")]
        return list({location(one): one for one in targets if one}.values())


def recorded(metadata: Mapping[str, Any] | None, *keys: str) -> Any:
    """Return an entry of the metadata; None where there is none."""
    found: Any = metadata
    for key in keys:
        found = (found or {}).get(key)
    return found


def read_inputs(
    run: str | Path,
    results: Sequence[str | Path] = (),
    via: Alignment | str | Path | None = None,
    ceiling: str | Path | None = None,
) -> Inputs:
    """Read a run's folder, further results and π."""
    place = Path(run)
    if not exists(place):
        raise DataError(
            f"{place}: no such file or folder", hint="give a folder that transport or merge wrote"
        )
    if place.is_file():  # transfusion.json itself, a LoRA file, or one result
        found, results = [], [place, *results]
    else:
        found = _read_folder(place)
    known = {one.path.resolve() for one in found}
    found += [_read(Path(path)) for path in results if Path(path).resolve() not in known]
    runs = [one for one in found if one.verb in RUNS]
    if len(runs) > 1:
        raise DataError(
            f"{listing(one.path for one in runs)}: metadata of {len(runs)} runs",
            hint="give the files of one run; a report is about one",
        )
    rest = [one for one in found if one.verb not in RUNS]
    pi, reason = _alignment(runs, rest, via)
    if not found and pi is None:
        raise DataError(
            f"{run}: nothing to report",
            hint=f"give a folder with a {FILE} that transport or merge wrote, or results of"
            f" {listing(sorted(set(FORMATS) - set(RUNS)))}",
        )
    given = None if ceiling is None else str(ceiling)
    metadata = runs[0].info if runs else None
    return _about_this_run(Inputs(place, metadata, rest, pi, given, [reason] if reason else []))


def _read_folder(folder: Path) -> list[Result]:
    """Read the results of a folder; other JSON files are passed over."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            info = read_json(path_inside(folder, path, DataError))
        except CheckpointError:
            continue
        if str(info.get("verb")) in FORMATS:
            found.append(_checked(path, info))
    return found


def _read(path: Path) -> Result:
    try:
        info = read_metadata(path) if path.suffix == LORA else read_json(path)
    except CheckpointError as error:
        hint = "give a folder, a JSON file or a moved LoRA file that transfusion wrote"
        raise DataError(error.message, hint=hint) from error
    verb = info.get("verb")
    if str(verb) not in FORMATS:
        reason = f'its "verb" is {reprlib.repr(verb)}' if verb is not None else 'it has no "verb"'
        raise DataError(
            f"{path}: not a known result: {reason}",
            hint=f"give a JSON file that one of {listing(FORMATS)} wrote",
        )
    return _checked(path, info)


def _checked(path: Path, info: Mapping[str, Any]) -> Result:
    verb = str(info["verb"])
    format = FORMATS[verb]
    if verb == "verify":
        format = next((one for key, one in PROOFS.items() if key in info), Equivalence)
    hint = f"make it again with 'transfusion {verb}' of this version"
    found = validate(info, format, f"{path}: a result of {verb}", hint=hint, error=DataError)
    if verb not in RUNS:
        return Result(path, verb, found)
    try:
        return Result(path, verb, read_metadata(path))
    except CheckpointError as error:
        raise DataError(error.message, hint=hint) from error


def _alignment(
    runs: Sequence[Result], results: Sequence[Result], via: Alignment | str | Path | None
) -> tuple[Alignment | None, str]:
    """Return π as given or from its recorded file, or a sentence on why there is none.

    Of a π between models of different shapes, the metadata has all that is shown.
    """
    given, wanted = via is not None, recorded(runs[0].info, "alignment", "blake3") if runs else None
    if not given and runs:
        via = recorded(runs[0].info, "settings", "via") or kept_pi(runs[0].info, runs[0].path.parent)
    elif not given:
        written = [one.info.written for one in results if one.verb == "align"]
        via = written[0] if len(written) == 1 else None
    if via is None:
        return None, "The run did not keep its π in a file." if runs else "No file of π was given."
    try:
        pi = Alignment.load(via) if isinstance(via, str | Path) else via
    except AlignmentError as error:
        if given:
            raise
        return None, f"The file of π cannot be read: {error.message}."
    if wanted in (None, pi.digest):
        return (None if pi.other_shape else pi), ""
    if given:
        raise MismatchError(
            f"{via} is another π than that of this run: {pi.digest[:12]}…, not {wanted[:12]}…",
            hint="give the π that was used for this run",
        )
    return None, f"{via} holds another π now."


# ── which results are about this run ─────────────────────────────────────────────────────────


def location(name: object) -> str:
    """Return the absolute path of a model, or its name if there is no such path."""
    return str(Path(str(name)).resolve()) if name and exists(str(name)) else str(name or "")


def same(name: object, *known: object) -> bool:
    """Whether a name in a result is one of the known names and paths of a model.

    A relative path that does not exist here was written in another folder: then it matches the end of a path.
    """
    if not name:
        return False
    places = {location(one) for one in known if one}
    if location(name) in places:
        return True
    written = PurePath(str(name))
    if exists(str(name)) or written.is_absolute():
        return False
    end = tuple(part for part in written.parts if part not in ("..", "."))
    return bool(end) and any(PurePath(place).parts[-len(end) :] == end for place in places)


def _about_this_run(inputs: Inputs) -> Inputs:
    """Mark results about other models, and leave out proofs about another π, with a note on each."""
    results, notes = list[Result](), list(inputs.notes)
    for one in inputs.results:
        digest = one.info.alignment.blake3 if one.verb == "verify" else None
        if inputs.digest and digest not in (None, inputs.digest):
            file = f" ({Path(one.info.via).name})" if one.info.via else ""
            other = f"another π{file}, {digest[:12]}…"
            notes.append(f"{one.path.name} is left out: it is about {other}, not this run's.")
            continue
        if not (own := _belongs(inputs, one)):
            subject = f"{one.path.name} is about other models: {one.subject}."
            notes.append(f"{subject} It is not used for the main numbers.")
        results.append(replace(one, own=own))
    return replace(inputs, results=results, notes=notes)


def _belongs(inputs: Inputs, result: Result) -> bool:
    """Whether a result is about this run. Without a run, every result is."""
    metadata, info = inputs.metadata, result.info
    if metadata is None:
        return True
    if result.verb == "evaluate":
        return inputs.own_row(info) is not None
    a, b, tuned = metadata["base"], metadata["onto"], metadata["finetuned"]
    pairs = []
    if result.verb in ("sweep", "fewshot"):
        pairs = [(info.base, a), (info.onto, b), (info.finetuned, tuned[0] if len(tuned) == 1 else {})]
    elif result.verb == "barrier":
        pairs = [(info.a, a), (info.b, b)]
    return all(same(name, model.get("path"), model.get("name")) for name, model in pairs)
