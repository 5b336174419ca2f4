"""Waiting as a GPU sees it, which runs behind the host."""

import time

import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import make, steps
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.gang import Gang, own_device
from orchestrator.job import Job
from orchestrator.strategies.measure.device import WaitTimer

WAIT_S = 0.05


def waits_ms(rank: int) -> tuple[float, float]:
    """How long a busy device and an idle one wait while the host does something else."""
    device = own_device()
    matrix, found = torch.randn(8192, 8192, device=device), []
    for products in (50, 0):
        torch.cuda.synchronize()
        timer = WaitTimer(device)
        for _ in range(products):
            matrix = torch.tanh(matrix @ matrix)
        with timer.waiting():
            time.sleep(WAIT_S)
        found.append(timer.total_ms())
    return found[0], found[1]


@pytest.mark.usefixtures("gpu")
def test_a_busy_gpu_does_not_wait_for_the_host(gang: Gang) -> None:
    """If it fails, perf/comm_pct and perf/data_wait_pct count time in which the GPU computes."""
    ((busy_ms, idle_ms),) = gang.run(waits_ms, world_size=1)
    assert idle_ms >= 0.9e3 * WAIT_S
    assert busy_ms < 0.5 * idle_ms


class Weighted(Toy):
    """Its weights are numbers of the host."""

    def weight(self, target: torch.Tensor) -> int:
        return len(target)


def step_that_may_not_wait(rank: int, case: Case) -> float:
    """The loss of a step in which torch refuses to wait for the device."""
    results = steps(make(case, rank))
    next(results)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = next(results)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return float(result.loss_sum)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("job", [Weighted(), Tokens(empty=6)], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", ["single", "ddp-2"])
def test_a_step_reads_nothing_from_the_device_and_copies_no_number_to_it(gang: Gang, name: str, job: Job) -> None:
    """If it fails, each step waits until the device has nothing left to do."""
    case = LAYOUTS[name].of(Case(job=job, train=having(steps=2, global_batch_size=16)))
    assert all(loss > 0 for loss in gang.run(step_that_may_not_wait, case, world_size=LAYOUTS[name].world_size))
