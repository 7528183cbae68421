"""Corrupted tables are caught: some in every run, all of them in the slow one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "mutate_tables.py"


def mutate(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *names], capture_output=True, text=True, check=False)


def test_every_corruption_of_the_llama_table_is_caught():
    found = mutate("llama")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1/1" in found.stdout, "merging qk with vo was among them"


@pytest.mark.slow
def test_every_corruption_of_every_table_is_caught():
    found = mutate()
    assert found.returncode == 0, found.stdout + found.stderr
