"""Seconds and memory of functional alignment, against its floor: python -m functional

    python -m functional                                   all sizes, without and with a limit of memory
    python -m functional --subjects ViT-B/16 "Llama 0.1 B"
    python -m functional --json results.json --keep models

The floor is what no implementation on matrix products goes below: the forward passes of both models on all
probes, and one polar decomposition for every rotated axis by products alone, at the speed of this machine's
own products. That speed is measured before and after every run, because machines are shared. Texts that a
language model writes are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from functional.models import SUBJECTS
from transfusion.alignment.alignment import Alignment
from transfusion.matching.methods import FunctionalOptions
from transfusion.model.model import Model
from transfusion.running.building import skeleton
from transfusion.running.probes import enough_probes, tokens_of_a_probe
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.resources import format_bytes, parse_bytes

POLAR_PRODUCTS = 42
"""Products of a polar decomposition by the best odd polynomials of degree 5, from singular values of 1e-7 of
the largest on: 14 steps of three products."""


@dataclass
class Measured:
    """One run."""

    subject: str
    limit: str
    seconds: float
    busy: float
    """Seconds of processor time."""
    peak: int
    floor: float
    digest: str
    parameters: int

    @property
    def ratio(self) -> float:
        return self.seconds / self.floor


def speed(size: int = 1536, rounds: int = 3) -> float:
    """Return the operations per second of products in float32, on all cores at once."""
    cores = os.cpu_count() or 1
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def multiply() -> None:
        torch.set_num_threads(1)
        matrix = torch.randn(size, size)
        for _ in range(rounds):
            matrix @ matrix

    threads = [threading.Thread(target=multiply) for _ in range(cores)]
    since = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed = time.perf_counter() - since
    torch.set_num_threads(before)
    return 2 * size**3 * rounds * cores / passed


def operations(a: Path, pi: Alignment) -> float:
    """Return the operations of the floor."""
    model = Model.open(a)
    options = FunctionalOptions()
    subject = ProbedModel(model, skeleton(model))
    tokens = enough_probes(subject, options.probes, options.samples) * tokens_of_a_probe(subject)
    weights = sum(
        torch.Size(model.info(name).shape).numel()
        for name, layout in model.architecture.tensors.items()
        if layout.arrow is not None and "vocab" not in layout.names()
    )
    rotations = [map_ for map_ in pi.maps.values() if map_.rotates]
    polars = sum(map_.blocks * map_.size**3 for map_ in rotations)
    return 2 * 2 * tokens * weights + POLAR_PRODUCTS * 2 * polars


def measure(name: str, folder: Path, limit: str) -> Measured:
    """Align in a process of its own."""
    a, b = SUBJECTS[name].make(folder, name)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        output = Path(place) / "pi.safetensors"
        command = [sys.executable, "-m", "transfusion", "align", str(a), str(b), "-o", str(output)]
        command += ["--method", "functional", "--json", *(["--memory", limit] if limit else [])]
        speeds, since = [speed()], time.perf_counter()
        printed = Path(place) / "printed"
        with printed.open("wb") as out:
            child = subprocess.Popen(command, stdout=out)
            _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - since
        if child.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        speeds.append(speed())
        pi = Alignment.load(output)
        assert isinstance(pi, Alignment)
        floor = operations(a, pi) / (sum(speeds) / len(speeds))
        digest = json.loads(printed.read_bytes())["blake3"]
    return Measured(
        name,
        limit,
        seconds,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss * 1024,
        floor,
        digest,
        Model.open(a).checkpoint.parameters,
    )


def draw(found: list[Measured]) -> Table:
    table = Table(title="functional alignment")
    for column in (
        "model",
        "parameters",
        "limit",
        "seconds",
        "processor",
        "floor",
        "× floor",
        "peak",
        "π",
    ):
        table.add_column(column, justify="left" if column in ("model", "limit", "π") else "right")
    for one in found:
        table.add_row(
            one.subject,
            f"{one.parameters / 1e6:.0f} M",
            one.limit or "none",
            f"{one.seconds:.0f}",
            f"{one.busy:.0f}",
            f"{one.floor:.0f}",
            f"{one.ratio:.1f}",
            format_bytes(one.peak),
            one.digest[:8],
        )
    return table


def kept_limits(found: list[Measured]) -> list[str]:
    """Return what is wrong: a limit that was not kept, or another π under a limit."""
    wrong: list[str] = []
    digests: dict[str, set[str]] = {}
    for one in found:
        digests.setdefault(one.subject, set()).add(one.digest)
        if one.limit and one.peak > parse_bytes(one.limit):
            wrong.append(f"{one.subject}: {format_bytes(one.peak)} with a limit of {one.limit}")
    return wrong + [f"{name}: a limit changed π" for name, some in digests.items() if len(some) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--limits", choices=["both", "none", "some"], default="both")
    parser.add_argument("--keep", type=Path, help="keep the models in this folder")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    asked = parser.parse_args()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in asked.subjects:
            limits = {"both": ("", SUBJECTS[name].memory), "none": ("",), "some": (SUBJECTS[name].memory,)}
            for limit in limits[asked.limits]:
                found.append(measure(name, folder, limit))
                print(json.dumps(asdict(found[-1])), file=sys.stderr, flush=True)
    Console(width=140).print(draw(found))
    if asked.json:
        results: list[dict[str, Any]] = [asdict(one) for one in found]
        asked.json.write_text(json.dumps(results, indent=2))
    if wrong := kept_limits(found):
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
