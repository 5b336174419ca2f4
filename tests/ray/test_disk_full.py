"""A full disk costs checkpoints, not the training."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import events, wait_for


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode == 0
    )
    if not mounted:
        pytest.skip("mounting a small file system needs root")
    yield folder
    deadline = time.monotonic() + 20  # until the killed workers have closed their logs
    while subprocess.run(["umount", folder], stderr=subprocess.DEVNULL, check=False).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_training_goes_on(run: Callable[..., Any], small_disk: Path) -> None:
    """Two checkpoints of 2.4 MB do not fit; the run ends well and says what is missing."""
    result = run("strategy=ddp", "train.steps=30", "train.eval_every=0", "checkpoint.every=10",
                 f"output_dir={small_disk}")  # fmt: skip
    assert result.exit_code == 0
    assert result.summary["steps"] == 30
    failed = events(result.run_dir, "checkpoint_failed")
    assert [f["step"] for f in failed] == [20, 30]
    assert all("disk full" in f["reason"] for f in failed)
    assert [e["step"] for e in events(result.run_dir, "checkpoint_saved")] == [10]
    assert [p.name for p in (result.run_dir / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_fence_that_cannot_be_written_at_first_costs_no_checkpoint(run: Callable[..., Any], tmp_path: Path) -> None:
    """The fence file cannot be replaced while the second generation begins."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")

    def block() -> None:
        (path,) = wait_for(lambda: list(tmp_path.glob("outputs/*/*/events.jsonl")), "a run")
        fence = path.with_name("fence")
        wait_for(lambda: events(path.parent, "worker_lost"), "the loss of a worker")
        subprocess.run(["mount", "--bind", fence, fence], check=True)  # nothing can be renamed to a mount point
        wait_for(lambda: len(events(path.parent, "generation_started")) == 2, "the second generation")
        time.sleep(1)
        subprocess.run(["umount", fence], check=True)

    blocker = threading.Thread(target=block)
    blocker.start()
    result = run("strategy=ddp", "train.steps=200", "checkpoint.every=20", "recovery.chaos=[kill@13:1]",
                 "job._target_=helpers.leisurely_job.Leisurely", "train.eval_every=0")  # fmt: skip
    blocker.join(timeout=60)
    assert result.exit_code == 0, result.reason
    assert events(result.run_dir, "checkpoint_saved")[-1]["step"] == 200
