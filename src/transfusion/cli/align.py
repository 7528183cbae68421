"""The verb ``align``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion import __version__
from transfusion.cli.console import Messages, results_apart, show
from transfusion.cli.option_checks import given
from transfusion.cli.options import (
    Anyway,
    ArchitectureFile,
    BaseArgument,
    Config,
    DryRun,
    Dtype,
    Force,
    Json,
    NewBaseArgument,
    Output,
    Quiet,
    Verbose,
    VocabularyShare,
    computing,
)
from transfusion.cli.search_options import AdviceOption, InnerOption, ResidualOption, Seed, chosen_method
from transfusion.matching.methods import Method
from transfusion.runtime.byte_sizes import format_bytes

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment
    from transfusion.runtime.resources import Resources


@given(method=chosen_method, resources=computing)
def align(
    a: BaseArgument,
    b: NewBaseArgument,
    output: Output,
    method: Method,
    resources: Resources,
    residual: ResidualOption = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    inner: InnerOption = None,
    advice: AdviceOption = True,
    seed: Seed = 0,
    vocabulary_share: VocabularyShare = None,
    anyway: Anyway = False,
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: Dtype = "float32",
) -> None:
    """Find how the units of A correspond to those of B, and write it as a file of π."""
    from transfusion.matching.alignment_run import align as run
    from transfusion.matching.alignment_run import plan_align

    common: dict[str, Any] = {"method": method, "residual": residual, "inner": inner, "dtype": dtype}
    common |= {"vocabulary_share": vocabulary_share}
    common |= {"config": config, "output": output, "force": force, "resources": resources}
    common |= {"progress": Messages(quiet=quiet, verbose=verbose)}
    if dry_run:
        _show_plan(plan_align(a, b, **common), output, as_json)
        return
    with results_apart():
        pi = run(a, b, seed=seed, advice=advice, anyway=anyway, **common)
    _show(pi, output, as_json, verbose)


def _show(pi: Alignment, output: Path, as_json: bool, verbose: bool) -> None:
    """Print the verdict, then what moved; the objective only with details."""
    from transfusion.matching.base_drift import describe_drift
    from transfusion.runtime.run_record import COMMAND

    metadata = pi.provenance
    trace = metadata.objective
    moved, advice = pi.moved_axes, metadata.advice
    result = {
        "transfusion": __version__,
        "verb": "align",
        "command": COMMAND.get(),
        "written": str(output),
        "method": metadata.method,
        **asdict(metadata.policy),
        "blake3": pi.digest,
        "axes": len(pi.maps),
        "axes_moved": moved,
        "sweeps": max(0, len(trace) - 1),
        "objective": list(trace),
        "assignment_gap": metadata.gap,
        "advice": dict(advice) or None,
        **({"vocabulary": dict(metadata.vocabulary)} if metadata.vocabulary else {}),
        "run": dict(metadata.run),
    }
    lines = [f"{advice['verdict']}: {advice['text']}"] if advice else []
    if instead := advice.get("instead"):
        lines.append(f"better: {instead}")
    if drift := advice.get("drift"):
        lines.append(describe_drift(drift))
    lines.append(f"π written to {output}: {moved} of {len(pi.maps)} axes moved")
    if trace and verbose:
        sweeps = len(trace) - 1
        lines.append(f"objective {trace[0]:.6g} → {trace[-1]:.6g} in {sweeps} sweep{'s' * (sweeps != 1)}")
    show(result, as_json, "\n".join(lines))


def _show_plan(plan: dict[str, int], output: Path, as_json: bool) -> None:
    """Print what aligning would read and write."""
    text = (
        f"would match {plan['axes']} axes, read {format_bytes(plan['bytes_to_read'])} at least once and write"
        f" {output}"
    )
    show({"would_write": str(output), **plan}, as_json, text)
