"""Results in Python: tables and figures where people look, and silence where programs run."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import save_file

import transfusion
from small_models import CASES, finetuned
from transfusion.alignment.alignment import Alignment
from transfusion.report.inspect import Description
from transfusion.report.result_files import Result
from transfusion.runtime.progress import SILENT, following, of_caller
from transfusion.runtime.shown import LINES, Shown
from transfusion.runtime.terminal import TerminalProgress
from transfusion.transport.output import Output
from transfusion.transport.refinement.asked import Asked

SRC = Path(transfusion.__file__).parents[1]


@pytest.fixture(scope="module")
def job(made, tmp_path_factory) -> dict[str, Any]:
    """A fine-tune, two bases, a file of π, and examples."""
    folder = tmp_path_factory.mktemp("job")
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    pi = transfusion.align(a, b, advice=False).save(folder / "pi.safetensors")
    images = torch.randn(21, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": images, "labels": torch.arange(21) % 7}, folder / "data.safetensors")
    tuned = finetuned(CASES["vit-classifier"], a, folder / "tuned")
    return {"tuned": tuned, "base": a, "onto": b, "via": pi, "data": folder / "data.safetensors"}


def asked(job: dict[str, Any], verb: str) -> tuple[list[object], Any]:
    """The words of the command line, and the result of the function, with the same settings."""
    tuned, a, b, pi, data = job.values()
    moving = {"base": a, "onto": b, "via": pi}
    of_pi = ["--base", a, "--onto", b, "--via", pi, "--data", data]
    match verb:
        case "sweep":
            found = transfusion.sweep(tuned, **moving, data=data, alphas=[0.5, 1])
            return [verb, tuned, *of_pi, "--alphas", "0.5,1"], found
        case "fewshot":
            found = transfusion.fewshot(tuned, **moving, data=data, shots=1, epochs=1)
            file = pi.with_name("alpha.json")
            return [verb, tuned, *of_pi, "--shots", "1", "--epochs", "1", "-o", file], found
        case "evaluate":
            found = transfusion.evaluate([b, tuned], data=data, against=a)
            return [verb, b, tuned, "--data", data, "--against", a], found
        case "barrier":
            found = transfusion.barrier(a, b, via=pi, data=data, points=3)
            return [verb, a, b, "--via", pi, "--data", data, "--points", "3"], found
        case "verify":
            return [verb, a, "--via", pi], transfusion.verify(a, via=pi)
        case "inspect":
            return [verb, a], transfusion.inspect(a)
        case "inspect π":
            return ["inspect", pi], Alignment.load(pi)
    raise ValueError(verb)


DRAWN = ("sweep", "fewshot", "barrier")


@pytest.mark.parametrize("verb", [*DRAWN, "evaluate", "verify", "inspect", "inspect π"])
def test_a_result_shows_what_the_command_line_prints(verb, job, cli):
    words, found = asked(job, verb)
    quiet = [] if verb in ("verify", "inspect", "inspect π") else ["-q"]
    code, out, err = cli(*words, *quiet)
    assert code == 0, err
    printed = [line.rstrip() for line in out.splitlines() if not line.startswith("written to ")]
    if len(printed) > LINES:
        printed[LINES:] = [f"… and {len(printed) - LINES} more lines: rich.print shows all"]
    assert repr(found).splitlines() == printed
    html = found._repr_html_()
    assert re.sub(r"<[^>]+>", "", html).startswith(printed[0].replace("'", "&#x27;")[:30])
    pictures = re.findall(r'<img alt="\w+" src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(pictures) == (verb in DRAWN)
    for picture in pictures:
        texts = [text for one in ElementTree.fromstring(b64decode(picture)).iter() for text in one.itertext()]
        assert any("auto" in text for text in texts), "the key of the figure names the method of π"


def test_an_output_shows_what_it_would_write(job):
    moved = transfusion.transport(job["tuned"], base=job["base"], onto=job["onto"], via=job["via"])
    title, tensors, *rest = repr(moved).splitlines()
    assert title == f"{job['tuned']}, moved onto {job['onto']}"
    assert re.fullmatch(r"tensors  (\d+): \1 moved", tensors)
    assert [line.split()[0] for line in rest] == ["reads", "writes"]


def test_every_result_shows_itself():
    assert all(getattr(transfusion, verb) for verb in transfusion.__all__), "imports all modules of results"
    every = [Result, Alignment, Output, Description, Asked]
    every += [one for one in Result.__subclasses__() if one.__module__.startswith("transfusion.")]
    assert len(every) > 8
    for one in every:
        assert one.__repr__ is Shown.__repr__, f"{one.__name__}: its dataclass writes a repr of its own"
        assert one is Result or one.__rich__ is not Shown.__rich__


class Hostile(Shown):
    def __rich__(self):
        from rich.text import Text

        return Text("x\x1b[2J<script>&\x9b31m\n" + "line\n" * 100)


def test_names_steer_neither_a_terminal_nor_a_page():
    text, html = repr(Hostile()), Hostile()._repr_html_()
    assert text.startswith("x\\x1b[2J<script>&\\x9b31m\n")
    assert "\\x1b[2J&lt;script&gt;&amp;\\x9b31m\n" in html
    assert html.count("line\n") == 100
    assert text.splitlines()[-1] == f"… and {101 - LINES} more lines: rich.print shows all"


# ── progress ──────────────────────────────────────────────────────────────────────────────────

ALIGN = "import transfusion; pi = transfusion.align({a!r}, {b!r}, method='guarded')"


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    return {**inherited, "PYTHONPATH": str(SRC), "TERM": "xterm", "PYTHONUNBUFFERED": "1"}


def test_a_script_whose_output_is_read_by_a_program_is_silent(job, tmp_path):
    tuned, a, b, *_ = map(str, job.values())
    moving = f"transfusion.transport({tuned!r}, base={a!r}, onto={b!r}, via=pi, output='moved')"
    code = f"import os; os.chdir({str(tmp_path)!r}); {ALIGN.format(a=a, b=b)}; {moving}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "moved" / "model.safetensors").is_file()


def test_one_thread_speaks_and_a_verb_within_a_verb_leaves_it_to_that(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(of_caller(), TerminalProgress)
    with following(SILENT):
        assert of_caller() is None
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(of_caller).result() is None
    monkeypatch.setenv("RANK", "1")
    assert of_caller() is None


@pytest.mark.parametrize("silent", [False, True])
def test_in_a_terminal_a_function_shows_bars_and_warnings_unless_it_is_told_not_to(silent, made):
    code = ALIGN.format(a=str(made("vit")), b=str(made("vit", 2)))
    if silent:
        code = "from transfusion.runtime.progress import SILENT\n" + code.replace(")", ", progress=SILENT)")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment(), stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # how a terminal says that the other end is closed
            pass
        os.close(ours)
        assert running.wait() == 0
    text = b"".join(parts).decode()
    assert ("━" in text) != silent
    assert (text == "") == silent


class Watched(NotebookClient):
    """Keeps every message of the kernel with something to show."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.seen = [*getattr(self, "seen", []), msg["content"]["data"]]
        return super().process_message(msg, cell, cell_index)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_shows_bars_while_it_runs_and_then_tables_and_figures(job, monkeypatch, tmp_path):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    tuned, a, b, via, data = map(str, job.values())
    cells = [
        "from transfusion.runtime.notebook import NotebookProgress as P; P.AFTER = P.EVERY = 0.0",
        ALIGN.format(a=a, b=b)
        + f"; moved = transfusion.transport({tuned!r}, base={a!r}, onto={b!r}, via=pi)\npi",
        f"transfusion.barrier({a!r}, {b!r}, via={via!r}, data={data!r}, points=3)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = Watched(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    bars = [one["text/html"] for one in client.seen]
    assert any(re.search(r'<progress value="\d+" max="\d+"></progress> \d+/\d+ ', one) for one in bars)
    for cell in notebook.cells[1:]:
        *others, shown = cell.outputs
        assert shown.output_type == "execute_result"
        assert shown.data["text/html"].startswith("<pre ")
        left = [one.data["text/html"] for one in others if one.output_type == "display_data"]
        assert set(left) == {""}, "the bars are gone"
    warnings = [one.text for one in notebook.cells[1].outputs if one.get("name") == "stderr"]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: not alignable")
    assert "data:image/svg+xml;base64," in notebook.cells[2].outputs[-1].data["text/html"]
    assert "barrier" in notebook.cells[2].outputs[-1].data["text/plain"]
