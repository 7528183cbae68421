"""What sweep and fewshot have in common: three models, alignments, and results in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import exists, expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.cli.console import Messages, out, print_json
from transfusion.cli.options import Device, InnerOption, Jobs, MethodOption, ResidualOption, Seed
from transfusion.cli.shared import AlignChoices, calibrated, files_of, open_bases, open_finetune

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment
    from transfusion.model.model import Model


MOST = 1000
"""How many α may be asked for as first:last:count."""


def choices(
    method: MethodOption = None,
    residual: ResidualOption = None,
    inner: InnerOption = None,
    device: Device = "cpu",
    seed: Seed = 0,
    jobs: Jobs = None,
) -> AlignChoices:
    """How to align, where no π is given, and where to compute."""
    return AlignChoices(method, residual, inner, None, device, seed, jobs)


class AlphaRun:
    """The fine-tune and the two bases, opened."""

    def __init__(
        self,
        models: tuple[str, str, str],
        *,
        config: Path | None,
        jobs: int | None,
        messages: Messages,
    ) -> None:
        """The fine-tune, A and B, in this order."""
        use_threads(jobs)
        finetuned, base, onto = models
        self.messages = messages
        self.bases: tuple[Model, Model] = open_bases(base, onto, config, messages)
        self.tuned = open_finetune(finetuned, base, config, messages)

    def alignments(
        self, via: Sequence[str], choices: AlignChoices, calibrate: Path | None
    ) -> list[Alignment]:
        """The given π; or a new one, with a bar."""
        from transfusion.alignment.alignment import Alignment

        shown = calibrated(calibrate, choices.method, via[0] if via else None)
        if not via:
            return [replace(choices, search=shown).align(self.bases, self.messages)]
        choices.refuse_beside_via()
        return [Alignment.load(file) for file in via]


def use_threads(jobs: int | None) -> None:
    """As many threads as the user said."""
    if jobs:
        import torch

        torch.set_num_threads(jobs)


def as_alphas(text: str | None, usual: Sequence[float]) -> list[float]:
    """first:last:count in equal steps, or values with commas between them."""
    if text is None:
        return list(usual)
    try:
        if ":" not in text:
            return [float(word) for word in text.split(",") if word.strip()]
        first, last, count = text.split(":")
        low, high, steps = float(first), float(last), int(count)
        if not 2 <= steps <= MOST:
            raise ValueError
        return [round(low + (high - low) * step / (steps - 1), 6) for step in range(steps)]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r}: first:last:count with a count from 2 to {MOST}, or values with commas, were expected"
        ) from error


def require_places(outputs: Sequence[Path], inputs: Sequence[str | None], *, force: bool) -> None:
    """Refuse, before any work is done, places that cannot be written or hold an input."""
    from transfusion.checkpoint.publishing import require_writable

    if len({file.resolve() for file in outputs}) < len(outputs):
        raise typer.BadParameter("two outputs have the same name")
    for file in outputs:
        require_writable(file, force=force, inputs=places_of(*inputs), folder=False)


def places_of(*references: str | None) -> list[Path]:
    """The places on this machine that hold inputs; data of the hub has none yet."""
    return files_of(*(one for one in references if one is not None and exists(expanduser(one))))


def publish(file: Path, result: Mapping[str, Any], figure: str = "", *, force: bool) -> None:
    """Write a result as JSON, or as the figure of this name where the file is to be one."""
    from transfusion.checkpoint.publishing import publish_file, write_json

    if not figure or file.suffix == ".json":
        publish_file(file, lambda staged: write_json(staged, dict(result)), force=force)
        return
    from transfusion.reporting.charts import result_figures

    draw = getattr(result_figures, figure)
    publish_file(file, lambda staged: draw(result, staged, file.suffix.removeprefix(".")), force=force)


def tell(result: dict[str, Any], view: Any, places: Sequence[Path], as_json: bool) -> None:
    """A result for people, or for programs."""
    if as_json:
        print_json({"written": [str(place) for place in places], **result})
        return
    out.print(view)
    for place in places:
        out.print(f"written to {place}", markup=False)
