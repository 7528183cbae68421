"""The settings of `report`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transfusion.runtime.progress import BARS, SILENT, Progress
from transfusion.runtime.settings import ARCHITECTURE, MODELS, argument, setting

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment


@dataclass(frozen=True)
class ReportSettings:
    """The settings of `report`."""

    run: str | Path = argument(
        "A folder or a LoRA file that transport or merge wrote, or any folder with results.", kind=Path
    )
    results: Iterable[str | Path] = setting(
        (), "Results from elsewhere.", kind=Path, many=True, metavar="[RESULT.json]..."
    )
    _: KW_ONLY
    via: Alignment | str | Path | None = setting(None, "The file of π.", shown="where the run had it")
    ceiling: str | Path | None = setting(None, "B fine-tuned itself: how much of the gap was closed.")
    output: str | Path | None = setting(None, "Where to write the page.", kind=Path, flag="--output,-o")
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    architecture: str | Path | None = setting(None, ARCHITECTURE, kind=Path, panel=MODELS)
    progress: Progress = setting(SILENT, "Follows the run.", shown=BARS, typed=False)
