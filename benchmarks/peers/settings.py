"""The command line and the result file of the peers."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.job import Job


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The parsed command line; :func:`parse` says what the fields mean."""

    job: str
    fields: dict[str, Any]
    steps: int
    global_batch_size: int
    log_every: int
    result: str
    workers: int
    address: str
    dashboard: bool
    split: str
    schedule: str
    num_microbatches: int
    kill_at: int
    kill_every: int
    checkpoint_every: int
    compile: bool
    loading_processes: int
    share_gpu: bool

    def kills(self, step: int) -> bool:
        """Return whether rank 1 dies before this step."""
        if self.kill_every and step > self.kill_at:
            return (step - self.kill_at) % self.kill_every == 0
        return step == self.kill_at

    def make_job(self) -> Job:
        """Import the job's class and create the job."""
        module, _, name = self.job.rpartition(".")
        job = getattr(importlib.import_module(module), name)(**self.fields)
        assert isinstance(job, Job)
        return job


def parse() -> Settings:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True, help="import path of the job's class")
    parser.add_argument("--fields", type=json.loads, required=True, help="the job's fields as JSON")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--log-every", type=int, required=True)
    parser.add_argument("--result", required=True, help="file for the measurements")
    parser.add_argument("--workers", type=int, default=0, help="number of Ray Train's workers; torchrun sets its own")
    parser.add_argument("--address", default="local", help="address of the Ray to use; local: start one")
    parser.add_argument("--no-dashboard", dest="dashboard", action="store_false")
    parser.add_argument("--split", default="", help="the first layer of a pipeline's second stage")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--num-microbatches", type=int, default=1)
    parser.add_argument("--kill-at", type=int, default=0, help="the step before which rank 1 dies; 0: never")
    parser.add_argument("--kill-every", type=int, default=0, help="steps between two kills; 0: only one")
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--loading-processes", type=int, default=0, help="processes that load data for each rank")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks use the first GPU")
    return Settings(**vars(parser.parse_args()))


class StepTimer:
    """The time at which each step of a process ends."""

    def __init__(self) -> None:
        self._first_step_at = 0.0
        self._ends: list[float] = []

    def end_step(self) -> None:
        """Record that a step has ended."""
        if not self._ends:
            self._first_step_at = time.time()
        self._ends.append(time.perf_counter())

    def write(self, path: str) -> None:
        """Write the end of the first step, in seconds since the epoch, and the durations of the others."""
        write_timing(path, self._first_step_at, [(b - a) * 1e3 for a, b in itertools.pairwise(self._ends)])


def write_timing(path: str, first_step_at: float, step_ms: Sequence[float]) -> None:
    """Write the end of the first step, in seconds since the epoch, and the durations of the others."""
    Path(path).write_text(json.dumps({"first_step_at": first_step_at, "step_ms": list(step_ms)}))
