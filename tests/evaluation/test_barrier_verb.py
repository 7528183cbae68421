"""``transfusion barrier`` as its users see it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from transfusion.evaluation.barrier import Shortcuts
from transfusion.evaluation.settings import SHORTCUTS
from transfusion.matching.align import align


@pytest.fixture(scope="module")
def job(made, tmp_path_factory):
    """Two models, a π untied and one tied, and a file of examples."""
    folder = tmp_path_factory.mktemp("job")
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    vias = [
        align(a, b, residual=residual, advice=False).save(folder / f"{residual}.safetensors")
        for residual in ("untied", "tied")
    ]
    images = torch.randn(20, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    data = folder / "data.safetensors"
    save_file({"pixel_values": images, "labels": torch.arange(20) % 7}, data)
    return a, b, vias, data


@pytest.fixture
def run(cli, job):
    a, b, _, data = job
    return lambda *more: cli("barrier", a, b, "--data", data, *more)


def test_a_table_of_all_ways(run, job):
    untied, tied = job[2]
    code, out, err = run("--via", untied, "--via", tied, "--points", 3)
    assert (code, err) == (0, "")
    assert "vanilla" in out
    assert "auto (untied)" in out
    assert "auto (tied)" in out
    assert all(f" {alpha} " in out for alpha in ("0", "0.5", "1"))
    assert "20 examples of" in out
    assert "Shortcuts that carry P_out·P_inᵀ at α = 0: auto (untied): interpolated." in out
    assert "does not compute what A computes" not in out


def test_results_for_programs(run, job):
    untied, tied = job[2]
    _, out, _ = run("--via", untied, "--via", untied, "--via", tied, "--no-vanilla", "--points", 3, "--json")
    result = json.loads(out)
    labels = [curve["label"] for curve in result["curves"]]
    assert labels == ["auto (untied) 1", "auto (untied) 2", "auto (tied)"]
    assert result["examples"] == 20
    assert result["question"] == "class of every example"
    first = result["curves"][0]
    assert [point["alpha"] for point in first["points"]] == [0, 0.5, 1]
    assert first["points"][0].keys() == {"alpha", "loss", "accuracy"}
    assert first["height"] >= 0
    assert first["faithful"] is True
    assert first["shortcuts"] == "interpolated"


def test_only_vanilla_with_a_limit(run):
    code, out, _ = run("--points", 2, "--limit", 5, "--json")
    assert code == 0
    assert json.loads(out)["examples"] == 5
    assert [curve["label"] for curve in json.loads(out)["curves"]] == ["vanilla"]


def test_shortcuts_are_a_choice_and_a_changed_function_is_marked(run, job):
    code, out, _ = run("--via", job[2][0], "--shortcuts", "plain", "--points", 2)
    assert code == 0
    assert "* π(A) does not compute what A computes" in out
    code, out, _ = run("--via", job[2][0], "--shortcuts", "rounded", "--points", 3, "--json")
    assert json.loads(out)["curves"][1]["shortcuts"] == "rounded"


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("json", b"{\n")]
)
def test_what_is_written(suffix, start, run, job, tmp_path):
    output = tmp_path / f"figure.{suffix}"
    code, out, _ = run("--via", job[2][0], "--points", 2, "-o", output, "--shortcuts", "plain")
    assert code == 0
    assert out.endswith(f"written to {output}\n")
    assert output.read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_a_result_is_replaced_only_if_that_is_asked(run, tmp_path):
    output = tmp_path / "result.json"
    assert run("--points", 2, "-o", output)[0] == 0
    before = output.read_bytes()
    code, _, err = run("--points", 3, "-o", output)
    assert code == 1
    assert "exists already" in err
    assert output.read_bytes() == before
    assert run("--points", 3, "-o", output, "--force")[0] == 0
    assert output.read_bytes() != before


def test_a_figure_leaves_the_drawing_library_as_it_was(run, tmp_path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    assert run("--points", 2, "-o", tmp_path / "figure.svg")[0] == 0
    assert dict(mpl.rcParams) == before
    first = (tmp_path / "figure.svg").read_bytes()
    run("--points", 2, "-o", tmp_path / "figure.svg", "--force")
    assert (tmp_path / "figure.svg").read_bytes() == first


def test_refusals_come_before_any_work(run, job, monkeypatch, tmp_path):
    monkeypatch.setattr("transfusion.evaluation.barrier._line", None)
    code, _, err = run("-o", tmp_path / "figure.bmp")
    assert code == 1
    assert "neither a figure nor JSON" in err
    code, _, err = run("-o", job[3].with_suffix(".safetensors"), "--force")
    assert code == 1
    link = tmp_path / "data.json"
    link.symlink_to(job[3])
    code, _, err = run("-o", link, "--force")
    assert code == 1
    assert "is, or holds, an input" in err
    assert run("--no-vanilla")[0] == 2
    assert run("--shortcuts", "bent")[0] == 2
    assert run("--points", 1)[0] == 2
    assert run("--limit", 0)[0] == 2
    assert run("--dtype", "float16")[0] == 2


def test_bad_data_is_one_line_and_a_hint(cli, job, tmp_path):
    a, b, _, _ = job
    save_file({"pixel_values": torch.zeros(2, 3, 12, 12)}, tmp_path / "data.safetensors")
    code, out, err = cli("barrier", a, b, "--data", tmp_path / "data.safetensors")
    assert (code, out) == (1, "")
    assert len(err.strip().splitlines()) == 2
    assert "no labels in it" in err
    assert cli("barrier", a, b)[0] == 2


def test_the_choices_on_the_command_line_are_all_there_are():
    assert tuple(Shortcuts) == SHORTCUTS
