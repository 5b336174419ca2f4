"""The traces of several ranks as one, and what they say about a step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.driver.ending import MERGED, report_profile
from orchestrator.records import run_dir as rundir
from orchestrator.timeline.traces import clock_offset_us, merged, step_parts

BASE_NS = 1_000_000_000


def event(name: str, begin: float, end: float, *, cat: str = "user_annotation", pid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 1, "ts": begin, "dur": end - begin}


def trace_of(*events: dict[str, Any], host: str = "one", base_ns: int = BASE_NS) -> dict[str, Any]:
    return {"host_name": host, "baseTimeNanoseconds": base_ns, "traceEvents": list(events)}


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


def test_clocks_of_two_hosts_are_aligned_by_the_ends_of_what_they_do_together() -> None:
    ahead_us = 250.0
    here = trace_of(event("gloo:all_reduce", 100, 200), event("gloo:all_reduce", 300, 400))
    moved = [event("gloo:all_reduce", 150 + ahead_us, 200 + ahead_us), event("gloo:all_reduce", 390, 404 + ahead_us)]
    there = trace_of(*moved, host="two")
    assert clock_offset_us(here, there) == pytest.approx(ahead_us + 2)
    assert clock_offset_us(here, trace_of(*moved)) == 0.0, "one host has one clock"
    ends = [e["ts"] + e["dur"] for e in merged({0: here, 1: there})["traceEvents"] if e["ph"] == "X"]
    assert ends == pytest.approx([200, 400, 198, 402])
    later = trace_of(*moved, host="two", base_ns=BASE_NS + 1_000_000)
    assert clock_offset_us(here, later) == pytest.approx(1000 + ahead_us + 2)
    ends = [e["ts"] + e["dur"] for e in merged({0: here, 1: later})["traceEvents"] if e["ph"] == "X"]
    assert ends == pytest.approx([200, 400, 198, 402])


def test_ranks_with_equal_process_ids_are_different_processes() -> None:
    flow = {"ph": "s", "id": 3, "name": "fwdbwd", "cat": "fwdbwd", "pid": 7, "tid": 1, "ts": 1.0}
    label = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}}
    kernel = event("gemm", 0, 1, cat="kernel", pid=0)
    mark = {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9.0}
    events = merged({r: trace_of(event("aten::mm", 0, 1), flow, label, kernel, mark) for r in (0, 1)})["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0, GPU 0", "rank 1", "rank 1, GPU 0"]
    assert [names[e["pid"]] for e in events if e["name"] == "gemm"] == ["rank 0, GPU 0", "rank 1, GPU 0"]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


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
    assert found["profile"] == str(run_dir.profile / MERGED)
    for part in ("3 steps of ", "computation ", "optimizer ", "waiting for samples "):
        assert part in found["profiled"]
    with gzip.open(found["profile"], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_without_traces_there_is_nothing_to_merge(tmp_path: Path) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    run_dir.profile.mkdir()
    assert report_profile(run_dir) == {"profile": str(run_dir.profile)}
