"""One Ray for all tests of this folder; every run in a directory of its own."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from helpers.faults.outcome import leftovers

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
    assert leftovers(timeout_s=60) == []
