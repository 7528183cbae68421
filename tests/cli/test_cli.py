"""The command line as its users see it: stdout, stderr, exit codes."""

from __future__ import annotations

import json
import shlex
from importlib import import_module

import pytest
from safetensors.torch import load_file, save_file

import transfusion
from small_models import CASES, finetuned, often
from transfusion.cli import main
from transfusion.cli.console import in_options
from transfusion.errors import UselessResultError
from transfusion.matching.methods import INSIST, WITH_TRAINING, WITHOUT_TRAINING


def test_the_whole_job(cli, made, tmp_path):
    a, b = made("llama", 1), made("llama", 2)
    tuned = finetuned(CASES["llama"], a, tmp_path / "tuned")
    pi = tmp_path / "pi.safetensors"

    code, out, err = cli("align", a, b, "-o", pi, "--method", "guarded")
    assert (code, err.startswith("warning: the vocabularies were not compared")) == (0, True)
    verdict, better, written = out.splitlines()
    assert verdict.startswith("not alignable by permutation: ")
    assert better == f"better: {in_options(f'{WITH_TRAINING} {WITHOUT_TRAINING}')}"
    assert written.startswith(f"π written to {pi}: ")
    code, out, err = cli("align", a, b, "-o", pi, "--force", "-v", "--method", "guarded")
    assert "objective" in out.splitlines()[3]

    code, out, _ = cli("inspect", pi)
    assert code == 0
    assert "method guarded, seed 0" in out
    assert "layer.0.group" in out
    assert "0←" in out

    code, out, _ = cli("verify", a, "--via", pi)
    assert code == 0
    assert "π(A) computes what A computes, with P_out·P_inᵀ in 6 shortcuts" in out

    code, out, err = cli(
        "transport", tuned, "--base", a, "--onto", b, "--via", pi, "-o", tmp_path / "moved", "-q"
    )
    tokens, verdict = err.splitlines()
    assert code == 0
    assert tokens.startswith("warning: the vocabularies were not compared, and are taken to be the same")
    assert verdict.startswith("warning: not alignable by permutation: "), "the user's own π"
    assert f"tensors moved onto {b} with α = 1" in out
    assert (tmp_path / "moved" / "transfusion.json").exists()


def test_transport_without_a_pi_aligns_first(cli, made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit-classifier"], a, tmp_path / "tuned")
    bases = ("--base", a, "--onto", b, "--force-unrelated")
    code, out, _ = cli("transport", tuned, *bases, "-o", tmp_path / "moved", "--residual", "tied")
    assert code == 0
    assert "taken from the fine-tune, because B has none that fit: classifier.weight, classifier.bias" in out
    assert "left out of B, because the fine-tune does not have them: pooler.dense.weight" in out
    metadata = json.loads((tmp_path / "moved" / "transfusion.json").read_text())
    assert metadata["alignment"]["residual"] == "tied"


def test_bases_that_are_not_alignable_are_refused_with_the_command_to_type(cli, made, tmp_path):
    """The default would write a result of no use; the command in the hint is accepted as it is."""
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned of A")
    typed = ["transport", str(tuned), "--base", str(a), "--onto", str(b), "-o", str(tmp_path / "moved"), "-q"]
    code, out, err = cli(*typed)
    assert (code, out) == (4, "")
    message, _, last = err.splitlines()
    assert message.startswith(f"error: nothing was written: {a} and {b} are not alignable by permutation: ")
    _, command = last.split("type this next: ")
    assert shlex.split(command) == ["transfusion", *typed, "--refine"]
    assert cli(*shlex.split(command)[1:], "--dry-run")[0] == 0
    assert not [path for path in tmp_path.iterdir() if "moved" in path.name]

    for insisting in (["--force-unrelated"], ["--method", "guarded"]):
        code, _, err = cli(*typed, *insisting, "--force")
        assert code == 0
        assert err.startswith("warning: not alignable by permutation: "), "-q hides no warning"
    code, out, err = cli(*typed, "--force", "--refine", "--refine-steps", 2)
    assert (code, "not alignable" in out + err) == (0, False)


@pytest.mark.parametrize("verb", ["transport", "merge"])
def test_the_command_to_type_has_no_option_that_would_be_refused(verb, cli, made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    limited = ["--memory", "2GB"] if verb == "transport" else []
    bases = ["--base", a, "--onto", b, "-o", tmp_path / "moved", *limited]
    code, _, err = cli(verb, *[tuned] * (1 + (verb == "merge")), *bases)
    assert code == 4
    assert err.splitlines()[-1] == (
        "hint: --method functional does without training and brings less. --force-unrelated writes the permutation"
        " nevertheless."
    )


def test_in_python_the_parameters_to_give_are_named(made, tmp_path):
    tuned = finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned")
    bases = {"base": made("vit", 1), "onto": made("vit", 2)}
    with pytest.raises(UselessResultError, match="not alignable by permutation") as refused:
        transfusion.transport(tuned, **bases)
    assert refused.value.hint == f"{WITH_TRAINING} {WITHOUT_TRAINING} {INSIST}"
    assert transfusion.transport(tuned, **bases, force_unrelated=True).state_dict()


def test_results_as_json_are_alone_on_stdout(cli, made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    _, out, _ = cli("align", a, b, "-o", tmp_path / "pi.safetensors", "--json", "--no-advice")
    assert json.loads(out)["objective"][-1] > json.loads(out)["objective"][0]
    _, out, _ = cli("inspect", tmp_path / "pi.safetensors", "--json")
    assert json.loads(out)["heads"].keys() == {f"layer.{i}.head" for i in range(3)}
    _, out, _ = cli("inspect", a, "--json")
    axes = {axis["axis"]: axis for axis in json.loads(out)["axes"]}
    assert axes["layer.*.qk"] | {"tensors": None, "why": None} == {
        "axis": "layer.*.qk",
        "size": 6,
        "count": 3,
        "group": "permutation",
        "within": "layer.*.head",
        "stream": None,
        "why": None,
        "tensors": None,
    }
    _, out, _ = cli("verify", a, "--via", tmp_path / "pi.safetensors", "--json")
    assert json.loads(out)["equal"] is True


def test_inspect_shows_what_moves_what_stays_and_why(cli, made):
    code, out, _ = cli("inspect", made("llama"))
    assert code == 0
    assert 'config.json says model_type "llama"' in out
    assert "axes that may move" in out
    assert "rotary positions rotate each pair of units by its own angle" in out
    assert "layers.{}.self_attn.q_proj.weight" in out


def test_a_random_move_applied_is_the_same_function_and_is_found_again(cli, made, tmp_path):
    a = made("clip")
    plant, b, pi = tmp_path / "plant.safetensors", tmp_path / "b", tmp_path / "pi.safetensors"
    assert cli("align", a, a, "--method", "random", "--residual", "tied", "--seed", 5, "-o", plant)[0] == 0
    code, out, _ = cli("apply", plant, a, "-o", b)
    assert (code, out) == (0, f"π(A) written to {b}\n")
    assert cli("verify", a, "--via", plant)[0] == 0
    assert cli("align", a, b, "--residual", "tied", "-o", pi)[0] == 0
    assert load_file(pi).keys() == load_file(plant).keys()
    assert all((value == load_file(plant)[name]).all() for name, value in load_file(pi).items())


def test_dry_runs_write_nothing(cli, made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    code, out, _ = cli("align", a, b, "-o", tmp_path / "pi", "--dry-run")
    assert code == 0
    assert "would match" in out
    code, out, _ = cli("transport", tuned, "--base", a, "--onto", b, "-o", tmp_path / "moved", "--dry-run")
    assert code == 0
    assert f"would write {tmp_path / 'moved'}: " in out
    assert "0 carried" in out
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]


def test_the_output_is_checked_before_any_work_even_in_a_dry_run(cli, made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    (tmp_path / "file").write_text("")
    arguments = ["transport", tuned, "--base", a, "--onto", b, "--method", "naive", "--dry-run", "-o"]
    for place, info in ((tmp_path / "tuned", "is, or holds, an input"), (tmp_path / "file", "is a file")):
        code, _, err = cli(*arguments, place, "--force")
        assert code == 1
        assert info in err


def test_a_transport_ends_with_the_advice(cli, made, shuffled, tmp_path):
    a, b = shuffled("vit")
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    _, out, _ = cli("transport", tuned, "--base", a, "--onto", b, "-o", tmp_path / "moved")
    assert out.splitlines()[-5] == "alignable: the units of A were found again in B"
    code, _, err = cli("transport", tuned, "--base", a, "--onto", b, "-o", tmp_path / "no", "--full")
    assert code == 2
    assert "whole model already" in err


def test_a_known_error_is_one_line_and_a_hint(cli, made, tmp_path):
    code, out, err = cli("align", made("vit"), made("bert"), "-o", tmp_path / "pi", "-q")
    assert code == 1
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")


def test_help_shows_no_type_beside_a_flag(cli):
    assert "bool" not in cli("--help")[1] + cli("transport", "--help")[1] + cli("align", "--help")[1]


def test_wrong_usage_exits_with_2(cli, made, tmp_path):
    assert cli("align", made("vit"))[0] == 2
    code, _, err = cli("transport", made("vit"), "--base", made("vit"), "-o", tmp_path / "x")
    assert (code, "--onto is missing" in err) == (2, True)
    assert cli("align", made("vit"), made("vit"), "-o", tmp_path / "x", "--residual", "loose")[0] == 2
    assert cli("align", made("vit"), made("vit"), "-o", tmp_path / "x", "--dtype", "int8")[0] == 2
    assert cli("align", made("vit"), made("vit"), "-o", tmp_path / "x", "--method", "magic")[0] == 2
    assert cli("conjure")[0] == 2


def test_a_failed_verification_exits_with_3_and_names_the_module(cli, made, tmp_path):
    import numpy as np

    from tests.verification.test_verification import with_map
    from transfusion.matching.align import align

    a = made("llama")
    pi = with_map(align(a, a, method="random", residual="tied"), "layer.1.qk", np.arange(8)[::-1])
    pi.save(tmp_path / "bad.safetensors")
    code, out, err = cli("verify", a, "--via", tmp_path / "bad.safetensors")
    assert (code, out) == (3, "")
    assert "does not compute what A computes" in err
    assert "first in layers.1.self_attn.o_proj" in err


def test_apply_under_untied_is_refused(cli, made, tmp_path):
    a, pi = made("vit"), tmp_path / "pi.safetensors"
    cli("align", a, a, "--method", "random", "-o", pi)
    code, _, err = cli("apply", pi, a, "-o", tmp_path / "out")
    assert code == 1
    assert "a plain shortcut cannot convert one into the other" in err
    assert "--residual tied" in err
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_before_any_work(cli, made, tmp_path, monkeypatch):
    (tmp_path / "pi").write_text("mine")
    monkeypatch.setattr("transfusion.matching.align._align", None)
    code, _, err = cli("align", made("vit"), made("vit"), "-o", tmp_path / "pi")
    assert code == 1
    assert "exists already" in err
    assert "--force" in err


@pytest.fixture
def copies(made, tmp_path):
    """A folder with copies of two bases and a fine-tune, which must survive."""
    import shutil

    shutil.copytree(made("vit", 1), tmp_path / "m" / "a")
    shutil.copytree(made("vit", 2), tmp_path / "m" / "b")
    finetuned(CASES["vit"], made("vit", 1), tmp_path / "m" / "tuned")
    return tmp_path / "m"


@pytest.mark.parametrize("output", ["", "a", "b", "tuned", "b/model.safetensors", ".."])
def test_force_never_touches_an_input(output, cli, copies):
    before = {path: path.read_bytes() for path in copies.rglob("*") if path.is_file()}
    arguments = ("transport", copies / "tuned", "--base", copies / "a", "--onto", copies / "b", "--force")
    code, _, err = cli(*arguments, "-o", copies / output)
    assert code == 1
    assert "is, or holds, an input" in err
    code, _, err = cli("align", copies / "a", copies / "b", "--force", "-o", copies / output)
    assert code == 1
    assert {path: path.read_bytes() for path in copies.rglob("*") if path.is_file()} == before


def test_the_root_is_no_output(cli, made):
    code, _, err = cli("align", made("vit", 1), made("vit", 2), "-o", "/", "--force")
    assert code == 1
    assert "cannot be an output" in err


def test_how_to_align_and_an_alignment_exclude_each_other(cli, made, tmp_path):
    cli("align", made("vit", 1), made("vit", 2), "-o", tmp_path / "pi", "--no-advice")
    arguments = (
        "transport",
        made("vit", 1),
        "--base",
        made("vit", 1),
        "--onto",
        made("vit", 2),
        "-o",
        tmp_path / "x",
    )
    code, _, err = cli(*arguments, "--via", tmp_path / "pi", "--residual", "tied")
    assert code == 2
    assert "--via is aligned already" in err


def test_bases_that_compute_differently_are_noted(cli, made, tmp_path):
    import shutil

    shutil.copytree(made("llama", 2), tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    _, _, err = cli("align", made("llama", 1), tmp_path / "b", "-o", tmp_path / "pi", "-q")
    assert "warning: the two bases have different settings: hidden_act (silu, relu)" in err


def test_an_adapter_of_another_base_is_noted(cli, made, tmp_path):
    from tests.transport.test_adapter import edit, train_adapter

    train_adapter(made("llama"), tmp_path / "adapter", ["q_proj"])
    edit(tmp_path / "adapter", base_model_name_or_path="org/other")
    arguments = ("--base", made("llama", 1), "--onto", made("llama", 2), "-o", tmp_path / "moved", "-q")
    code, _, err = cli("transport", tmp_path / "adapter", *arguments, "--force-unrelated")
    assert code == 0
    assert f"warning: {tmp_path / 'adapter'} says that it was trained on org/other" in err


@pytest.mark.parametrize("name", often(["SIGINT", "SIGTERM"], ["SIGTERM"]))
def test_an_interrupted_program_says_so_and_goes_on_when_run_again(name, cli, made, tmp_path):
    import signal
    import subprocess
    import sys

    tuned = finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned")
    code = (
        "import os, signal, sys\n"
        "from transfusion.cli import main\n"
        "from transfusion.transport.output import Output\n"
        "compute = Output.rows\n"
        "def stop(self, entry, rows):\n"
        f"    if 'layer.2' in entry: os.kill(os.getpid(), signal.{name})\n"
        "    return compute(self, entry, rows)\n"
        "Output.rows = stop\n"
        "main(sys.argv[1:])\n"
    )
    arguments = [
        "transport",
        tuned,
        "--base",
        made("vit", 1),
        "--onto",
        made("vit", 2),
        "-o",
        tmp_path / "moved",
        "--force-unrelated",
    ]
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 128 + getattr(signal, name)
    partial = tmp_path / ".moved.partial"
    kept = f"the same command resumes from {partial}"
    assert found.stderr.splitlines()[-1] == f"interrupted; no output was written; {kept}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".moved.partial", "tuned"]
    assert [path.suffix for path in (partial / "kept").iterdir()] == [".safetensors"], "π was lost"
    assert not list((partial / "output").iterdir())
    _, _, said = cli(*arguments)
    assert said.startswith("note: going on with the π that an interrupted run had found\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "tuned"]


def test_nan_weights_stop_the_run(cli, made, tmp_path):
    a = made("vit", 1)
    bad = tmp_path / "bad"
    bad.mkdir()
    state = load_file(a / "model.safetensors")
    next(one for one in state.values() if one.ndim == 2)[0, 0] = float("nan")
    save_file(state, bad / "model.safetensors")
    (bad / "config.json").write_text((a / "config.json").read_text())
    code, _, err = cli("align", a, bad, "-o", tmp_path / "pi")
    assert code == 1
    assert "contains NaN or infinite values" in err
    assert not (tmp_path / "pi").exists()


def test_an_open_clip_file_without_its_configuration_is_refused_whatever_its_heads(cli, made, tmp_path):
    """With heads of another size than assumed, π(A) would not be A; -q would even hide the assumption."""
    weights = next(made("open_clip").glob("open_clip_*model*"))
    alone = tmp_path / f"clip{weights.suffix}"
    alone.write_bytes(weights.read_bytes())
    pi = tmp_path / "pi"
    code, _, err = cli("align", alone, alone, "-o", pi, "-q")
    assert code == 1
    assert "the number of attention heads does not follow from the shapes" in err
    assert "--config" in err
    assert not pi.exists()
    config = ("--config", made("open_clip") / "open_clip_config.json")
    assert cli("inspect", alone, *config)[0] == 0
    assert cli("align", alone, alone, "--method", "random", "-o", pi, "-q", *config)[0] == 0
    for more, code in (((), 0), (("--onto", alone), 3)):  # the next step that is told leads on
        assert "--config" in cli("verify", alone, "--via", pi, *more)[2]
        assert cli("verify", alone, "--via", pi, *more, *config)[0] == code


def test_an_unexpected_error_hides_its_traceback_unless_asked(cli, made, monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(import_module("transfusion.report.inspect"), "describe_model", broken)
    code, _, err = cli("inspect", made("vit"))
    assert code == 1
    assert "unexpected: ZeroDivisionError: oops" in err
    assert "TRANSFUSION_DEBUG=1" in err
    monkeypatch.setenv("TRANSFUSION_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(made("vit"))])


def test_the_version_is_printed(cli):
    from transfusion import __version__

    assert cli("--version")[1] == f"transfusion {__version__}\n"
