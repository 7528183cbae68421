"""The rooms of the package: few."""

from __future__ import annotations

from inspect import isfunction
from pathlib import Path

import transfusion

ROOT = Path(transfusion.__file__).parent
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if "__pycache__" not in path.parts]


def test_there_are_at_most_fifteen_rooms():
    rooms = {path.relative_to(ROOT).parts[0] for path in MODULES} - {"__init__.py", "__main__.py"}
    assert len(rooms) <= 15, sorted(rooms)


def test_rooms_named_like_verbs_leave_the_verbs_alone():
    import transfusion.report.page
    import transfusion.transport.transport

    assert isfunction(transfusion.transport)
    assert isfunction(transfusion.report)
