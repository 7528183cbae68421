"""What B changed where an adapter acts: whether the adapter still fits, and an α that keeps its strength.

For every weight W that an adapter changes by ΔW = Σ sᵢ·uᵢ·vᵢᵀ, B's own change D = W_B − π(W_A) is compared
with ΔW, direction by direction. No model is run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from transfusion.architecture.layouts import Layout
from transfusion.architecture.naming import block_of
from transfusion.errors import AdapterError
from transfusion.files.tensor_files import row_blocks
from transfusion.matching.advice import OUTSIDE, describe_drift, relative
from transfusion.matching.weights.weight_pair import dot_by_row, sum_of
from transfusion.runtime.engines import Threads
from transfusion.runtime.progress import phase
from transfusion.transport.adapters.folded import FoldedAdapter
from transfusion.transport.adapters.move import MovedAdapter
from transfusion.transport.adapters.targets import as_matrix
from transfusion.transport.alpha import Alpha
from transfusion.transport.task_vector import working

LOW_RANK = 1e-3
"""The share of a change that its directions may miss; kinds whose changes have a higher rank miss more."""
NOTABLE = 0.05
"""The share of an adapter in B's own change from which it is told."""


@dataclass(frozen=True)
class DriftSums:
    """Squares and products over some weights; those of two sets of weights are added."""

    of_a: float = 0.0
    """|π(A)|²."""
    moved: float = 0.0
    """|D|²."""
    added: float = 0.0
    """|ΔW|²."""
    overlap: float = 0.0
    """⟨ΔW, D⟩."""
    known: float = 0.0
    """|ΔW|² of the weights whose directions are known."""
    overwritten: float = 0.0
    """Σ sᵢ² over the directions where D is larger than the adapter's change."""
    response_a: float = 0.0
    """Σ sᵢ²·|π(A)·vᵢ|²: what A makes of the inputs that the adapter reads. |π(A)|², if they are not known."""
    response_b: float = 0.0
    """The same of B."""

    def __add__(self, other: DriftSums) -> DriftSums:
        return DriftSums(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def as_dict(self) -> dict[str, float | None]:
        """Return the numbers that a user reads."""
        return {
            "moved": relative(self.moved, self.of_a),
            "strength": relative(self.added, self.of_a),
            "overwritten": round(self.overwritten / self.known, 6) if self.known else None,
            "contained": round(self.overlap / self.added, 6) if self.added else None,
            "alpha": relative(self.response_b, self.response_a) or 1.0,
        }


def adapter_drift(moved: MovedAdapter, jobs: int | None = None) -> dict[str, Any] | None:
    """Return how far B moved from A where an adapter acts, in all and in every block.

    None for adapters that change no weights, or cannot be folded into them.

    ``moved`` is |D| / |A|, and ``strength`` |ΔW| / |A|. ``overwritten`` is the share of ΔW in directions that
    B changed by more than the adapter does. ``contained`` is the share of ΔW that B's own change has already,
    negative if B went the other way. ``alpha`` keeps the strength of the adapter relative to what the base
    makes of the same inputs. ``jobs`` is the number of threads; by default one per core.
    """
    folded = FoldedAdapter(replace(moved, alpha=Alpha()))
    try:
        changed = sorted(folded.changed)
    except AdapterError:
        return None
    models = moved.base.architecture, moved.onto.architecture
    names = [name for name in changed if all(name in one.tensors for one in models)]
    with phase("comparing A and B where the adapter acts"), Threads.opened(jobs) as threads:
        found = threads.each(partial(_drift, folded), names)
    blocks: dict[str, DriftSums] = defaultdict(DriftSums)
    for name, sums in zip(names, found, strict=True):
        blocks[block_of(name) or OUTSIDE] += sums
    if not blocks:
        return None
    total = sum(blocks.values(), DriftSums())
    return {**total.as_dict(), "blocks": {name: sums.as_dict() for name, sums in blocks.items()}}


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


def _drift(folded: FoldedAdapter, name: str) -> DriftSums:
    """Return the sums of one weight, which is read some rows at a time."""
    product, change = folded.factors(name), None
    try:
        if product is not None:
            found = _directions_of_product(*product)
        else:
            layout = folded.moved.onto.architecture.tensors[name]
            change = _as_matrix(folded.delta(name), layout)
            found = _directions(change, _rank(folded, name))
        sums = _undirected(folded, name, change) if found is None else _directed(folded, name, *found)
        if all(map(isfinite, astuple(sums))):
            return sums
    except LinAlgError:  # the change has infinite values
        pass
    for model in (folded.moved.base, folded.moved.onto):
        model.read(name)  # refuses it by name
    raise AdapterError(
        f"{folded.moved.label}: its change of {name} is too large to compute with: look at its alpha",
        hint="was it saved after a training that diverged? Save it again",
    )


def _undirected(folded: FoldedAdapter, name: str, change: Tensor | None) -> DriftSums:
    """Return the sums for a change without known directions, or for no change."""
    sums = DriftSums()
    for outputs, inputs, of_a, of_b in _side_by_side(folded, name):
        drift, size = of_b - of_a, _squares(of_a)
        here = torch.zeros_like(drift) if change is None else change[outputs, inputs].to(drift)
        sums += DriftSums(
            of_a=size,
            moved=_squares(drift),
            added=_squares(here),
            overlap=sum_of(dot_by_row(here, drift)),
            response_a=size,
            response_b=_squares(of_b),
        )
    return sums


def _directed(folded: FoldedAdapter, name: str, left: Tensor, sizes: Tensor, right: Tensor) -> DriftSums:
    """Return the sums for a change by its singular vectors (as columns of ``left``, rows of ``right``)."""
    size, moved = 0.0, 0.0
    from_a, from_b = torch.zeros_like(left), torch.zeros_like(left)  # what each makes of the directions
    written = torch.zeros_like(right)
    for outputs, inputs, of_a, of_b in _side_by_side(folded, name):
        read = right[:, inputs].T.to(of_a.dtype)
        from_a[outputs] += of_a @ read
        from_b[outputs] += of_b @ read
        size += _squares(of_a)
        drift = of_b - of_a
        moved += _squares(drift)
        written[:, inputs] += left[outputs].T.to(drift.dtype) @ drift
    lengths = torch.maximum((from_b - from_a).norm(dim=0), written.norm(dim=1))
    added = _squares(sizes)
    return DriftSums(
        of_a=size,
        moved=moved,
        added=added,
        overlap=sum_of(sizes * dot_by_row(written, right)),
        known=added,
        overwritten=_squares(sizes[lengths > sizes]),
        response_a=_squares(from_a * sizes),
        response_b=_squares(from_b * sizes),
    )


def _side_by_side(folded: FoldedAdapter, name: str) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield blocks of π(A) and B as matrices, with their outputs and inputs."""
    base, onto, alignment = folded.moved.base, folded.moved.onto, folded.moved.alignment
    layout, shape = onto.architecture.tensors[name], onto.info(name).shape
    everything = slice(None)
    if layout.arrow is None or not alignment.moves_by_rows(layout):
        of_a, of_b = alignment.move(working(base.raw(name)), layout), working(onto.raw(name))
        yield everything, everything, _as_matrix(of_a, layout), _as_matrix(of_b, layout)
        return
    along = layout.outputs if 0 in layout.outputs else layout.inputs
    below = prod(shape[dim] for dim in along if dim)
    for rows in row_blocks(shape):
        of_a = working(alignment.move_rows(partial(base.raw, name), layout, rows))
        of_b = working(onto.raw(name, rows))
        here = slice(rows.start * below, rows.stop * below)
        places = (here, everything) if along == layout.outputs else (everything, here)
        yield *places, as_matrix(of_a, layout), as_matrix(of_b, layout)


def _as_matrix(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor.reshape(1, -1) if layout.arrow is None else as_matrix(tensor, layout)


def _rank(folded: FoldedAdapter, name: str) -> int:
    """Return the rank that a change has, if its kind is one of low rank."""
    factors = folded.moved.factors
    return sum({one.module: one.rank for one in factors if one.tensor == name and one.rank}.values())


def _directions_of_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the singular vectors and values of a product of low rank; None if it is zero."""
    (outputs, tall), (inputs, wide) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    within, sizes, of_inputs = torch.linalg.svd(tall @ wide.T, full_matrices=False)
    return (outputs @ within, sizes, of_inputs @ inputs.T) if bool(sizes.any()) else None


def _directions(change: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the singular vectors and values of a change of this rank; None if its rank is higher."""
    rank, size = min(rank, *change.shape), _squares(change)
    if not rank or not size:
        return None
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(change.shape[1], rank, generator=generator, dtype=change.dtype)
    basis = torch.linalg.qr(change @ probes).Q
    within = basis.T @ change
    if _squares(torch.addmm(change, basis, within, alpha=-1)) > LOW_RANK**2 * size:
        return None
    left, sizes, right = torch.linalg.svd(within, full_matrices=False)
    return basis @ left, sizes, right


def _squares(tensor: Tensor) -> float:
    return sum_of(dot_by_row(tensor, tensor))
