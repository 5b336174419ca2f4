"""Workers are slow, stand still, or are replaced while something else happens; ``test_faults.py`` has the others."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.records.runs import events, losses, pid_of_rank, wait_for


def test_a_stop_while_a_worker_is_replaced_saves_what_the_survivor_holds(run: Any, tmp_path: Path) -> None:
    def stop() -> None:
        (path,) = wait_for(lambda: list(tmp_path.glob("outputs/*/*/events.jsonl")), "a run")
        wait_for(lambda: events(path.parent, "worker_lost"), "the loss of a worker")
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    result = run("train.steps=2000", "checkpoint.every=1000", "recovery.chaos=[kill@13:1]", "recovery.backoff_s=0.1",
                 "cluster.stop_grace_s=30", "job._target_=helpers.jobs.leisurely_job.Leisurely")  # fmt: skip
    stopper.join(timeout=60)
    assert (result.status, result.exit_code) == ("KILLED", 130), result.reason
    (saved,) = events(result.run_dir, "checkpoint_saved")
    assert 12 <= saved["step"] < 1000
    assert result.reason == f"stopped by SIGINT at step {saved['step']}"


@pytest.mark.campaign
def test_a_straggler_is_named_after_ten_seconds(run: Any) -> None:
    words = ("train.steps=36", "train.log_every=2", "train.eval_every=0")
    result = run("job._target_=helpers.jobs.straggling_job.Straggling", *words)
    assert result.exit_code == 0, result.reason
    (found,) = events(result.run_dir, "straggler_found")
    assert found["rank"] == 1
    assert found["node"].startswith(f"{socket.gethostname()} (")
    assert 10 + 20 <= found["step"] <= 36, "ten steps warm up"
    assert found["slower_by"] > 2
    assert found["throughput_loss"] > 0.5
    assert found["compute_ms"] > 400 > found["data_wait_ms"]


@pytest.mark.campaign
def test_a_straggler_is_replaced_if_configured(run: Any, tmp_path: Path) -> None:
    job = ("job._target_=helpers.jobs.straggling_job.SlowProcess", f"job.who={tmp_path / 'who'}")
    words = ("train.steps=60", "train.log_every=2", "train.eval_every=0", "recovery.replace_stragglers=true")
    result = run(*job, *words)
    assert result.exit_code == 0, result.reason
    (lost,) = events(result.run_dir, "worker_lost")
    assert (lost["rank"], "times slower than the others" in lost["reason"]) == (1, True)
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)


@pytest.mark.campaign
def test_a_thousand_clean_steps_raise_no_alarm(run: Any) -> None:
    words = ("train.steps=1000", "train.eval_every=200", "checkpoint.every=50", "recovery.hang_min_s=2")
    result = run("job.hidden=16", *words)
    assert result.exit_code == 0, result.reason
    assert (result.summary["restarts"], result.summary["effective_time_pct"]) == (0, 100)
    assert events(result.run_dir, "worker_lost") == []


@pytest.mark.campaign
@pytest.mark.parametrize("pause", ["val_s", "train_s"])
@pytest.mark.parametrize("words", [("strategy=ddp",), ("strategy=hogwild", "data.num_workers=1")])
def test_a_slow_batch_of_a_new_loader_is_not_a_hang(run: Any, pause: str, words: tuple[str, ...]) -> None:
    """In the evaluation, rank 1 has ended its share long before rank 0, and waits for it in the next step."""
    words = (*words, "train.steps=40", "train.eval_every=20", "recovery.hang_min_s=1", "cluster.heartbeat_s=0.2")
    result = run(
        "job._target_=helpers.jobs.stalling_job.Stalling", f"job.{pause}=1.5", *words, "recovery.max_failures=0"
    )
    assert result.exit_code == 0, result.reason
    assert events(result.run_dir, "worker_lost") == []


@pytest.mark.campaign
def test_a_rank_that_hangs_at_the_same_step_again_gets_twice_the_time(run: Any) -> None:
    words = ("train.steps=12", "train.eval_every=0", "recovery.hang_min_s=1", "recovery.hang_max_s=3")
    result = run("job._target_=helpers.jobs.stalling_job.Stalling", "job.val_s=4.5", *words)
    assert result.exit_code == 0, result.reason
    (lost,) = events(result.run_dir, "worker_lost")
    assert "in phase eval (recovery.hang_max_s): " in lost["reason"]


@pytest.mark.campaign
def test_a_spare_has_loaded_the_job_before_it_is_needed(run: Any, tmp_path: Path) -> None:
    enrolled = tmp_path / "enrolled"
    enrolled.mkdir()
    job = (
        "job._target_=helpers.jobs.enrolling_job.Enrolling",
        f"job.folder={enrolled}",
        "job.wanted=4",
    )  # the driver is one of them
    words = ("train.steps=4", "train.eval_every=0", "recovery.hang_min_s=150", "recovery.max_failures=0")
    result = run(*job, *words, "strategy.num_workers=2", "recovery.spares=1")
    assert result.exit_code == 0, result.reason


@pytest.mark.campaign
def test_a_worker_that_stands_still_for_a_while_loses_no_point(run: Any, tmp_path: Path) -> None:
    def pause() -> None:
        pid = pid_of_rank(tmp_path, 1, after_step=40)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        paused.set()

    paused = threading.Event()
    pausing = threading.Thread(target=pause, daemon=True)
    pausing.start()
    result = run(
        "job._target_=helpers.jobs.leisurely_job.Leisurely", "train.steps=120", "train.log_every=1",
        "train.eval_every=0", "cluster.stopped_timeout_s=60",
    )  # fmt: skip
    pausing.join(10)
    assert paused.is_set()
    assert not pausing.is_alive()
    assert result.exit_code == 0, result.reason
    assert events(result.run_dir, "worker_lost") == []
    assert sorted(losses(result.run_dir)) == list(range(1, 121))
