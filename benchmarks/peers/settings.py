"""The command line and the result file that the hand-written peers share."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.job import Job


@dataclass(frozen=True, kw_only=True)
class Settings:
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

    def kills(self, step: int) -> bool:
        """Whether rank 1 dies in this step."""
        if self.kill_every and step > self.kill_at:
            return (step - self.kill_at) % self.kill_every == 0
        return step == self.kill_at

    def make_job(self) -> Job:
        module, _, name = self.job.rpartition(".")
        job = getattr(importlib.import_module(module), name)(**self.fields)
        assert isinstance(job, Job)
        return job


def parse() -> Settings:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--fields", type=json.loads, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--log-every", type=int, required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--workers", type=int, default=0, help="Ray Train's; torchrun has its own")
    parser.add_argument("--address", default="local", help="of the Ray to use; local: a new one")
    parser.add_argument("--no-dashboard", dest="dashboard", action="store_false")
    parser.add_argument("--split", default="", help="the layer that a pipeline's second stage begins with")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--num-microbatches", type=int, default=1)
    parser.add_argument("--kill-at", type=int, default=0, help="the step in which rank 1 dies; 0: it does not")
    parser.add_argument("--kill-every", type=int, default=0, help="steps between that and the next one; 0: no more")
    parser.add_argument("--checkpoint-every", type=int, default=20)
    return Settings(**vars(parser.parse_args()))


def write_result(path: str, *, first_step_at: float, marks: Sequence[float]) -> None:
    """``marks``: the end of each step in seconds; ``first_step_at`` the first one on the wall clock."""
    step_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
    Path(path).write_text(json.dumps({"first_step_at": first_step_at, "step_ms": step_ms}))
