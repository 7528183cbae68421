"""Where a demo works, what it keeps, and where its report goes."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.checkpoint.publishing import publish_file, require_writable, write_json
from transfusion.checkpoint.staging import staged_folder
from transfusion.errors import OutputError
from transfusion.runtime.run_record import RunRecord
from transfusion.transportation.adapters.adapter import CONFIG, Adapter

REPORT = Path("transfusion-demo") / "report.html"
"""Where the report of a demo is, from where the demo was started."""
TOLD = ("evaluation", "sweep", "barrier", "verify")
"""The results that a report shows, as far as a demo has them."""
GONE = "The models of this demo were not kept; with --keep FOLDER they are, for other verbs to try."
RESULT = "demo.json"
"""The whole result, in a kept folder and beside the report."""


@contextmanager
def workplace(keep: Path | None, *, force: bool) -> Iterator[Path]:
    """A folder for models and results: one that goes, or one that appears whole when all is done."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    with staged_folder(keep, force=force) as staged:
        yield (now := staged.resolve())
        _rename(now, str(now), str(keep.resolve()))


def _rename(folder: Path, before: str, after: str) -> None:
    """Let everything in a folder speak of the place where the folder will be.

    An adapter's digest covers the name of its base, so those that tell of an adapter get its new digest.
    """
    adapters = sorted(config.parent for config in folder.glob(f"*/{CONFIG}"))
    then = [Adapter.open(place).digest for place in adapters]
    _replace(folder, {before: after})
    _replace(folder, dict(zip(then, (Adapter.open(place).digest for place in adapters), strict=True)))
    for file in folder.glob("pi-*.safetensors"):
        pi = Alignment.load(file)
        named = {end: getattr(pi.provenance, end).replace(before, after) for end in ("source", "target")}
        replace(pi, provenance=replace(pi.provenance, **named)).save(file, force=True)


def _replace(folder: Path, words: Mapping[str, str]) -> None:
    """Replace words in all texts of a folder."""
    for file in (*folder.rglob("*.json"), *folder.rglob("*.md")):
        text = info = file.read_text()
        for then, now in words.items():
            info = info.replace(then, now)
        if info != text:
            file.write_text(info)


def write_result(folder: Path, record: RunRecord, result: Mapping[str, Any], name: str | None = None) -> None:
    """A result as the verb of the record would have written it."""
    write_json(folder / f"{name or record.verb}.json", record.of(dict(result)))


def tell(folder: Path, *, kept: bool = True) -> Path | None:
    """Write the report on a demo's folder into it; none, where the package has no room for reports.

    Of a folder that will be gone, it names no commands that would look for models there.
    """
    try:
        reporting = import_module("transfusion.reporting.build_report")
    except ModuleNotFoundError:
        return None
    results = [folder / f"{name}.json" for name in TOLD if (folder / f"{name}.json").exists()]
    ceiling = next(place for name in ("b-tuned", "b-lora") if (place := folder / name).exists())
    page = reporting.report(folder / "b-functional", results, ceiling=ceiling)
    if not kept:
        sections = [section for section in page.sections if section.id != "commands"]
        page = replace(page, sections=sections, missing=[], notes=[*page.notes, GONE])
    return Path(page.save(folder / "report.html"))


def require_place(place: Path, *, force: bool) -> None:
    """Refuse, before any work is done, to replace a file that no demo wrote."""
    if place.exists() and not force and not _ours(place):
        raise OutputError(
            f"{place} exists already, and no demo wrote it as it is now",
            hint="move it away, or give --force to replace it",
        )
    require_writable(place, force=True, folder=False)


def publish_report(page: Path, place: Path, result: Mapping[str, Any], *, force: bool) -> Path:
    """Copy a report to its place, with the result beside it, which knows the page again by its digest."""
    require_place(place, force=force)
    info = {**result, "report": {"file": place.name, "sha256": _digest(page)}}
    publish_file(place.with_name(RESULT), lambda staged: write_json(staged, info), force=True)
    return publish_file(place, lambda staged: shutil.copyfile(page, staged), force=True)


def _ours(place: Path) -> bool:
    try:
        info = json.loads(place.with_name(RESULT).read_text())
        return bool(info["report"]["sha256"] == _digest(place))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
