"""Write the tables of all families, measured: python scripts/family_table.py > docs/families.md

For every family: the axes that move, the axes that stay and why, the classes it was certified on, and the
largest change of any output when every free axis of such a model was moved at random, in float64.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from small_models import CASES, Case
from transfusion.architecture.table import Family, Symmetry
from transfusion.families import all_families
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import certify

HEAD = """# Families

Every family is described by one table, and every table is certified on the classes of its library
([below](#certified-on)): all free axes are moved at random in float64, with the residual stream tied and
untied, and no output may change. *Change* is the largest change that was measured. Every axis that stays was
also moved, alone, and did change the outputs; [the reasons](#why-an-axis-stays) are below.

`head/qk` is the axis `qk` within each `head`. *In pairs*: pairs of units are rotated by any angle and not
permuted (rotary positions). Written by `make families`."""


@dataclass
class Row:
    """What was measured of one family."""

    family: str
    library: str
    moves: list[str]
    stays: dict[str, list[str]]
    """Axes that stay, each with its reasons."""
    change: float
    classes: list[str]


def measure(family: Family, cases: list[Case]) -> Row:
    """Certify all cases of a family."""
    moves: dict[str, Symmetry] = {}
    stays: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, None] = {}
    change = 0.0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = Model.open(case.save(Path(folder) / "model", 1))
            live = LiveModel.of(model)
            certificate = certify(live)
        assert certificate.passed, (case.name, certificate.failures)
        change = max(change, certificate.difference)
        classes[type(live.module).__name__] = None
        for space in model.architecture.spaces.values():
            if space.group is not Symmetry.FIXED:
                parent = model.architecture.spaces[space.parent].axis if space.parent else ""
                name = "stream" if space.stream else space.axis
                moves[f"`{parent}/{name}`" if parent else f"`{name}`"] = space.group
            elif space.why not in stays[space.axis]:
                stays[space.axis].append(space.why)
    moving = [f"{name} in pairs" if group.rotates_pairs else name for name, group in moves.items()]
    return Row(family.name, family.library, moving, dict(stays), change, list(classes))


def page(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of docs/families.md."""
    yield HEAD
    yield "\n| family | moves | stays | change |\n|---|---|---|---|"
    for row in rows:
        stays = ", ".join(f"`{axis}`" for axis in row.stays)
        yield f"| `{row.family}` ({row.library}) | {', '.join(row.moves)} | {stays} | {row.change:.0e} |"
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for axis, reasons in row.stays.items():
            for why in reasons:
                families[axis, why].append(row.family)
    yield "\n## Why an axis stays\n\n| axis | reason | families |\n|---|---|---|"
    for (axis, why), names in sorted(families.items()):
        shown = ", ".join(f"`{name}`" for name in names) if len(names) <= 4 else f"{len(names)} families"
        yield f"| `{axis}` | {why} | {shown} |"
    yield "\n## Certified on\n\n| family | classes |\n|---|---|"
    for row in rows:
        yield f"| `{row.family}` | {', '.join(row.classes)} |"


def main() -> None:
    families = sorted(all_families(), key=lambda family: family.name)
    rows = [
        measure(family, [case for case in CASES.values() if case.family == family.name])
        for family in families
    ]
    print("\n".join(page(rows)))


if __name__ == "__main__":
    main()
