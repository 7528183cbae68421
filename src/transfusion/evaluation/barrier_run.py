"""The function `barriers`: the loss between π(A) and B, for several π, beside that between A and B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment.alignment import Alignment
from transfusion.alignment.rectangular import AnyAlignment, require_one_shape
from transfusion.errors import SettingError
from transfusion.evaluation.alpha_sweep import given_alignments, labels_of
from transfusion.evaluation.evaluation_data import EvaluationData
from transfusion.evaluation.interpolation import (
    POINTS,
    Barrier,
    BarrierPoint,
    Shortcuts,
    barrier,
    curves_metadata,
)
from transfusion.evaluation.model_comparison import DataReference
from transfusion.model.bases import open_bases
from transfusion.model.model import Model, Reference
from transfusion.report.charts.result_figures import draw_barriers
from transfusion.report.result_files import Paths, ResultFiles
from transfusion.runtime.progress import SILENT, Progress
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.runtime.run_record import RunRecord

VANILLA = "vanilla"


@dataclass(frozen=True)
class Barriers:
    """The barriers of several alignments, by label."""

    curves: Mapping[str, Barrier]
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The result as it is written to files, with the record of its run."""

    def metadata(self) -> dict[str, Any]:
        """Return all curves as plain data; what they have in common stands once."""
        return curves_metadata(self.curves)


def barriers(
    a: Model | Reference,
    b: Model | Reference,
    *,
    data: DataReference,
    via: AnyAlignment | str | Path | Sequence[AnyAlignment | str | Path] | None = None,
    vanilla: bool = True,
    points: int = POINTS,
    shortcuts: Shortcuts | str | None = None,
    batch: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    output: Paths = None,
    force: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
) -> Barriers:
    """Measure the loss of (1 − α)·π(A) + α·B for several π, and draw it.

    ``a`` and ``b`` are the two bases: paths, hub ids, modules or state dicts.
    ``data`` are the examples: a path, a hub id, examples in memory, or an `EvaluationData` that says more.
    ``via`` is π, its file, or several; ``vanilla`` adds the curve between A and B as they are.
    ``points`` counts the values of α, ends included; ``shortcuts``, ``batch`` and ``dtype`` are those of
    `barrier`.
    ``output`` is a figure (.png, .svg, .pdf) or .json, or several; with ``force``, existing files are
    replaced.
    ``resources`` are threads; ``progress`` follows the run.

    >>> found = transfusion.barriers("models/a", "models/b", via="pi.safetensors", data="data.safetensors")
    >>> list(found.curves)
    ['vanilla', 'guarded']
    """
    record = RunRecord("barrier")
    paths = given_alignments(via)
    if not paths and not vanilla:
        raise SettingError("`vanilla=False` without `via` leaves nothing to measure", hint="give a file of π")
    asked = EvaluationData.of(data)
    read = (a, b, *asked.files, *paths)
    files = ResultFiles.checked(output, force=force, inputs=read, draw=draw_barriers)
    models = open_bases(a, b, progress=progress)
    ways: list[Alignment | None] = [None] if vanilla else []
    ways += [require_one_shape(one) for one in paths]
    curves: dict[str, Barrier] = {}
    with resources.in_process(), progress.bar(points * len(ways), "building the models") as advance:
        for label, pi in zip(labels_of(ways, VANILLA), ways, strict=True):

            def on_point(point: BarrierPoint, label: str = label) -> None:
                advance(f"{label} · α = {point.alpha:.3g} · loss {point.loss:.4g}")

            curves[label] = barrier(
                *models,
                via=pi,
                data=asked,
                points=points,
                shortcuts=shortcuts,
                batch=batch,
                dtype=dtype,
                on_point=on_point,
            )
    return files.finish(Barriers(curves), record)
