"""What the verbs ``transport`` and ``merge`` print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transfusion.cli.console import show
from transfusion.errors import listing
from transfusion.runtime.byte_sizes import format_bytes


def show_moved(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    """Print what was written; or, in a dry run, what would be."""
    output = values["output"]
    if values["dry_run"]:
        _show_plan(result.plan(), output, as_json)
        return
    metadata = result.metadata()
    show(
        {"written": str(output), **metadata}, as_json, "\n".join([*_lines(metadata), f"written to {output}"])
    )


_COUNTED = ("tensors", "moved", "carried", "kept", "dropped")


def _show_plan(plan: Mapping[str, int], output: Path, as_json: bool) -> None:
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
