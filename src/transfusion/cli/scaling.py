"""The verbs that choose α by examples: sweep, and fewshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfusion.cli.asking import (
    BatchOption,
    ClassesOption,
    ComputedIn,
    DataOption,
    HeadOption,
    LabelOption,
    LimitOption,
    MetricOption,
    SplitOption,
    SupportClasses,
    SupportOption,
    TextOption,
    as_data,
    existing,
)
from transfusion.cli.console import Talk, command, out, print_json
from transfusion.cli.options import (
    ArchitectureFile,
    CalibrateOption,
    Config,
    Force,
    InnerOption,
    Jobs,
    Json,
    MethodOption,
    NewTokensOption,
    Quiet,
    ResidualOption,
    Seed,
    TrustBase,
    Vias,
)
from transfusion.cli.work import Choices, as_dtype, calibrated, files_of, open_bases, open_finetune

if TYPE_CHECKING:
    from transfusion.alignment import Alignment
    from transfusion.model import Model

Finetuned = Annotated[str, typer.Argument(show_default=False, help="A model, or a PEFT adapter.")]
BaseOption = Annotated[
    str, typer.Option("--base", show_default=False, help="A: the base that was fine-tuned.")
]
OntoOption = Annotated[str, typer.Option("--onto", show_default=False, help="B: the base to move it onto.")]
Naive = Annotated[bool, typer.Option("--naive/--no-naive", help="Also B + α·τ, with nothing moved.")]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        show_default=False,
        help="Where to write: a figure (.png, .svg, .pdf) or .json; may be given several times.",
    ),
]


def sweep(
    finetuned: Finetuned,
    base: BaseOption,
    onto: OntoOption,
    data: DataOption,
    support: SupportOption = None,
    via: Vias = None,
    alphas: Annotated[
        str | None,
        typer.Option(
            show_default="12 values from 0.01 to 2, 1 among them",
            help="first:last:count, or values with commas between them.",
        ),
    ] = None,
    naive: Naive = True,
    output: Files = None,
    classes: ClassesOption = None,
    support_classes: SupportClasses = None,
    head: HeadOption = None,
    split: SplitOption = None,
    text: TextOption = None,
    label: LabelOption = None,
    metric: MetricOption = None,
    limit: LimitOption = None,
    batch: BatchOption = None,
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    calibrate: CalibrateOption = None,
    new_tokens: NewTokensOption = "refuse",
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: ComputedIn = "float32",
    seed: Seed = 0,
    jobs: Jobs = None,
    trust_base: TrustBase = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Measure B + α·π(τ) and B + α·τ for many α, without writing any model, and draw the gains over B."""
    from transfusion.cli.gains import of_sweep
    from transfusion.cli.ways import require_suffix
    from transfusion.record import Record
    from transfusion.scaling import ALPHAS
    from transfusion.scaling import sweep as measure

    record, talk = Record("sweep", command()), Talk(quiet=quiet, verbose=False)
    values = as_alphas(alphas, ALPHAS)
    for file in output or ():
        require_suffix(file)
    inputs = files_of(*existing(finetuned, base, onto, data, support, *(via or ())))
    _require_places(output or [], inputs, force)
    job = _Job(finetuned, base, onto, config, talk, jobs)
    ways = job.alignments(via or [], Choices(method, residual, inner, None, "cpu", seed, jobs), calibrate)
    shared = {"text": text, "label": label, "metric": metric, "limit": limit, "split": split}
    with talk.points(len(values) * (len(ways) + naive)) as step:
        found = measure(
            job.tuned,
            base=job.bases[0],
            onto=job.bases[1],
            data=as_data(data, classes=classes, head=head, **shared),
            support=as_data(support, classes=support_classes, **shared) if support else None,
            via=ways,
            alphas=values,
            naive=naive,
            batch=batch,
            dtype=as_dtype(dtype),  # type: ignore[arg-type]
            trust_base=trust_base,
            new_tokens=new_tokens,
            on_point=lambda name, point: step(f"{name} · α = {point.alpha:.3g} · {point.task_gain:+.3g}"),
        )
    result = record.of(found.story())
    for file in output or ():
        _publish(file, result, "draw_sweep", force)
    _tell(result, of_sweep(result), output or [], as_json)


def fewshot(
    finetuned: Finetuned,
    base: BaseOption,
    onto: OntoOption,
    data: DataOption,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", show_default=False, help="The α file of π(τ), for 'transport --alpha'."
        ),
    ],
    test: Annotated[
        str | None,
        typer.Option(
            show_default="what was not drawn",
            help="Examples to measure on; what was drawn for training is left out.",
            rich_help_panel="The data",
        ),
    ] = None,
    via: Annotated[
        str | None, typer.Option(show_default=False, help="A file of π; without it, align first.")
    ] = None,
    shots: Annotated[int, typer.Option(min=1, help="Examples of every class; of texts, all texts.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="How often all of them are looked at.")] = 40,
    rate: Annotated[float, typer.Option(help="How far Adam moves the coefficients at a time.")] = 0.05,
    start: Annotated[float, typer.Option(min=0, help="Where the coefficients begin.")] = 1.0,
    naive: Naive = True,
    naive_output: Annotated[
        Path | None, typer.Option(show_default=False, help="The α file of τ as it is.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            show_default=False,
            help="Everything that was measured, as .json, or drawn (.png, .svg, .pdf); may be given several"
            " times.",
        ),
    ] = None,
    classes: ClassesOption = None,
    head: HeadOption = None,
    split: SplitOption = None,
    test_split: Annotated[
        str | None,
        typer.Option(show_default="as --split", help="The same for --test.", rich_help_panel="The data"),
    ] = None,
    text: TextOption = None,
    label: LabelOption = None,
    metric: MetricOption = None,
    limit: LimitOption = None,
    batch: BatchOption = None,
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    calibrate: CalibrateOption = None,
    new_tokens: NewTokensOption = "refuse",
    config: Config = None,
    architecture: ArchitectureFile = None,
    dtype: ComputedIn = "float32",
    seed: Seed = 0,
    jobs: Jobs = None,
    trust_base: TrustBase = False,
    as_json: Json = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Learn one α for every layer from a few examples of every class, and write it for 'transport --alpha'."""
    from transfusion.cli.gains import of_fewshot
    from transfusion.cli.ways import require_suffix
    from transfusion.record import Record
    from transfusion.scaling import fewshot as learn
    from transfusion.writer import publish_file, write_json

    record, talk = Record("fewshot", command()), Talk(quiet=quiet, verbose=False)
    if naive_output is not None and not naive:
        raise typer.BadParameter("--naive-output needs what --no-naive leaves out")
    for file in results or ():
        require_suffix(file)
    places = [output, *([naive_output] if naive_output else []), *(results or [])]
    inputs = files_of(*existing(finetuned, base, onto, data, test, via))
    _require_places(places, inputs, force)
    job = _Job(finetuned, base, onto, config, talk, jobs)
    choices = Choices(method, residual, inner, None, "cpu", seed, jobs)
    ways = job.alignments([via] if via else [], choices, calibrate)
    shared = {"text": text, "label": label, "metric": metric, "limit": limit}
    shared |= {"classes": classes, "head": head}
    with talk.points((epochs + 1) * (1 + naive)) as step:
        found = learn(
            job.tuned,
            base=job.bases[0],
            onto=job.bases[1],
            data=as_data(data, split=split, **shared),
            test=as_data(test or data, split=test_split or split, **shared),
            via=ways[0],
            shots=shots,
            epochs=epochs,
            rate=rate,
            start=start,
            naive=naive,
            seed=seed,
            batch=batch,
            dtype=as_dtype(dtype),  # type: ignore[arg-type]
            trust_base=trust_base,
            new_tokens=new_tokens,
            on_epoch=lambda name, epoch, loss: step(f"{name} · epoch {epoch} · loss {loss:.4g}"),
        )
    result = record.of(found.story())
    for file, curve in ((output, found.moved), (naive_output, found.naive)):
        if file is not None and curve is not None:
            made = curve.learned.coefficients
            publish_file(file, lambda staged, made=made: write_json(staged, made), force=force)  # type: ignore[misc]
    for file in results or ():
        _publish(file, result, "draw_fewshot", force)
    _tell(result, of_fewshot(result), places, as_json)


class _Job:
    """The three models, opened."""

    def __init__(
        self, finetuned: str, base: str, onto: str, config: Path | None, talk: Talk, jobs: int | None
    ) -> None:
        import torch

        if jobs:
            torch.set_num_threads(jobs)
        self.talk = talk
        self.bases: tuple[Model, Model] = open_bases(base, onto, config, talk)
        self.tuned = open_finetune(finetuned, base, config, talk)

    def alignments(self, via: Sequence[str], choices: Choices, calibrate: Path | None) -> list[Alignment]:
        """The given π; or a new one, with a bar."""
        from dataclasses import replace

        from transfusion.alignment import Alignment

        shown = calibrated(calibrate, choices.method, via[0] if via else None)
        if not via:
            return [replace(choices, search=shown).align(self.bases, self.talk)]
        choices.refuse_beside_via()
        return [Alignment.load(file) for file in via]


def as_alphas(text: str | None, usual: Sequence[float]) -> list[float]:
    """first:last:count in equal steps, or values with commas between them."""
    if text is None:
        return list(usual)
    try:
        if ":" not in text:
            return [float(word) for word in text.split(",") if word.strip()]
        first, last, count = text.split(":")
        low, high, steps = float(first), float(last), int(count)
        if steps < 2:
            raise ValueError
        return [round(low + (high - low) * step / (steps - 1), 6) for step in range(steps)]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r}: first:last:count with a count of 2 or more, or values with commas, were expected"
        ) from error


def _require_places(outputs: Sequence[Path], inputs: list[Path], force: bool) -> None:
    from transfusion.writer import require_writable

    if len({file.resolve() for file in outputs}) < len(outputs):
        raise typer.BadParameter("two outputs have the same name")
    for file in outputs:
        require_writable(file, force=force, inputs=inputs, folder=False)


def _publish(file: Path, result: dict[str, Any], figure: str, force: bool) -> None:
    from transfusion import figures
    from transfusion.writer import publish_file, write_json

    if file.suffix == ".json":
        publish_file(file, lambda staged: write_json(staged, result), force=force)
        return
    draw = getattr(figures, figure)
    publish_file(file, lambda staged: draw(result, staged, file.suffix.removeprefix(".")), force=force)


def _tell(result: dict[str, Any], view: Any, places: Sequence[Path], as_json: bool) -> None:
    if as_json:
        print_json({"written": [str(place) for place in places], **result})
        return
    out.print(view)
    for place in places:
        out.print(f"written to {place}", markup=False)
