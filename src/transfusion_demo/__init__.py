"""The demo: the whole job on real data, with models small enough to train while you wait.

`digits` has images, `text` reviews of films; both write their models and results into one folder, in the
words of `results`, which `output_folder` keeps or throws away.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfusion.checkpoint.publishing import write_json
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.run_record import RunRecord
from transfusion_demo import digits, text
from transfusion_demo.output_folder import REPORT, RESULT, publish_report, require_place, tell, workplace
from transfusion_demo.training import one_thread

Plan = digits.DigitsPlan | text.TextPlan


def run(
    *,
    seed: int = 0,
    keep: Path | None = None,
    force: bool = False,
    report: Path | None = REPORT,
    on_text: bool = False,
    plan: Plan | None = None,
    command: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, align, transport and measure; the result has tables of scores, gains and shares of the gap.

    Models are kept only if a folder is given. The report goes to ``report``, unless that is none; a
    file there that no demo wrote is replaced only with ``force``.
    """
    if report is not None:
        require_place(report, force=force)
    require_library("transformers").utils.logging.disable_progress_bar()
    record = RunRecord("demo", command)
    which: Any = text if on_text else digits
    with one_thread(), workplace(keep, force=force) as folder:
        found = which.run(folder, seed=seed, say=say, plan=plan)
        kind = "text" if on_text else "digits"
        result = record.of({"demo": kind, "seed": seed, **found, "kept_in": str(keep) if keep else None})
        write_json(folder / RESULT, result)
        if keep is None and report is not None:
            _tell(folder, report, result, kept=False, force=force)
    if keep is not None:
        result = json.loads((keep / RESULT).read_text())
        if report is not None:
            _tell(keep, report, result, kept=True, force=force)
    return result


def _tell(folder: Path, report: Path, result: dict[str, Any], *, kept: bool, force: bool) -> None:
    """Write the report to its place, if there is one, and note the place."""
    page = tell(folder, kept=kept)
    if page is not None:
        result["report"] = str(publish_report(page, report, result, force=force))
