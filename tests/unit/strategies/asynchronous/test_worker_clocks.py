"""Which workers of a parameter server may continue, by how far they are ahead of the slowest."""

import pytest

from orchestrator.strategies.asynchronous.parameter_server.server import WorkerClocks


def test_without_a_bound_every_worker_continues_at_once() -> None:
    clocks = WorkerClocks(range(3), step=5, bound=None)
    assert [clocks.advance(0) for _ in range(4)] == [[0]] * 4
    assert clocks.slowest == 5
    assert clocks.max_lead == 4


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_ahead_of_the_bound_waits_for_the_slowest(bound: int) -> None:
    clocks = WorkerClocks(range(2), step=0, bound=bound)
    for _ in range(bound):
        assert clocks.advance(0) == [0]
    assert clocks.advance(0) == []
    assert clocks.advance(1) == [0, 1]
    assert clocks.slowest == 1
    assert clocks.max_lead == bound


def test_released_workers_are_in_the_order_of_their_ranks() -> None:
    clocks = WorkerClocks(range(3), step=0, bound=0)
    assert clocks.advance(2) == []
    assert clocks.advance(0) == []
    assert clocks.advance(1) == [0, 1, 2]
