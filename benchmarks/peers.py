"""mergekit's task arithmetic, in an environment of its own, on the models of a benchmark.

mergekit has no π, and knows one base. A + (A_ft − A) + (B − A) is what τ added unchanged comes to: its task
arithmetic with base A, of A_ft and B with weight 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

MERGEKIT = "0.1.5"
ENVIRONMENT = Path.home() / ".cache" / "transfusion" / f"mergekit-{MERGEKIT}"
_PLAIN = ["--no-copy-tokenizer", "--quiet"]


class Peer(NamedTuple):
    """An installed mergekit."""

    program: Path
    versions: str

    def command(self, a: Path, tuned: Path, b: Path, out: Path, dtype: str) -> list[str]:
        """Return the command that adds τ to B unchanged, computed in this type; it is stored as bfloat16."""
        models = [{"model": str(one), "parameters": {"weight": 1.0}} for one in (tuned, b)]
        config = {
            "merge_method": "task_arithmetic",
            "base_model": str(a),
            "models": models,
            "parameters": {"normalize": False, "lambda": 1.0},
            "dtype": dtype,
            "out_dtype": "bfloat16",
        }
        file = a.parent / f"mergekit-{dtype}.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
        return [str(self.program), str(file), str(out), *_PLAIN]


def install(place: Path = ENVIRONMENT) -> Peer:
    """Make an environment with mergekit, unless it is there; torch first, in the version that runs here."""
    python, marker = place / "bin" / "python", place / "versions.json"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for wanted in (f"torch=={torch.__version__.partition('+')[0]}", f"mergekit=={MERGEKIT}"):
            subprocess.run([*pip, wanted], check=True)
        asked = "import json, torch, transformers as t; print(json.dumps([torch.__version__, t.__version__]))"
        found = json.loads(subprocess.check_output([str(python), "-c", asked], text=True).splitlines()[-1])
        marker.write_text(json.dumps(found))
    of_torch, of_transformers = json.loads(marker.read_text())
    versions = f"mergekit {MERGEKIT}, torch {of_torch}, transformers {of_transformers}"
    return Peer(place / "bin" / "mergekit-yaml", versions)


class Difference(NamedTuple):
    """How far two models are apart, value by value."""

    values: int
    differing: int
    """Values that are not the same number."""
    steps: int
    """The most steps of the stored type between two values."""


def difference(one: Path, other: Path) -> Difference:
    """Compare all tensors of two folders with bfloat16 models, whatever their shards are."""
    ours, theirs = _placed(one), _placed(other)
    if ours.keys() != theirs.keys():
        raise SystemExit(f"{one} and {other} have different tensors: {sorted(ours.keys() ^ theirs.keys())}")
    values = differing = steps = 0
    for name in ours:
        with safe_open(ours[name], "pt") as left, safe_open(theirs[name], "pt") as right:
            apart = (_ordered(left.get_tensor(name)) - _ordered(right.get_tensor(name))).abs()
        values += apart.numel()
        differing += int(apart.count_nonzero())
        steps = max(steps, int(apart.max()))
    return Difference(values, differing, steps)


def _placed(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of bfloat16 values in their order: neighbours differ by 1, and the zeros are one."""
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
