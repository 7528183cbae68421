"""The rooms of the package: few, and no name in two of them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import transfusion

ROOT = Path(transfusion.__file__).parent
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if "__pycache__" not in path.parts]


def test_there_are_at_most_fifteen_rooms():
    rooms = {path.relative_to(ROOT).parts[0] for path in MODULES} - {"__init__.py", "__main__.py"}
    assert len(rooms) <= 15, sorted(rooms)


def test_no_module_name_occurs_twice():
    places = defaultdict(list)
    for path in MODULES:
        if path.stem not in ("__init__", "__main__") and "families" not in path.parts:
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_public_class_name_occurs_twice():
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
