"""The demo: a whole transport on real data, with models that are trained within a minute or two.

`digits` moves a fine-tune between vision transformers, `text` a LoRA between encoders of film reviews. Both
use the steps of `steps`. Models and results are in one folder, which is temporary or kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.errors import OutputError
from transfusion.files.publishing import open_staging, publish_file, require_writable, write_json
from transfusion.report.page import report as build_report
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import SILENT, Progress, followed, phase
from transfusion.runtime.run_record import RunRecord
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.settings import CONFIG
from transfusion_demo import digits, text
from transfusion_demo.steps import ONE_THREAD, DemoProgress

REPORT = Path("transfusion-demo") / "report.html"
"""The default place of the report, relative to the current folder."""
REPORTED = ("evaluation", "sweep", "barrier", "verify")
"""The results that the report shows, if the demo has them."""
NOT_KEPT = "The models of this demo were not kept. Give --keep FOLDER to keep them and to try other verbs."
RESULT = "demo.json"
"""The file of the whole result, in a kept folder and beside the report."""
Plan = digits.DigitsPlan | text.TextPlan


@followed
def run(
    *,
    seed: int = 0,
    keep: Path | None = None,
    force: bool = False,
    report: Path | None = REPORT,
    on_text: bool = False,
    plan: Plan | None = None,
    command: str | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Train, align, transport and measure; return tables of scores, gains and shares of the gap.

    ``seed`` decides all random numbers. ``keep`` is a folder for the models and results; without it they are
    deleted. ``report`` is the file of the report, or None for no report; ``force`` replaces a file there that
    no demo wrote. ``on_text`` runs the demo on text in place of digits. ``plan`` has the sizes and the
    training times. ``command`` is recorded as the command line. ``progress`` gets a note for every step, and
    bars.
    """
    if report is not None:
        require_replaceable(report, force=force)
    which: Any = text if on_text else digits
    for name in which.LIBRARIES:
        require_library(name, extra="demo")
    require_library("transformers").utils.logging.disable_progress_bar()
    record = RunRecord("demo", command)
    with ONE_THREAD.in_process(), working_folder(keep, force=force) as folder:
        with progress.bar(text="reading the data") as advance:
            found = which.run(folder, seed=seed, progress=DemoProgress(progress, advance), plan=plan)
        kind = "text" if on_text else "digits"
        result = record.of({"demo": kind, "seed": seed, **found, "kept_in": str(keep) if keep else None})
        write_json(folder / RESULT, result)
        if keep is None:
            return _with_report(folder, report, result, kept=False, force=force)
    result = json.loads((keep / RESULT).read_text())
    return _with_report(keep, report, result, kept=True, force=force)


def _with_report(
    folder: Path, report: Path | None, result: dict[str, Any], *, kept: bool, force: bool
) -> dict[str, Any]:
    """Publish the report, if it is wanted, and note its place in the result."""
    if report is None:
        return result
    with phase("drawing the report"):
        page = write_report(folder, kept=kept)
    return {**result, "report": str(publish_report(page, report, result, force=force))}


# ── the folder and the report ────────────────────────────────────────────────────────────────


@contextmanager
def working_folder(keep: Path | None, *, force: bool) -> Iterator[Path]:
    """Open a folder for models and results: a temporary one, or ``keep``, which appears when all is done."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    with open_staging(keep, force=force) as staging:
        staging.begin()
        yield (now := staging.output.resolve())
        _replace_paths(now, str(now), str(keep.resolve()))


def _replace_paths(folder: Path, before: str, after: str) -> None:
    """Replace the folder's path in all of its files by the path that the folder will have.

    An adapter's fingerprint covers the name of its base, so recorded ones are replaced as well.
    """

    def replace_words(words: Mapping[str, str]) -> None:
        for file in (*folder.rglob("*.json"), *folder.rglob("*.md")):
            text = file.read_text()
            for old, new in words.items():
                text = text.replace(old, new)
            file.write_text(text)

    adapters = sorted(config.parent for config in folder.glob(f"*/{CONFIG}"))
    known = [Adapter.open(place).fingerprint for place in adapters]
    replace_words({before: after})
    replace_words({old: Adapter.open(place).fingerprint for old, place in zip(known, adapters, strict=True)})
    for file in folder.glob("pi-*.safetensors"):
        pi = Alignment.load(file)
        named = {end: getattr(pi.provenance, end).replace(before, after) for end in ("source", "target")}
        replace(pi, provenance=replace(pi.provenance, **named)).save(file, force=True)


def write_report(folder: Path, *, kept: bool = True) -> Path:
    """Write the report on a demo into its folder. Without ``kept`` it suggests no commands."""
    results = [file for name in REPORTED if (file := folder / f"{name}.json").exists()]
    ceiling = next(model for name in ("b-tuned", "b-lora") if (model := folder / name).exists())
    page = build_report(folder / "b-refined", results, ceiling=ceiling)
    if not kept:
        sections = [section for section in page.sections if section.id != "commands"]
        page = replace(page, sections=sections, missing=[], notes=[*page.notes, NOT_KEPT])
    return page.save(folder / "report.html")


def require_replaceable(place: Path, *, force: bool) -> None:
    """Refuse to replace a file that no demo wrote."""
    if place.exists() and not force and not _is_report(place):
        raise OutputError(
            f"{place} exists already, and it is not the report of a demo",
            hint="move it away, or replace it with --force",
        )
    require_writable(place, force=True, folder=False)


def publish_report(page: Path, place: Path, result: Mapping[str, Any], *, force: bool) -> Path:
    """Copy a report to its place, and write the result beside it with the digest of the page."""
    require_replaceable(place, force=force)
    info = {**result, "report": {"file": place.name, "sha256": _digest(page)}}
    publish_file(place.with_name(RESULT), lambda staged: write_json(staged, info), force=True)
    return publish_file(place, lambda staged: shutil.copyfile(page, staged), force=True)


def _is_report(place: Path) -> bool:
    """Whether the digest that a demo wrote beside a file is the digest of the file."""
    try:
        info = json.loads(place.with_name(RESULT).read_text())
        return bool(info["report"]["sha256"] == _digest(place))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
