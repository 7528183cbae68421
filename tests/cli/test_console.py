"""The command line under odd names, full disks and signals; and hints in its options."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError

import transfusion
from small_models import CASES, finetuned
from transfusion.cli import console
from transfusion.cli.console import in_options
from transfusion.runtime import terminal as terminal_room
from transfusion.runtime.terminal import one_line, printable


@pytest.mark.parametrize(
    "name", [r"no\[/b] such", "[/]", "[bold]x", "\\", "[red", "a\nb", "x\x1b[2Jy", "\x07"]
)
def test_names_are_shown_as_they_are_and_control_nothing(name, cli):
    code, _, err = cli("inspect", name)
    assert code == 1
    assert one_line(name) in err.replace("\n", " ")
    assert "\x1b[2J" not in err
    assert "unexpected" not in err


def test_only_line_breaks_are_more_than_letters():
    assert printable("π\tand\nτ\x1b[2J\udcff") == "π\\tand\nτ\\x1b[2J\\udcff"
    assert one_line("one\r\ntwo") == "one two"


def test_a_phase_within_a_phase_has_a_bar_below_it(monkeypatch):
    terminal = Console(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(terminal_room, "err", terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    messages = console.Messages(quiet=False)
    with messages.bar(4, "outside") as outside:
        outside("outer work")
        with messages.bar(2, "inside") as inside:
            inside("inner work")
            assert [task.fields["what"] for task in messages._bars.tasks] == ["outer work", "inner work"]
        assert [task.fields["what"] for task in messages._bars.tasks] == ["outer work"]
        with suppress(ValueError), messages.bar(2, "tried in vain"):
            raise ValueError
        assert [task.fields["what"] for task in messages._bars.tasks] == ["outer work"]
    assert messages._bars is None
    with pytest.raises(KeyboardInterrupt), messages.bar(1, "interrupted"):
        raise KeyboardInterrupt
    assert messages._bars is None


def test_without_a_terminal_a_long_phase_prints_a_line_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(terminal_room, "monotonic", lambda: now[0])
    monkeypatch.setattr(terminal_room, "err", Console(stderr=True, highlight=False, soft_wrap=True))
    for quiet in (False, True):
        with console.Messages(quiet=quiet).bar(600, "refining") as advance:
            for step in range(100):
                now[0] += 1.0
                advance(f"refining, loss {step}")
        lines = capsys.readouterr().err.splitlines()
        assert lines == [] if quiet else [f"{n}/600 refining, loss {n - 1}, {n} s" for n in (30, 60, 90)]


@pytest.mark.parametrize(("asked", "hidden"), [([], True), (["default"], False)])
def test_what_libraries_announce_is_not_for_users(asked, hidden, monkeypatch, cli):
    monkeypatch.setattr(sys, "warnoptions", asked)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        assert cli("--version")[0] == 0
        assert (("ignore", None, FutureWarning, None, 0) in warnings.filters) is hidden


STEERING = "x\x1b[2J\x07\x9b31m\x7f\u202ey"


def test_strings_of_a_file_do_not_steer_the_terminal(cli, made, tmp_path):
    """Wherever they are shown: tables, lines, JSON, notes and errors."""
    a, b = made("vit", 1), made("vit", 2)
    pi = transfusion.align(a, b, method="naive")
    advice = {"verdict": STEERING, "text": STEERING, "instead": STEERING}
    odd = replace(pi.provenance, method=STEERING, source=STEERING, target=STEERING, advice=advice)
    replace(pi, provenance=odd).save(tmp_path / "pi.safetensors")
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    moving = ("transport", tuned, "--base", a, "--onto", b, "--via", tmp_path / "pi.safetensors", "--force")
    said = ""
    for more in ((), ("--json",)):
        for command in (("inspect", tmp_path / "pi.safetensors"), (*moving, "-o", tmp_path / "moved")):
            code, out, err = cli(*command, *more)
            assert code == 0, err
            said += out + err
    moved = json.loads(out)
    assert moved["alignment"]["advice"]["text"] == STEERING, "as data, it is what it was"
    assert "\\x9b31m" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


@pytest.mark.parametrize(("total", "shown"), [(None, "reading"), (3, "1/3 reading")])
def test_a_bar_fits_into_80_columns_and_counts_only_towards_a_known_total(total, shown, monkeypatch):
    terminal = Console(width=80, file=StringIO(), force_terminal=True)
    monkeypatch.setattr(terminal_room, "err", terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with console.Messages(quiet=False).bar(total, "reading") as advance:
        advance("reading the weights of both bases, " * 9)
    lines = [Text.from_ansi(line).plain for line in terminal.file.getvalue().splitlines()]
    assert any(f" {shown} the weights of" in line for line in lines)
    assert not any("None" in line or len(line) > 80 for line in lines)


NAMES = [
    pytest.param(b"x" * 250, id="long"),
    pytest.param(b"**", id="pattern"),
    pytest.param(b"a[b]?", id="brackets"),
    pytest.param("π\u0301 ñ".encode(), id="accents"),
]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_may_have_any_name_that_a_file_may_have(name, cli, made, tmp_path):
    a, b, tuned = made("vit", 1), made("vit", 2), finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned")
    (place := tmp_path / "place").mkdir()
    pi, moved = place / f"{os.fsdecode(name)[:-1]}p", place / os.fsdecode(name)
    assert cli("align", a, b, "--method", "naive", "-o", pi)[0] == 0
    code, _, err = cli("transport", tuned, "--base", a, "--onto", b, "--via", pi, "-o", moved)
    assert code == 0, err
    assert cli("transport", "--from", moved, "-o", place / "again")[0] == 0
    assert sorted(place.iterdir()) == sorted([pi, moved, place / "again"])


@pytest.mark.parametrize("name", [b"x" * 256, b"x" * 5000])
def test_a_name_that_no_file_can_have_is_refused(name, cli, made, tmp_path):
    place = tmp_path / os.fsdecode(name)
    for arguments in (("align", made("vit", 1), made("vit", 2), "-o", place), ("inspect", place)):
        code, _, err = cli(*arguments)
        assert code == 1
        assert "File name too long" in err
        assert "unexpected" not in err


@pytest.mark.parametrize("method", ["guarded", "functional"])
def test_a_full_disk_is_a_known_error_of_align(method, cli, made, tmp_path):
    a, b = made("vit", 1), made("vit", 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code, _, err = cli("align", a, b, "--method", method, "-o", tmp_path / "pi")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 1
    assert "File too large" in err
    assert "check free disk space" in err
    assert "unexpected" not in err
    assert not (tmp_path / "pi").exists()


def test_no_memory_left_is_a_known_error(cli, monkeypatch):
    def demanding(arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("transfusion.cli.app.app", demanding)
    code, _, err = cli("inspect", "x")
    assert code == 1
    assert "not enough memory" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_told_by_the_exit_code_whatever_native_code_makes_of_it(number, code, cli, monkeypatch):
    def native(arguments: object) -> None:
        try:
            os.kill(os.getpid(), number)
        except BaseException as error:
            raise SafetensorError("Error while serializing: interrupted") from error

    monkeypatch.setattr("transfusion.cli.app.app", native)
    found, _, err = cli("inspect", "x")
    assert found == code
    assert err.startswith("interrupted; no output was written")


def test_names_that_are_no_text_are_known_errors(made, tmp_path):
    """safetensors opens no such file. In a process of its own: what is under test is how stderr is written."""
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.symlink_to(made("vit", 1))
    script = "import sys; from transfusion.cli import main; main(sys.argv[1:])"
    for arguments in (["inspect", folder], ["align", made("vit", 1), made("vit", 2), "-o", folder / "pi"]):
        run = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True)
        assert run.returncode == 1
        assert b"not " in run.stderr
        assert b"UTF-8" in run.stderr
        assert b"unexpected" not in run.stderr


def _hints() -> Iterator[tuple[str, str]]:
    """Every literal hint of the library, with its module; the command line has its own."""
    root = Path(transfusion.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                parts = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
                yield path.name, "".join(one.value for one in parts if isinstance(one.value, str))


def test_hints_name_parameters_which_the_command_line_shows_as_options():
    """Hints reach users of Python, too: options are for the command line, and for whole commands to type."""
    for module, hint in _hints():
        command = any(word in hint for word in ("transfusion ", "hf upload ", "ray ", "command line"))
        assert command or "--" not in hint, (module, hint)
        assert not re.search(r"`[a-z_]+(=[^`]*)?`", in_options(hint)), (module, hint)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed, made, tmp_path):
    """A service may start the program without them; the files of a run must not take their numbers."""
    a, b = made("vit", 1), made("vit", 2)
    command = f"align {a} {b} --method naive -o {tmp_path / 'pi.safetensors'}"
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m transfusion {command} {closed}"], capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert ("π written" in done.stdout) == (">&-" not in closed.split())
    assert transfusion.Alignment.load(tmp_path / "pi.safetensors").provenance.method == "naive"
