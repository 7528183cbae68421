"""Reports: a run and what was measured of it, as one page of HTML.

`reading` gathers the run's story, results and π; `belonging` tells which results are about this run; `bases`
opens the models that are still there; `quality`, `heads` and `shares` compute what π and the weights tell;
`pi`, `results` and `proofs` make sections of it, which `page` puts into one file with figures from `charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transfusion.alignment import Alignment
from transfusion.architecture import Heads
from transfusion.reporting.bases import Bases
from transfusion.reporting.belonging import notes as others
from transfusion.reporting.heads import panels
from transfusion.reporting.hero import hero
from transfusion.reporting.missing import missing
from transfusion.reporting.page import Report
from transfusion.reporting.parts import Command, Section
from transfusion.reporting.pi import advice, by_layer, heads, task_vector, what_was_moved
from transfusion.reporting.proofs import time_and_memory
from transfusion.reporting.quality import qualities
from transfusion.reporting.reading import STORY, Material, gather
from transfusion.reporting.results import from_results
from transfusion.reporting.shares import groups, require_ceiling

__all__ = ["Report", "report"]


def report(
    run: str | Path,
    results: Iterable[str | Path] = (),
    *,
    via: Alignment | str | Path | None = None,
    ceiling: str | Path | None = None,
) -> Report:
    """A page about a run: what was moved onto what, the advice, every figure that there are numbers for.

    ``run`` is a folder that `transport` or `merge` wrote, or any folder with results of other verbs;
    ``results`` are further results, which may lie anywhere. π is taken from where the run had it, if ``via``
    does not say otherwise. ``ceiling`` is B fine-tuned itself, if there is such a model.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> page = transfusion.report(moved.save("moved"), via="pi.safetensors")
    >>> print(page.hero.title, page.hero.verdict, page.save("report.html"), sep=" · ")
    tuned, moved onto b · alignable · report.html
    """
    material = gather(run, results, via, ceiling)
    bases = Bases.of(material)
    require_ceiling(bases.b, material.ceiling)
    pi, story = material.alignment, material.story
    told = _advice(material)
    quality = qualities(told, pi, bases, material.of("verify"))
    sections: list[Section] = [what_was_moved(story)] if story else []
    if told.get("text"):
        sections.append(advice(told, pi.provenance.objective if pi else ()))
    measured = from_results(material)
    sections += [one for one in measured if one.id == "evaluation"]
    if quality is not None:
        sections.append(by_layer(quality))
    if pi is not None and (found := panels(pi, bases)):
        sections.append(heads(found, pi.provenance.policy.heads is Heads.FLAT))
    if changed := groups(pi, bases, quality, material.ceiling):
        sections.append(task_vector(changed, quality, material.ceiling))
    sections += [one for one in measured if one.id != "evaluation"]
    if (time := time_and_memory(_runs(material))) is not None:
        sections.append(time)
    typed, again = _typed(material), _again(material)
    if typed or again:
        lead = "As they were typed." if typed else ""
        sections.append(Section("commands", "Commands", lead, [*typed, *again]))
    shown = {section.id for section in sections}
    notes = [
        *([material.without] if material.without else []),
        *material.left_out,
        *others(material),
        *bases.notes,
    ]
    first, lacking = hero(material, told, quality), missing(material, shown)
    return Report(first, sections, lacking, notes, material.inputs(via))


def _advice(material: Material) -> Mapping[str, Any]:
    if material.story is not None:
        return material.story["alignment"].get("advice") or {}
    return material.alignment.provenance.advice if material.alignment else {}


def _runs(material: Material) -> list[tuple[str, Mapping[str, Any]]]:
    """The record of every step: π's own, the story's, those of the results."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    aligned = material.of("align")
    if material.alignment is not None and not aligned:
        found.append(("align", material.alignment.provenance.run))
    if material.story is not None:
        found.append((material.story["verb"], material.story.get("run") or {}))
    found += [(one.verb, one.told.get("run") or {}) for one in material.results]
    return found


def _typed(material: Material) -> list[Command]:
    story = material.story
    found = [Command(str(story["command"]), story["verb"])] if story and story.get("command") else []
    found += [
        Command(str(one.told["command"]), one.verb) for one in material.results if one.told.get("command")
    ]
    return found


def _again(material: Material) -> list[Command]:
    story = material.story
    if not story or not story.get("repeatable", True) or not material.run.is_dir():
        return []
    again = f"transfusion {story['verb']} --from {STORY} -o ../again"
    return [Command(again, "the same again, bit for bit, from the folder of this run")]
