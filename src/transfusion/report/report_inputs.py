"""The inputs of a report: a run and its results, from a folder and from single files."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.errors import AlignmentError, CheckpointError, DataError, MismatchError, listing
from transfusion.report.result_schemas import SCHEMAS, schema_of
from transfusion.runtime.untrusted_files import path_inside, read_json, validate
from transfusion.transport.output_record import kept_pi, read_metadata

METADATA = "transfusion.json"
METADATA_VERBS = ("transport", "merge")
LORA = ".safetensors"
"""The end of a LoRA file's name. A moved one has the metadata in its header."""


@dataclass(frozen=True)
class Result:
    """One result and its file."""

    path: Path
    verb: str
    info: Mapping[str, Any]


@dataclass(frozen=True)
class ReportInputs:
    """The inputs of a report."""

    run: Path
    metadata: Mapping[str, Any] | None
    """The metadata of the transport or merge; None if there are only results."""
    results: tuple[Result, ...]
    alignment: Alignment | None
    without: str
    """Why there is no π; empty if there is one."""
    ceiling: str | None = None
    """B fine-tuned itself, if it was given."""
    left_out: tuple[str, ...] = ()
    """A sentence for each result that is not about this run."""

    @property
    def digest(self) -> str | None:
        """The digest of this run's π, if it is known."""
        return digest_of(self.metadata, self.alignment)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run if self.run.is_dir() else self.run.parent

    @property
    def output(self) -> Path:
        """The output of the run: a folder, or a LoRA file."""
        return self.run if self.run.suffix == LORA else self.folder

    def files(self, via: Alignment | str | Path | None = None) -> list[Path]:
        """All files that were read, which no page may overwrite: run, results, π and models."""
        metadata = self.metadata or {}
        models = [
            *metadata.get("finetuned", ()),
            *(metadata[role] for role in ("base", "onto") if role in metadata),
        ]
        named = [self.run, *(one.path for one in self.results), self.ceiling]
        named += [via if isinstance(via, str | Path) else (metadata.get("settings") or {}).get("via")]
        named += [one.info["written"] for one in self.of("align")]
        return inputs_of(*named, *(one.get("path") or one.get("name") for one in models))

    def of(self, verb: str) -> list[Result]:
        """Return the results of one verb."""
        return [result for result in self.results if result.verb == verb]


def inputs_of(*references: str | Path | None) -> list[Path]:
    """Return the local files of references. HTML files in their folders are not inputs."""
    roots = [Path(one) for one in references if one is not None and exists(one)]
    inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
    return [*roots, *(path for path in inside if path.suffix != ".html")]


def gather_inputs(
    run: str | Path,
    results: Iterable[str | Path] = (),
    via: Alignment | str | Path | None = None,
    ceiling: str | Path | None = None,
) -> ReportInputs:
    """Read a run's folder, further results and π."""
    place = Path(run)
    if not exists(place):
        raise DataError(
            f"{place}: no such file or folder", hint="give a folder that transport or merge wrote"
        )
    if place.is_file():  # transfusion.json itself, a LoRA file, or one result
        results, place = [place, *results], place.parent
        found: list[Result] = []
    else:
        files = [path_inside(place, path, DataError) for path in sorted(place.glob("*.json"))]
        found = [one for path in files if (one := _known(path)) is not None]
    known = {one.path.resolve() for one in found}
    found += [_given(Path(path)) for path in results if Path(path).resolve() not in known]
    records = [one for one in found if one.verb in METADATA_VERBS]
    if len(records) > 1:
        raise DataError(
            f"{listing(one.path for one in records)}: metadata of {len(records)} runs",
            hint="give the files of one run; a report is about one",
        )
    metadata = records[0].info if records else None
    rest = tuple(one for one in found if one.verb not in METADATA_VERBS)
    alignment, without = _alignment(records[0] if records else None, rest, via)
    if metadata is None and not rest and alignment is None:
        raise DataError(
            f"{run}: nothing to report",
            hint=f"give a folder with a {METADATA} that transport or merge wrote, or results of"
            f" {listing(sorted(set(SCHEMAS) - set(METADATA_VERBS)))}",
        )
    pi = digest_of(metadata, alignment)
    foreign = [one for one in rest if one.verb == "verify" and pi and about(one) not in (None, pi)]
    return ReportInputs(
        Path(run),
        metadata,
        tuple(one for one in rest if one not in foreign),
        alignment,
        without,
        None if ceiling is None else str(ceiling),
        tuple(f"{one.path.name} is left out: it is about {_other(one)}, not this run's." for one in foreign),
    )


def digest_of(metadata: Mapping[str, Any] | None, alignment: Alignment | None) -> str | None:
    """Return the digest of a run's π, from π itself or from the metadata."""
    info = (metadata or {}).get("alignment") or {}
    return alignment.digest if alignment is not None else info.get("blake3")


def about(proof: Result) -> str | None:
    """Return the digest of the π that a result of `verify` is about, if it is recorded."""
    info = proof.info.get("alignment") or {}
    return str(info["blake3"]) if "blake3" in info else None


def _other(proof: Result) -> str:
    """Describe the π of a result of `verify`."""
    file = f" ({Path(proof.info['via']).name})" if proof.info.get("via") else ""
    return f"another π{file}, {str(about(proof))[:12]}…"


def _known(path: Path) -> Result | None:
    """Read a result of the folder; return None for any other JSON file."""
    try:
        info = read_json(path)
    except CheckpointError:
        return None
    return _checked(path, info) if str(info.get("verb")) in SCHEMAS else None


def _given(path: Path) -> Result:
    try:
        info = read_metadata(path) if path.suffix == LORA else read_json(path)
    except CheckpointError as error:
        hint = "give a folder, a JSON file or a moved LoRA file that transfusion wrote"
        raise DataError(error.message, hint=hint) from error
    verb = info.get("verb")
    if str(verb) not in SCHEMAS:
        reason = f'its "verb" is {reprlib.repr(verb)}' if verb is not None else 'it has no "verb"'
        raise DataError(
            f"{path}: not a known result: {reason}",
            hint=f"give a JSON file that one of {listing(SCHEMAS)} wrote",
        )
    return _checked(path, info)


def _checked(path: Path, info: Mapping[str, Any]) -> Result:
    verb = str(info["verb"])
    hint = f"make it again with 'transfusion {verb}' of this version"
    validate(info, schema_of(verb, info), f"{path}: a result of {verb}", hint=hint, error=DataError)
    return Result(path, verb, info)


def _alignment(
    record: Result | None, results: Sequence[Result], via: Alignment | str | Path | None
) -> tuple[Alignment | None, str]:
    """Return π as given or from its recorded file, and why there is none.

    Of a π between models of different shapes, the metadata has all that is shown.
    """
    metadata = None if record is None else record.info
    wanted = None if metadata is None else metadata["alignment"].get("blake3")
    if via is not None:
        pi = Alignment.load(via) if isinstance(via, str | Path) else via
        if wanted not in (None, pi.digest):
            raise MismatchError(
                f"{via} is another π than that of this run: {pi.digest[:12]}…, not {wanted[:12]}…",
                hint="give the π that was used for this run",
            )
        return (None, "") if pi.other_shape else (pi, "")
    place = ((metadata or {}).get("settings") or {}).get("via")
    if record is not None and place is None:
        place = kept_pi(record.info, record.path.parent)
    if place is None and metadata is not None:
        return None, "The run did not keep its π in a file."
    if place is None:
        aligned = [one.info["written"] for one in results if one.verb == "align"]
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
