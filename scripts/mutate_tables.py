"""Corrupt every table in turn and see whether certification notices: python scripts/mutate_tables.py

On the small models of each family: each row dropped, two axes swapped in each row, each fixed axis freed,
q·k merged with v·o where q and k cannot move, each scale forgotten, and each other
vector called a scale. Prints how many corruptions were caught, and lists those that were not; exits with 1 if
there are any. Swapping two fixed axes changes no claim, and is left out.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table as View

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from small_models import CASES, Case
from transfusion.architecture.binding import bind, blocks_of
from transfusion.architecture.layouts import parse
from transfusion.architecture.table import UNREAD, Axis, Rows, Symmetry, Table
from transfusion.errors import TransfusionError
from transfusion.families import all_families
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import certify

Mutant = tuple[str, str, Table]
"""Kind, what was done, the corrupted table."""


Replace = Callable[[str | None], Table]
"""Gives the table with another layout of a row, or without the row."""


def rows_of(table: Table) -> Iterator[tuple[str, str, Replace]]:
    """Every row that the library reads, with a function that gives the table with that row replaced."""
    for number, stack in enumerate(table.stacks):
        for name, layout in stack.rows.items():
            if layout.startswith(UNREAD) or not blocks_of(name, stack):
                continue
            yield name, layout, partial(in_stack, table, number, name)
    for part in ("rows", "heads"):
        for name, layout in getattr(table, part).items():
            yield name, layout, partial(outside, table, part, name)


def changed(rows: Rows, name: str, layout: str | None) -> Rows:
    found = {one: layout if one == name else text for one, text in rows.items()}
    return {one: text for one, text in found.items() if text is not None}


def in_stack(table: Table, number: int, name: str, layout: str | None) -> Table:
    stacks = list(table.stacks)
    stacks[number] = replace(stacks[number], rows=changed(stacks[number].rows, name, layout))
    return replace(table, stacks=stacks)


def outside(table: Table, part: str, name: str, layout: str | None) -> Table:
    rows: dict[str, Any] = {part: changed(getattr(table, part), name, layout)}
    return replace(table, **rows)


def fixed_names(table: Table) -> set[str]:
    axes = [*table.axes, *(axis for stack in table.stacks for axis in stack.axes)]
    return {axis.name for axis in axes if axis.group is not Symmetry.PERMUTATION}


def mutants(table: Table, present: set[str], axes: set[str]) -> Iterator[Mutant]:
    """Corruptions of the rows that claim something, and of the declarations that matter here."""
    fixed = fixed_names(table)
    for pattern, text, replaced in rows_of(table):
        if not claims(pattern, present):
            continue
        layout = text.removeprefix("optional ").removeprefix("scale ")
        mark = text.removesuffix(layout)
        yield "row dropped", pattern, replaced(None)
        yield from wrong_scales(pattern, mark, layout, replaced)
        names = parse(layout).names()
        if len(names) > 1 and not set(names[:2]) <= fixed and stream(names[0]) != stream(names[1]):
            swapped = parse(layout).rename(swap(names[0], names[1]))
            yield "axes swapped", f"{pattern}: {swapped}", replaced(f"{mark}{swapped}")
    for name in sorted(fixed & axes):
        yield "fixed axis freed", name, free(table, name)
    if "qk" in fixed & axes and any(axis.name == "vo" for stack in table.stacks for axis in stack.axes):
        merged = [replace(stack, rows=renamed(stack.rows, "qk", "vo")) for stack in table.stacks]
        sized = [replace(s, sizes={k: v for k, v in s.sizes.items() if k != "qk"}) for s in merged]
        yield "qk merged with vo", "qk becomes vo", replace(table, stacks=sized)


def renamed(rows: Rows, name: str, other: str) -> Rows:
    return {one: re.sub(rf"\b{name}\b", other, layout) for one, layout in rows.items()}


def wrong_scales(pattern: str, mark: str, layout: str, replaced: Replace) -> Iterator[Mutant]:
    """The row without its ``scale``; or with one, where the layout is a vector with an axis."""
    if mark.endswith("scale "):
        yield "scale forgotten", pattern, replaced(mark.removesuffix("scale ") + layout)
    elif (one := parse(layout)).arrow is None and len(one.items) == 1 and one.names():
        yield "scale invented", pattern, replaced(f"{mark}scale {layout}")


def claims(pattern: str, present: set[str]) -> bool:
    """Whether a row's pattern names a tensor of this model."""
    numbered = re.sub(r"\{(\d+\+|\w+)?\}", "NUMBER", pattern)
    regex = re.escape(numbered).replace("NUMBER", r"\d+").replace(r"\*", r"(weight|bias)")
    return any(re.fullmatch(regex, name) for name in present)


def stream(name: str) -> str:
    """Points of one stream are one axis while the stream is tied; swapping them may be no corruption."""
    point = name.split("@", maxsplit=1)[0].rsplit(".", maxsplit=1)[-1]
    return "the stream" if point in ("x", "y", "z", "w") else name


def swap(first: str, second: str) -> Callable[[str], str]:
    return lambda name: {first: second, second: first}.get(name, name)


def free(table: Table, name: str) -> Table:
    def loose(axes: Iterable[Axis]) -> list[Axis]:
        return [replace(a, group=Symmetry.PERMUTATION) if a.name == name else a for a in axes]

    stacks = [replace(stack, axes=tuple(loose(stack.axes))) for stack in table.stacks]
    return replace(table, axes=loose(table.axes), stacks=stacks)


def caught(model: Model, live: LiveModel, table: Table) -> bool:
    """Whether a corrupted table is refused, or fails its certification."""
    shapes = {name: model.info(name).shape for name in model.names}
    try:
        architecture = bind(table, shapes, model.family.name)
        return not certify(replace(live, architecture=architecture)).passed
    except TransfusionError:
        return True


def examine(cases: list[Case]) -> dict[str, tuple[int, list[str]]]:
    """For each kind of corruption: how many there were, and which went unnoticed."""
    tried: set[tuple[str, str]] = set()
    result: dict[str, tuple[int, list[str]]] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = Model.open(case.save(Path(folder) / "model", 1))
            live = LiveModel.of(model)
        table = model.family.table(model.config, frozenset(model.names))
        axes = {space.axis for space in model.architecture.spaces.values() if space.size > 1}
        for kind, what, mutant in mutants(table, set(model.architecture.tensors), axes):
            if (kind, what) in tried:
                continue
            tried.add((kind, what))
            count, missed = result.get(kind, (0, []))
            result[kind] = (count + 1, missed if caught(model, live, mutant) else [*missed, what])
    return result


def main(wanted: list[str]) -> int:
    kinds = [
        *("row dropped", "axes swapped", "fixed axis freed", "qk merged with vo"),
        *("scale forgotten", "scale invented"),
    ]
    view = View("family", *kinds, title="Corruptions caught, of those tried")
    survivors: list[str] = []
    transformers.utils.logging.disable_progress_bar()
    for family in all_families():
        if wanted and family.name not in wanted:
            continue
        found = examine([case for case in CASES.values() if case.family == family.name])
        cells = []
        for kind in kinds:
            count, missed = found.get(kind, (0, []))
            cells.append(f"{count - len(missed)}/{count}" if count else "–")
            survivors += [f"{family.name}: {kind}: {what}" for what in missed]
        view.add_row(family.name, *cells)
    console = Console(width=110)
    console.print(view)
    for survivor in survivors:
        console.print(f"not caught: {survivor}", markup=False)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
