"""What the verb ``barrier`` does: several ways between two models, measured, named, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli.alpha_runs import require_places, use_threads
from transfusion.cli.console import Messages, command, out, print_json
from transfusion.cli.data_options import BatchOption, Precision, examples, sources
from transfusion.cli.grouped_options import given
from transfusion.cli.option_checks import within
from transfusion.cli.options import (
    ArchitectureFile,
    Figure,
    Force,
    Jobs,
    Json,
    ModelArgument,
    Quiet,
    Treatment,
    Vias,
)
from transfusion.cli.shared import as_dtype, open_bases
from transfusion.errors import OutputError

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment
    from transfusion.evaluation.evaluation_data import EvaluationData
    from transfusion.evaluation.interpolation import Barrier
    from transfusion.model.model import Model

VANILLA = "vanilla"
DRAWN = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class BarrierRun:
    """How to measure, as far as the user said so."""

    points: int
    shortcuts: str | None
    batch: int | None
    dtype: str

    def measure(
        self,
        models: tuple[Model, Model],
        via: list[str],
        data: EvaluationData,
        messages: Messages,
        *,
        vanilla: bool,
    ) -> dict[str, Barrier]:
        """One way per π, and the one without, by label, with a bar."""
        import torch

        from transfusion.alignment.alignment import Alignment
        from transfusion.evaluation.interpolation import barrier

        alignments: list[Alignment | None] = [None] if vanilla else []
        alignments += [Alignment.load(path) for path in via]
        curves: dict[str, Barrier] = {}
        with messages.points(self.points * len(alignments)) as step:
            for label, pi in zip(barrier_curves(alignments), alignments, strict=True):
                curves[label] = barrier(
                    *models,
                    via=pi,
                    data=data,
                    points=self.points,
                    shortcuts=self.shortcuts,
                    batch=self.batch,
                    dtype=as_dtype(self.dtype) or torch.float32,
                    on_point=lambda point, label=label: step(  # type: ignore[misc]
                        f"{label} · α = {point.alpha:.3g} · loss {point.loss:.4g}"
                    ),
                )
        return curves


def barrier_curves(alignments: Sequence[Alignment | None]) -> list[str]:
    """What to call every way: the method, and what tells two of one method apart."""
    from transfusion.evaluation.alpha_sweep import labels_of

    return labels_of(alignments, VANILLA)


def require_suffix(output: Path) -> None:
    """Refuse, before any work is done, a kind of figure that nobody can draw."""
    if output.suffix not in (*DRAWN, ".json"):
        raise OutputError(
            f"{output}: neither a figure nor JSON", hint=f"end the name in {', '.join(DRAWN)} or .json"
        )


@given(data=examples)
def barrier(
    a: ModelArgument,
    b: ModelArgument,
    data: EvaluationData,
    via: Vias = None,
    points: Annotated[
        int, typer.Option(min=2, help="How many values of α, ends included.", callback=within(1, 10_001))
    ] = 11,
    shortcuts: Treatment = None,
    vanilla: Annotated[
        bool, typer.Option("--vanilla/--no-vanilla", help="Also the way from A itself, with nothing moved.")
    ] = True,
    output: Figure = None,
    batch: BatchOption = None,
    dtype: Precision = "float32",
    architecture: ArchitectureFile = None,
    jobs: Jobs = None,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure the loss of (1 − α)·π(A) + α·B for α from 0 to 1, and draw it."""
    from transfusion.cli import views
    from transfusion.evaluation.interpolation import alignment_records
    from transfusion.runtime.run_record import RunRecord

    record, messages = RunRecord("barrier", command()), Messages(quiet=quiet, verbose=False)
    if not via and not vanilla:
        raise typer.BadParameter("--no-vanilla without --via leaves nothing to measure")
    if output is not None:
        require_suffix(output)
        require_places([output], (a, b, *sources(data), *(via or ())), force=force)
    use_threads(jobs)
    models = open_bases(a, b, None, messages)
    curves = BarrierRun(points, shortcuts, batch, dtype).measure(
        models, via or [], data, messages, vanilla=vanilla
    )
    result = record.of(alignment_records(curves))
    if output is not None:
        _publish(curves, result, output, force)
        result = {"written": str(output), **result}
    if as_json:
        print_json(result)
        return
    out.print(views.barrier(result))
    if output is not None:
        out.print(f"written to {output}", markup=False)


def _publish(curves: dict[str, Barrier], result: dict[str, Any], output: Path, force: bool) -> None:
    from transfusion.checkpoint.publishing import publish_file, write_json
    from transfusion.reporting.charts.result_figures import draw_barriers

    if output.suffix == ".json":
        publish_file(output, lambda staged: write_json(staged, result), force=force)
        return
    kind = output.suffix.removeprefix(".")
    publish_file(output, lambda staged: draw_barriers(curves, staged, kind), force=force)
