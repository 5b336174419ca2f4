"""Tests on one GPU, which several ranks share.

Without a GPU all of them are skipped, unless ``GPU_TESTS_ON_CPU`` is set: then those that need no GPU run on CPUs with
gloo, to try the tests themselves.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.machines.shared_gpu import shared_gpu_ray
from helpers.ranks.gang import GLOO, NCCL, Backend, Gang, close_gangs, gang_on

HERE = Path(__file__).parent
ON_CPU = "GPU_TESTS_ON_CPU" in os.environ
MAX_RANKS = 4


def pytest_runtest_setup() -> None:
    if not ON_CPU and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU (torch.cuda.is_available() is false)")


@pytest.fixture
def backend() -> Backend:
    """Where the tests run."""
    return GLOO if ON_CPU else NCCL


@pytest.fixture
def gpu() -> None:
    """For tests that CPUs cannot run."""
    if ON_CPU:
        pytest.skip("needs a GPU")


@pytest.fixture
def gang(backend: Backend) -> Gang:
    """Up to four processes on one GPU, the same ones for all tests of this folder."""
    return gang_on(backend)


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the processes with the last test of this folder, to free the GPU."""
    if nextitem is None or HERE not in nextitem.path.parents:
        close_gangs()


@pytest.fixture(scope="module")
def one_gpu_for_all() -> Iterator[int]:
    """The number of GPUs of a Ray whose workers share one."""
    close_gangs()
    with shared_gpu_ray(MAX_RANKS):
        yield MAX_RANKS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run("strategy=ddp", ...)`` in a fresh directory."""
    from orchestrator import run as orchestrator_run

    monkeypatch.chdir(tmp_path)
    return lambda *overrides: orchestrator_run(["tracking=none", *overrides])
