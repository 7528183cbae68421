"""Corrupted tables are caught: some in every run, all of them in the slow one."""

from __future__ import annotations

import pytest

import mutate_tables


def test_every_corruption_of_the_llama_table_is_caught(capsys):
    code, info = mutate_tables.main(["llama"]), capsys.readouterr().out
    assert code == 0, info
    assert "1/1" in info, "merging qk with vo was among them"


@pytest.mark.slow
def test_every_corruption_of_every_table_is_caught(capsys):
    assert mutate_tables.main([]) == 0, capsys.readouterr().out
