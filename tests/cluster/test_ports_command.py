"""A port of docs/ports.md as its reader runs it: the file copied into a directory, and the command of the page."""

import json
import shutil
from pathlib import Path

import pytest

import digits_job
from helpers.machines import commands
from helpers.ranks.job_trials import trained
from helpers.records.runs import losses, run_dirs


@pytest.mark.campaign
def test_a_copied_port_trains_as_it_does_without_ray(tmp_path: Path) -> None:
    shutil.copy(digits_job.__file__, tmp_path)
    job = "job._target_=digits_job.Digits"
    settings = ("train.steps=20", "train.global_batch_size=60", "train.log_every=1", "train.eval_every=10")
    words = ("strategy=ddp", job, *settings, "tracking=none", "cluster=local")
    ended = commands.run(*words, cwd=tmp_path, timeout_s=100)
    assert ended.returncode == 0, ended.stdout
    assert "finished: 20 steps" in ended.stdout
    (run_dir,) = run_dirs(tmp_path)
    assert json.loads((run_dir / "run.json").read_text())["state"] == "finished"
    _, expected = trained(digits_job.Digits(), steps=20, batch=60)
    assert list(losses(run_dir).values()) == pytest.approx(expected, rel=1e-5)
