"""One Ray for all tests of this folder; every run in a directory of its own."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

HERE = Path(__file__).parent
ENVIRONMENT = dict(os.environ)


@pytest.fixture(autouse=True)
def one_ray() -> None:
    """A local Ray with four CPUs. Its workers get this process's ``sys.path``, and so find the jobs in ``helpers``."""
    if not ray.is_initialized():
        os.environ.pop("RAY_ADDRESS", None)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End Ray with the tests of this folder, and what it and the runs have set in the environment."""
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        ray.shutdown()
        os.environ.clear()
        os.environ.update(ENVIRONMENT)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run("strategy=ddp", ...)`` in a fresh directory, without MLflow unless asked for, and without its model and
    dataset.
    """
    from orchestrator import run as orchestrator_run

    monkeypatch.chdir(tmp_path)

    def start(*overrides: str, tracking: str = "none") -> Any:
        return orchestrator_run(
            [f"tracking={tracking}", "tracking.log_model=false", "tracking.log_dataset=false", *overrides]
        )

    return start


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No actor and no placement group outlives its run."""
    yield
    from ray.util.placement_group import placement_group_table

    held = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    assert not held, held
    workers = [p for p in psutil.Process().children(recursive=True) if _is_busy_worker(p)]
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, alive


def _is_busy_worker(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(title in command for title in ("/worker-", "ray::Worker", "ray::ScriptWorker", "ray::rank-"))
