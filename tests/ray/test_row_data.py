"""Rows of a ``ray.data.Dataset``: the losses of a plain loop over them, whatever is lost, and from any position."""

import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from helpers.conformance.reference import plain_losses
from helpers.jobs.row_jobs import RowJob, write_files
from helpers.records.runs import events, losses, wait_for_step

STEPS, BATCH = 30, 36
WORDS = (
    "job._target_=helpers.jobs.row_jobs.RowJob", "strategy=ddp", "strategy.num_workers=2", f"train.steps={STEPS}",
    f"train.global_batch_size={BATCH}", "train.log_every=1", "train.eval_every=0", "recovery.backoff_s=0.1",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "rows")
    return tmp_path / "rows"


@pytest.fixture(scope="module")
def expected() -> dict[int, float]:
    return plain_losses(RowJob(), batch=BATCH, steps=STEPS)


def warnings(run_dir: Path) -> list[str]:
    return [event["message"] for event in events(run_dir, "warned") if "data" in event["message"]]


def test_a_run_resumes_within_an_epoch_on_another_number_of_workers(
    run: Any, folder: Path, expected: dict[int, float]
) -> None:
    words = (*WORDS, "job.kind=rows", f"job.folder={folder}")
    first = run(*words, "checkpoint.every=4", "recovery.max_failures=0", "recovery.chaos=[kill@19:0]")
    assert first.exit_code == 1, first.reason
    resumed = run(*words, f"resume={first.run_dir}", "recovery.chaos=[]", "strategy.num_workers=1",
                  "train.eval_every=25")  # fmt: skip
    assert resumed.exit_code == 0, resumed.reason
    assert losses(resumed.run_dir) == pytest.approx(expected, rel=1e-4)
    assert warnings(resumed.run_dir) == []
