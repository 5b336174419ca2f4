"""Waiting as a GPU sees it, which runs behind the host."""

from __future__ import annotations

import time

import pytest
import torch

from helpers.gang import Gang, own_device
from orchestrator.strategies.device_clock import WaitTimer

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
