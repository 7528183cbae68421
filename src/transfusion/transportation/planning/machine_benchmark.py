"""Measuring a machine: what the search does most, at sizes that take a few seconds together."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median

import torch
from safetensors.torch import save_file
from torch import Tensor

from transfusion.alignment.maps import Permutation
from transfusion.alignment.tensor_moves import move_tensor
from transfusion.checkpoint.checkpoint import Checkpoint
from transfusion.checkpoint.tensor_content import all_finite, content, row_blocks
from transfusion.layouts import parse
from transfusion.matching.solvers.assignment import assign
from transfusion.matching.solvers.dual_prices import MemoryCosts
from transfusion.matching.solvers.sparse_assignment import assign_among_candidates
from transfusion.matching.weights.weight_pair import NUMBERS
from transfusion.transportation.planning.machine import Machine

ASSIGNED = (4, 64, 512, 1024, 2048, 4096)
"""Sizes at which assignments are timed."""
AMONG_CANDIDATES = (2048, 4096)
"""Sizes at which those among candidates are timed: what huge ones take follows from their growth."""
_HEIGHT, _WIDTH, _INNER = 512, 2048, 1024
_ROWS, _FILES = 1024, 6
"""The file that is read: as many tensors of such rows, 8192 wide."""


def measure(folder: str | Path | None = None, sizes: Iterable[int] | None = None) -> Machine:
    """The constants of this machine; of the disk that a folder is on, or else the one for temporary files."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product = _product(_INNER)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            file = Path(place) / "weights.safetensors"
            writing = _writing(file)
            storage = _cold(file)
            reading, hashing = _reading(file), _hashing(file)
        return Machine(
            cores=(cores := os.cpu_count() or 1),
            product=product,
            together=_together(cores),
            summing=_summing(product),
            reading=reading,
            hashing=hashing,
            picking=_picking(),
            placing=_placing(),
            moving=_moving(),
            comparing=_comparing(),
            eigen=_eigen(),
            fresh=_fresh(),
            storage=storage,
            writing=writing,
            assignments={size: _assignment(size, assign) for size in sizes or ASSIGNED},
            candidates={size: _assignment(size, _among_candidates) for size in AMONG_CANDIDATES},
        )
    finally:
        torch.set_num_threads(threads)


def _seconds(do: Callable[[], object], times: int = 5) -> float:
    """The middle one of several runs, after one that does not count. Only the seconds that this thread had a
    core count: those that others had it are not the machine's.
    """
    do()
    taken = []
    for _ in range(times):
        begun = time.thread_time()
        do()
        taken.append(time.thread_time() - begun)
    return median(taken)


def _multiplier(inner: int) -> Callable[[], object]:
    left, right, into = torch.randn(_HEIGHT, inner), torch.randn(_WIDTH, inner), torch.zeros(_HEIGHT, _WIDTH)
    return lambda: torch.addmm(into, left, right.T, out=into)


def _product(inner: int) -> float:
    return 2 * _HEIGHT * _WIDTH * inner / _seconds(_multiplier(inner), 9)


def _together(cores: int) -> float:
    """How much slower each core is when all have products to do. Again only the seconds count that a thread
    had a core, so that others who use the machine at the same time are not taken for its limits.
    """
    if cores == 1:
        return 1.0

    def some(do: Callable[[], object]) -> float:
        torch.set_num_threads(1)
        do()
        begun = time.thread_time()
        for _ in range(10):
            do()
        return time.thread_time() - begun

    tasks = [_multiplier(_INNER) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        pairs = [(some(tasks[0]), fmean(pool.map(some, tasks))) for _ in range(5)]
    return min(1.0, median(alone / every for alone, every in pairs))


def _summing(product: float) -> float:
    """What a product takes beyond its operations, of which a thin one has few."""
    thin = 16
    beyond = _seconds(_multiplier(thin), 9) - 2 * _HEIGHT * _WIDTH * thin / product
    return _HEIGHT * _WIDTH / max(beyond, 1e-6)


def _writing(file: Path) -> float:
    """A file of weights, flushed to the disk."""
    tensors = {str(number): torch.randn(_ROWS, 8192).to(torch.bfloat16) for number in range(_FILES)}
    begun = time.perf_counter()
    save_file(tensors, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return file.stat().st_size / (time.perf_counter() - begun)


def _cold(file: Path) -> float:
    """The same file from the disk; where a system does not forget a file on request, from memory."""
    with file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        while opened.read(2**22):
            pass
        return file.stat().st_size / (time.perf_counter() - begun)


def _reading(file: Path) -> float:
    opened = Checkpoint.open(file)

    def read() -> None:
        for number in range(_FILES):
            for rows in row_blocks(opened.tensors[str(number)].shape, NUMBERS):
                opened.read(str(number), rows).to(torch.float32)

    return file.stat().st_size / _seconds(read, 3)


def _hashing(file: Path) -> float:
    opened = Checkpoint.open(file)

    def read() -> None:
        digest = hashlib.sha256()
        for rows in row_blocks(opened.tensors["0"].shape):
            block = opened.read("0", rows)
            all_finite(block)
            digest.update(content(block))

    return _ROWS * 8192 * 2 / _seconds(read, 3)


def _picking() -> float:
    matrix, columns = torch.randn(_WIDTH, _WIDTH), torch.randperm(_WIDTH)
    into = torch.empty(_WIDTH, _WIDTH)
    across = _seconds(lambda: torch.index_select(matrix, 1, columns, out=into))
    along = _seconds(lambda: torch.index_select(matrix, 0, columns, out=into))
    return 2 * matrix.numel() / (across + along)


def _placing() -> float:
    """Positions laid out, moved once in each of two dimensions, and numbered."""
    count, order = 2**20, torch.randperm(2**10)

    def place() -> None:
        positions = torch.arange(count).reshape(2**10, 2**10)
        positions = positions.index_select(0, order).index_select(1, order)
        torch.arange(count)[positions.reshape(-1)]

    return count / _seconds(place)


def _moving() -> float:
    rng = torch.Generator().manual_seed(0)
    tensor, layout, sizes = torch.randn(_INNER, _WIDTH), parse("a <- b"), {"a": _INNER, "b": _WIDTH}
    maps = {id: Permutation(torch.randperm(size, generator=rng).numpy()[None]) for id, size in sizes.items()}
    return tensor.numel() / _seconds(lambda: move_tensor(tensor, layout, maps, sizes, {}))


def _comparing() -> float:
    one, other = torch.randn(_INNER, _WIDTH), torch.randn(_INNER, _WIDTH)
    return one.numel() / _seconds(lambda: float(torch.linalg.vecdot(one, other).sum(dtype=torch.float64)))


def _eigen() -> float:
    matrix = torch.randn(512, 512, dtype=torch.float64)
    square = matrix @ matrix.T
    return 512**3 / _seconds(lambda: torch.linalg.eigvalsh(square), 3)


def _fresh() -> float:
    """So large that the C library does not keep it for later; what filling it takes anyway does not count."""
    count = 2**24
    known = torch.empty(count)
    filling = _seconds(lambda: known.zero_())
    return 4 * count / max(_seconds(lambda: torch.empty(count).fill_(0.0)) - filling, 1e-6)


def _assignment(size: int, solve: Callable[[Tensor], object]) -> float:
    """Between units that have nothing in common."""
    gain = torch.randn(1, size, size, generator=torch.Generator().manual_seed(size))
    if size > 1024:
        begun = time.thread_time()
        solve(gain)
        return time.thread_time() - begun
    return _seconds(lambda: solve(gain), 3)


def _among_candidates(gain: Tensor) -> object:
    return assign_among_candidates(MemoryCosts(gain[0]))
