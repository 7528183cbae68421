"""The verb ``transport``, and the output that it has in common with ``merge``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli.console import Messages, results_apart, show
from transfusion.cli.option_checks import given, missing
from transfusion.cli.options import (
    Anyway,
    ArchitectureFile,
    Config,
    DryRun,
    Force,
    From,
    Json,
    MaybeBase,
    MaybeOnto,
    NewTokensOption,
    OtherPartsOption,
    Output,
    Quiet,
    StoredDtype,
    TrustBase,
    Verbose,
    Via,
    VocabularyShare,
    computing,
)
from transfusion.cli.search_options import CalibrateOption, Seed, aligning
from transfusion.errors import listing
from transfusion.runtime.byte_sizes import format_bytes

if TYPE_CHECKING:
    from transfusion.runtime.resources import Resources
    from transfusion.transport.output import Output as MovedOutput


@given(aligning=aligning, resources=computing)
def transport(
    *,
    context: typer.Context,
    output: Output,
    resources: Resources,
    finetuned: Annotated[
        str | None,
        typer.Argument(
            metavar="FINETUNED",
            show_default=False,
            help="The fine-tune of A: a model, a PEFT adapter, or a LoRA file.",
        ),
    ] = None,
    base: MaybeBase = None,
    onto: MaybeOnto = None,
    via: Via = None,
    alpha: Annotated[
        str | None,
        typer.Option(
            "--alpha",
            show_default="1; less where a functional π would do harm",
            help="How much of the change to add: a number, a file with one number per layer, or auto: as much"
            " as changes B's outputs on synthetic inputs the way the fine-tune changed A's.",
        ),
    ] = None,
    aligning: dict[str, Any],
    keep_support: Annotated[
        float | None,
        typer.Option(
            "--keep-support",
            show_default="no bound",
            help="Protect what B could do before: take a smaller α, so that B's outputs on synthetic inputs"
            " move by no more than this share of their own spread. With --refine: the weight of keeping B's"
            " outputs, beside the fine-tune's (0.3 by default).",
        ),
    ] = None,
    refine: Annotated[
        bool,
        typer.Option(
            "--refine",
            help="Then train the result to answer like the fine-tune, on synthetic inputs and without data;"
            " of an adapter, only the adapter.",
        ),
    ] = False,
    refine_steps: Annotated[
        int | None,
        typer.Option(
            "--refine-steps", min=1, show_default="600", help="The largest number of training steps."
        ),
    ] = None,
    refine_rank: Annotated[
        int | None,
        typer.Option(
            "--refine-rank",
            min=1,
            show_default="all weights",
            help="Leave B untouched, train a LoRA of this rank, and write it as an adapter.",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--merge", help="Of an adapter: write the whole model, with the adapter in it.")
    ] = False,
    repeat: From = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
    calibrate: CalibrateOption = None,
    config: Config = None,
    architecture: ArchitectureFile = None,
    new_tokens: NewTokensOption = "refuse",
    other_parts: OtherPartsOption = "refuse",
    vocabulary_share: VocabularyShare = None,
    anyway: Anyway = False,
    trust_base: TrustBase = False,
    dtype: StoredDtype = None,
) -> None:
    """Write B + α·π(τ): the fine-tune of A, moved onto B. An adapter stays an adapter."""
    from transfusion.transport.transport_run import transport as run

    common: dict[str, Any] = {"base": base, "onto": onto, "via": via, "output": output, "force": force}
    common |= {"dry_run": dry_run, "resources": resources}
    common |= {"progress": Messages(quiet=quiet, verbose=verbose)}
    if repeat is not None:
        show_rerun(context, repeat, [finetuned] if finetuned else [], common, as_json)
        return
    if finetuned is None or base is None or onto is None:
        raise missing({"FINETUNED": finetuned, "--base": base, "--onto": onto})
    with results_apart():
        moved = run(
            finetuned,
            alpha=alpha,
            keep_support=keep_support,
            refine=refine,
            refine_steps=refine_steps,
            refine_rank=refine_rank,
            calibrate=calibrate,
            dtype=dtype,
            full=full,
            new_tokens=new_tokens,
            other_parts=other_parts,
            vocabulary_share=vocabulary_share,
            anyway=anyway,
            trust_base=trust_base,
            seed=seed,
            config=config,
            architecture=architecture,
            **common,
            **aligning,
        )
    show_output(moved, output, dry_run, as_json)


_BESIDE_FROM = {
    *("output", "finetuned", "base", "onto", "via", "repeat", "architecture"),
    *("jobs", "engine", "address", "memory", "device", "dry_run", "as_json", "force", "quiet", "verbose"),
}


def show_rerun(
    context: typer.Context, file: Path, finetuned: list[str], common: Mapping[str, Any], as_json: bool
) -> None:
    """Repeat a recorded run, and print its output; refuse options that the record decides."""
    from transfusion.transport.rerun import rerun

    named = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    decided = [
        named[name]
        for name in context.params
        if name not in _BESIDE_FROM and str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    if decided:
        raise typer.BadParameter(f"--from decides {', '.join(decided)}; leave it out")
    with results_apart():
        moved = rerun(file, finetuned=finetuned, **common)
    show_output(moved, common["output"], common["dry_run"], as_json)


def show_output(moved: MovedOutput, output: Path, dry_run: bool, as_json: bool) -> None:
    """Print what was written; or, in a dry run, what would be."""
    if dry_run:
        _show_plan(moved.plan(), output, as_json)
        return
    metadata = moved.metadata()
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
