"""Reports: a run and its results, as one page of HTML.

`results` reads the run, its results and π; `measures` computes numbers from π and the models, if they still
exist. `sections` makes the sections of both, with charts from `charts`. This module adds the page's head
and the commands.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from transfusion import __version__
from transfusion.alignment.alignment import Alignment
from transfusion.files.publishing import publish_file, require_writable, write_text
from transfusion.matching.methods import WITH_TRAINING
from transfusion.report import sections as make
from transfusion.report.charts import draw_strands
from transfusion.report.formats import Evaluation, ScoredModel, Scores, Sweep, SweepCurve
from transfusion.report.measures import (
    Bases,
    Quality,
    group_changes,
    head_panels,
    measure_quality,
    require_ceiling,
    shares_of,
)
from transfusion.report.parts import (
    RATES,
    Command,
    Figure,
    Number,
    Section,
    Table,
    axis_name,
    between,
    brief,
    capital,
    gain_unit,
    gained,
    kind_of,
    layer_of,
    listed,
    measured,
    percent,
    short,
    two_digits,
)
from transfusion.report.results import Inputs, location, read_inputs, recorded
from transfusion.report.settings import ReportSettings
from transfusion.runtime.progress import phase
from transfusion.runtime.run_record import shareable_text
from transfusion.runtime.settings import verb
from transfusion.transport.alpha import Alpha
from transfusion.transport.outcome import LITTLE, outcome_of
from transfusion.transport.record import FILE

__all__ = ["Report", "report"]

WELL_PREDICTED = 0.5
"""The share of B's activations from which on a prediction counts as good."""


@dataclass(frozen=True)
class Hero:
    """The head of the page."""

    title: str
    summary: str
    stations: Sequence[tuple[str, str, str]]
    """A, τ, π and B: symbol, name and explanation."""
    verdict: str
    mood: str
    """Of the verdict: ``good``, ``fair``, ``bad`` or nothing."""
    numbers: Sequence[Number]
    strands: Figure | None
    outcome: Sequence[tuple[str, str]]
    """What arrived, what it cost B, and how to load the result."""
    next_steps: Sequence[str]
    """What to try, if the result should not be relied upon as it is."""


@dataclass(frozen=True, repr=False)
class Report:
    """A page about one run, ready to be written."""

    hero: Hero
    sections: Sequence[Section]
    missing: Sequence[Command]
    """A command for every section that has no data."""
    notes: Sequence[str]
    """Inputs that could not be read, and why."""
    inputs: Sequence[Path] = ()
    """The files that were read, which the page never overwrites."""
    root: Path = Path()
    """The folder that holds the run. Paths on the page are relative to it."""

    def __repr__(self) -> str:
        return f"<report: {self.hero.title}, {len(self.sections)} sections>"

    def html(self) -> str:
        """Return the whole page as text. It holds no absolute path of this machine."""

        def without_paths(value: object) -> object:
            if isinstance(value, str) and not isinstance(value, Markup):
                return shareable_text(value, self.root, self.inputs)
            return value

        environment = Environment(
            loader=PackageLoader("transfusion.report", "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
            finalize=without_paths,
        )
        folder = files("transfusion.report") / "templates"
        texts = {name: Markup((folder / name).read_text("utf-8")) for name in ("style.css", "script.js")}
        template = environment.get_template("page.html.jinja")
        return template.render(page=self, texts=texts, version=__version__)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the page. ``force`` replaces an existing file, but never a file that was read."""
        require_writable(Path(path), force=force, inputs=self.inputs, folder=False)
        text = self.html()
        return publish_file(Path(path), lambda staged: write_text(staged, text), force=force)


@verb(ReportSettings)
def report(settings: ReportSettings) -> Report:
    """Make one HTML page of a run: advice, layers, heads, curves, scores and time.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> page = transfusion.report(moved.save("moved"), via="pi.safetensors")
    >>> print(page.hero.title, page.hero.verdict, page.save("report.html"), sep=" · ")
    tuned, moved onto b · alignable · report.html
    """
    inputs = read_inputs(settings.run, list(settings.results), settings.via, settings.ceiling)
    read, output = inputs.files(settings.via), settings.output
    if output is not None:
        require_writable(Path(output), force=settings.force, inputs=read, folder=False)
    with phase("drawing the page"):
        bases, info = Bases.of(inputs), _advice(inputs)
        require_ceiling(bases.b, inputs.ceiling)
        # between different shapes, axes are no longer one to one
        quality = None if info.get("blocks") else measure_quality(inputs, info, bases)
        sections = list(_sections(inputs, bases, info, quality))
        missing = missing_commands(inputs, models_of(inputs), {section.id for section in sections})
        hero, notes = make_hero(inputs, info, quality), [*inputs.notes, *bases.notes]
        page = Report(hero, sections, missing, notes, read, inputs.folder.absolute().parent)
    if output is not None:
        page.save(output, force=settings.force)
    return page


def _advice(inputs: Inputs) -> Mapping[str, Any]:
    if inputs.metadata is not None:
        return recorded(inputs.metadata, "alignment", "advice") or {}
    return inputs.alignment.provenance.advice if inputs.alignment else {}


def _sections(
    inputs: Inputs, bases: Bases, advice: Mapping[str, Any], quality: Quality | None
) -> Iterator[Section]:
    """Yield the sections that there is something to show in."""
    pi, metadata = inputs.alignment, inputs.metadata
    if metadata is not None:
        yield make.what_was_moved(metadata)
    if advice.get("text"):
        yield make.advice(advice, pi.provenance.objective if pi else ())
    if advice.get("blocks"):
        yield make.blocks(advice)
    if inputs.of("evaluate"):
        yield make.evaluations(inputs)
    if quality is not None:
        yield make.layers(quality)
    if pi is not None and (panels := head_panels(pi, bases)):
        yield make.heads(panels, pi)
    if groups := group_changes(inputs, bases, quality):
        yield make.task_vector(groups, quality, inputs.ceiling)
    yield from (section(inputs) for verb, section in make.RESULTS.items() if inputs.of(verb))
    for last in (make.time_and_memory(inputs), typed_commands(inputs)):
        if last is not None:
            yield last


# ── the head of the page ─────────────────────────────────────────────────────────────────────


def make_hero(inputs: Inputs, advice: Mapping[str, Any], quality: Quality | None) -> Hero:
    """Make the head of a page: title, verdict, main numbers and the picture of π."""
    tuned, a, b, method = models_of(inputs)
    metadata, targets = inputs.metadata or {}, inputs.targets()
    refined, verdict = metadata.get("refinement"), str(advice.get("verdict", ""))
    if verdict == "predicted" and advice.get("found") is not None:
        verdict = f"{percent(advice['found'])} of B predicted"
    title = f"From {short(a)} to {short(b)}" if a and b else f"Results in {short(inputs.run.resolve())}"
    summary = "Results in one place."
    if tuned and b:
        title = f"{listed(map(short, tuned))}, moved onto {short(b)}"
        how = " and trained there to answer like it" if refined else " without training: B + α·π(τ)"
        summary = f"A fine-tune of A, moved onto the new base B{how}."
    stations = (
        ("A", short(a), "the base that was fine-tuned"),
        ("τ", listed(map(short, tuned)), "the change that the fine-tune made"),
        ("π", method, "the method that matched units of A with B"),
        ("B", short(b), "the new base"),
    )
    numbers = [*_measured(inputs, b), *_without_data(inputs, quality)][:4]
    if not metadata and len(targets) > 1:
        numbers = []
        several = listed(map(short, targets))
        summary += f" They are about several targets, {several}, so no main numbers are shown."
    lost = any(one.name.startswith("support") and one.mood == "bad" for one in numbers)
    mood = _mood(advice, lost)
    if refined:
        gap = next((f"{one.value} of the gap" for one in numbers if one.name == "of the gap"), "")
        verdict, mood = ": ".join(filter(None, ["refined", gap])), _mood_of_refinement(refined, numbers)
    steps = _next_steps(advice, lost, metadata) if mood in ("fair", "bad") else []
    there, strands = [station for station in stations if station[1]], draw_pi(inputs.alignment)
    ended = outcome_of(metadata, short(inputs.run.resolve())).rows() if metadata else []
    return Hero(title, summary, there, verdict, mood, numbers, strands, ended, steps)


def models_of(inputs: Inputs) -> tuple[list[str], str, str, str]:
    """Return the fine-tunes, A, B and the method, from the metadata, a result or π."""
    if (metadata := inputs.metadata) is not None:
        tuned = [str(one["name"]) for one in metadata["finetuned"]]
        return tuned, metadata["base"]["name"], metadata["onto"]["name"], metadata["alignment"]["method"]
    if len(inputs.targets()) > 1:
        return [], "", "", ""
    for one in (*inputs.of("sweep"), *inputs.of("fewshot")):
        if (info := one.info).finetuned and info.base and info.onto:
            method = next((curve.method for curve in info.curves if curve.method), "")
            return [info.finetuned], info.base, info.onto, method
    if (pi := inputs.alignment) is not None:
        return [], pi.provenance.source, pi.provenance.target, pi.provenance.method
    for one in inputs.of("barrier"):
        return [], one.info.a or "", one.info.b or "", ""
    return [], "", "", ""


def _mood(advice: Mapping[str, Any], support_lost: bool) -> str:
    """Judge a result: ``good`` only if π is well founded and no loss of support was measured."""
    verdict, found = advice.get("verdict"), advice.get("found", 0.0)
    predicted = verdict == "predicted"
    if verdict in ("alignable", "same lineage") or (predicted and found >= WELL_PREDICTED):
        return "fair" if support_lost else "good"
    if predicted and found > advice.get("null", 0.0) + 0.1:
        return "fair"
    return "bad" if advice else ""


def _mood_of_refinement(refined: Mapping[str, Any], numbers: Sequence[Number]) -> str:
    """Judge a refined result by what it is for: the task, or answers that have come nearer to the
    fine-tune's.
    """
    task = [one.mood for one in numbers if one.name.startswith("task")]
    before, after = refined["divergence"]
    if fmean(refined["after"].values()) < LITTLE:
        return "fair"
    return "good" if (all(mood == "good" for mood in task) if task else after < before) else "fair"


def _next_steps(advice: Mapping[str, Any], support_lost: bool, metadata: Mapping[str, Any]) -> list[str]:
    """Say what to try: nothing that the run has done already."""
    steps = []
    refined = "refinement" in metadata
    tried = "alpha" in (metadata.get("output_shift") or {})
    if not refined:
        steps.append(WITH_TRAINING.replace("`refine=True`", "--refine").rstrip("."))
    if not refined and not tried:
        steps.append("transport with --alpha auto, which chooses α by what both models compute")
    if advice.get("verdict") == "predicted":
        steps.append("give unlabelled inputs of your own with --calibrate")
    if support_lost and refined:
        steps.append("keep more of B with a larger weight, such as --refine-keep 1")
    elif support_lost:
        steps.append("choose a smaller α: transfusion sweep shows what the support loses at each")
    else:
        steps.append("evaluate on the support as well (--support), before you rely on this model")
    return steps


def _measured(inputs: Inputs, b: str) -> list[Number]:
    """Return the gains from an evaluation of this output, or else from a sweep."""
    for result in (one for one in inputs.of("evaluate") if one.own):
        scores: Evaluation = result.info
        row = _only_row(inputs, scores) if inputs.metadata is None else inputs.own_row(scores)
        if row is not None:
            note = short(row.model) if inputs.metadata is None else ""
            return _gains(row, scores, note) + _gap(row, scores, b, inputs.ceiling)
    for result in (one for one in inputs.of("sweep") if one.own):
        sweep: Sweep = result.info
        sign = 1 if sweep.task.metric in RATES else -1

        def gain(curve: SweepCurve, sign: int = sign) -> float:
            return sign * (curve.at_best.gain_of("task") or 0.0)

        best = max([one for one in sweep.curves if one.method] or sweep.curves, key=gain)
        alpha = brief(best.at_best.alpha)
        note = f"{best.label}, α = {alpha}, the best of the sweep, chosen on this data"
        return _gains(best.at_best, sweep, note)
    return []


def _only_row(inputs: Inputs, info: Evaluation) -> ScoredModel | None:
    """Return the only model of an evaluation besides B and the ceiling, if there is one."""
    known = {location(one) for one in (info.against, info.ceiling, inputs.ceiling) if one}
    rows = [one for one in info.models if location(one.model) not in known and one.gain]
    return rows[0] if len(rows) == 1 else None


def _gains(one: Scores, info: Evaluation | Sweep, note: str) -> list[Number]:
    """Return the gains of a model, or its scores where it has none."""
    found: list[Number] = []
    for what, data in info.data().items():
        metric, gain, score = data.metric, one.gain_of(what), one.of(what)
        if score is None:
            continue
        value = measured(score.value, metric)
        if gain is None:
            found.append(Number(value, f"{metric} on the {what}", note))
            continue
        interval = (one.gain_interval or {}).get(what)
        sure = f"95 %: {between(interval, metric, gained)}; " if interval else ""
        low, high = interval or (gain, gain)
        better = "good" if (gain > 0) == (metric in RATES) else "bad"
        mood = "" if abs(gain) < 1e-9 or low <= 0 <= high else better  # neither, if it may be chance
        name, told = f"{what}, {gain_unit(metric)}", f"{sure}{note or f'{metric} {value}'}"
        found.append(Number(gained(gain, metric), name, told, mood))
    return found


def _gap(own: ScoredModel, info: Evaluation, b: str, ceiling: str | None) -> list[Number]:
    """Return the share of the gap between B and B fine-tuned itself."""
    models = {location(one.model): one for one in info.models}
    start = models.get(location(b or info.against))
    end = models.get(location(ceiling)) if ceiling else None
    if start is None or end is None or abs(end.task.value - start.task.value) < 1e-9:
        return []
    share = (own.task.value - start.task.value) / (end.task.value - start.task.value)
    return [Number(percent(share), "of the gap", f"from B to {short(end.model)}, on the task")]


def _without_data(inputs: Inputs, quality: Quality | None) -> list[Number]:
    """Return the numbers that need no evaluation."""
    found: list[Number] = []
    if quality is not None:
        note = f"the mean over axes; the null is {two_digits(fmean(one.null for one in quality.axes))}"
        found.append(Number(two_digits(fmean(one.found for one in quality.axes)), quality.title, note))
    if (metadata := inputs.metadata) is not None:
        alpha = Alpha.of(metadata["alpha"])
        found.append(Number(str(metadata.get("moved", 0)), "tensors moved"))
        value = "by layer" if alpha.patterns else f"{alpha.default:g}"
        found.append(Number(value, "α", "the factor of τ"))
    return found


def draw_pi(pi: Alignment | None) -> Figure | None:
    """Draw π for one axis from the middle of the model: neurons if they move, else the stream."""
    single = [id for id, map_ in pi.maps.items() if map_.blocks == 1 and not map_.is_identity()] if pi else []
    if pi is None or not single:
        return None
    by_kind = (
        [id for id in single if id.rsplit(".", 1)[-1] == kind] for kind in ("ffn", "x", "stream", "head")
    )
    some = next(filter(None, by_kind), single)
    id = some[len(some) // 2]
    shares, layer = shares_of(pi.maps[id]), layer_of(id)
    what = axis_name(kind_of(id)) + (f" of layer {layer}" if layer is not None else "")
    rows = [(str(to), str(int(row.argmax())), percent(float(row.max()))) for to, row in enumerate(shares)]
    moves = f"This π moves {len(pi.maps)} axes."
    caption = f"{capital(what)}: which units of A become which units of B. {moves}"
    table = Table(["unit of B", "mostly from A's", "share"], rows)
    return Figure("strands", f"π, drawn: {what}", partial(draw_strands, caption, shares), table, caption)


# ── commands ─────────────────────────────────────────────────────────────────────────────────


def typed_commands(inputs: Inputs) -> Section | None:
    """Return all recorded commands, and the command that repeats the run."""
    metadata = inputs.metadata or {}
    typed = [(one.verb, one.info.command) for one in inputs.results]
    typed = [(metadata["verb"], metadata["command"]), *typed] if metadata else typed
    commands = [Command(text, verb) for verb, text in typed if text]
    lead = "As they were typed; absolute paths are shortened." if commands else ""
    if metadata and metadata.get("repeatable", True) and inputs.run.is_dir():
        again = f"transfusion {metadata['verb']} --from {FILE} -o ../again"
        commands.append(Command(again, "the same again, bit for bit, from the folder of this run"))
    return Section("commands", "Commands", "Commands", lead, commands) if commands else None


MISSING = {
    "evaluation": (
        "scores on a task and on a support, which is what B could do before",
        "evaluate {b} {run} --against {b} --data TASK --support DATA -o {folder}/evaluate.json",
    ),
    "alpha": (
        "how task and support depend on α",
        "sweep {tuned} --base {a} --onto {b} {by} --data TASK --support DATA -o {folder}/sweep.json",
    ),
    "fewshot": (
        "α for every part of the model, from a few examples",
        "fewshot {tuned} --base {a} --onto {b} {by} --data TRAIN --test TEST -o alpha.json"
        " --results {folder}/fewshot.json",
    ),
    "barrier": ("the loss between π(A) and B", "barrier {a} {b} {by} --data FILE -o {folder}/barrier.json"),
    "proof": (
        "whether π(A) computes the same as A, or how much of B it predicts",
        "verify {a} {by} -o {folder}/verify.json",
    ),
}
"""What a section without data would show, and the command that makes its data."""


def missing_commands(
    inputs: Inputs, names: tuple[Sequence[str], str, str, str], present: Collection[str]
) -> list[Command]:
    """Return a command for every section that has no data, with the names of this run."""
    finetuned, a, b, method = names
    pi = recorded(inputs.metadata, "settings", "via")
    tuned = finetuned[0] if finetuned else "FINETUNED"
    given = {"tuned": tuned, "a": a or "A", "b": b or "B", "run": inputs.run, "folder": inputs.folder}
    words = {key: shlex.quote(str(value)) for key, value in given.items()}
    words["by"] = f"--via {shlex.quote(str(pi)) if pi else 'PI'}"
    found = [
        Command(f"transfusion {text.format(**words)}", what)
        for id, (what, text) in MISSING.items()
        if id not in present
    ]
    report = f"transfusion report {words['run']}"
    if inputs.alignment is None and a and b:
        how = f" --method {shlex.quote(method)}" if method and " " not in method else ""
        align = f"transfusion align {words['a']} {words['b']}{how} -o pi.safetensors"
        found.append(Command(f"{align} && {report} --via pi.safetensors", "layers and heads"))
    if inputs.ceiling is None and "tau" in present:
        what = "the share of the gap, and π(τ) compared with the change that B's own fine-tune made"
        found.append(Command(f"{report} --ceiling B_FINETUNED", what))
    return found
