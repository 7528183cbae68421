"""The threat model names the test that holds each of its lines, and these tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parents[1]
PAGE = (HERE.parent / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)


def test_every_test_that_the_threat_model_names_exists():
    there = {
        (str(file.relative_to(HERE)), node.name)
        for file in HERE.rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(NAMED) > 15
    assert not set(NAMED) - there


def test_every_line_of_the_threat_model_has_a_test():
    rows = PAGE.partition("| line | how it is held | test |")[2].strip().splitlines()[1:]
    assert len(rows) > 10
    assert not [row for row in rows if not re.search(r"`[\w/]+\.py::test_\w+`", row.rpartition(" | ")[2])]
    assert "TODO" not in PAGE
