"""Temporary folders: in memory where there is plenty, on disk where that was asked for."""

from __future__ import annotations

from pathlib import Path

from transfusion.runtime import scratch as module
from transfusion.runtime.scratch import scratch_folder


def place_of(nbytes: int, on_disk: bool) -> Path:
    with scratch_folder(nbytes, on_disk=on_disk) as folder:
        (folder / "file").write_text("something")
    assert not folder.exists()
    return folder.parent


def test_small_files_are_in_memory_unless_it_is_limited(monkeypatch, tmp_path):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(module, "IN_MEMORY", tmp_path)
    assert place_of(1000, on_disk=False) == tmp_path
    assert place_of(1000, on_disk=True) != tmp_path
    assert place_of(2**60, on_disk=False) != tmp_path, "there is not so much memory"


def test_tmpdir_is_obeyed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert place_of(1000, on_disk=False) == tmp_path


def test_there_may_be_no_file_system_in_memory(monkeypatch, tmp_path):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(module, "IN_MEMORY", tmp_path / "missing")
    assert place_of(1000, on_disk=False) != tmp_path / "missing"
