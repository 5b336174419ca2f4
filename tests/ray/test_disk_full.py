"""A full disk costs checkpoints, not the training."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.machines.disks import freezable_disk, mounted, require_mounts
from helpers.records.runs import events, wait_for


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield folder


@pytest.mark.campaign
def test_training_goes_on(run: Callable[..., Any], small_disk: Path) -> None:
    """Two checkpoints of 2.4 MB do not fit; the run completes its steps and says that the last checkpoint is lost.

    A hang whose stacks cannot be written is healed all the same.
    """

    def block() -> None:
        (logs,) = wait_for(lambda: list(small_disk.glob("*/*/logs")), "a run")
        (logs / "stacks-generation-1.txt").mkdir()

    blocker = threading.Thread(target=block)
    blocker.start()
    result = run("strategy=ddp", "train.steps=30", "train.eval_every=0", "checkpoint.every=10",
                 "recovery.chaos=[sleep@15:1]", "recovery.hang_min_s=8", f"output_dir={small_disk}")  # fmt: skip
    blocker.join(timeout=60)
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["reason"].endswith("stacks of all ranks: not written (Is a directory)")
    assert (result.status, result.exit_code) == ("FAILED", 3)
    assert "all 30 steps are done, but their result is lost: the checkpoint of step 30 could not be" in result.reason
    assert "disk full" in result.reason
    assert result.summary["steps"] == 30
    failed = events(result.run_dir, "checkpoint_failed")
    assert [f["step"] for f in failed] == [20, 30]
    assert all("disk full" in f["reason"] for f in failed)
    assert [e["step"] for e in events(result.run_dir, "checkpoint_saved")] == [10]
    assert [p.name for p in (result.run_dir / "checkpoints").iterdir()] == ["step-00000010"]


@pytest.mark.campaign
def test_a_last_checkpoint_that_is_never_written_is_no_success(run: Callable[..., Any], tmp_path: Path) -> None:
    """The disk stands still when the last checkpoint is written, for longer than the run waits without progress."""

    require_mounts()

    def freeze() -> None:
        (folder,) = wait_for(lambda: list(tmp_path.glob("outputs/*/*/checkpoints")), "a run")
        with freezable_disk(tmp_path, megabytes=32, folder=folder) as disk:
            disk.freeze()
            ended.wait(60)

    ended = threading.Event()
    freezer = threading.Thread(target=freeze)
    freezer.start()
    try:
        result = run("strategy=ddp", "train.steps=20", "checkpoint.every=0", "recovery.hang_max_s=4",
                     "recovery.hang_min_s=4", "cluster.stop_grace_s=2")  # fmt: skip
    finally:
        ended.set()
        freezer.join(timeout=30)
    assert (result.status, result.exit_code) == ("FAILED", 3)
    assert "the checkpoint of step 20 could not be written: nothing was written for 4 s" in result.reason
    assert [e["step"] for e in events(result.run_dir, "checkpoint_failed")] == [20]


@pytest.mark.campaign
def test_a_fence_that_cannot_be_written_at_first_costs_no_checkpoint(run: Callable[..., Any], tmp_path: Path) -> None:
    """The fence file cannot be replaced while the second generation begins."""

    require_mounts()

    def block() -> None:
        (path,) = wait_for(lambda: list(tmp_path.glob("outputs/*/*/events.jsonl")), "a run")
        fence = path.with_name("fence")
        wait_for(lambda: events(path.parent, "worker_lost"), "the loss of a worker")
        with mounted(fence, "--bind", fence):  # nothing can be renamed to a mount point
            wait_for(lambda: len(events(path.parent, "generation_started")) == 2, "the second generation")
            time.sleep(1)
            blocked.set()

    blocked = threading.Event()
    blocker = threading.Thread(target=block)
    blocker.start()
    result = run("strategy=ddp", "train.steps=200", "checkpoint.every=20", "recovery.chaos=[kill@13:1]",
                 "job._target_=helpers.jobs.leisurely_job.Leisurely", "train.eval_every=0")  # fmt: skip
    blocker.join(timeout=60)
    assert blocked.is_set()
    assert result.exit_code == 0, result.reason
    assert events(result.run_dir, "checkpoint_saved")[-1]["step"] == 200
