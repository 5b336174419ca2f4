"""The last lines of the console: how a run has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.files.golden import Golden, sections
from helpers.records.console_events import (
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


def test_verdicts(golden: Golden) -> None:
    """The last lines of a run: of a success, a failure and a stop, each with what the summary adds to them."""

    def with_summary(ended: RunEnded = FINISHED, **summary: Any) -> list[str]:
        return printed(STARTED, FORMED, replace(ended, summary={**ended.summary, **summary}))

    points = [point(499, 20, train__loss=0.013), point(500, 20.1, train__loss=0.0123)]
    best = BestFound(time=START + 20, step=100, metric="val/loss", value=0.1)
    early = replace(FINISHED, reason="ended early: train.stop_after=3: val/loss has not improved")
    evaluates = replace(STARTED, resumed_from_step=400, source="/runs/0", evaluates=True)
    evaluated = point(400, 20, val__loss=0.25, val__f1=0.5)
    collateral = replace(FAILED, rank=0, reason="RuntimeError: connection closed by peer")
    failed = RunEnded(status="FAILED", exit_code=1, reason="a worker failed", summary={}, next_commands=("again",))
    waited = replace(failed, reason="waited too long for a GPU", next_commands=())
    begun = (STARTED, FORMED, point(38, 7, train__loss=1.0), StopRequested(time=START + 8, signal="SIGTERM"))
    bubble = {"bubble_pct": 31.04, "bubble_theory_pct": 27.27, "timeline": "/runs/1/timeline.json"}
    texts = {
        "success": printed(STARTED, FORMED, *points, FINISHED),
        "ended early": printed(STARTED, FORMED, points[1], best, early),
        "evaluation": printed(evaluates, FORMED, evaluated, replace(FINISHED, summary={"steps": 400})),
        "pipeline": with_summary(**bubble),
        "pipeline that was stopped": with_summary(KILLED, **bubble),
        "samples": with_summary(samples="/runs/1/samples"),
        "limit of a run that finished": with_summary(limit="limited by computation"),
        "no limit of a run that was stopped": with_summary(KILLED, limit="limited by computation"),
        "not in MLflow": with_summary(mlflow_missing="no answer from http://mlflow:5000"),
        "again after a late warning": printed(STARTED, FINISHED, Warned(message="12 points are missing")),
        "failure of the first rank": printed(STARTED, FORMED, FAILED, collateral, failed),
        "failure after one that was healed": printed(STARTED, FORMED, FAILED, replace(FORMED, generation=2), waited),
        "stop with a checkpoint": printed(*begun, SAVED, KILLED),
        "stop without a checkpoint": printed(*begun, KILLED),
        "stop before training": printed(STARTED, replace(KILLED, reason="stopped by SIGINT before training began")),
    }
    golden("console/verdicts", sections(texts))


def test_verdict_names_a_long_wait_apart_from_the_duration() -> None:
    def first_line(**waits: float) -> str:
        ended = replace(FINISHED, summary={**FINISHED.summary, **waits})
        return next(line for line in printed(STARTED, ended) if "finished" in line)

    assert first_line(waited_s=0.4).startswith("finished: 500 steps in 21.0 s, ")
    assert first_line(waited_s=15.4).startswith("finished: 500 steps in 6.0 s after waiting 15s for resources, ")
    both = first_line(queue_s=10.2, waited_s=5.2)
    assert both.startswith("finished: 500 steps in 6.0 s after waiting 10s in the queue and 5.2s for resources, ")


@pytest.mark.parametrize(("idle_pct", "told"), [(3.0, True), (60.0, False)])
def test_the_end_says_that_the_machine_was_shared(idle_pct: float, told: bool) -> None:
    summary = {**FINISHED.summary, "others_cpu_pct": 48.2, "idle_cpu_pct": idle_pct}
    others = "warning: other programs used 48% of the CPUs while the steps were timed"
    warning = f"{others}; on a free machine the run may be faster"
    assert (warning in printed(STARTED, FORMED, replace(FINISHED, summary=summary))) == told
