"""Rows of a ``ray.data.Dataset``: the losses of a plain loop over them, whatever is lost, and from any position."""

import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from helpers.conformance.reference import plain_losses
from helpers.jobs.row_jobs import RowJob, write_files, write_images
from helpers.records.runs import events, in_campaign, losses, wait_for_step

STEPS, BATCH = 30, 36
WORDS = (
    "job._target_=helpers.jobs.row_jobs.RowJob", "strategy=ddp", f"train.steps={STEPS}",
    f"train.global_batch_size={BATCH}", "train.log_every=1", "recovery.backoff_s=0.1",
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


@pytest.mark.parametrize(
    ("kind", "alone"), [("rows", "stream"), *in_campaign(("function", "windows"), ("images", "pixels"))]
)
def test_a_run_resumes_within_an_epoch_on_another_number_of_workers(
    run: Any, folder: Path, kind: str, alone: str, tmp_path: Path
) -> None:
    expected = plain_losses(RowJob(kind=alone), batch=BATCH, steps=STEPS)
    if kind == "images":
        write_images(folder := tmp_path / "images")
    words = (*WORDS, f"job.kind={kind}", f"job.folder={folder}", "checkpoint.every=4", "train.eval_every=0",
             f"data.shuffle_window={64 if kind == 'function' else 0}")  # fmt: skip
    first = run(*words, "strategy.num_workers=2", "recovery.max_failures=0", "recovery.chaos=[kill@19:0]")
    assert first.exit_code == 1, first.reason
    resumed = run(*words, f"resume={first.run_dir}", "strategy.num_workers=1", "recovery.chaos=[]")
    assert resumed.exit_code == 0, resumed.reason
    assert losses(resumed.run_dir) == pytest.approx(expected, rel=1e-4)
    again = [warning for warning in warnings(resumed.run_dir) if "rows of the epoch were read again in" in warning]
    assert len(again) == len(warnings(resumed.run_dir)) == (kind == "images")


def kill_feeder(folder: Path) -> None:
    wait_for_step(folder, 20)
    (name,) = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "/feeder" in actor["name"]]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))


def test_a_lost_reader_rank_and_feeder_change_no_loss(
    run: Any, folder: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    killer = threading.Thread(target=kill_feeder, args=(tmp_path,))
    killer.start()
    result = run(*WORDS, "strategy.num_workers=2", "job.kind=dying", f"job.folder={folder}",
                 f"job.mark={tmp_path / 'died'}", "job.pause_ms=50", "recovery.chaos=[kill@9:0]",
                 "train.eval_every=15")  # fmt: skip
    killer.join(10)
    assert not killer.is_alive()
    assert result.exit_code == 0, result.reason
    assert (tmp_path / "died").exists()
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)
    assert losses(result.run_dir) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("read", ["run", *in_campaign("node")])
def test_a_stream_is_read_once_for_all_ranks(run: Any, expected: dict[int, float], read: str) -> None:
    result = run(*WORDS, "strategy.num_workers=2", f"data.read={read}", "recovery.chaos=[kill@9:0]",
                 "data.num_workers=1", "train.eval_every=15")  # fmt: skip
    assert result.exit_code == 0, result.reason
    assert losses(result.run_dir) == pytest.approx(expected, rel=1e-4)
    assert result.summary["steps_lost"] == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("failing", "train data, in a task of Ray Data: ValueError: this row is broken"),
        ("unseeded", "job.dataset('train'): random_shuffle without a seed has another order each time"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(run: Any, folder: Path, kind: str, message: str) -> None:
    result = run(*WORDS, "strategy.num_workers=1", f"job.kind={kind}", f"job.folder={folder}")
    assert result.exit_code == 1
    assert message in result.reason
    assert events(result.run_dir, "worker_lost") == [], "no second attempt"
