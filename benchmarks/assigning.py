"""How fast large assignments are solved: among candidates, against looking at everything.

    python benchmarks/assigning.py                                the table
    python benchmarks/assigning.py --sizes 2048 --modes trained   a part of it

Gains are sums of three products B·Aᵀ of weights of shape (size, size / 3.5), as an MLP of Llama has them.
In `independent` both are drawn from a normal distribution. In `trained` columns fall off by a power law and
rows have very different sizes, as in trained layers. A number behind the colon is the correlation of A and B
after a permutation that was planted. Seconds are of one core, as the processor counts them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from transfusion.matching import assignment
from transfusion.matching.assignment import assign_among_candidates
from transfusion.runtime import scratch

SIZES = "2048,4096,8192,14336"
MODES = "independent,independent:0.1,trained,trained:0.1,trained:0.5"
SECTIONS = 3
_Result = TypeVar("_Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--modes", default=MODES)
    options = parser.parse_args()
    print("| size | gain | dense s | sparse s | ratio | loss | gap | dense MB | sparse MB | chosen |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for size in map(int, options.sizes.split(",")):
        for mode in options.modes.split(","):
            print(row(size, mode), flush=True)


def row(size: int, mode: str) -> str:
    """One line of the table."""
    torch.set_num_threads(os.cpu_count() or 1)
    gain = make(size, mode)
    torch.set_num_threads(1)
    found, sparse, sparse_mb = measured(lambda: assign_among_candidates(gain))
    exact, dense, dense_mb = measured(lambda: assignment._among_all(gain[None]))
    scratch.clear()
    index = torch.from_numpy(exact.index[0])[:, None]
    total = float(gain.gather(1, index).sum(dtype=torch.float64))
    few = assignment.wants_candidates(gain[None])
    loss = (total - found.total) / abs(total)
    return (
        f"| {size} | {mode} | {dense:.2f} | {sparse:.2f} | {dense / sparse:.1f} | {loss:.0e} |"
        f" {found.gap:.0e} | {dense_mb:.0f} | {sparse_mb:.0f} | {'sparse' if few else 'dense'} |"
    )


def make(size: int, mode: str, seed: int = 0) -> Tensor:
    """A gain of this kind."""
    name, _, level = mode.partition(":")
    draw = torch.Generator().manual_seed(seed)
    width, correlation = int(size / 3.5), float(level or 0)
    places = torch.randperm(size, generator=draw)
    strength, of_a, of_b = torch.ones(width), torch.ones(size, 1), torch.ones(size, 1)
    if name == "trained":
        strength = torch.arange(1, width + 1).float().pow(-0.5)
        of_a, of_b = torch.randn(2, size, 1, generator=draw).mul(0.7).exp()
        of_b = of_a[places] if correlation else of_b
    gain = torch.zeros(size, size)
    for _ in range(SECTIONS):
        a, noise = (torch.randn(size, width, generator=draw) for _ in range(2))
        b = correlation * a[places] + (1 - correlation**2) ** 0.5 * noise
        gain.addmm_(b * strength * of_b, (a * strength * of_a).T)
    return gain


def measured(do: Callable[[], _Result]) -> tuple[_Result, float, float]:
    """What comes out, the seconds it took, and the memory in MB beyond what there was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = peak_mb(), time.process_time()
    result = do()
    return result, time.process_time() - began, peak_mb() - before


def peak_mb() -> float:
    """The most memory that this process has had since it was last reset."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
