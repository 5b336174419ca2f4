"""Tests of ``tests/gpu`` as a probe, stopped after some time instead of at their end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest
from harness.arms import HERE

from gpu_probes.probe import ProbeError

TEST_TIMEOUT_S = 60.0
MAX_FAILURES = 6


class Progress:
    """A plugin of pytest that counts, and begins no test after ``limit_s``."""

    def __init__(self, limit_s: float):
        self.passed = 0
        self.failed: list[str] = []
        self.is_cut = False
        self._deadline = time.monotonic() + limit_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid.partition('::')[2]}: {_reason(report)}")
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is not None and time.monotonic() > self._deadline:
            self.is_cut = True
            item.session.shouldstop = "the time of the probe is over"


def run_tests(*, words: Sequence[str], limit_s: float, on_cpu: bool) -> str:
    """Run tests that pytest selects by ``words``, and return how many have passed.

    Raises:
        ProbeError: a test has failed, or none has run.
    """
    if on_cpu:
        os.environ["GPU_TESTS_ON_CPU"] = "1"
    os.chdir(HERE.parent)
    progress = Progress(limit_s)
    flags = ["-vv", "-m", "gpu", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", f"--maxfail={MAX_FAILURES}"]
    code = pytest.main([*flags, *words], plugins=[progress])
    found = f"{progress.passed} passed{', cut' if progress.is_cut else ''}"
    if progress.failed:
        raise ProbeError(f"{found}; failed: {'; '.join(progress.failed)}")
    if not progress.passed:
        raise ProbeError(f"no test has passed (pytest exited with {int(code)})")
    return found


def _reason(report: pytest.TestReport) -> str:
    return (report.longreprtext.strip().splitlines() or ["?"])[-1][:160]
