"""The inputs of a report: a run, the results beside it and from single files, and π.

A result is read with the model of its format: only what the page shows, checked, and nothing converted.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import exists
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.provenance import EmptyInfo, Number, PredictionInfo, RunInfo
from transfusion.errors import AlignmentError, CheckpointError, DataError, MismatchError, listing
from transfusion.report.parts import listed, short
from transfusion.runtime.untrusted_files import path_inside, read_json, validate
from transfusion.transport.record import FILE, kept_pi, read_metadata

LORA = ".safetensors"
"""The end of a LoRA file's name. A moved one has the metadata in its header."""

# ── formats ──────────────────────────────────────────────────────────────────────────────────

Count: TypeAlias = Annotated[int, Field(ge=0, le=2**63)]
Place: TypeAlias = Annotated[str, StringConstraints(max_length=4_000, pattern=r"^[^\x00]*$")]
Interval: TypeAlias = Annotated[list[Number], Field(min_length=2, max_length=2)]


class Format(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class AnyResult(Format):
    """The fields of every result."""

    command: str | None = None
    run: RunInfo | EmptyInfo | None = None


class Data(Format):
    """The data of a measurement."""

    data: str
    examples: Count
    question: str
    metric: str
    classes: Count | None = None


class Score(Format):
    value: Number
    interval: Interval | None = None


class Gains(Format):
    task: Number | None
    support: Number | None = None


class Scores(Format):
    """The scores of one model, on the task and perhaps on the support."""

    task: Score
    support: Score | None = None
    gain: Gains | None = None
    gain_interval: dict[str, Interval | None] | None = None

    def of(self, what: str) -> Score | None:
        return self.task if what == "task" else self.support

    def gain_of(self, what: str) -> float | None:
        return getattr(self.gain, what) if self.gain else None


class Measured(AnyResult):
    """A result with scores, on the task and perhaps on the support."""

    task: Data
    support: Data | None = None

    def data(self) -> dict[str, Data]:
        return {"task": self.task, **({"support": self.support} if self.support else {})}


class ScoredModel(Scores):
    model: Place


class Evaluation(Measured):
    models: Annotated[list[ScoredModel], Field(min_length=1)]
    against: Place | None = None
    ceiling: Place | None = None


class SweepPoint(Scores):
    alpha: Number
    gain: Gains


class SweepCurve(Format):
    label: str
    best: Number
    points: Annotated[list[SweepPoint], Field(min_length=1)]
    method: str | None = None

    @property
    def at_best(self) -> SweepPoint:
        return min(self.points, key=lambda one: abs(one.alpha - self.best))


class Sweep(Measured):
    at_zero: Scores
    curves: Annotated[list[SweepCurve], Field(min_length=1)]
    finetuned: Place | None = None
    base: Place | None = None
    onto: Place | None = None


class FewShotGain(Format):
    plain: Number
    learned: Number


class FewShotCurve(Format):
    label: str
    plain: Score
    learned: Score
    gain: FewShotGain
    coefficients: dict[str, Number]
    losses: list[Number]
    method: str | None = None


class FewShot(AnyResult):
    task: Data
    shots: Count
    zero: Score
    curves: list[FewShotCurve]
    finetuned: Place | None = None
    base: Place | None = None
    onto: Place | None = None


class BarrierPoint(Format):
    alpha: Number
    loss: Number
    accuracy: Number


class BarrierCurve(Format):
    label: str
    points: Annotated[list[BarrierPoint], Field(min_length=1)]
    height: Number | None
    faithful: bool
    method: str | None = None


class Barrier(AnyResult):
    question: str
    examples: Count
    data: str
    curves: list[BarrierCurve]
    a: Place | None = None
    b: Place | None = None


class PiReference(Format):
    blake3: str | None = None
    method: str = "method unknown"


class Proof(AnyResult):
    """The fields of every result of `verify`."""

    a: Place | None = None
    via: Place | None = None
    alignment: PiReference | None = None

    @property
    def digest(self) -> str | None:
        """The digest of the π that the result is about, if it is recorded."""
        return self.alignment.blake3 if self.alignment else None


class Equivalence(Proof):
    equal: bool
    difference: float
    outputs: list[str]
    tolerance: float | None = None
    reason: str | None = None


class Prediction(Proof):
    holds: bool
    found: Number
    identity: Number
    null: Number
    axes: dict[str, PredictionInfo]
    probes: str = ""


class Check(Format):
    passed: bool


class Certificate(Proof):
    passed: bool
    checks: list[Check]


class Aligned(AnyResult):
    written: Place
    method: str


class OutputShift(Format):
    direction: Number | None = None
    size: Number | None = None
    probes: str = ""


class BlockDrift(Format):
    """What B changed in the weights of one block that an adapter changes."""

    moved: Number
    strength: Number
    overwritten: Number | None
    contained: Number | None
    alpha: Number


class Drift(BlockDrift):
    blocks: dict[str, BlockDrift]


class Refined(Format):
    start: str
    measure: str
    before: dict[str, Number]
    after: dict[str, Number]
    kept: Number
    steps: Count


class Moved(AnyResult):
    """The fields of a transport or a merge that only a page shows; `read_metadata` has checked the others."""

    output_shift: OutputShift | None = None
    drift: Drift | None = None
    refinement: Refined | None = None
    moved: Count = 0
    unchanged: Count = 0
    new_tokens: Count = 0
    carried: list[str] = []
    dropped: list[str] = []


RUNS = ("transport", "merge")
FORMATS: Mapping[str, type[AnyResult]] = {
    "align": Aligned,
    "barrier": Barrier,
    "evaluate": Evaluation,
    "fewshot": FewShot,
    "merge": Moved,
    "sweep": Sweep,
    "transport": Moved,
    "verify": Equivalence,
}
PROOFS: Mapping[str, type[AnyResult]] = {"holds": Prediction, "passed": Certificate}
"""Further formats of `verify`, by the key that only they have."""


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
    results: tuple[Result, ...]
    alignment: Alignment | None
    ceiling: str | None = None
    """B fine-tuned itself, if it was given."""
    notes: tuple[str, ...] = ()
    """What is not shown, or not about this run, and why."""

    @property
    def digest(self) -> str | None:
        """The digest of this run's π, if it is known."""
        return self.alignment.digest if self.alignment else recorded(self.metadata, "alignment", "blake3")

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run if self.run.is_dir() else self.run.parent

    def files(self, via: Alignment | str | Path | None = None) -> list[Path]:
        """All files that were read, which no page may overwrite: run, results, π and models."""
        metadata = self.metadata or {}
        models = [*metadata.get("finetuned", ()), *(metadata[one] for one in ("base", "onto") if metadata)]
        named = [self.run, *(one.path for one in self.results), self.ceiling]
        named += [via if isinstance(via, str | Path) else recorded(metadata, "settings", "via")]
        named += [one.info.written for one in self.of("align")]
        return local_files(*named, *(one.get("path") or one.get("name") for one in models))

    def of(self, verb: str) -> list[Result]:
        """Return the results of one verb."""
        return [result for result in self.results if result.verb == verb]

    def own(self, verb: str) -> list[Result]:
        """Return the results of one verb that are about this run."""
        return [result for result in self.of(verb) if result.own]

    def own_row(self, info: Evaluation) -> ScoredModel | None:
        """Return the row of an evaluation that is the output of this run."""
        output = self.run if self.run.suffix == LORA else self.folder
        rows = info.models if self.metadata is not None else []
        return next((one for one in rows if same(one.model, output.resolve())), None)

    def targets(self) -> list[str]:
        """Return every B of the results once, in their order."""
        measured = [one for one in self.results if one.verb in ("evaluate", "sweep", "fewshot")]
        return list({location(one.target): one.target for one in measured if one.target}.values())


def recorded(metadata: Mapping[str, Any] | None, *keys: str) -> Any:
    """Return an entry of the metadata; None where there is none."""
    found: Any = metadata
    for key in keys:
        found = (found or {}).get(key)
    return found


def local_files(*references: str | Path | None) -> list[Path]:
    """Return the local files of references. HTML files in their folders are not inputs."""
    roots = [Path(one) for one in references if one is not None and exists(one)]
    inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
    return [*roots, *(path for path in inside if path.suffix != ".html")]


# ── reading ──────────────────────────────────────────────────────────────────────────────────


def read_inputs(
    run: str | Path,
    results: Iterable[str | Path] = (),
    via: Alignment | str | Path | None = None,
    ceiling: str | Path | None = None,
) -> Inputs:
    """Read a run's folder, further results and π."""
    place = Path(run)
    if not exists(place):
        raise DataError(
            f"{place}: no such file or folder", hint="give a folder that transport or merge wrote"
        )
    found: list[Result] = []
    if place.is_file():  # transfusion.json itself, a LoRA file, or one result
        results = [place, *results]
    else:
        files = [path_inside(place, path, DataError) for path in sorted(place.glob("*.json"))]
        found = [one for path in files if (one := _read_known(path)) is not None]
    known = {one.path.resolve() for one in found}
    found += [_read(Path(path)) for path in results if Path(path).resolve() not in known]
    records = [one for one in found if one.verb in RUNS]
    if len(records) > 1:
        raise DataError(
            f"{listing(one.path for one in records)}: metadata of {len(records)} runs",
            hint="give the files of one run; a report is about one",
        )
    record = records[0] if records else None
    rest = [one for one in found if one.verb not in RUNS]
    metadata = record.info if record else None
    pi, reason = _alignment(record, rest, via)
    if not found and pi is None:
        raise DataError(
            f"{run}: nothing to report",
            hint=f"give a folder with a {FILE} that transport or merge wrote, or results of"
            f" {listing(sorted(set(FORMATS) - set(RUNS)))}",
        )
    given = None if ceiling is None else str(ceiling)
    return _about_this_run(Inputs(Path(run), metadata, tuple(rest), pi, given, (reason,) if reason else ()))


def _read_known(path: Path) -> Result | None:
    """Read a result of the folder; return None for any other JSON file."""
    try:
        info = read_json(path)
    except CheckpointError:
        return None
    return _checked(path, info) if str(info.get("verb")) in FORMATS else None


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
    record: Result | None, results: Sequence[Result], via: Alignment | str | Path | None
) -> tuple[Alignment | None, str]:
    """Return π as given or from its recorded file, or a sentence on why there is none.

    Of a π between models of different shapes, the metadata has all that is shown.
    """
    wanted = recorded(record.info if record else None, "alignment", "blake3")
    if via is not None:
        pi = Alignment.load(via) if isinstance(via, str | Path) else via
        if wanted not in (None, pi.digest):
            raise MismatchError(
                f"{via} is another π than that of this run: {pi.digest[:12]}…, not {wanted[:12]}…",
                hint="give the π that was used for this run",
            )
        return (None, "") if pi.other_shape else (pi, "")
    if record is not None:
        place = recorded(record.info, "settings", "via") or kept_pi(record.info, record.path.parent)
        if place is None:
            return None, "The run did not keep its π in a file."
    else:
        aligned = [one.info.written for one in results if one.verb == "align"]
        if len(aligned) != 1:
            return None, "No file of π was given."
        place = aligned[0]
    try:
        pi = Alignment.load(place)
    except AlignmentError as error:
        return None, f"The file of π cannot be read: {error.message}."
    if wanted not in (None, pi.digest):
        return None, f"{place} holds another π now."
    return (None, "") if pi.other_shape else (pi, "")


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
    results, notes = [], list(inputs.notes)
    for one in inputs.results:
        if one.verb == "verify" and inputs.digest and one.info.digest not in (None, inputs.digest):
            file = f" ({Path(one.info.via).name})" if one.info.via else ""
            other = f"another π{file}, {one.info.digest[:12]}…"
            notes.append(f"{one.path.name} is left out: it is about {other}, not this run's.")
            continue
        if not _belongs(inputs, one):
            one = replace(one, own=False)
            subject = f"{one.path.name} is about other models: {one.subject}."
            notes.append(f"{subject} It is not used for the main numbers.")
        results.append(one)
    return replace(inputs, results=tuple(results), notes=tuple(notes))


def _belongs(inputs: Inputs, result: Result) -> bool:
    """Whether a result is about this run. Without a run, every result is."""
    metadata, info = inputs.metadata, result.info
    if metadata is None:
        return True

    def means(name: str | None, model: Mapping[str, Any]) -> bool:
        return same(name, model.get("path"), model.get("name"))

    match result.verb:
        case "evaluate":
            return inputs.own_row(info) is not None
        case "sweep" | "fewshot":
            tuned = metadata["finetuned"]
            bases = means(info.base, metadata["base"]) and means(info.onto, metadata["onto"])
            return bases and len(tuned) == 1 and means(info.finetuned, tuned[0])
        case "barrier":
            return means(info.a, metadata["base"]) and means(info.b, metadata["onto"])
    return True
