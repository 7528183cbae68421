"""Assignments: the best permutation, whichever way it is found, and a bound that holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from transfusion.alignment.maps import Map
from transfusion.errors import AlignmentError
from transfusion.matching import assignment
from transfusion.matching.assignment import EXACT, assign, assign_among_candidates, solve


def best_total(gain):
    values = gain.double().numpy()
    places, units = linear_sum_assignment(values, maximize=True)
    return values[places, units].sum()


def total(gain, index):
    return gain.double().numpy()[np.arange(len(gain)), index].sum()


def trained(size, seed, *, signal=0.0):
    """A gain as two trained layers have it: few strong directions, units of very different sizes."""
    rng = np.random.default_rng(seed)
    width = max(2, size // 4)
    strength = np.arange(1, width + 1) ** -0.5
    norms = np.exp(0.7 * rng.standard_normal((2, size, 1)))
    a, noise = rng.standard_normal((2, size, width)) * strength
    b = signal * a[rng.permutation(size)] + (1 - signal**2) ** 0.5 * noise
    return torch.from_numpy(((norms[0] * b) @ (norms[1] * a).T).astype(np.float32))


KINDS = {
    "random": lambda rng, n: rng.standard_normal((n, n)),
    "tied": lambda rng, n: rng.integers(0, 3, (n, n)),
    "constant": lambda rng, n: np.full((n, n), rng.standard_normal()),
    "zero": lambda rng, n: np.zeros((n, n)),
    "negative": lambda rng, n: -np.exp(rng.standard_normal((n, n))),
    "one row for all": lambda rng, n: np.tile(rng.standard_normal(n), (n, 1)),
    "one column for all": lambda rng, n: np.tile(rng.standard_normal((n, 1)), n),
    "rank one": lambda rng, n: np.outer(rng.standard_normal(n), rng.standard_normal(n)),
    "low rank": lambda rng, n: rng.standard_normal((n, 3)) @ rng.standard_normal((3, n)),
    "a wish for all": lambda rng, n: rng.standard_normal((n, n)) + 9 * (np.arange(n) < 2),
    "wild rows": lambda rng, n: rng.standard_normal((n, n)) * 10 ** rng.uniform(-6, 6, (n, 1)),
    "wild": lambda rng, n: rng.standard_normal((n, n)) * 10 ** rng.uniform(-6, 6, (n, n)),
    "far from zero": lambda rng, n: 1e5 + rng.standard_normal((n, n)),
    "planted": lambda rng, n: 5 * np.eye(n)[rng.permutation(n)] + rng.standard_normal((n, n)),
}


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1.0, 1e-30, 1e25]),
)
def test_candidates_collect_what_the_best_permutation_does_and_the_bound_holds(kind, size, seed, scale):
    made = KINDS[kind](np.random.default_rng(seed), size).astype(np.float32) * np.float32(scale)
    gain = torch.from_numpy(made)
    found = assign_among_candidates(gain)
    best, largest = best_total(gain), float(gain.abs().max())
    assert sorted(found.index) == list(range(size))
    assert found.total == pytest.approx(total(gain, found.index), rel=1e-12, abs=1e-12 * size * largest)
    assert best <= found.bound + 1e-11 * size * largest
    assert found.total >= best - EXACT * abs(found.bound) - 1e-11 * size * largest


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 60), seed=st.integers(0, 2**32 - 1), use=st.sampled_from(["best", "worst", "some"])
)
def test_what_is_known_never_makes_it_worse(size, seed, use):
    rng = np.random.default_rng(seed)
    gain = torch.from_numpy(rng.standard_normal((size, 3)) @ rng.standard_normal((3, size))).float()
    best, worst = (linear_sum_assignment(gain.numpy(), maximize=most)[1] for most in (True, False))
    known = {"best": best, "worst": worst, "some": rng.permutation(size)}[use]
    found = assign_among_candidates(gain, known=known)
    assert found.gap <= EXACT
    collected = total(gain, found.index)
    assert collected == pytest.approx(best_total(gain), rel=2 * EXACT, abs=1e-6)


@pytest.mark.parametrize("signal", [0.0, 0.1, 0.6])
def test_gains_as_trained_layers_have_them_are_solved_exactly(signal):
    gain = trained(700, 1, signal=signal)
    found = assign_among_candidates(gain)
    assert found.gap <= EXACT
    assert total(gain, found.index) == pytest.approx(best_total(gain), rel=2 * EXACT)


def test_large_gains_are_solved_among_candidates_and_small_ones_as_they_are(monkeypatch):
    gain = torch.stack([trained(300, seed) for seed in range(2)])
    whole = solve(gain)
    assert (whole.gap, whole.exact) == (0.0, True)
    asked = []
    honest = assignment.assign_among_candidates
    monkeypatch.setattr(assignment, "LARGE", 300)
    monkeypatch.setattr(
        assignment,
        "assign_among_candidates",
        lambda one, known: asked.append(known) or honest(one, known=known),
    )
    known = Map.random(300, 2, np.random.default_rng(0))
    found = solve(gain, known=known)
    assert (np.stack(asked) == known.index).all()
    assert found.exact
    assert found.gap <= EXACT
    assert (found.permutation.index == whole.permutation.index).all()
    assert (assign(gain).index == whole.permutation.index).all()


def test_where_every_unit_has_a_place_of_its_own_candidates_are_not_needed(monkeypatch):
    gain = torch.randn(64, 64) + 30 * torch.eye(64)[torch.randperm(64)]
    monkeypatch.setattr(assignment, "LARGE", 64)
    monkeypatch.setattr(assignment, "assign_among_candidates", None)
    assert (assign(gain[None]).index[0] == gain.argmax(1).numpy()).all()


def test_a_search_that_is_cut_short_says_what_is_missing_and_memory_makes_up_for_it(monkeypatch):
    gain = trained(400, 3)
    monkeypatch.setattr(assignment, "ROUNDS", 1)
    monkeypatch.setattr(assignment, "CANDIDATES", 1)
    found = assign_among_candidates(gain)
    best = best_total(gain)
    collected = total(gain, found.index)
    assert found.gap > EXACT
    assert collected < best <= collected / (1 - found.gap) * (1 + 1e-9)
    monkeypatch.setattr(assignment, "LARGE", 400)
    whole = solve(gain[None])
    assert whole.exact
    assert total(gain, whole.permutation.index[0]) == pytest.approx(best, rel=1e-6)


def test_the_answer_does_not_depend_on_threads_nor_on_the_call():
    gain = trained(700, 4)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            started = assignment.first_prices(gain, 1.0)
            found.append((started.tobytes(), assign_among_candidates(gain)))
    finally:
        torch.set_num_threads(before)
    assert len({started for started, _ in found}) == 1
    assert len({(one.index.tobytes(), one.total, one.bound) for _, one in found}) == 1


def test_double_precision_is_taken_as_it_is():
    gain = trained(200, 5).double() * (1 + 1e-10)
    found = assign_among_candidates(gain)
    assert found.total == pytest.approx(best_total(gain), rel=1e-13)


def test_a_gain_that_is_not_finite_is_refused():
    gain = torch.randn(8, 8)
    gain[3, 4] = torch.nan
    with pytest.raises(AlignmentError, match="not a finite number"):
        assign_among_candidates(gain)


@pytest.mark.parametrize(("size", "rivals", "wanted"), [(40, 39, False), (50, 39, True), (50, 20, False)])
def test_large_crowds_are_solved_among_candidates(size, rivals, wanted, monkeypatch):
    monkeypatch.setattr(assignment, "LARGE", 50)
    gain = torch.eye(size)
    gain[:rivals, 0] = 2.0
    assert assignment.wants_candidates(gain[None]) is wanted
