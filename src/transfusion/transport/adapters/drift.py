"""What B changed where an adapter acts: whether the adapter still fits, and an α that keeps its strength.

For every weight W that an adapter changes by ΔW = Σ sᵢ·uᵢ·vᵢᵀ, B's own change D = W_B − π(W_A) is compared
with ΔW, direction by direction. No model is run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from transfusion.architecture.layouts import Layout
from transfusion.architecture.naming import block_of
from transfusion.errors import AdapterError
from transfusion.files.tensor_files import row_blocks
from transfusion.matching.advice import OUTSIDE, describe_drift, relative
from transfusion.matching.weights import dot_by_row, sum_of
from transfusion.runtime.engines import Threads
from transfusion.runtime.progress import phase
from transfusion.transport.adapters.kinds import singular_directions
from transfusion.transport.adapters.moved_adapter import MovedAdapter
from transfusion.transport.adapters.places import as_matrix
from transfusion.transport.alpha import Alpha
from transfusion.transport.task_vector import working

NOTABLE = 0.05  # the share of an adapter in B's own change from which it is told


def adapter_drift(moved: MovedAdapter, jobs: int | None = None) -> dict[str, Any] | None:
    """Return how far B moved from A where an adapter acts, in all and in every block.

    None for adapters that change no weights, or cannot be folded into them.

    ``moved`` is |D| / |A|, and ``strength`` |ΔW| / |A|. ``overwritten`` is the share of ΔW in directions that
    B changed by more than the adapter does. ``contained`` is the share of ΔW that B's own change has already,
    negative if B went the other way. ``alpha`` keeps the strength of the adapter relative to what the base
    makes of the same inputs. ``jobs`` is the number of threads; by default one per core.
    """
    moved = replace(moved, alpha=Alpha())
    try:
        changed = sorted(moved.changed)
    except AdapterError:
        return None
    models = moved.base.architecture, moved.onto.architecture
    names = [name for name in changed if all(name in one.tensors for one in models)]
    with phase("comparing A and B where the adapter acts"), Threads.opened(jobs) as threads:
        found = threads.map(partial(_drift, moved), names)
    blocks: dict[str, list[dict[str, float]]] = {}
    for name, sums in zip(names, found, strict=True):
        blocks.setdefault(block_of(name) or OUTSIDE, []).append(sums)
    if not blocks:
        return None
    return {**_told(found), "blocks": {name: _told(some) for name, some in blocks.items()}}


def strength_alpha(drift: Mapping[str, Any]) -> Alpha:
    """Return the α of every block that keeps the adapter's relative strength."""
    blocks = {name: block["alpha"] for name, block in drift["blocks"].items()}
    return Alpha(blocks.pop(OUTSIDE, 1.0), {f"{name}.*": alpha for name, alpha in blocks.items()})


def describe_adapter_drift(drift: Mapping[str, Any]) -> list[str]:
    """Return what B changed where an adapter acts, sentence by sentence."""
    moved = {name: block["moved"] for name, block in drift["blocks"].items()}
    first = f"where the adapter acts, {describe_drift(moved)}"
    lines = [f"{first}; the adapter changes A's by {drift['strength']:.1%}"]
    if drift["overwritten"] is None or not drift["moved"]:
        return lines
    share, contained = f"{drift['overwritten']:.0%}", drift["contained"]
    if share == "0%":
        lines.append("in every direction of the adapter, B changed less than the adapter does")
    else:
        lines.append(f"in the directions of {share} of the adapter, B changed more than the adapter does")
    if contained >= NOTABLE:
        lines.append(f"B's own change already contains {contained:.0%} of the adapter")
    elif contained <= -NOTABLE:
        lines.append(f"B's own change goes the other way, and undoes {-contained:.0%} of the adapter")
    return lines


def _told(found: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return the numbers that a user reads, from the sums of some weights."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in (pair for one in found for pair in one.items()):
        sums[name] += value
    known, added = sums["known"], sums["added"]
    return {
        "moved": relative(sums["moved"], sums["of_a"]),
        "strength": relative(added, sums["of_a"]),
        "overwritten": round(sums["overwritten"] / known, 6) if known else None,
        "contained": round(sums["overlap"] / added, 6) if added else None,
        "alpha": relative(sums["response_b"], sums["response_a"]) or 1.0,
    }


def _drift(moved: MovedAdapter, name: str) -> dict[str, float]:
    """Return squares and products over one weight, which is read some rows at a time."""
    sums: dict[str, float] = defaultdict(float)
    try:
        if (product := moved.product(name)) is not None:
            directions, change = singular_directions(*product), None
        else:
            layout = moved.onto.architecture.tensors[name]
            directions, change = None, _matrix(moved.delta(name), layout)
        _compare(moved, name, directions, change, sums)
    except LinAlgError:  # the change has infinite values
        sums["added"] = inf
    if all(map(isfinite, sums.values())):
        return sums
    for model in (moved.base, moved.onto):
        model.read(name)  # refuses it by name
    raise AdapterError(
        f"{moved.label}: its change of {name} is too large to compute with: look at its alpha",
        hint="was it saved after a training that diverged? Save it again",
    )


def _compare(
    moved: MovedAdapter,
    name: str,
    directions: tuple[Tensor, Tensor, Tensor] | None,
    change: Tensor | None,
    sums: dict[str, float],
) -> None:
    """Add to the sums of a weight; by the singular vectors of the change, if they are known."""
    left, sizes, right = directions or (torch.zeros(0, 0),) * 3
    read, written = torch.zeros_like(sizes), torch.zeros_like(right)  # |D·vᵢ|², and uᵢᵀ·D
    for rows, of_a, of_b in _side_by_side(moved, name):
        drift = of_b - of_a  # D, (outputs, inputs)
        sums["of_a"] += _squares(of_a)  # |π(A)|²
        sums["moved"] += _squares(drift)
        if change is not None:
            sums["added"] += _squares(change[rows])  # |ΔW|²
            sums["overlap"] += sum_of(dot_by_row(change[rows].to(drift), drift))  # ⟨ΔW, D⟩
        if directions is not None:
            u, v = left[rows].to(drift), right.to(drift)
            read += (drift @ v.T).square().sum(dim=0)  # (rank,)
            written += u.T @ drift  # (rank, inputs)
            of_a, of_b = of_a @ v.T * sizes, of_b @ v.T * sizes  # what each makes of the inputs that are read
        sums["response_a"] += _squares(of_a)  # Σ sᵢ²·|π(A)·vᵢ|², or |π(A)|² without directions
        sums["response_b"] += _squares(of_b)
    if directions is not None:
        larger = torch.maximum(read.sqrt(), written.norm(dim=1)) > sizes  # where D is larger than ΔW
        sums["added"] = sums["known"] = _squares(sizes)
        sums["overlap"] = sum_of(sizes * dot_by_row(written, right))
        sums["overwritten"] = _squares(sizes[larger])


def _side_by_side(moved: MovedAdapter, name: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of π(A) and B as matrices, with their outputs."""
    base, onto, alignment = moved.base, moved.onto, moved.alignment
    layout, shape = onto.architecture.tensors[name], onto.info(name).shape
    if layout.arrow == "<-" and len(layout.outputs) == 1 and alignment.moves_by_rows(layout):
        for rows in row_blocks(shape):
            of_a = alignment.move_rows(partial(base.raw, name), layout, rows)
            yield rows, _matrix(of_a, layout), _matrix(onto.raw(name, rows), layout)
    else:
        of_a = alignment.move(working(base.raw(name)), layout)
        yield slice(None), _matrix(of_a, layout), _matrix(onto.raw(name), layout)


def _matrix(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a weight as a matrix in float32 or float64; a vector as one row."""
    return working(tensor.reshape(1, -1) if layout.arrow is None else as_matrix(tensor, layout))


def _squares(tensor: Tensor) -> float:
    return sum_of(dot_by_row(tensor, tensor))
