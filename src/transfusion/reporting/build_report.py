"""Reports: a run and what was measured of it, as one page of HTML.

`report_inputs` gathers the run's metadata, results and π; `result_matching` selects the results that are
about this run; `report_bases` opens the models that still exist; `unit_quality`, `head_panels` and
`change_shares` compute what π and the weights show; `pi_sections`, `result_sections` and `proof_sections`
make sections, and `html_page` writes them into one file with figures from `charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import HeadPolicy
from transfusion.reporting.change_shares import groups, require_ceiling
from transfusion.reporting.head_panels import panels
from transfusion.reporting.headline import hero
from transfusion.reporting.html_page import Report
from transfusion.reporting.missing_sections import missing
from transfusion.reporting.page_parts import Command, PageSection
from transfusion.reporting.pi_sections import advice, by_layer, heads, task_vector, what_was_moved
from transfusion.reporting.proof_sections import time_and_memory
from transfusion.reporting.report_bases import Bases
from transfusion.reporting.report_inputs import METADATA, ReportInputs, gather_inputs
from transfusion.reporting.result_matching import notes as others
from transfusion.reporting.result_sections import from_results
from transfusion.reporting.unit_quality import qualities

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
    material = gather_inputs(run, results, via, ceiling)
    bases = Bases.of(material)
    require_ceiling(bases.b, material.ceiling)
    pi, metadata = material.alignment, material.metadata
    info = _advice(material)
    quality = qualities(info, pi, bases, material.of("verify"))
    sections: list[PageSection] = [what_was_moved(metadata)] if metadata else []
    if info.get("text"):
        sections.append(advice(info, pi.provenance.objective if pi else ()))
    measured = from_results(material)
    sections += [one for one in measured if one.id == "evaluation"]
    if quality is not None:
        sections.append(by_layer(quality))
    if pi is not None and (found := panels(pi, bases)):
        sections.append(heads(found, pi.provenance.policy.heads is HeadPolicy.FLAT))
    if changed := groups(pi, bases, quality, material.ceiling):
        sections.append(task_vector(changed, quality, material.ceiling))
    sections += [one for one in measured if one.id != "evaluation"]
    if (time := time_and_memory(_runs(material))) is not None:
        sections.append(time)
    typed, again = _typed(material), _again(material)
    if typed or again:
        lead = "As they were typed." if typed else ""
        sections.append(PageSection("commands", "Commands", lead, [*typed, *again]))
    shown = {section.id for section in sections}
    notes = [
        *([material.without] if material.without else []),
        *material.left_out,
        *others(material),
        *bases.notes,
    ]
    first, lacking = hero(material, info, quality), missing(material, shown)
    return Report(first, sections, lacking, notes, material.inputs(via), material.folder.absolute().parent)


def _advice(material: ReportInputs) -> Mapping[str, Any]:
    if material.metadata is not None:
        return material.metadata["alignment"].get("advice") or {}
    return material.alignment.provenance.advice if material.alignment else {}


def _runs(material: ReportInputs) -> list[tuple[str, Mapping[str, Any]]]:
    """The record of every step: π's own, the story's, those of the results."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    aligned = material.of("align")
    if material.alignment is not None and not aligned:
        found.append(("align", material.alignment.provenance.run))
    if material.metadata is not None:
        found.append((material.metadata["verb"], material.metadata.get("run") or {}))
    found += [(one.verb, one.info.get("run") or {}) for one in material.results]
    return found


def _typed(material: ReportInputs) -> list[Command]:
    metadata = material.metadata
    found = (
        [Command(str(metadata["command"]), metadata["verb"])] if metadata and metadata.get("command") else []
    )
    found += [
        Command(str(one.info["command"]), one.verb) for one in material.results if one.info.get("command")
    ]
    return found


def _again(material: ReportInputs) -> list[Command]:
    metadata = material.metadata
    if not metadata or not metadata.get("repeatable", True) or not material.run.is_dir():
        return []
    again = f"transfusion {metadata['verb']} --from {METADATA} -o ../again"
    return [Command(again, "the same again, bit for bit, from the folder of this run")]
