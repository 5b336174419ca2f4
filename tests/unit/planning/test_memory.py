"""The memory of a worker from the sizes of the parameters, and the smallest number of workers that fits."""

import pytest

from helpers.machines.plans import GPU_BOX, LAPTOP, plan_of
from orchestrator.planning.memory import UNKNOWN, Division, MemoryLimit, ParameterSize, fewest_parts, worker_memory
from orchestrator.planning.plan import Node

SIZES = [
    ParameterSize(rows=10, row_bytes=40, trained=True, state_bytes=80),
    ParameterSize(rows=3, row_bytes=4, trained=False, state_bytes=0),
]
STATE = 400 * 4 + 12
"""Parameters, gradients and two tensors of optimizer state, and the frozen parameter."""


def test_rows_are_divided_as_on_the_worker_that_has_most() -> None:
    memory = worker_memory(SIZES, Division(parameters=4, gradients=4, optimizer=4))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (3 * 40 + 4, 3 * 40, 3 * 80)
    assert memory.total == memory.state == 484
    assert worker_memory(SIZES, Division(optimizer=2)).optimizer == 5 * 80
    assert worker_memory(SIZES, Division(stages=2)).state == STATE / 2


@pytest.mark.parametrize(
    ("limit", "fewest"),
    [
        (MemoryLimit(largest_bytes=STATE), 2),
        (MemoryLimit(largest_bytes=STATE / 2 - 1), 3),
        (MemoryLimit(largest_bytes=4 + 160), 10),
        (MemoryLimit(largest_bytes=4 + 159), None),
        (MemoryLimit(largest_bytes=STATE + 40, total_bytes=STATE + 40), 2),
        (MemoryLimit(largest_bytes=STATE - 40, total_bytes=STATE - 40), None),
        (MemoryLimit(largest_bytes=STATE / 2 - 1, total_bytes=2 * STATE), 3),
    ],
)
def test_the_fewest_workers_over_which_the_state_fits(limit: MemoryLimit, fewest: int | None) -> None:
    assert fewest_parts(SIZES, limit) == fewest


def test_workers_on_cpus_share_the_memory_of_the_nodes() -> None:
    nodes = tuple(Node(node_id=str(i), name=f"n{i}", cpus=8, gpus=0, memory_bytes=100 * (i + 1)) for i in range(2))
    memory = plan_of(nodes, "strategy.num_workers=4").memory
    assert memory.of_each(4) == 75
    assert memory.of_each(1) == 200, "a worker is on one node"
    assert plan_of(LAPTOP).memory == UNKNOWN


def test_a_worker_on_a_gpu_has_the_memory_of_the_smallest() -> None:
    nodes = tuple(Node(node_id=str(i), name=f"n{i}", cpus=8, gpus=4, gpu_memory_bytes=80 - i) for i in range(2))
    assert plan_of(nodes).memory == MemoryLimit(largest_bytes=79)
    assert plan_of(GPU_BOX).memory == UNKNOWN
