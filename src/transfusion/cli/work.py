"""What several verbs do: align with a bar, report a result, protect the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from transfusion.alpha import Alpha
from transfusion.architecture import Inner, Residual
from transfusion.cli.console import Talk, out, print_json, printable, results_apart
from transfusion.errors import OutputError, listing
from transfusion.methods import DEFAULT, Method, preset
from transfusion.sizes import as_words

if TYPE_CHECKING:
    import torch

    from transfusion.alignment import Alignment
    from transfusion.model import Model
    from transfusion.record import Record


@dataclass(frozen=True)
class Choices:
    """How to align, as far as the user said so."""

    method: str | None = None
    residual: Residual | None = None
    inner: Inner | None = None
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

    def align(self, models: tuple[Model, Model], talk: Talk, journal: Path | None = None) -> Alignment:
        """Align two models, with a bar; what an interrupted run has written down is taken up."""
        import torch

        from transfusion.clock import Clock
        from transfusion.matching import align

        clock = Clock()
        if journal is not None and journal.exists():
            talk.note(f"note: going on from {journal}, if it belongs to the same models and method")
        with results_apart(), talk.sweeps() as on_step:
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
        talk.time(clock)
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


def open_bases(a: str, b: str, config: Path | None, talk: Talk) -> tuple[Model, Model]:
    """Two bases of one architecture; what was assumed about them, or differs, is said aloud."""
    from transfusion.model import Model, differing_settings, require_same_shape

    models = Model.open(a, config=config), Model.open(b, config=config)
    talk.assumptions(*models)
    require_same_shape(*models)
    if differing := differing_settings(*models):
        talk.note(f"note: the two bases are configured differently: {listing(differing)}")
    return models


def open_finetune(reference: str, base: str, config: Path | None, talk: Talk) -> Model | str:
    """A fine-tune that is a model, opened; an adapter stays a reference, and says where it comes from."""
    from transfusion.adapter import Adapter, is_adapter
    from transfusion.model import Model

    if is_adapter(reference):
        talk.origin(Adapter.open(reference), base)
        return reference
    return Model.open(reference, config=config)


def files_of(*references: str | Path | None) -> list[Path]:
    """The places that hold inputs, which no output may overwrite."""
    from transfusion.references import resolve

    roots = [resolve(reference) for reference in references if reference is not None]
    inside = [path for root in roots if root.is_dir() for path in root.iterdir()]
    return [*roots, *inside]


def require_json(output: Path | None, inputs: Iterable[Path], *, force: bool) -> None:
    """Refuse, before any work is done, a place that a result cannot go to."""
    from transfusion.writer import require_writable

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


def show_plan(choices: Choices, models: tuple[Model, Model], output: Path, as_json: bool) -> None:
    """What aligning would do, and in how much memory."""
    import torch

    from transfusion.matching import planned

    plan = planned(
        *models,
        method=choices.chosen(),
        memory=choices.memory,
        engine=choices.engine,
        jobs=choices.jobs,
        dtype=as_dtype(choices.dtype) or torch.float32,
    )
    lines = [
        f"would match {plan['axes']} axes, read {as_words(plan['bytes_to_read'])} at least once and write"
        f" {output}"
    ]
    if "memory" in plan:
        whose = "this process" if choices.engine == "local" else "each worker"
        sure = "about" if choices.memory is None else "at most"
        lines.append(
            f"{whose}: {sure} {as_words(plan['memory'])} of memory: {plan['threads']} thread(s) with"
            f" {as_words(plan['memory_of_a_block'])} each (the most for {plan['most_demanding']}),"
            f" {as_words(plan['memory_of_kept_gains'])} for gains that are kept, and the program"
        )
    show({"would_write": str(output), **plan}, as_json, "\n".join(lines))


def timed(pi: Alignment, record: Record) -> Alignment:
    """The same π, which tells how long it took to find."""
    return replace(pi, provenance=replace(pi.provenance, run=record.run()))


def report_alignment(pi: Alignment, output: Path, record: Record, as_json: bool) -> None:
    story = pi.provenance
    trace = story.objective
    moved = sum(not map_.is_identity() for map_ in pi.maps.values())
    result = {
        "written": str(output),
        "method": story.method,
        **asdict(story.policy),
        "sha256": pi.digest,
        "axes": len(pi.maps),
        "axes_moved": moved,
        "sweeps": max(0, len(trace) - 1),
        "objective": list(trace),
        "assignment_gap": story.gap,
        "advice": dict(story.advice) or None,
    }
    text = f"π written to {output}: {moved} of {len(pi.maps)} axes moved"
    if trace:
        text += (
            f", objective {trace[0]:.6g} → {trace[-1]:.6g} in {len(trace) - 1} sweep{'s' * (len(trace) != 2)}"
        )
    if story.advice:
        text += f"\n{story.advice['verdict']}: {story.advice['text']}"
    show({**record.head(), **result, "run": dict(story.run)}, as_json, text)


def report_transport(story: dict[str, Any], output: Path, as_json: bool) -> None:
    alpha = Alpha.of(story["alpha"])
    lines = [f"{story['moved']} tensors moved onto {story['onto']['name']} with α = {alpha}"]
    if story["verb"] == "merge":
        names = listing([one["name"] for one in story["finetuned"]], 3)
        lines[0] += f"; {len(story['finetuned'])} fine-tunes combined by {story['how']}: {names}"
    if story.get("unchanged"):
        lines[0] += f"; {story['unchanged']} more came out as B has them"
    lines += _named("carried over from the fine-tune, where B has nothing to add to", story["carried"])
    if story.get("kept") is not None:
        kept = f"keeps at least {story['kept']:.1%} of the change of every module"
        lines.append(f"factored to rank {story['rank']}, which {kept}")
    if story.get("new_tokens"):
        lines.append(f"{story['new_tokens']} new token(s) of the fine-tune follow those of B")
    if story.get("lost_tokens"):
        lines.append(f"{story['lost_tokens']} new token(s) of the fine-tune were dropped")
    lines += _arrived(story.get("arrival") or {})
    lines += _named("left behind, because the fine-tune does not have them", story.get("dropped", ()))
    if advice := story["alignment"]["advice"]:
        lines.append(f"{advice['verdict']}: {advice['text']}")
    show({"written": str(output), **story}, as_json, "\n".join([*lines, f"written to {output}"]))


def _arrived(arrival: Mapping[str, Any]) -> list[str]:
    """How much of the change was seen in B's outputs, or why that was not looked at."""
    if "not_tried" in arrival:
        return [f"α was taken from the weights alone: {arrival['not_tried']}"]
    if not arrival:
        return []
    return [
        f"on {arrival['probes']}, the change of B's outputs has a cosine of {arrival['direction']:.2f} with"
        f" that of A's, and {arrival['size']:.2f} of its size"
    ]


def _named(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what}: {listing(names)}"] if names else []
