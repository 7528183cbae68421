"""The settings of `apply`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transfusion.runtime.progress import SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.settings import MODELS, argument, setting

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment
    from transfusion.model.bases import ConfigArgument
    from transfusion.model.model import Model, Reference


@dataclass(frozen=True)
class ApplySettings:
    """The settings of `apply`."""

    via: Alignment | str | Path = argument("The file of π.", metavar="PI")
    a: Model | Reference = argument(
        "A: the base that was fine-tuned; a folder, a file or a hub id.", metavar="A"
    )
    _: KW_ONLY
    output: str | Path | None = setting(None, "The folder or file to write.", kind=Path, flag="--output,-o")
    force: bool = setting(False, "Replace an existing output.", kind=bool)
    config: ConfigArgument = setting(
        None, "The config.json of weights that come without one.", kind=Path, panel=MODELS
    )
    architecture: str | Path | None = setting(
        None, "A file with a table of your own.", kind=Path, panel=MODELS
    )
    resources: Resources = setting(
        LOCAL,
        "Engine, threads and memory.",
        kind=Resources,
        only=("jobs", "engine", "address", "memory"),
    )
    progress: Progress = setting(SILENT, "Follows the run.", typed=False)
