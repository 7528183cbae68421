"""Reports: a run and its results, as one page of HTML.

`results` reads the run, its results and π; `measures` computes numbers from π and the models, if they still
exist. `sections` makes the sections of both, with charts from `charts`. This module adds the page's head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from transfusion import __version__
from transfusion.alignment.alignment import Alignment
from transfusion.files.publishing import publish_file, require_writable, write_text
from transfusion.report import sections as make
from transfusion.report.charts import StrandChart
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
    Hero,
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
from transfusion.report.results import (
    Evaluation,
    Inputs,
    ScoredModel,
    Scores,
    Sweep,
    SweepCurve,
    local_files,
    location,
    read_inputs,
    recorded,
)
from transfusion.report.settings import ReportSettings
from transfusion.runtime.progress import phase
from transfusion.runtime.run_record import shareable_text
from transfusion.runtime.settings import verb
from transfusion.transport.alpha import Alpha

__all__ = ["Report", "report"]

WELL_PREDICTED = 0.5
"""The share of B's activations from which on a prediction counts as good."""
TERMS = (
    ("task", "data of what the fine-tune was trained for"),
    ("support", "data of what B could do before, which B should still be able to do"),
    ("null", "the same measure where there is nothing to find; what is not above the null is chance"),
)


@verb(ReportSettings)
def report(settings: ReportSettings) -> Report:
    """Make one HTML page of a run: advice, layers, heads, curves, scores and time.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> page = transfusion.report(moved.save("moved"), via="pi.safetensors")
    >>> print(page.hero.title, page.hero.verdict, page.save("report.html"), sep=" · ")
    tuned, moved onto b · alignable · report.html
    """
    results, via, output = list(settings.results), settings.via, settings.output
    inputs = read_inputs(settings.run, results, via, settings.ceiling)
    if output is not None:
        named = via if isinstance(via, str | Path) else None
        given = local_files(settings.run, *results, named, settings.ceiling)
        require_writable(Path(output), force=settings.force, inputs=given, folder=False)
    with phase("drawing the page"):
        page = _page(inputs, via)
    if output is not None:
        page.save(output, force=settings.force)
    return page


def _page(inputs: Inputs, via: Alignment | str | Path | None) -> Report:
    """Return the page of a run, section by section."""
    bases = Bases.of(inputs)
    require_ceiling(bases.b, inputs.ceiling)
    pi, metadata, advice = inputs.alignment, inputs.metadata, _advice(inputs)
    other_shapes = bool(advice.get("blocks"))  # axes are no longer one to one
    quality = None if other_shapes else measure_quality(inputs, advice, bases)

    sections: list[Section | None] = []
    if metadata is not None:
        sections.append(make.what_was_moved(metadata))
    if advice.get("text"):
        sections.append(make.advice(advice, pi.provenance.objective if pi else ()))
    if other_shapes:
        sections.append(make.blocks(advice))
    if inputs.of("evaluate"):
        sections.append(make.evaluations(inputs))
    if quality is not None:
        sections.append(make.layers(quality))
    if pi is not None and (panels := head_panels(pi, bases)):
        sections.append(make.heads(panels, pi))
    if groups := group_changes(inputs, bases, quality):
        sections.append(make.task_vector(groups, quality, inputs.ceiling))
    sections += [section(inputs) for verb, section in make.RESULTS.items() if inputs.of(verb)]
    sections += [make.time_and_memory(inputs), make.typed_commands(inputs)]
    shown = [section for section in sections if section is not None]

    names = models_of(inputs)
    missing = make.missing_commands(inputs, names, {section.id for section in shown})
    hero = make_hero(inputs, advice, quality)
    notes = [*inputs.notes, *bases.notes]
    return Report(hero, shown, missing, notes, inputs.files(via), inputs.folder.absolute().parent)


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
        style, script = (Markup((folder / name).read_text("utf-8")) for name in ("style.css", "script.js"))
        return environment.get_template("page.html.jinja").render(
            hero=self.hero,
            sections=self.sections,
            missing=self.missing,
            notes=self.notes,
            version=__version__,
            style=style,
            script=script,
        )

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the page. ``force`` replaces an existing file, but never a file that was read."""
        require_writable(Path(path), force=force, inputs=self.inputs, folder=False)
        text = self.html()
        return publish_file(Path(path), lambda staged: write_text(staged, text), force=force)


def _advice(inputs: Inputs) -> Mapping[str, Any]:
    if inputs.metadata is not None:
        return recorded(inputs.metadata, "alignment", "advice") or {}
    return inputs.alignment.provenance.advice if inputs.alignment else {}


# ── the head of the page ─────────────────────────────────────────────────────────────────────


def make_hero(inputs: Inputs, advice: Mapping[str, Any], quality: Quality | None) -> Hero:
    """Make the head of a page: title, verdict, main numbers and the picture of π."""
    tuned, a, b, method = models_of(inputs)
    metadata = inputs.metadata or {}
    verdict = str(advice.get("verdict", ""))
    if verdict == "predicted" and advice.get("found") is not None:
        verdict = f"{percent(advice['found'])} of B predicted"
    title = f"From {short(a)} to {short(b)}" if a and b else f"Results in {short(inputs.run.resolve())}"
    summary = "Results in one place."
    if tuned and b:
        title = f"{listed(map(short, tuned))}, moved onto {short(b)}"
        refined = ", B + α·π(τ), refined on synthetic inputs"
        how = refined if "refinement" in metadata else " without training: B + α·π(τ)"
        summary = f"A fine-tune of A, moved onto the new base B{how}."
    stations = (
        ("A", short(a), "the base that was fine-tuned"),
        ("τ", listed(map(short, tuned)), "the change that the fine-tune made"),
        ("π", method, "the method that matched units of A with B"),
        ("B", short(b), "the new base"),
    )
    numbers = [*_measured(inputs, b), *_without_data(inputs, quality)][:4]
    if inputs.metadata is None and len(several := inputs.targets()) > 1:
        numbers = []
        targets = listed(map(short, several))
        summary += f" They are about several targets, {targets}, so no main numbers are shown."
    support_lost = any(one.name.startswith("support") and one.mood == "bad" for one in numbers)
    mood = _mood(advice, support_lost)
    return Hero(
        title,
        summary,
        [station for station in stations if station[1]],
        verdict,
        mood,
        numbers,
        draw_pi(inputs.alignment),
        _next_steps(advice, support_lost, metadata) if mood in ("fair", "bad") else [],
        TERMS,
    )


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


def _next_steps(advice: Mapping[str, Any], support_lost: bool, metadata: Mapping[str, Any]) -> list[str]:
    """Say what to try: nothing that the run has done already."""
    steps = []
    refined = "refinement" in metadata
    compared = recorded(metadata, "alignment", "method") == "auto"
    tried = "alpha" in (metadata.get("output_shift") or {})
    if not refined:
        steps.append("transport with --refine, which asks the fine-tune itself on synthetic inputs")
    if not refined and not (compared and tried):
        steps.append("transport with --method auto --alpha auto, which compares the methods and chooses α")
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
    for result in inputs.own("evaluate"):
        scores: Evaluation = result.info
        row = _only_row(inputs, scores) if inputs.metadata is None else inputs.own_row(scores)
        if row is not None:
            note = short(row.model) if inputs.metadata is None else ""
            return _gains(row, scores, note) + _gap(row, scores, b, inputs.ceiling)
    for result in inputs.own("sweep"):
        sweep: Sweep = result.info
        curves = [one for one in sweep.curves if one.method] or sweep.curves

        def gain(curve: SweepCurve, metric: str = sweep.task.metric) -> float:
            found = curve.at_best.gain_of("task") or 0.0
            return found if metric in RATES else -found

        best = max(curves, key=gain)
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
        mean, null = (
            sum(getattr(axis, what) for axis in quality.axes) / len(quality.axes)
            for what in ("found", "null")
        )
        note = f"the mean over axes; the null is {two_digits(null)}"
        found.append(Number(two_digits(mean), quality.title, note))
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
    chart = StrandChart(shares, ("A", "B"), caption)
    table = Table(["unit of B", "mostly from A's", "share"], rows)
    return Figure("strands", f"π, drawn: {what}", chart, table, caption)
