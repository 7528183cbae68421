"""Reports: a run and its results, as one page of HTML.

`report_inputs` reads the run's metadata, results and π. `result_matching` finds the results that are about
this run. `report_bases` opens the models that still exist. `unit_quality`, `head_panels` and `change_shares`
compute numbers from π and the weights. `pi_sections`, `result_sections`, `proof_sections` and
`command_sections` make the sections, with charts from `charts`. `html_page` writes them into one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.architecture.architecture import HeadPolicy
from transfusion.files.publishing import require_writable
from transfusion.report.change_shares import groups, require_ceiling
from transfusion.report.command_sections import missing_commands, typed_commands
from transfusion.report.head_panels import panels
from transfusion.report.headline import hero
from transfusion.report.html_page import Report
from transfusion.report.page_parts import PageSection
from transfusion.report.pi_sections import advice, blocks, by_layer, heads, task_vector, what_was_moved
from transfusion.report.proof_sections import time_and_memory
from transfusion.report.report_bases import Bases
from transfusion.report.report_inputs import ReportInputs, gather_inputs, inputs_of
from transfusion.report.result_matching import notes as others
from transfusion.report.result_sections import from_results
from transfusion.report.unit_quality import qualities

__all__ = ["Report", "report"]


def report(
    run: str | Path,
    results: Iterable[str | Path] = (),
    *,
    via: Alignment | str | Path | None = None,
    ceiling: str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
) -> Report:
    """Make one HTML page of a run: advice, layers, heads, curves, scores and time.

    ``run`` is a folder or a LoRA file that `transport` or `merge` wrote, or any folder with results of other
    functions.
    ``results`` are files of further results.
    ``via`` is π, or its file; the default is the file that the run used.
    ``ceiling`` is B fine-tuned itself, if there is such a model.
    ``output`` is a file to write the page to; with ``force``, an existing file is replaced.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> page = transfusion.report(moved.save("moved"), via="pi.safetensors")
    >>> print(page.hero.title, page.hero.verdict, page.save("report.html"), sep=" · ")
    tuned, moved onto b · alignable · report.html
    """
    results = list(results)
    inputs = gather_inputs(run, results, via, ceiling)
    if output is not None:
        named = via if isinstance(via, str | Path) else None
        files = inputs_of(run, *results, named, ceiling)
        require_writable(Path(output), force=force, inputs=files, folder=False)
    bases = Bases.of(inputs)
    require_ceiling(bases.b, inputs.ceiling)
    pi, metadata = inputs.alignment, inputs.metadata
    info = _advice(inputs)
    shapes = bool(info.get("blocks"))  # A and B have different ones, and axes are no longer one to one
    quality = None if shapes else qualities(info, pi, bases, inputs.of("verify"))
    sections: list[PageSection] = [what_was_moved(metadata)] if metadata else []
    if info.get("text"):
        sections.append(advice(info, pi.provenance.objective if pi else ()))
    if shapes:
        sections.append(blocks(info))
    measured = from_results(inputs)
    sections += [one for one in measured if one.id == "evaluation"]
    if quality is not None:
        sections.append(by_layer(quality))
    if pi is not None and (found := panels(pi, bases)):
        sections.append(heads(found, pi.provenance.policy.heads is HeadPolicy.FLAT))
    if changed := groups(pi, bases, quality, inputs.ceiling):
        sections.append(task_vector(changed, quality, inputs.ceiling))
    sections += [one for one in measured if one.id != "evaluation"]
    if (time := time_and_memory(_runs(inputs))) is not None:
        sections.append(time)
    if (commands := typed_commands(inputs)) is not None:
        sections.append(commands)
    shown = {section.id for section in sections}
    notes = [
        *([inputs.without] if inputs.without else []),
        *inputs.left_out,
        *others(inputs),
        *bases.notes,
    ]
    first, missing = hero(inputs, info, quality), missing_commands(inputs, shown)
    folder = inputs.folder.absolute().parent
    page = Report(first, sections, missing, notes, inputs.files(via), folder)
    if output is not None:
        page.save(output, force=force)
    return page


def _advice(inputs: ReportInputs) -> Mapping[str, Any]:
    if inputs.metadata is not None:
        return inputs.metadata["alignment"].get("advice") or {}
    return inputs.alignment.provenance.advice if inputs.alignment else {}


def _runs(inputs: ReportInputs) -> list[tuple[str, Mapping[str, Any]]]:
    """The run records of all steps: of π, of the transport and of the results."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    aligned = inputs.of("align")
    if inputs.alignment is not None and not aligned:
        found.append(("align", inputs.alignment.provenance.run))
    if inputs.metadata is not None:
        found.append((inputs.metadata["verb"], inputs.metadata.get("run") or {}))
    found += [(one.verb, one.info.get("run") or {}) for one in inputs.results]
    return found
