"""Whether freed blocks stay in a process, in processes of their own, because the settings are those of a process."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # the imports of new processes

SCRIPT = """
import resource
import torch
from orchestrator.worker.process import process_memory

def says(what):
    block = torch.ones(2**22)
    before = process_memory._status()["VmData"]
    del block
    print(what, "returned" if process_memory._status()["VmData"] < before else "kept")

process_memory.set_allocator(gathers=True)
says("a worker that gathers:")
process_memory.keep_if_plentiful(10**6)
says("shared by more workers than any machine has memory for:")
limits = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (process_memory._status()["VmData"] + 64 * 2**20, limits[1]))
process_memory.keep_if_plentiful(1)
says("within a limit:")
resource.setrlimit(resource.RLIMIT_DATA, limits)
process_memory.keep_if_plentiful(1)
says("with plenty of memory:")
process_memory.set_allocator(gathers=False)
says("another worker:")
"""


def lines_of(**variables: str) -> list[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    words = [sys.executable, "-c", SCRIPT]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment).stdout.splitlines()


def test_a_worker_that_gathers_returns_large_blocks_until_there_is_plenty_of_memory() -> None:
    """What was kept once may be used again: those that return blocks come first."""
    assert lines_of() == [
        "a worker that gathers: returned",
        "shared by more workers than any machine has memory for: returned",
        "within a limit: returned",
        "with plenty of memory: kept",
        "another worker: kept",
    ]


def test_settings_of_the_user_are_kept() -> None:
    lines = lines_of(MALLOC_MMAP_THRESHOLD_=str(2**25), MALLOC_TRIM_THRESHOLD_=str(2**31 - 1))
    assert len(lines) == 5
    assert all(line.endswith(": kept") for line in lines)
