"""What the traces of several ranks say about a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.driver.ending import report_profile
from orchestrator.records import run_dir as rundir
from orchestrator.timeline.traces import step_parts


def event(name: str, begin: float, end: float, *, cat: str = "user_annotation", pid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 1, "ts": begin, "dur": end - begin}


def trace_of(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": list(events)}


STEP = trace_of(
    event("ProfilerStep#7", 0, 1000),
    event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100),
    event("aten::stack", 50, 100, cat="cpu_op"),
    event("aten::mm", 100, 500, cat="cpu_op"),
    event("c10d::allreduce_", 400, 700, cat="cpu_op"),
    event("gloo:all_reduce", 400, 700),
    event("Optimizer.step#SGD.step", 700, 900),
    event("aten::add_", 750, 850, cat="cpu_op"),
    event("aten::mm", 1500, 1700, cat="cpu_op"),
)


def test_every_moment_of_a_step_counts_once() -> None:
    """Communication counts where nothing is computed, waiting for samples where neither takes place."""
    parts = step_parts([STEP])
    assert parts is not None
    assert (parts.steps, parts.step_ms) == (1, 1.0)
    assert (parts.computation_pct, parts.communication_pct) == pytest.approx((45, 20))
    assert (parts.optimizer_pct, parts.data_pct, parts.other_pct) == pytest.approx((20, 5, 10))
    assert str(parts) == (
        "1 step of 1 ms: computation 45%, communication that nothing hides 20%, optimizer 20%, other 10%, "
        "waiting for samples 5%"
    )
    assert step_parts([trace_of(event("aten::mm", 0, 1, cat="cpu_op"))]) is None


def test_on_gpus_kernels_are_the_computation() -> None:
    kernels = trace_of(
        event("ProfilerStep#7", 0, 100),
        event("aten::mm", 0, 90, cat="cpu_op"),
        event("gemm", 10, 60, cat="kernel", pid=0),
        event("ncclDevKernel_AllReduce_Sum_f32", 50, 80, cat="kernel", pid=0),
    )
    parts = step_parts([kernels])
    assert parts is not None
    assert (parts.computation_pct, parts.communication_pct) == pytest.approx((50, 20))


def test_what_torch_records_is_recognised(tmp_path: Path) -> None:
    """The names of its events, in traces of a training step."""
    run_dir = rundir.create(tmp_path, "digits-ddp")
    run_dir.profile.mkdir()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(40, 64)), batch_size=10)
    for rank in (0, 1):
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda p, rank=rank: p.export_chrome_trace(str(run_dir.profile / f"rank-{rank}.json")),
        ) as profiler:
            for (inputs,) in loader:
                model(inputs).sum().backward()
                optimizer.step()
                profiler.step()
    found = report_profile(run_dir)
    assert found["profile"] == str(run_dir.profile)
    for part in ("3 steps of ", "computation ", "optimizer ", "waiting for samples "):
        assert part in found["profiled"]


def test_without_traces_no_parts_are_named(tmp_path: Path) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    run_dir.profile.mkdir()
    assert report_profile(run_dir) == {"profile": str(run_dir.profile)}
