"""Opening the two bases of a run, and naming the files that no output may overwrite."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import exists, expanduser
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.errors import listing
from transfusion.model.model import Model, Reference, differing_settings, require_same_shape
from transfusion.runtime.progress import SILENT, Progress

ConfigArgument: TypeAlias = str | Path | Mapping[str, Any] | None
"""A configuration for weights that come without one: a JSON file, or its content."""


def open_model(model: Model | Reference, config: ConfigArgument = None) -> Model:
    """Open a model, unless it is open already."""
    return model if isinstance(model, Model) else Model.open(model, config=config)


def open_bases(
    a: Model | Reference,
    b: Model | Reference,
    config: ConfigArgument = None,
    progress: Progress = SILENT,
) -> tuple[Model, Model]:
    """Open two bases of one architecture; note how they were recognised and which settings differ."""
    models = open_model(a, config), open_model(b, config)
    for model in models:
        if model.checkpoint.config is None:
            progress.note(f"note: {model.label}: recognised by {model.why}")
        else:
            progress.detail(f"{model.label}: {model.family.name}, because {model.why}")
    require_same_shape(*models)
    if differing := differing_settings(*models):
        progress.note(f"note: the two bases have different settings: {listing(differing)}")
    return models


def input_files(*inputs: object) -> list[Path]:
    """Return the paths that hold inputs: models, files of π, and references that exist on this machine.

    Other inputs, such as models in memory and hub ids of data, have no path.
    """
    roots = [root for one in inputs if (root := _root(one)) is not None]
    inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
    return [*roots, *inside]


def _root(given: object) -> Path | None:
    if isinstance(given, Model):
        return None if given.checkpoint.in_memory else given.checkpoint.root
    if isinstance(given, str | Path) and exists(expanduser(given)):
        return Path(expanduser(given))
    return None
