"""A run starts with the workers that there are, and hands over those that are told to end; ``test_faults.py`` has the
losses.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from helpers.faults.check import WORDS, merged, plain_outcome, slow_until
from helpers.faults.table import VARIANTS
from helpers.records.runs import events, losses, pid_of_rank, wait_for_step

SLOW = merged(*WORDS, *VARIANTS["slow steps"], "checkpoint.every=0")


def assert_plain_losses(run_dir: Path, words: tuple[str, ...]) -> None:
    expected = plain_outcome(words).losses
    assert losses(run_dir) == {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items()}


@pytest.mark.campaign
def test_a_run_starts_with_what_is_free_and_grows(run: Any, tmp_path: Path) -> None:
    held = placement_group([{"CPU": 2}], name="another user's")
    assert held.wait(30)

    def release() -> None:
        wait_for_step(tmp_path, 20)
        remove_placement_group(held)

    releaser = threading.Thread(target=release, daemon=True)
    releaser.start()
    with slow_until(tmp_path, recoveries=1) as slow:
        result = run(*merged(*SLOW, *slow, "strategy.num_workers=[1,4]", "cluster.cpus_per_worker=1"))
    releaser.join(10)
    assert result.exit_code == 0, result.reason
    first, *later = [len(e["workers"]) for e in events(result.run_dir, "generation_started")]
    assert first == 2
    assert later, "it grows, to 4 at once or one by one"
    assert later == sorted(later)
    (note,) = events(result.run_dir, "noted")
    assert "starts with 2 of 4 workers" in note["message"]
    assert {event["planned"] for event in events(result.run_dir, "recovered")} == {"growing"}
    assert_plain_losses(result.run_dir, SLOW)


def test_a_worker_that_is_told_to_end_hands_over(run: Any, tmp_path: Path) -> None:
    def terminate() -> None:
        os.kill(pid_of_rank(tmp_path, 1, after_step=10), signal.SIGTERM)

    terminator = threading.Thread(target=terminate, daemon=True)
    terminator.start()
    words = merged(*SLOW, "train.steps=100")
    with slow_until(tmp_path, recoveries=1) as slow:
        result = run(*words, *slow, "strategy.num_workers=2", "recovery.max_failures=0")
    terminator.join(10)
    assert result.exit_code == 0, result.reason
    (handed_over,) = events(result.run_dir, "recovered")
    assert (handed_over["planned"], handed_over["num_workers"]) == ("preempted", 2)
    assert (handed_over["replaced"], handed_over["in_place"], handed_over["steps_lost"]) == ([1], True, 0)
    assert (result.summary["restarts"], result.summary["preemptions"]) == (0, 1)
    assert [e["step"] for e in events(result.run_dir, "checkpoint_saved")] == [handed_over["step"], 100]
    assert_plain_losses(result.run_dir, words)
