"""The benchmark of one GPU, with a tiny model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.machines.commands import environment
from helpers.records.runs import ROOT


@pytest.mark.timeout(600)
def test_the_benchmark_compares_trains_two_ranks_and_recovers() -> None:
    """If it fails, a figure of benchmarks/gpu.py cannot be measured on this machine."""
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--smoke"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for claim in (
        "samples/s, ours / plain loop, a tiny model",
        "samples/s, ours / plain loop, a tiny model, compiled",
        "memory of tensors",
        "last loss, two ranks",
        "samples/s, two ranks on one GPU, ours / torchrun",
        "a step of 5 ms whose confirmation spins / sleeps",
    ):
        assert claim in done.stdout
    assert "raise@40:1: the next step came after " in done.stdout
