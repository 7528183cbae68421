"""Visits: which can begin, and in which order they are told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfusion.matching.blocks import AxisBlock
from transfusion.matching.visits import Visit, VisitQueue


def sweeps(tensors: list[frozenset[str]], count: int) -> list[list[Visit]]:
    """Sweeps over blocks that have these tensors."""
    return [
        [
            Visit(AxisBlock(str(place)), some, sweep, place + 1, len(tensors))
            for place, some in enumerate(tensors)
        ]
        for sweep in range(count)
    ]


@given(
    tensors=st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=6),
    count=st.integers(1, 4),
    ahead=st.integers(0, 3),
    workers=st.integers(1, 4),
    data=st.data(),
)
def test_a_visit_waits_for_those_before_it_that_share_a_tensor_and_for_no_others(
    tensors, count, ahead, workers, data
):
    planned = sweeps(tensors, count)
    order = [visit for sweep in planned for visit in sweep]
    queue: VisitQueue[int] = VisitQueue(iter(planned), ahead)
    running: list[Visit] = []
    ended: set[Visit] = set()
    told: list[Visit] = []
    while True:
        while len(running) < workers and (visit := queue.begin()) is not None:
            before = order[: order.index(visit)]
            assert all(other in ended or other.tensors.isdisjoint(visit.tensors) for other in before)
            assert visit.sweep <= order[len(told)].sweep + ahead
            running.append(visit)
        if not running:
            break
        visit = running.pop(data.draw(st.integers(0, len(running) - 1)))
        ended.add(visit)
        for one, outcome in queue.end(visit, order.index(visit)):
            assert order[outcome] is one
            told.append(one)
    assert told == order


def test_all_that_share_nothing_begin_at_once():
    queue: VisitQueue[None] = VisitQueue(
        iter(sweeps([frozenset("a"), frozenset("b"), frozenset("ab")], 2)), 1
    )
    first, second = queue.begin(), queue.begin()
    assert first is not None
    assert second is not None
    assert queue.begin() is None
    assert list(queue.end(second, None)) == []
    assert [visit for visit, _ in queue.end(first, None)] == [first, second]


def test_after_a_stop_nothing_begins():
    queue: VisitQueue[None] = VisitQueue(iter(sweeps([frozenset("a"), frozenset("b")], 2)), 1)
    first, second = queue.begin(), queue.begin()
    assert first is not None
    assert second is not None
    assert [visit for visit, _ in queue.end(first, None)] == [first]
    queue.stop()
    assert queue.begin() is None
    assert list(queue.end(second, None)) == []
