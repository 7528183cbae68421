"""The nearest orthogonal matrix, by products and Cholesky factors, and by a decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transfusion.matching import procrustes as module
from transfusion.matching.activations import AxisPiece
from transfusion.matching.functional import AxisSums, spans
from transfusion.matching.heads_and_experts import nuclear_norms
from transfusion.matching.procrustes import (
    EXACT,
    PANEL,
    is_polar,
    iterated_polar,
    normalise_units,
    polar,
    symmetric_product,
    unit,
)

SIZE = EXACT + 88


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decaying(smallest: float) -> Tensor:
    """A matrix whose singular values fall evenly to a share of the largest."""
    (left, _), (right, _) = (torch.linalg.qr(drawn(SIZE, SIZE, seed=seed)) for seed in (1, 2))
    return left * torch.logspace(0, torch.log10(torch.tensor(smallest)), SIZE, dtype=torch.float64) @ right


def by_svd(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix)
    return u @ v


@pytest.mark.parametrize(
    ("matrix", "error"), [(drawn(SIZE, SIZE), 1e-5), (decaying(1e-3), 1e-5), (decaying(1e-5), 3e-3)]
)
def test_it_is_that_of_the_singular_vectors(matrix, error):
    """Directions of small singular values are only as certain as float32 knows them."""
    found = polar(matrix.float())
    assert found.dtype is torch.float32
    assert (found.T @ found - torch.eye(SIZE)).abs().max() < 1e-5
    assert torch.linalg.vector_norm(found - by_svd(matrix)) / SIZE**0.5 < error


def test_no_decomposition_is_needed(monkeypatch):
    monkeypatch.setattr(torch.linalg, "svd", None)
    polar(drawn(SIZE, SIZE).float())
    polar(decaying(1e-6).float())


def test_a_nearly_singular_matrix_takes_another_round(monkeypatch):
    rounds: list[float] = []

    def counted(matrix: Tensor, smallest: float) -> Tensor:
        rounds.append(smallest)
        return iterated_polar(matrix, smallest)

    monkeypatch.setattr(module, "iterated_polar", counted)
    found = polar(decaying(1e-10))
    assert len(rounds) > 1
    assert (found.T @ found - torch.eye(SIZE, dtype=torch.float64)).abs().max() < 1e-4


@pytest.mark.parametrize("matrix", [torch.zeros(SIZE, SIZE), torch.ones(SIZE, SIZE)])
def test_a_singular_matrix_has_one_too(matrix):
    """Not only one: the decomposition takes some."""
    found = polar(matrix)
    assert (found.T @ found - torch.eye(SIZE)).abs().max() < 1e-4


def test_small_and_stacked_matrices_are_decomposed_exactly():
    small = drawn(3, 40, 40)
    assert torch.allclose(polar(small), torch.stack([by_svd(one) for one in small]), atol=1e-12)


def test_the_check_refuses_what_is_not_it():
    matrix = drawn(SIZE, SIZE)
    right = by_svd(matrix)
    assert is_polar(right, matrix)
    assert not is_polar(1.01 * right, matrix), "not orthogonal"
    assert not is_polar(by_svd(drawn(SIZE, SIZE, seed=5)), matrix), "orthogonal, and of another matrix"
    assert not is_polar(right * float("nan"), matrix)


def test_only_half_of_a_symmetric_product_is_computed():
    matrix = drawn(70, SIZE)
    found = symmetric_product(matrix)
    assert torch.equal(found[PANEL:, :PANEL], found[:PANEL, PANEL:].T), "below the diagonal it is a copy"
    assert torch.allclose(found, matrix.T @ matrix, atol=1e-10)


# ── sums over samples ────────────────────────────────────────────────────────────────────────


def piece(a: Tensor, b: Tensor, side: str = "output") -> AxisPiece:
    return AxisPiece(("x",), a, b, side)


def test_sums_are_those_of_the_joined_samples():
    """As if all pieces, each of length 1, were one."""
    pieces = [
        piece(drawn(20, 90, seed=n), 3 * drawn(20, 90, seed=n + 5), side) for n, side in enumerate("or")
    ]
    sums = AxisSums()
    for one in pieces:
        sums.add(one)
    b, a = (torch.cat([unit(getattr(one, name)) for one in pieces], 1) for name in "ba")
    assert torch.allclose(sums.covariance, b @ a.T, atol=1e-12)
    assert sums.ratio("o") == pytest.approx(3, rel=0.1)
    assert sums.ratio("nothing") == 1.0
    assert torch.allclose(sums.correlation(), normalise_units(b) @ normalise_units(a).T, atol=1e-12)


def test_activations_that_lack_directions_are_noticed():
    full, other = drawn(30, 100), drawn(30, 100, seed=1)
    dead, copied = full.clone(), full.clone()
    dead[7] = 0
    copied[7] = copied[3]
    assert spans([piece(full, other)])
    assert not spans([piece(dead, other)]), "a unit without activations"
    assert not spans([piece(copied, other)]), "two units with the same"
    assert not spans([piece(full[:, :20], other)]), "fewer samples than units"
    assert spans([piece(dead, other), piece(full, other)]), "all pieces together count"
    assert not spans([])
    many = drawn(SIZE, SIZE + 50)
    assert spans([piece(many, many)])
    assert not spans([piece(many[:, : SIZE - 1], many)]), "fewer samples than units"
    many[5] = 0
    assert not spans([piece(many, many)]), "a unit without activations"


def test_nuclear_norms_come_from_eigenvalues():
    matrices = drawn(4, 5, 12, 12)
    assert torch.allclose(nuclear_norms(matrices), torch.linalg.matrix_norm(matrices, ord="nuc"), rtol=1e-9)
