"""What transport and merge have in common: prepare, plan, write in a workshop, tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.cli.console import Talk, results_apart
from transfusion.cli.work import Choices, files_of, report_transport, show
from transfusion.sizes import as_words

if TYPE_CHECKING:
    from transfusion.alignment import Alignment
    from transfusion.engines.means import Means
    from transfusion.model import Model
    from transfusion.transportation import AdapterOutput, Journey, Transport
    from transfusion.writer import Workshop


@dataclass(frozen=True)
class Moving:
    """One run that writes an output for B."""

    output: Path
    talk: Talk
    dry_run: bool
    as_json: bool
    force: bool
    means: Means

    def go(
        self,
        models: tuple[Model, Model],
        inputs: tuple[str | None, ...],
        via: str | None,
        choices: Choices,
        prepare: Callable[[Journey], Transport | AdapterOutput],
    ) -> None:
        """Find the way from A to B, and write what is prepared for it."""
        from transfusion.alignment import Alignment
        from transfusion.model import take_hashes
        from transfusion.transportation import Journey
        from transfusion.writer import workshop

        given = Alignment.load(via) if via is not None else None
        self._require_place(files_of(*inputs, via))
        if self.dry_run:
            self._plan(prepare(Journey.planned(*models, given, assumed=True)).plan(self.means))
            return
        with results_apart(), self.means.connected():
            with self.means.hired() as engine:
                take_hashes(*models, engine=engine)
            if given is None:  # complain about anything else before the long work
                prepare(Journey.planned(*models, hashed=True, assumed=True)).bound().require(self.means)
            with workshop(self.output, force=self.force) as shop:
                pi = given or self._aligned(models, choices, shop)
                moved = prepare(Journey.between(*models, pi))
                self._write(moved, shop)
        report_transport(moved.story(), self.output, self.as_json)

    def again(
        self,
        file: Path,
        finetuned: Sequence[str],
        base: str | None,
        onto: str | None,
        via: str | None,
    ) -> None:
        """Write once more what a story tells of, and compare; inputs may lie elsewhere by now."""
        from transfusion.inputs import read_json
        from transfusion.transportation.repeating import Rerun
        from transfusion.writer import workshop

        rerun = Rerun.of(file, finetuned=finetuned, base=base, onto=onto, via=via)
        self._require_place(files_of(*rerun.places))
        if self.dry_run:
            moved = rerun.prepare()
            self._plan(moved.plan(self.means))
            return
        if rerun.alignment is None:
            self.talk.note("note: the file of π is not there any more, so it is found again")
        with workshop(self.output, force=self.force) as shop:
            moved = rerun.prepare()
            self._write(moved, shop)
            if (shop.output / "transfusion.json").exists():
                rerun.check(read_json(shop.output / "transfusion.json")["files"])
        report_transport(moved.story(), self.output, self.as_json)
        self.talk.note(f"the same as {file} tells of, bit for bit")

    def _require_place(self, inputs: list[Path]) -> None:
        from transfusion.writer import require_writable

        single = self.output.suffix == ".safetensors"
        require_writable(self.output, force=self.force, inputs=inputs, folder=not single)

    def _aligned(self, models: tuple[Model, Model], choices: Choices, shop: Workshop) -> Alignment:
        """Align, and keep the result until the output is there: a later step may fail or be interrupted."""
        from transfusion.alignment import Alignment

        same = replace(choices, jobs=None, engine="local", address=None, memory=None)  # whatever these are
        asked = json.dumps([asdict(same), *(model.digest for model in models)], default=str)
        place = shop.keep(f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.safetensors")
        if place.exists():
            self.talk.note("note: going on with the π that an interrupted run had found")
            return Alignment.load(place)
        pi = choices.align(models, self.talk, shop.keep("journal"))
        pi.save(place, force=True)
        return pi

    def _write(self, moved: Transport | AdapterOutput, shop: Workshop) -> None:
        for note in moved.notes:
            self.talk.note(f"note: {note}")
        with self.talk.tensors(moved.plan()["tensors"]) as step:
            moved.write(shop, step, self.means)

    @property
    def _where(self) -> str:
        return "" if self.means.shared else ", in each worker"

    def _plan(self, plan: Mapping[str, int]) -> None:
        counts = ", ".join(f"{plan[what]} {what}" for what in plan if what in _COUNTED)
        text = (
            f"would write {self.output}: {counts}; read {as_words(plan['bytes_to_read'])}, write"
            f" {as_words(plan['bytes_to_write'])}, with at most {as_words(plan['memory'])} of memory for"
            f" tensors on {plan['threads']} thread{'s' * (plan['threads'] > 1)}, and"
            f" {as_words(plan['memory_in_all'])} with the program{self._where}"
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
