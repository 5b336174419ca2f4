"""One Ray for each file; every run in a directory of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

HERE = Path(__file__).parent


def in_campaign(*values: Any) -> list[Any]:
    """Parameters that the default run leaves out."""
    return [
        pytest.param(*v, marks=pytest.mark.campaign)
        if isinstance(v, tuple)
        else pytest.param(v, marks=pytest.mark.campaign)
        for v in values
    ]


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    os.environ.pop("RAY_ADDRESS", None)
    sys.path.insert(0, str(HERE))  # the jobs of `faulty_jobs.py`, for the workers too
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()
    sys.path.remove(str(HERE))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run("strategy=ddp", ...)`` in a fresh directory, without MLflow unless asked for."""
    from orchestrator import run as orchestrator_run

    monkeypatch.chdir(tmp_path)

    def start(*overrides: str, tracking: str = "none") -> Any:
        return orchestrator_run([f"tracking={tracking}", *overrides])

    return start


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No actor and no placement group outlives its run."""
    yield
    from ray.util.placement_group import placement_group_table

    held = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    assert not held, held
    workers = [p for p in psutil.Process().children(recursive=True) if _is_busy_worker(p)]
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive, alive


def _is_busy_worker(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "/worker-" in command or "ray::Worker" in command


def losses(run_dir: Path) -> dict[int, float]:
    """``train/loss`` by step."""
    return series(run_dir, "train/loss")


def series(run_dir: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if name in line]
    assert len(steps) == len(set(steps)), f"double points of {name}"
    return {line["step"]: line[name] for line in lines if name in line}


def events(run_dir: Path, kind: str) -> Sequence[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def pid_of_rank(folder: Path, rank: int, *, after_step: int) -> int:
    """The process of a rank of the run below ``folder``, once that has come so far."""
    (metrics,) = wait_for(lambda: list(folder.glob("outputs/*/*/metrics.jsonl")))
    wait_for(lambda: max(losses(metrics.parent), default=0) >= after_step)
    (started,) = events(metrics.parent, "generation_started")
    return int(started["workers"][rank].rpartition(" ")[2])


def wait_for(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it gives something."""
    deadline = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
