"""What a command imports before its work, and what it leaves to those that need it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from small_models import CASES, finetuned
from transfusion.cli import without_collection

_LATER = ("scipy", "sympy", "transformers", "matplotlib", "jinja2", "ray", "torch._dynamo", "torch._inductor")
_SCRIPT = """
import gc, json, sys
from transfusion.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as done:
    found = {"code": done.code, "modules": list(sys.modules)}
print(json.dumps({**found, "frozen": gc.get_freeze_count(), "collecting": gc.isenabled()}), file=sys.stderr)
"""


def run(*arguments: object) -> dict:
    command = [sys.executable, "-c", _SCRIPT, json.dumps(list(map(str, arguments)))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stderr.splitlines()[-1])
    assert found["code"] == 0, done.stderr
    return found


@pytest.mark.parametrize("arguments", [("--help",), ("transport", "--help"), ("--version",)], ids=str)
def test_help_imports_no_library_that_computes(arguments):
    loaded = set(run(*arguments)["modules"])
    assert not loaded & {"torch", "numpy", "safetensors", *_LATER}


def test_a_transport_by_a_given_pi_imports_no_search(made, aligned, tmp_path):
    pi = tmp_path / "pi.safetensors"
    aligned(made("vit", 1), made("vit", 2)).save(pi)
    tuned = finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned")
    bases = ("--base", made("vit", 1), "--onto", made("vit", 2))
    found = run("transport", tuned, *bases, "--via", pi, "-o", tmp_path / "moved", "-q")
    later = {*_LATER, "transfusion.matching.align"} - {"jinja2"}  # the card is a template
    assert not later.intersection(found["modules"])
    assert found["collecting"]
    assert found["frozen"] > 100_000  # the libraries


def test_collection_goes_on_after_an_import():
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
