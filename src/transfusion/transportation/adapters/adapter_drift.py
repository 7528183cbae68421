"""What B changed where an adapter acts: whether the adapter still fits, and an α that keeps its strength.

For every weight W that an adapter changes by ΔW = Σ sᵢ·uᵢ·vᵢᵀ, B's own change D = W_B − π(W_A) is compared
with ΔW, direction by direction. No model is run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transfusion.architecture.naming import block_of
from transfusion.errors import AdapterError
from transfusion.matching.base_drift import OUTSIDE, describe_drift, relative
from transfusion.transportation.adapters.adapter_targets import as_matrix
from transfusion.transportation.adapters.adapter_transport import AdapterTransport
from transfusion.transportation.adapters.folded_adapter import FoldedAdapter
from transfusion.transportation.alpha import Alpha
from transfusion.transportation.task_vector import working

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


def with_drift(moved: AdapterTransport, *, keep_strength: bool = False) -> AdapterTransport:
    """Return a moved adapter with B's changes in its record; with the α that keeps its strength, if asked."""
    drift = adapter_drift(moved)
    if drift is None:
        return moved
    alpha = strength_alpha(drift) if keep_strength else moved.alpha
    return replace(moved, alpha=alpha, output_record=replace(moved.output_record, drift=drift))


def adapter_drift(moved: AdapterTransport) -> dict[str, Any] | None:
    """Return how far B moved from A where an adapter acts, in all and in every block.

    None for adapters that change no weights, or cannot be folded into them.

    ``moved`` is |D| / |A|, and ``strength`` |ΔW| / |A|. ``overwritten`` is the share of ΔW in directions that
    B changed by more than the adapter does. ``contained`` is the share of ΔW that B's own change has already,
    negative if B went the other way. ``alpha`` keeps the strength of the adapter relative to what the base
    makes of the same inputs.
    """
    folded = FoldedAdapter(replace(moved, alpha=Alpha()))
    try:
        changed = sorted(folded.changed)
    except AdapterError:
        return None
    blocks: dict[str, DriftSums] = defaultdict(DriftSums)
    for name in changed:
        if name in moved.base.architecture.tensors and name in moved.onto.architecture.tensors:
            blocks[block_of(name) or OUTSIDE] += _drift(folded, name)
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
    lines = [f"{first}; the adapter changes them by {drift['strength']:.1%}"]
    if drift["overwritten"] is None or not drift["moved"]:
        return lines
    lines.append(
        f"{drift['overwritten']:.0%} of the adapter is in directions that B changed by more than the adapter"
        " does"
    )
    if abs(drift["contained"]) >= NOTABLE:
        lines.append(f"B's own change contains {drift['contained']:.0%} of the adapter")
    return lines


def _drift(folded: FoldedAdapter, name: str) -> DriftSums:
    moved = folded.moved
    layout = moved.onto.architecture.tensors[name]
    of_a = moved.alignment.move(working(moved.base.read(name)), layout)
    of_b, change = working(moved.onto.read(name)), folded.delta(name)
    if layout.arrow is None:
        of_a, of_b, change = (one.reshape(1, -1) for one in (of_a, of_b, change))
    else:
        of_a, of_b, change = (as_matrix(one, layout) for one in (of_a, of_b, change))
    drift = of_b - of_a
    ranks = {one.module: one.rank for one in moved.factors if one.tensor == name and one.rank is not None}
    found = _directions(change, sum(ranks.values()))
    if found is None:
        size = _squares(of_a)
        return DriftSums(
            of_a=size,
            moved=_squares(drift),
            added=_squares(change),
            overlap=float(torch.linalg.vecdot(change, drift).sum(dtype=torch.float64)),
            response_a=size,
            response_b=_squares(of_b),
        )
    left, sizes, right = found
    written, taken = left.T @ drift, drift @ right.T
    overwritten = torch.maximum(taken.norm(dim=0), written.norm(dim=1)) > sizes
    read = (right * sizes[:, None]).T
    added = _squares(sizes)
    return DriftSums(
        of_a=_squares(of_a),
        moved=_squares(drift),
        added=added,
        overlap=float((sizes * torch.linalg.vecdot(written, right)).sum(dtype=torch.float64)),
        known=added,
        overwritten=_squares(sizes[overwritten]),
        response_a=_squares(of_a @ read),
        response_b=_squares(of_b @ read),
    )


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
    return float(torch.linalg.vecdot(tensor, tensor).sum(dtype=torch.float64))  # short sums lose no digits
