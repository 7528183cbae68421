"""What transport and merge have in common: prepare, plan, write in a workshop, tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.cli.console import Messages, results_apart
from transfusion.cli.shared import AlignChoices, files_of, report_transport, show
from transfusion.runtime.byte_sizes import format_bytes

if TYPE_CHECKING:
    from transfusion.alignment.alignment import Alignment
    from transfusion.checkpoint.staging import StagingFolder
    from transfusion.model.model import Model
    from transfusion.runtime.resources import Resources
    from transfusion.transportation.adapters.adapter_output import AdapterOutput
    from transfusion.transportation.dense_transport import DenseTransport
    from transfusion.transportation.transport_plan import TransportPlan


@dataclass(frozen=True)
class OutputRun:
    """One run that writes an output for B."""

    output: Path
    messages: Messages
    dry_run: bool
    as_json: bool
    force: bool
    resources: Resources

    def go(
        self,
        models: tuple[Model, Model],
        inputs: tuple[str | None, ...],
        via: str | None,
        choices: AlignChoices,
        prepare: Callable[[TransportPlan], DenseTransport | AdapterOutput],
    ) -> None:
        """Find the way from A to B, and write what is prepared for it."""
        from transfusion.alignment.alignment import Alignment
        from transfusion.checkpoint.staging import open_staging
        from transfusion.model.model import take_hashes
        from transfusion.transportation.transport_plan import TransportPlan

        given = Alignment.load(via) if via is not None else None
        self._require_place(files_of(*inputs, via))
        if self.dry_run:
            self._plan(prepare(TransportPlan.planned(*models, given, assumed=True)).plan(self.resources))
            return
        with results_apart(), self.resources.connected():
            with self.resources.opened() as engine:
                take_hashes(*models, engine=engine)
            if given is None:  # complain about anything else before the long work
                prepare(TransportPlan.planned(*models, hashed=True, assumed=True)).bound().require(
                    self.resources
                )
            with open_staging(self.output, force=self.force) as staging:
                pi = given or self._aligned(models, choices, staging)
                moved = prepare(TransportPlan.between(*models, pi))
                self._write(moved, staging)
        report_transport(moved.metadata(), self.output, self.as_json)

    def again(
        self,
        file: Path,
        finetuned: Sequence[str],
        base: str | None,
        onto: str | None,
        via: str | None,
    ) -> None:
        """Write once more what a story tells of, and compare; inputs may lie elsewhere by now."""
        from transfusion.checkpoint.staging import open_staging
        from transfusion.runtime.untrusted_files import read_json
        from transfusion.transportation.rerun import Rerun

        rerun = Rerun.of(file, finetuned=finetuned, base=base, onto=onto, via=via)
        self._require_place(files_of(*rerun.places))
        if self.dry_run:
            moved = rerun.prepare()
            self._plan(moved.plan(self.resources))
            return
        if rerun.alignment is None:
            self.messages.note("note: the file of π is not there any more, so it is found again")
        with open_staging(self.output, force=self.force) as staging:
            moved = rerun.prepare()
            self._write(moved, staging)
            if (staging.output / "transfusion.json").exists():
                rerun.check(read_json(staging.output / "transfusion.json")["files"])
        report_transport(moved.metadata(), self.output, self.as_json)
        self.messages.note(f"the same as {file} tells of, bit for bit")

    def _require_place(self, inputs: list[Path]) -> None:
        from transfusion.checkpoint.publishing import require_writable

        single = self.output.suffix == ".safetensors"
        require_writable(self.output, force=self.force, inputs=inputs, folder=not single)

    def _aligned(
        self, models: tuple[Model, Model], choices: AlignChoices, staging: StagingFolder
    ) -> Alignment:
        """Align, and keep the result until the output is there: a later step may fail or be interrupted."""
        from transfusion.alignment.alignment import Alignment

        same = replace(choices, jobs=None, engine="local", address=None, memory=None)  # whatever these are
        asked = json.dumps([asdict(same), *(model.digest for model in models)], default=str)
        place = staging.keep(f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.safetensors")
        if place.exists():
            self.messages.note("note: going on with the π that an interrupted run had found")
            return Alignment.load(place)
        pi = choices.align(models, self.messages, staging.keep("journal"))
        pi.save(place, force=True)
        return pi

    def _write(self, moved: DenseTransport | AdapterOutput, staging: StagingFolder) -> None:
        for note in moved.notes:
            self.messages.note(f"note: {note}")
        with self.messages.tensors(moved.plan()["tensors"]) as step:
            moved.write(staging, step, self.resources)

    @property
    def _where(self) -> str:
        return "" if self.resources.shared else ", in each worker"

    def _plan(self, plan: Mapping[str, int]) -> None:
        counts = ", ".join(f"{plan[what]} {what}" for what in plan if what in _COUNTED)
        text = (
            f"would write {self.output}: {counts}; read {format_bytes(plan['bytes_to_read'])}, write"
            f" {format_bytes(plan['bytes_to_write'])}, with at most {format_bytes(plan['memory'])} of memory"
            f" for tensors on {plan['threads']} thread{'s' * (plan['threads'] > 1)}, and"
            f" {format_bytes(plan['memory_in_all'])} with the program{self._where}"
        )
        show({"would_write": str(self.output), **plan}, self.as_json, text)


_COUNTED = ("tensors", "moved", "carried", "kept", "dropped")


def as_settings(**given: Any) -> dict[str, Any]:
    """What a run was asked for, as far as it was asked for anything, for its story."""
    return {
        name: str(value.resolve()) if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None and value is not False
    }


def as_numbers(text: str | None) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(word) for word in (text or "").split(",") if word.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: numbers with commas between them were expected") from error


_BESIDE_FROM = {
    *("output", "finetuned", "base", "onto", "via", "repeat", "architecture"),
    *("jobs", "engine", "address", "memory", "dry_run", "as_json", "force", "quiet", "verbose"),
}


def refuse_beside_from(context: typer.Context) -> None:
    """A story says everything itself, but for where its inputs lie now."""
    named = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    said = [
        named[name]
        for name in context.params
        if name not in _BESIDE_FROM and str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    if said:
        raise typer.BadParameter(f"--from says already what {', '.join(said)} is")
