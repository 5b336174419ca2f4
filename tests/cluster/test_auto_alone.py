"""``strategy=auto`` on a Ray of its own, whose workers share all cores of the machine."""

import json
import os
from pathlib import Path

import pytest

from helpers.machines.commands import run


@pytest.mark.campaign
def test_the_chosen_strategy_has_the_threads_of_a_run_that_names_it(tmp_path: Path) -> None:
    """A job with a training step is not predicted, and its first candidate is taken where nothing is measured."""
    words = ("strategy=auto", "strategy.measured=0", "job._target_=helpers.jobs.step_toys.GAN", "train.steps=2")
    ended = run(*words, "tracking=none", cwd=tmp_path, timeout_s=200)
    assert ended.returncode == 0, ended.stdout
    (record,) = tmp_path.glob("outputs/*/*/run.json")
    plan = json.loads(record.read_text())["plan"]
    assert plan["strategy"] == "single"
    assert plan["threads_per_worker"] == len(os.sched_getaffinity(0))
