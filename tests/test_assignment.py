"""Assignments: the best permutation, whichever way it is found, and a bound that holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from transfusion.maps import Permutation
from transfusion.solvers import assignment, candidates, prices
from transfusion.solvers.assignment import assign, solve
from transfusion.solvers.candidates import EXACT, assign_among_candidates
from transfusion.solvers.prices import InMemory


class Rows:
    """A gain that is only handed out by rows, and remembers how many at once."""

    def __init__(self, gain):
        self._gain, self.size, self.most = gain, len(gain), 0

    def rows(self, start, stop):
        self.most = max(self.most, stop - start)
        return self._gain[start:stop].clone()


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
    found = assign_among_candidates(InMemory(gain))
    best, largest = best_total(gain), float(gain.abs().max())
    assert sorted(found.index) == list(range(size))
    assert found.total == pytest.approx(total(gain, found.index), rel=1e-12, abs=1e-12 * size * largest)
    assert best <= found.bound + 1e-11 * size * largest
    assert found.total >= best - EXACT * abs(found.bound) - 1e-11 * size * largest
