"""The notebooks: every cell runs, and what they are about is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SAID = {
    "first_steps": (
        r"^alignable: the units of A were found again in B",
        r"largest difference of any output below 1e-9: True",
        r"in its own place: (9\d|100)%",
        r"not alignable by permutation",
    ),
    "lora_to_a_new_release": (
        r"^alignable: the units of A were found again in B",
        r"'adapter_config.json', 'adapter_model.safetensors'",
        r"'peft_type': 'LORA', 'r': 8",
    ),
}


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return float(found[1])


def require_what_matters(name: str, text: str) -> None:
    for pattern in SAID[name]:
        assert re.search(pattern, text, re.MULTILINE), pattern
    if name == "first_steps":
        assert number(r"share of the gap that arrives: (-?\d+)%", text) > 50
    else:
        as_it_is = number(r"LoRA as it is +loss on capitals ([\d.]+)", text)
        moved = number(r"LoRA moved +loss on capitals ([\d.]+)", text)
        assert moved < as_it_is - 1
        assert number(r"LoRA moved +(\d+)% of the letters", text) > 60
        assert number(r"LoRA as it is +(\d+)% of the letters", text) < 30


@pytest.mark.parametrize("name", SAID)
def test_stored_outputs_say_what_matters(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    require_what_matters(name, printed(notebook))
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", SAID)
def test_notebooks_run(name, tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell["outputs"] = []
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    require_what_matters(name, printed(notebook))
