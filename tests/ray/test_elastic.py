"""A run goes on with the workers that there are: fewer after a loss, more where there is room for them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from helpers.conformance.reference import plain_losses
from helpers.jobs.leisurely_job import Leisurely
from helpers.records.runs import events, events_below, losses, pid_of_rank, wait_for, wait_for_step

STEPS = 200
WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every=0",
    "train.global_batch_size=48",
    "job._target_=helpers.jobs.leisurely_job.Leisurely",
    "job.momentum=0",  # which would make more of rounding, that differs with the number of workers
    "job.lr=0.1",
)
GRID = ("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=2", "strategy.split=[hidden1]")


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    return plain_losses(Leisurely(pause_ms=0, momentum=0, lr=0.1), batch=48, steps=STEPS)


@contextmanager
def slow_until(folder: Path, *, recoveries: int) -> Iterator[tuple[str, ...]]:
    """The words with which the run below ``folder`` is slow until it has recovered so many times."""

    def hurry() -> None:
        wait_for(lambda: len(events_below(folder, "recovered")) >= recoveries, f"recovery {recoveries}")
        (folder / "until").touch()

    waiting = threading.Thread(target=hurry, daemon=True)
    waiting.start()
    yield ("job.pause_ms=300", f"job.until={folder / 'until'}")
    waiting.join(10)


def assert_same_curve(run_dir: Path, expected: dict[int, float]) -> None:
    seen = losses(run_dir)
    assert len(seen) > 0.9 * len(expected)
    assert {step: pytest.approx(expected[step], rel=1e-5) for step in seen} == seen


def sizes(run_dir: Path) -> list[tuple[int, int, str | None]]:
    return [(e["num_workers_before"], e["num_workers"], e["planned"]) for e in events(run_dir, "recovered")]


def test_a_run_goes_on_smaller_and_grows_again(run: Any, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with slow_until(tmp_path, recoveries=2) as slow:
        result = run(*WORDS, *slow, "strategy.num_workers=[1,3]", "recovery.chaos=[kill@10:1]")
    assert result.exit_code == 0, result.reason
    assert sizes(result.run_dir) == [(3, 2, None), (2, 3, "growing")]
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)
    assert all(e["in_place"] for e in events(result.run_dir, "recovered"))
    assert [len(e["workers"]) for e in events(result.run_dir, "generation_started")] == [3, 2, 3]
    assert_same_curve(result.run_dir, undisturbed)


@pytest.mark.campaign
def test_a_run_starts_with_what_is_free_and_grows(run: Any, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    held = placement_group([{"CPU": 2}], name="another user's")
    assert held.wait(30)

    def release() -> None:
        wait_for_step(tmp_path, 20)
        remove_placement_group(held)

    releaser = threading.Thread(target=release, daemon=True)
    releaser.start()
    with slow_until(tmp_path, recoveries=1) as slow:
        result = run(*WORDS, *slow, "strategy.num_workers=[1,4]")
    releaser.join(10)
    assert result.exit_code == 0, result.reason
    first, *later = [len(e["workers"]) for e in events(result.run_dir, "generation_started")]
    assert first == 2
    assert later, "it grows, to 4 at once or one by one"
    assert later == sorted(later)
    (note,) = events(result.run_dir, "noted")
    assert "starts with 2 of 4 workers" in note["message"]
    assert {planned for _, _, planned in sizes(result.run_dir)} == {"growing"}
    assert_same_curve(result.run_dir, undisturbed)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("words", "least"), [(GRID, 2), (("strategy=hsdp", "strategy.shard_size=2", "cluster.cpus_per_worker=0.5"), 4)]
)
def test_replicas_are_lost_and_gained_as_a_whole(
    run: Any, tmp_path: Path, undisturbed: dict[int, float], words: tuple[str, ...], least: int
) -> None:
    most = least + 2
    with slow_until(tmp_path, recoveries=2) as slow:
        result = run(*WORDS, *words, *slow, f"strategy.num_workers=[{least},{most}]", "recovery.chaos=[kill@20:3]")
    assert result.exit_code == 0, result.reason
    assert sizes(result.run_dir) == [(most, least, None), (least, most, "growing")]
    assert result.summary["steps_lost"] == 0
    assert_same_curve(result.run_dir, undisturbed)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("strategy", "least", "most"),
    [
        (("strategy=pipeline", "strategy.num_microbatches=4"), 2, 3),
        (("strategy=fsdp",), 2, 3),
        (("strategy=fsdp_pipeline", "strategy.num_microbatches=2", "cluster.cpus_per_worker=0.5"), 4, 6),
        (("strategy=ddp", "strategy.shard_optimizer=true"), 2, 3),
    ],
)
def test_a_model_is_divided_anew_from_its_checkpoint(
    run: Any, tmp_path: Path, undisturbed: dict[int, float], strategy: tuple[str, ...], least: int, most: int
) -> None:
    words = [w for w in WORDS if not w.startswith("checkpoint")]
    divided = (*strategy, f"strategy.num_workers=[{least},{most}]")
    with slow_until(tmp_path, recoveries=2) as slow:
        result = run(*words, *divided, *slow, "checkpoint.every=25", "recovery.chaos=[kill@40:1]")
    assert result.exit_code == 0, result.reason
    assert sizes(result.run_dir) == [(most, least, None), (least, most, "growing")]
    (shrunk, grown) = events(result.run_dir, "recovered")
    assert (shrunk["steps_lost"] > 0, grown["steps_lost"]) == (True, 0)
    assert_same_curve(result.run_dir, undisturbed)


def test_a_worker_that_is_told_to_end_hands_over(run: Any, undisturbed: dict[int, float], tmp_path: Path) -> None:
    def terminate() -> None:
        os.kill(pid_of_rank(tmp_path, 1, after_step=10), signal.SIGTERM)

    terminator = threading.Thread(target=terminate, daemon=True)
    terminator.start()
    words = (f"train.steps={STEPS // 2}", *WORDS[1:])
    with slow_until(tmp_path, recoveries=1) as slow:
        result = run(*words, *slow, "strategy.num_workers=2", "recovery.max_failures=0")
    terminator.join(10)
    assert result.exit_code == 0, result.reason
    assert sizes(result.run_dir) == [(2, 2, "preempted")]
    (handed_over,) = events(result.run_dir, "recovered")
    assert (handed_over["replaced"], handed_over["in_place"], handed_over["steps_lost"]) == ([1], True, 0)
    assert (result.summary["restarts"], result.summary["preemptions"]) == (0, 1)
    saved = [e["step"] for e in events(result.run_dir, "checkpoint_saved")]
    assert saved == [handed_over["step"], STEPS // 2]
    assert_same_curve(result.run_dir, {step: loss for step, loss in undisturbed.items() if step <= STEPS // 2})
