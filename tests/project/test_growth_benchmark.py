"""The benchmark of growth: exponents, tables, and one run of the whole on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from growth import __main__ as benchmark
from growth import tables
from growth.llamas import SIZES, Size
from growth.tables import exponent
from growth.tasks import TASKS


def test_exponents_are_fitted_beyond_the_start() -> None:
    start = {"seconds": 2.0}
    sizes = (1e6, 1e7, 1e8, 1e9)
    runs = [{"parameters": size, "seconds": 2.0 + (size / 1e7) ** 1.5} for size in sizes]
    power, points = exponent(runs, start, "seconds")
    assert power == pytest.approx(1.5)
    assert points == 2, "runs that are hardly longer than the start do not count"
    assert exponent(runs[:2], start, "seconds") == (None, 0)
    assert exponent(runs, None, "seconds") == (None, 0)
    near = [{"parameters": size, "seconds": 99.0} for size in (1.1e9, 1.4e9)]
    assert exponent(near, start, "seconds") == (None, 2), "too near to each other"


def test_what_is_left_out_says_why() -> None:
    last = list(SIZES)[-1]
    for task in TASKS.values():
        assert task.largest == last or task.why, task.name


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(SystemExit, match="huge: unknown; known are 20M"):
        benchmark.main(["--sizes", "huge"])


@pytest.mark.slow
def test_a_run_is_measured_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SIZES, "small", Size("small", 2, 128, 320, 8, 4, 600))
    monkeypatch.setattr(benchmark, "ORDER", ["tiny", "small", *(name for name in SIZES if name != "small")])
    file, asked = tmp_path / "results.json", ["--sizes", "small", "--json", str(tmp_path / "results.json")]
    benchmark.main([*asked, "--tasks", "guarded", "--keep", str(tmp_path / "models")])
    capsys.readouterr()
    benchmark.main([*asked, "--tasks", "guarded,transport", "--keep", str(tmp_path / "models")])
    told = capsys.readouterr()
    assert "small transport:" in told.err
    assert "small guarded:" not in told.err, "it was there already"
    info = json.loads(file.read_text())
    assert sorted((one["task"], one["size"]) for one in info["runs"]) == [
        (task, size) for task in ("guarded", "transport") for size in ("small", "tiny")
    ]
    assert all(one["seconds"] > 0 and one["peak"] > 1e8 and one["processor"] > 0 for one in info["runs"])
    assert "`transport` of a dense fine-tune" in tables.everything(info)
