"""What the verb ``align`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion import __version__
from transfusion.cli.console import show
from transfusion.runtime.byte_sizes import format_bytes

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment


def show_align(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print what was found, or what would be done."""
    if values["dry_run"]:
        _show_plan(result, values["output"], as_json)
    else:
        _show(result, values["output"], as_json, values["verbose"])


def _show(pi: Alignment, output: Path, as_json: bool, verbose: bool) -> None:
    """Print the verdict, then what moved; the objective only with details."""
    from transfusion.matching.advice import describe_drift
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
