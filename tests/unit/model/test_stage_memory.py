"""A stage is built, and its cut measured, in about its share of the model's memory."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from orchestrator.model.cut import Cut
from orchestrator.model.layers import costs, flow
from orchestrator.model.precision import Precision
from orchestrator.model.stages import build_stages, sequence_of

LAYERS, WIDTH, STAGES = 64, 896, 4
CUT = Cut(tuple(range(0, LAYERS, LAYERS // STAGES)))
CPU = torch.device("cpu")


class NotByHand:
    def stages(self, model: nn.Module) -> None:
        """Leave the cutting to the strategy."""


def model(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def whole(layers: int, width: int) -> object:
    return model(layers, width)


def stage(number: int, layers: int, width: int) -> object:
    """As a worker does it that also measures the layers."""

    def build() -> nn.Module:
        return model(layers, width)

    inputs = torch.ones(2, width)
    sequence = sequence_of(build, inputs, CPU, split=(), num_stages=2, job=NotByHand())
    values = flow(sequence, inputs, precision=Precision())
    fresh = sequence_of(build, inputs, CPU, split=(), num_stages=2, job=NotByHand()).modules
    costs(fresh, values, inputs, precision=Precision(), loss=lambda out: out.square().mean())
    return build_stages(build, sequence, values, CUT, [number], device=CPU, seed=1, precision=Precision())


def peak_growth_bytes(build: Callable[..., object], args: Sequence[int]) -> int:
    """By how much the memory of this process grows at most while it runs ``build``."""
    torch.set_num_threads(1)
    warm = build(*args, LAYERS, 8)  # imports, and whatever libraries set up once
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    kept = build(*args, LAYERS, WIDTH)
    grown = _status("VmHWM") - before
    del warm, kept
    return grown


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kilobytes) * 1024


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_worker_is_about_its_share() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        all_of_it = processes.submit(peak_growth_bytes, whole, ()).result()
        assert all_of_it > 0.95 * LAYERS * WIDTH**2 * 4, "the measurement does not see the model"
        shares = [processes.submit(peak_growth_bytes, stage, (s,)).result() / all_of_it for s in range(STAGES)]
    assert max(shares) < 0.4, shares
    assert min(shares) > 0.9 / STAGES, "the measurement does not see the stage"
