"""What several verbs do: align with a bar, report a result, protect the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.architecture.architecture import InnerPolicy, Residual
from transfusion.cli.console import Messages, out, print_json, printable, results_apart
from transfusion.errors import OutputError, listing
from transfusion.matching.methods import DEFAULT, Method, preset
from transfusion.runtime.byte_sizes import format_bytes
from transfusion.transportation.alpha import Alpha

if TYPE_CHECKING:
    import torch

    from transfusion.alignment.alignment import Alignment
    from transfusion.model.model import Model
    from transfusion.runtime.run_record import RunRecord


@dataclass(frozen=True)
class AlignChoices:
    """How to align, as far as the user said so."""

    method: str | None = None
    residual: Residual | None = None
    inner: InnerPolicy | None = None
    dtype: str | None = None
    device: str = "cpu"
    seed: int = 0
    jobs: int | None = None
    search: Mapping[str, Any] = field(default_factory=dict)
    """Further choices about the search, by the names that a method has for them."""
    advice: bool = True
    engine: str = "local"
    address: str | None = None
    memory: int | None = None

    def refuse_beside_via(self) -> None:
        """A π that exists already cannot be aligned otherwise."""
        given = {"--method": self.method, "--residual": self.residual, "--inner": self.inner}
        said = [flag for flag, value in given.items() if value is not None]
        if said:
            raise typer.BadParameter(f"{', '.join(said)} says how to align, and --via is aligned already")

    def chosen(self) -> Method:
        """The method, as it was asked for."""
        method = preset(self.method or DEFAULT).changed(**self.search)
        return method.changed(residual=self.residual, inner=self.inner)

    def align(
        self, models: tuple[Model, Model], messages: Messages, journal: Path | None = None
    ) -> Alignment:
        """Align two models, with a bar; what an interrupted run has written down is taken up."""
        import torch

        from transfusion.matching.alignment_run import align
        from transfusion.runtime.clock import Clock

        clock = Clock()
        if journal is not None and journal.exists():
            messages.note(f"note: going on from {journal}, if it belongs to the same models and method")
        with results_apart(), messages.sweeps() as on_step:
            pi = align(
                *models,
                method=self.chosen(),
                dtype=as_dtype(self.dtype) or torch.float32,
                device=self.device,
                seed=self.seed,
                jobs=self.jobs,
                memory=self.memory,
                engine=self.engine,
                address=self.address,
                advice=self.advice,
                journal=journal,
                clock=clock,
                on_step=on_step,
            )
        messages.time(clock)
        return pi


def calibrated(
    calibrate: Path | None, method: str | None, via: str | None, used: bool = False, also: str = ""
) -> dict[str, Any]:
    """Inputs of the user's own, for a method that runs models; refused where nothing would look at them."""
    runs = via is None and preset(method or DEFAULT).functional is not None
    if calibrate is not None and not (runs or used):
        raise typer.BadParameter(f"--calibrate is for aligning by --method functional or auto{also}")
    return {"calibrate": as_place(calibrate)} if runs and calibrate is not None else {}


def as_place(path: Path | None) -> str | None:
    """Where something is, wherever the same is asked for again."""
    return None if path is None else str(path.resolve())


def as_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)


def open_bases(a: str, b: str, config: Path | None, messages: Messages) -> tuple[Model, Model]:
    """Two bases of one architecture; what was assumed about them, or differs, is said aloud."""
    from transfusion.model.model import Model, differing_settings, require_same_shape

    models = Model.open(a, config=config), Model.open(b, config=config)
    messages.assumptions(*models)
    require_same_shape(*models)
    if differing := differing_settings(*models):
        messages.note(f"note: the two bases are configured differently: {listing(differing)}")
    return models


def open_finetune(reference: str, base: str, config: Path | None, messages: Messages) -> Model | str:
    """A fine-tune that is a model, opened; an adapter stays a reference, and says where it comes from."""
    from transfusion.model.model import Model
    from transfusion.transportation.adapters.adapter import Adapter, is_adapter

    if is_adapter(reference):
        messages.origin(Adapter.open(reference), base)
        return reference
    return Model.open(reference, config=config)


def files_of(*references: str | Path | None) -> list[Path]:
    """The places that hold inputs, which no output may overwrite."""
    from transfusion.checkpoint.references import resolve

    roots = [resolve(reference) for reference in references if reference is not None]
    inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
    return [*roots, *inside]


def require_json(output: Path | None, inputs: Iterable[Path], *, force: bool) -> None:
    """Refuse, before any work is done, a place that a result cannot go to."""
    from transfusion.checkpoint.publishing import require_writable

    if output is None:
        return
    if output.suffix != ".json":
        raise OutputError(f"{output}: not a file of JSON", hint="end the name in .json")
    require_writable(output, force=force, inputs=inputs, folder=False)


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    """A result, for people or for programs."""
    if as_json:
        print_json(result)
    else:
        out.print(printable(text), markup=False)


def show_plan(choices: AlignChoices, models: tuple[Model, Model], output: Path, as_json: bool) -> None:
    """What aligning would do, and in how much memory."""
    import torch

    from transfusion.matching.search_memory import plan_memory

    plan = plan_memory(
        *models,
        method=choices.chosen(),
        memory=choices.memory,
        engine=choices.engine,
        jobs=choices.jobs,
        dtype=as_dtype(choices.dtype) or torch.float32,
    )
    lines = [
        f"would match {plan['axes']} axes, read {format_bytes(plan['bytes_to_read'])} at least once and write"
        f" {output}"
    ]
    if "memory" in plan:
        whose = "this process" if choices.engine == "local" else "each worker"
        sure = "about" if choices.memory is None else "at most"
        lines.append(
            f"{whose}: {sure} {format_bytes(plan['memory'])} of memory: {plan['threads']} thread(s) with"
            f" {format_bytes(plan['memory_of_a_block'])} each (the most for {plan['most_demanding']}),"
            f" {format_bytes(plan['memory_of_kept_gains'])} for gains that are kept, and the program"
        )
    show({"would_write": str(output), **plan}, as_json, "\n".join(lines))


def timed(pi: Alignment, record: RunRecord) -> Alignment:
    """The same π, which tells how long it took to find."""
    return replace(pi, provenance=replace(pi.provenance, run=record.run()))


def report_alignment(pi: Alignment, output: Path, record: RunRecord, as_json: bool) -> None:
    metadata = pi.provenance
    trace = metadata.objective
    moved = sum(not map_.is_identity() for map_ in pi.maps.values())
    result = {
        "written": str(output),
        "method": metadata.method,
        **asdict(metadata.policy),
        "sha256": pi.digest,
        "axes": len(pi.maps),
        "axes_moved": moved,
        "sweeps": max(0, len(trace) - 1),
        "objective": list(trace),
        "assignment_gap": metadata.gap,
        "advice": dict(metadata.advice) or None,
    }
    text = f"π written to {output}: {moved} of {len(pi.maps)} axes moved"
    if trace:
        text += (
            f", objective {trace[0]:.6g} → {trace[-1]:.6g} in {len(trace) - 1} sweep{'s' * (len(trace) != 2)}"
        )
    if metadata.advice:
        text += f"\n{metadata.advice['verdict']}: {metadata.advice['text']}"
    show({**record.head(), **result, "run": dict(metadata.run)}, as_json, text)


def report_transport(metadata: dict[str, Any], output: Path, as_json: bool) -> None:
    alpha = Alpha.of(metadata["alpha"])
    lines = [f"{metadata['moved']} tensors moved onto {metadata['onto']['name']} with α = {alpha}"]
    if metadata["verb"] == "merge":
        names = listing([one["name"] for one in metadata["finetuned"]], 3)
        lines[0] += f"; {len(metadata['finetuned'])} fine-tunes combined by {metadata['how']}: {names}"
    if metadata.get("unchanged"):
        lines[0] += f"; {metadata['unchanged']} more came out as B has them"
    lines += _named("carried over from the fine-tune, where B has nothing to add to", metadata["carried"])
    if metadata.get("kept") is not None:
        kept = f"keeps at least {metadata['kept']:.1%} of the change of every module"
        lines.append(f"factored to rank {metadata['rank']}, which {kept}")
    if metadata.get("new_tokens"):
        lines.append(f"{metadata['new_tokens']} new token(s) of the fine-tune follow those of B")
    if metadata.get("lost_tokens"):
        lines.append(f"{metadata['lost_tokens']} new token(s) of the fine-tune were dropped")
    lines += _arrived(metadata.get("output_shift") or {})
    lines += _named("left behind, because the fine-tune does not have them", metadata.get("dropped", ()))
    if advice := metadata["alignment"]["advice"]:
        lines.append(f"{advice['verdict']}: {advice['text']}")
    show({"written": str(output), **metadata}, as_json, "\n".join([*lines, f"written to {output}"]))


def _arrived(output_shift: Mapping[str, Any]) -> list[str]:
    """How much of the change was seen in B's outputs, or why that was not looked at."""
    if "not_tried" in output_shift:
        return [f"α was taken from the weights alone: {output_shift['not_tried']}"]
    if not output_shift:
        return []
    cosine, size = output_shift["direction"], output_shift["size"]
    return [
        f"on {output_shift['probes']}, the change of B's outputs has a cosine of {cosine:.2f} with that of"
        f" A's, and {size:.2f} of its size"
    ]


def _named(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what}: {listing(names)}"] if names else []
