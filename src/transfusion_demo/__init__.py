"""The demo: a whole transport on real data, with models that are trained within a minute or two.

`digits` moves a fine-tune between vision transformers, `text` a LoRA between encoders of film reviews. Both
use the steps of `demo_steps` and write their models and results into the folder that `output_folder` opens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transfusion.files.publishing import write_json
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.progress import SILENT, Progress, followed, phase
from transfusion.runtime.run_record import RunRecord
from transfusion_demo import digits, text
from transfusion_demo.demo_steps import DemoProgress
from transfusion_demo.output_folder import (
    REPORT,
    RESULT,
    publish_report,
    require_replaceable,
    working_folder,
    write_report,
)
from transfusion_demo.training import one_thread

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
    with one_thread(), working_folder(keep, force=force) as folder:
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
