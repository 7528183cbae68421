"""What the verbs print: lines for people, or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transfusion import __version__
from transfusion.cli.console import in_options, out, print_json, show
from transfusion.errors import listing
from transfusion.runtime.resources import format_bytes


def show_align(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print the verdict, then what moved, and the objective with details; or what would be done."""
    from transfusion.matching.advice import describe_drift
    from transfusion.runtime.run_record import COMMAND

    output = str(values["output"])
    if values["dry_run"]:
        what = (
            f"would match {result['axes']} axes, read {format_bytes(result['bytes_to_read'])} at least once"
        )
        show({"would_write": output, **result}, as_json, f"{what} and write {output}")
        return
    metadata = result.provenance
    trace, advice, moved = metadata.objective, metadata.advice, result.moved_axes
    sweeps = max(0, len(trace) - 1)
    info = {
        "transfusion": __version__,
        "verb": "align",
        "command": COMMAND.get(),
        "written": output,
        "method": metadata.method,
        **asdict(metadata.policy),
        "blake3": result.digest,
        "axes": len(result.maps),
        "axes_moved": moved,
        "sweeps": sweeps,
        "objective": list(trace),
        "assignment_gap": metadata.gap,
        "advice": dict(advice) or None,
        **({"vocabulary": dict(metadata.vocabulary)} if metadata.vocabulary else {}),
        "run": dict(metadata.run),
    }
    lines = [f"{advice['verdict']}: {advice['text']}"] if advice else []
    if instead := advice.get("instead"):
        lines.append(f"better: {in_options(instead)}")
    if drift := advice.get("drift"):
        lines.append(describe_drift(drift))
    lines.append(f"π written to {output}: {moved} of {len(result.maps)} axes moved")
    if trace and values["verbose"]:
        lines.append(f"objective {trace[0]:.6g} → {trace[-1]:.6g} in {sweeps} sweep{'s' * (sweeps != 1)}")
    show(info, as_json, "\n".join(lines))


# ── transport and merge ──────────────────────────────────────────────────────────────────────


def show_moved(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print what was written; or, in a dry run, what would be."""
    from transfusion.transport.outcome import outcome_of

    output = str(values["output"])
    if values["dry_run"]:
        plan = result.plan()
        parts = ("tensors", "moved", "carried", "kept", "dropped")
        counts = ", ".join(f"{count} {what}" for what, count in plan.items() if what in parts)
        read, write = (format_bytes(plan[f"bytes_to_{what}"]) for what in ("read", "write"))
        text = f"would write {output}: {counts}; read {read}, write {write}"
        if not any(values.get(name) for name in ("via", "method", "refine", "repeat", "force_unrelated")):
            text += "; A and B are compared first, which was not done yet and may stop it"
        if "seconds_to_learn" in plan:
            text += "\n" + _expected(plan)
        show({"would_write": output, **plan}, as_json, text)
        return
    metadata = result.metadata()
    ended, places = outcome_of(metadata, output), {"written": output}
    lines = [*_lines(metadata), f"written to {output}"]
    if result.uploaded is not None:
        places["uploaded"] = result.uploaded
        lines.append(f"uploaded to {result.uploaded}")
    lines += [": ".join(row) for row in ended.rows()]
    show({**places, "outcome": asdict(ended), **metadata}, as_json, "\n".join(lines))


def _expected(plan: Mapping[str, int]) -> str:
    """Return what a refinement is expected to take."""
    ask, learn, disk = (format_bytes(plan[name]) for name in ("memory_to_ask", "memory_to_learn", "disk"))
    minutes = [max(1, round(plan[f"seconds_to_{phase}"] / 60)) for phase in ("ask", "learn")]
    asking = f"ask: {ask} of memory, about {minutes[0]} min; " if plan["seconds_to_ask"] else ""
    return (
        f"refinement, {asking}learn: {learn}, about {minutes[1]} min; {plan['tokens_to_write']:,}"
        f" tokens are written, and answers take up to {disk} until the end"
    )


def _lines(metadata: Mapping[str, Any]) -> list[str]:
    """Return the metadata of an output, line by line; last the verdict on π, if π is used and it fits."""
    from transfusion.matching.advice import Verdict
    from transfusion.model.vocabulary_map import describe_vocabulary
    from transfusion.transport.adapters.drift import describe_adapter_drift
    from transfusion.transport.alpha import Alpha
    from transfusion.transport.refinement.settings import BASE, describe_refinement

    moved, onto = metadata["moved"], metadata["onto"]["name"]
    from_b = (metadata.get("refinement") or {}).get("start") == BASE
    if metadata.get("fits_as_it_is"):
        first = f"the fine-tune fits {onto} as it is: all of its {moved} tensors are unchanged, with α = 1"
    elif from_b:
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
    lines += describe_adapter_drift(metadata["drift"]) if metadata.get("drift") and not from_b else []
    lines += [text] if (text := describe_refinement(metadata.get("refinement"))) else []
    lines += _named("left out of B, because the fine-tune does not have them", metadata.get("dropped", ()))
    lines += _named("not moved, because B has no counterpart", metadata.get("left_out", ()))
    if (advice := metadata["alignment"]["advice"]) and advice["verdict"] != Verdict.DOUBT and not from_b:
        lines.append(f"{advice['verdict']}: {advice['text']}")
    return lines


def _shift(shift: Mapping[str, Any], *, refinable: bool) -> list[str]:
    """How much of the change was measured in B's outputs, or why it was not."""
    if "not_tried" in shift:
        return [f"α was taken from the weights alone: {shift['not_tried']}"]
    lines = []
    if lowered := shift.get("lowered"):
        lines.append(
            f"α was lowered from {lowered['alpha']:g}: there, B's outputs would move by"
            f" {lowered['reach']:.2f} of their own spread, and in another direction than A's (cosine"
            f" {lowered['direction']:.2f})" + ("; --refine brings more of the fine-tune" if refinable else "")
        )
    if shift:
        lines.append(
            f"with this α, on {shift['probes']}, the change of B's outputs has a cosine of"
            f" {shift['direction']:.2f} with the change of A's, and is {shift['size']:.2f} times as large"
        )
    return lines


def _named(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what}: {listing(names)}"] if names else []


# ── other verbs ──────────────────────────────────────────────────────────────────────────────


def show_applied(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print where π(A) is."""
    written = str(values["output"])
    show({"written": written}, as_json, f"π(A) written to {written}")


def show_asked(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print how many texts or latents were answered."""
    info = {"written": str(values["output"]), **result.about}
    show(info, as_json, f"{result.__rich__()}; written to {values['output']}")


def show_measured(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print the table of `evaluate`, `sweep`, `fewshot` or `barrier`, and the files that have it."""
    record, verb = result.record, result.record["verb"]
    files: list[Path] = []
    for given in (values["output"], values.get("naive_output"), values.get("results")):
        files += given if isinstance(given, list) else [given] if given is not None else []
    if as_json:
        written = {} if verb == "evaluate" else {"written": [str(file) for file in files]}
        print_json({**written, **record})
        return
    out.print(result)
    for file in files:
        out.print(f"written to {file}", markup=False)


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
