"""The memory budget that every verb shares: limits, threads that fit, and the error when nothing does."""

from __future__ import annotations

import pytest

from transfusion.errors import SettingError
from transfusion.runtime.byte_sizes import parse_bytes
from transfusion.runtime.memory_budget import PROGRAM, WORKER, MemoryBudget, memory_line


def test_a_worker_of_ray_takes_more_than_the_program():
    assert MemoryBudget.for_process(None, local=True).program == PROGRAM
    assert MemoryBudget.for_process(None, local=False).program == WORKER > PROGRAM


def test_without_a_limit_everything_fits():
    budget = MemoryBudget()
    budget.require(10**15, "everything")
    assert budget.room is None
    assert budget.threads(8, 10**15) == 8


@pytest.mark.parametrize(
    ("room", "threads"), [(0, 1), (1100, 1), (1199, 1), (1200, 2), (1500, 5), (10**6, 8)]
)
def test_threads_are_as_many_as_fit_and_at_least_one(room, threads):
    assert MemoryBudget(PROGRAM + room).threads(8, each=100, shared=1000) == threads


def test_threads_that_take_nothing_are_not_limited():
    assert MemoryBudget(PROGRAM).threads(8, each=0) == 8


def test_the_least_memory_that_the_error_names_is_enough():
    MemoryBudget(PROGRAM + 5000).require(5000, "w")
    with pytest.raises(SettingError, match=r"is too little: w takes 5\.0 kB, and the program itself") as info:
        MemoryBudget(PROGRAM + 4999).require(5000, "w")
    MemoryBudget(parse_bytes(info.value.hint.removeprefix("give at least "))).require(5000, "w")


def test_a_dry_run_says_whose_memory_it_is():
    assert (
        memory_line(10**9, 2, local=True, bounded=False)
        == "this process: about 1.00 GB of memory on 2 threads"
    )
    assert (
        memory_line(10**9, 1, local=False, bounded=True)
        == "each worker: at most 1.00 GB of memory on 1 thread"
    )
