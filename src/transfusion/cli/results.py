"""What the verbs print: lines for people, or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion import __version__
from transfusion.cli import views
from transfusion.cli.console import show, show_result
from transfusion.errors import listing
from transfusion.runtime.resources import format_bytes

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment

# ── align ────────────────────────────────────────────────────────────────────────────────────


def show_align(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print what was found, or what would be done."""
    if values["dry_run"]:
        _show_search_plan(result, values["output"], as_json)
    else:
        _show_alignment(result, values["output"], as_json, values["verbose"])


def _show_alignment(pi: Alignment, output: Path, as_json: bool, verbose: bool) -> None:
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


def _show_search_plan(plan: dict[str, int], output: Path, as_json: bool) -> None:
    """Print what aligning would read and write."""
    text = (
        f"would match {plan['axes']} axes, read {format_bytes(plan['bytes_to_read'])} at least once and write"
        f" {output}"
    )
    show({"would_write": str(output), **plan}, as_json, text)


# ── transport and merge ──────────────────────────────────────────────────────────────────────────


def show_moved(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print what was written; or, in a dry run, what would be."""
    output = values["output"]
    if values["dry_run"]:
        _show_move_plan(result.plan(), output, as_json)
        return
    metadata = result.metadata()
    show(
        {"written": str(output), **metadata}, as_json, "\n".join([*_lines(metadata), f"written to {output}"])
    )


_COUNTED = ("tensors", "moved", "carried", "kept", "dropped")


def _show_move_plan(plan: Mapping[str, int], output: Path, as_json: bool) -> None:
    counts = ", ".join(f"{plan[what]} {what}" for what in plan if what in _COUNTED)
    text = (
        f"would write {output}: {counts}; read {format_bytes(plan['bytes_to_read'])}, write"
        f" {format_bytes(plan['bytes_to_write'])}"
    )
    show({"would_write": str(output), **plan}, as_json, text)


def _lines(metadata: Mapping[str, Any]) -> list[str]:
    """Return the metadata of an output, line by line; the verdict on π last, unless it was a warning."""
    from transfusion.matching.advice import Verdict
    from transfusion.model.vocabulary_map import describe_vocabulary
    from transfusion.transport.adapters.drift import describe_adapter_drift
    from transfusion.transport.alpha import Alpha
    from transfusion.transport.refinement.settings import BASE, describe_refinement

    moved, onto = metadata["moved"], metadata["onto"]["name"]
    if metadata.get("fits_as_it_is"):
        first = f"the fine-tune fits {onto} as it is: all of its {moved} tensors are unchanged, with α = 1"
    elif (metadata.get("refinement") or {}).get("start") == BASE:
        first = f"{moved} tensors of {onto} trained"
    else:
        first = f"{moved} tensors moved onto {onto} with α = {Alpha.of(metadata['alpha'])}"
    if metadata["verb"] == "merge":
        names = listing([one["name"] for one in metadata["finetuned"]], 3)
        first += f"; {len(metadata['finetuned'])} fine-tunes combined by {metadata['how']}: {names}"
    if metadata.get("unchanged"):
        first += f"; {metadata['unchanged']} others are B's own, unchanged"
    lines = [first]
    lines += _named("taken from the fine-tune, because B has none that fit", metadata["carried"])
    if metadata.get("kept") is not None:
        kept = f"keeps at least {metadata['kept']:.1%} of the change of every module"
        lines.append(f"factored to rank {metadata['rank']}, which {kept}")
    if metadata.get("new_tokens"):
        lines.append(f"{metadata['new_tokens']} new token(s) of the fine-tune follow those of B")
    if metadata.get("lost_tokens"):
        lines.append(f"{metadata['lost_tokens']} new token(s) of the fine-tune were dropped")
    if (metadata.get("vocabulary") or {}).get("moved"):
        lines.append(f"vocabularies: {describe_vocabulary(metadata['vocabulary'])}")
    lines += _shift(metadata.get("output_shift") or {}, refinable=metadata["verb"] == "transport")
    lines += describe_adapter_drift(metadata["drift"]) if metadata.get("drift") else []
    lines += [text] if (text := describe_refinement(metadata.get("refinement"))) else []
    lines += _named("left out of B, because the fine-tune does not have them", metadata.get("dropped", ()))
    lines += _named("not moved, because B has no counterpart", metadata.get("left_out", ()))
    if (advice := metadata["alignment"]["advice"]) and advice["verdict"] != Verdict.DOUBT:
        lines.append(f"{advice['verdict']}: {advice['text']}")
    return lines


def _shift(output_shift: Mapping[str, Any], *, refinable: bool) -> list[str]:
    """How much of the change was measured in B's outputs, or why it was not."""
    if "not_tried" in output_shift:
        return [f"α was taken from the weights alone: {output_shift['not_tried']}"]
    if not output_shift:
        return []
    cosine, size = output_shift["direction"], output_shift["size"]
    because = []
    if lowered := output_shift.get("lowered"):
        because.append(
            f"α was lowered from {lowered['alpha']:g}: there, B's outputs would move by"
            f" {lowered['reach']:.2f} of their own spread, and in another direction than A's (cosine"
            f" {lowered['direction']:.2f})" + ("; --refine brings more of the fine-tune" if refinable else "")
        )
    return [
        *because,
        f"with this α, on {output_shift['probes']}, the change of B's outputs has a cosine of {cosine:.2f}"
        f" with the change of A's, and is {size:.2f} times as large",
    ]


def _named(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what}: {listing(names)}"] if names else []


# ── other verbs ──────────────────────────────────────────────────────────────────────────────────


def show_applied(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    written = str(values["output"])
    show({"written": written}, as_json, f"π(A) written to {written}")


def show_evaluated(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    show_result(result.record, views.evaluation(result.record), [values["output"]], as_json)


def show_swept(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    _show_written(result.record, values["output"] or (), views.sweep, as_json)


def show_learned(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    files = (values["output"], values["naive_output"], *(values["results"] or ()))
    _show_written(result.record, [file for file in files if file is not None], views.fewshot, as_json)


def show_followed(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    _show_written(result.record, values["output"] or (), views.barrier, as_json)


def _show_written(record: Mapping[str, Any], files: Any, view: Any, as_json: bool) -> None:
    """Print a result and the files that it was written to."""
    paths: list[Path] = list(files)
    whole = {"written": [str(file) for file in paths], **record}
    show_result(whole, view(whole), paths, as_json)


def show_report(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print which sections the page has."""
    info = {
        "written": str(values["output"]),
        "title": result.hero.title,
        "sections": [section.id for section in result.sections],
        "missing": [command.text for command in result.missing],
        "notes": list(result.notes),
    }
    names = ", ".join(section.name for section in result.sections)
    show(info, as_json, f"written to {values['output']}: {names}")
