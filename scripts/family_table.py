"""Write the table of all families, measured: python scripts/family_table.py > docs/families.md

For every family: the axes that move, those that stay and why, the classes it was certified on, and the
largest change of any output when every free axis of such a model was moved at random, in float64.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from families import CASES, Case
from transfusion.architecture.families import all_families
from transfusion.architecture.table import Family, Symmetry
from transfusion.live.live_model import LiveModel
from transfusion.model.model import Model
from transfusion.verification.certification import certify

HEAD = """# Families

Made by `python scripts/family_table.py`; every number was measured in that run. *Change* is the largest
change of any output, over all classes, when every free axis was moved at random, tied and untied, in
float64. Axes inside another are written `head/qk`; *in pairs* are those whose pairs of units were turned by
random angles, and not permuted. Every axis that stays was also moved, alone, and did change the outputs.

| family | moves | stays, because | change | certified on |
|---|---|---|---|---|"""


def row(family: Family, cases: list[Case]) -> str:
    moves: dict[str, Symmetry] = {}
    stays: dict[str, str] = {}
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
            if space.group is Symmetry.FIXED:
                stays[space.axis] = space.why
            else:
                parent = model.architecture.spaces[space.parent].axis if space.parent else ""
                name = "stream" if space.stream else space.axis
                moves[f"`{parent}/{name}`" if parent else f"`{name}`"] = space.group
    because = defaultdict(list)
    for axis, why in stays.items():
        because[why].append(f"`{axis}`")
    reasons = "; ".join(f"{', '.join(axes)}: {why}" for why, axes in because.items())
    moving = ", ".join(f"{name} in pairs" if group.turns else name for name, group in moves.items())
    return (
        f"| `{family.name}` ({family.library}) | {moving} | {reasons} | {change:.0e} | {', '.join(classes)} |"
    )


def main() -> None:
    print(HEAD)
    for family in sorted(all_families(), key=lambda family: family.name):
        print(row(family, [case for case in CASES.values() if case.family == family.name]))


if __name__ == "__main__":
    main()
