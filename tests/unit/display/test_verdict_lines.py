"""The last lines of the console: how a run has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.console_events import (
    FAILED,
    FINISHED,
    FORMED,
    KILLED,
    SAVED,
    START,
    STARTED,
    point,
    printed,
)
from orchestrator.protocol.events import (
    BestFound,
    RunEnded,
    StopRequested,
    Warned,
)


def test_verdict_of_a_success_is_last() -> None:
    points = [point(499, 20, train__loss=0.013), point(500, 20.1, train__loss=0.0123)]
    assert printed(STARTED, FORMED, *points, FINISHED)[-4:] == [
        "finished: 500 steps in 21.4 s, 8,210 samples/s, final loss 0.0123, val accuracy 0.9780",
        "run directory: /runs/1",
        "next: python -m orchestrator.compare --last 5",
        "next: mlflow ui --backend-store-uri sqlite:////runs/m.db",
    ]


def test_verdict_of_a_run_that_ended_early_says_why() -> None:
    ended = replace(FINISHED, reason="ended early: train.stop_after=3: val/loss has not improved")
    best = BestFound(time=START + 20, step=100, metric="val/loss", value=0.1)
    lines = printed(STARTED, FORMED, point(500, 20, train__loss=0.0123), best, ended)
    assert lines[-4] == "ended early: train.stop_after=3: val/loss has not improved"
    assert "best found" not in lines


def test_verdict_of_an_evaluation_lists_its_metrics() -> None:
    started = replace(STARTED, resumed_from_step=400, source="/runs/0", evaluates=True)
    lines = printed(
        started, FORMED, point(400, 20, val__loss=0.25, val__f1=0.5), replace(FINISHED, summary={"steps": 400})
    )
    assert "evaluates the checkpoint of step 400 of /runs/0" in lines
    assert lines[-6:-3] == ["evaluated: step 400 in 21.4 s", "val/f1 0.5000", "val/loss 0.2500"]


def test_verdict_names_a_long_wait_apart_from_the_duration() -> None:
    def first_line(**waits: float) -> str:
        ended = replace(FINISHED, summary={**FINISHED.summary, **waits})
        return next(line for line in printed(STARTED, ended) if "finished" in line)

    assert first_line(waited_s=0.4).startswith("finished: 500 steps in 21.0 s, ")
    assert first_line(waited_s=15.4).startswith("finished: 500 steps in 6.0 s after waiting 15s for resources, ")
    both = first_line(queue_s=10.2, waited_s=5.2)
    assert both.startswith("finished: 500 steps in 6.0 s after waiting 10s in the queue and 5.2s for resources, ")


def test_verdict_of_a_pipeline_has_its_bubble_and_where_to_look() -> None:
    summary = {"bubble_pct": 31.04, "bubble_theory_pct": 27.27, "timeline": "/runs/1/timeline.png"}
    for ended in (FINISHED, KILLED):
        lines = printed(STARTED, FORMED, replace(ended, summary={**ended.summary, **summary}))
        assert "bubble: 31.0%, in theory 27.3%; timeline: /runs/1/timeline.png" in lines


def test_verdict_says_where_samples_are() -> None:
    summary = {**FINISHED.summary, "samples": "/runs/1/samples"}
    assert "samples: /runs/1/samples" in printed(STARTED, FORMED, replace(FINISHED, summary=summary))


def test_verdict_says_what_limited_a_run_that_finished() -> None:
    summary = {**FINISHED.summary, "limit": "limited by computation"}
    assert "limited by computation" in printed(STARTED, FORMED, replace(FINISHED, summary=summary))
    assert "limited by computation" not in printed(STARTED, FORMED, replace(KILLED, summary=summary))


@pytest.mark.parametrize(("idle_pct", "told"), [(3.0, True), (60.0, False)])
def test_the_end_says_that_the_machine_was_shared(idle_pct: float, told: bool) -> None:
    summary = {**FINISHED.summary, "others_cpu_pct": 48.2, "idle_cpu_pct": idle_pct}
    others = "warning: other programs used 48% of the CPUs while the steps were timed"
    warning = f"{others}; on a free machine the run may be faster"
    assert (warning in printed(STARTED, FORMED, replace(FINISHED, summary=summary))) == told


def test_verdict_says_why_a_run_is_not_in_mlflow() -> None:
    summary = {**FINISHED.summary, "mlflow_missing": "no answer from http://mlflow:5000"}
    lines = printed(STARTED, FORMED, replace(FINISHED, summary=summary))
    assert lines[-1] == "not yet in MLflow: no answer from http://mlflow:5000"


def test_verdict_is_said_again_after_a_late_warning() -> None:
    lines = printed(STARTED, FINISHED, Warned(message="12 points are missing"))
    assert "warning: 12 points are missing" in lines
    assert lines[-4].startswith("finished: 500 steps")
    assert len([line for line in printed(STARTED, FINISHED) if line.startswith("finished")]) == 1


def test_verdict_of_a_failure_names_the_first_rank_that_failed() -> None:
    collateral = replace(FAILED, rank=0, reason="RuntimeError: connection closed by peer")
    ended = RunEnded(status="FAILED", exit_code=1, reason="a worker failed", summary={}, next_commands=("again",))
    lines = printed(STARTED, FORMED, FAILED, collateral, ended)
    assert lines[-5:] == [
        "failed: rank 1 at step 412: ValueError: item 7 is broken",
        "reason: a worker failed",
        "log: /runs/1/logs/rank-1.log",
        "run directory: /runs/1",
        "next: again",
    ]
    assert "  ValueError: item 7 is broken" in lines
    assert "  loading" in lines


def test_verdict_of_a_failure_is_not_that_of_a_healed_one() -> None:
    ended = RunEnded(status="FAILED", exit_code=1, reason="waited too long for a GPU", summary={})
    lines = printed(STARTED, FORMED, FAILED, replace(FORMED, generation=2), ended)
    assert "failed: waited too long for a GPU" in lines


def test_verdict_of_a_stop_names_the_checkpoint_and_its_step() -> None:
    stopped = StopRequested(time=START + 8, signal="SIGTERM")
    lines = printed(STARTED, FORMED, point(38, 7, train__loss=1.0), stopped, SAVED, KILLED)
    assert "stopped by SIGTERM at step 40; a checkpoint is at /runs/1/checkpoints/40" in lines
    lines = printed(STARTED, FORMED, point(38, 7, train__loss=1.0), stopped, KILLED)
    assert "stopped by SIGTERM at step 38; no checkpoint was written" in lines
    early = replace(KILLED, reason="stopped by SIGINT before training began")
    assert "stopped by SIGINT before training began; no checkpoint was written" in printed(STARTED, early)
