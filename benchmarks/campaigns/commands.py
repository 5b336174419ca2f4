"""Runs of the campaign as commands, and what happens beside them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import ray
from harness.arms import HERE, kill_tree

from campaigns.trial import TRIAL_TIMEOUT_S, Ended, Setting, ended
from helpers.records.runs import last_step as last_step_below
from helpers.records.runs import run_dirs as run_dirs_below
from helpers.records.runs import wait_for
from orchestrator.records.run_dir import RunDir

IMPORTS = f"{HERE}:{HERE.parent}"
"""What a command needs on its path to find the jobs of the benchmarks."""
HEALTHY = (
    "job._target_=stalling_job.Stalling",
    "recovery.hang_min_s=6",
    "recovery.hang_max_s=30",
    "recovery.build_max_s=30",
    "recovery.max_failures=0",
)
"""The overrides of a run in which nothing may be blamed on a worker."""


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call ``work(over)`` in a thread during the block; the event ``over`` is set when the block ends.

    Raises:
        Exception: what ``work`` raised.
    """
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, over)
        try:
            yield
        finally:
            over.set()
    future.result()


@contextlib.contextmanager
def launched(
    setting: Setting,
    *overrides: str,
    address: str = "",
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the layout as a command, which is killed with its children if it is still running after the block.

    Args:
        address: the address of the Ray to use; empty for the Ray of this process.
        prefix: a command that runs the command.
    """
    words = ("launch", f"cluster.address={address or gcs_address()}", *setting.overrides, *overrides)
    with started(setting, *words, prefix=prefix, environment=environment) as process:
        yield process


def verb_problems(
    setting: Setting, *words: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[str]:
    """Run a verb to its end; returns what was wrong with that, nothing if it ends with exit code 0."""
    with started(setting, *words, prefix=prefix, environment=environment) as process:
        code = process.wait(TRIAL_TIMEOUT_S)
    return [f"{words[0]}: exit {code}: {last_words(setting)}"] if code else []


@contextlib.contextmanager
def started(
    setting: Setting, verb: str, *words: str, prefix: Sequence[str], environment: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of our commands in the folder of the setting, as :func:`launched` does."""
    with (setting.folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", f"orchestrator.{verb}", *words],
            cwd=setting.folder,
            env={**os.environ, "PYTHONPATH": IMPORTS, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        kill_tree(process)


def gcs_address() -> str:
    """Return the address of the Ray of this process."""
    return str(ray.get_runtime_context().gcs_address)


def ended_process(setting: Setting, process: subprocess.Popen[bytes]) -> Ended:
    """Read what the run of a command has left behind."""
    return ended(run_dir(setting), exit_code=process.returncode, reason=last_words(setting))


def last_words(setting: Setting) -> str:
    """Return the end of what the commands of a setting have printed."""
    return " ".join((setting.folder / "output.txt").read_text().split()[-60:])


def run_dir(setting: Setting) -> RunDir:
    """Return the only run of a setting.

    Raises:
        AssertionError: there are others, or none appears.
    """
    runs = wait_for(lambda: run_dirs(setting), "a run")
    assert len(runs) == 1, f"{len(runs)} runs"
    return runs[0]


def run_dirs(setting: Setting) -> list[RunDir]:
    """Return the runs of a setting."""
    return [RunDir(path) for path in run_dirs_below(setting.folder)]


def last_step(setting: Setting) -> int:
    """Return the last step that a setting has logged; 0 before the first."""
    return last_step_below(setting.folder)
