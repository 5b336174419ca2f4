"""The console as plain lines: what a person reads while a run goes on, and where it is written."""

import io
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from helpers.files.golden import Golden, sections
from helpers.machines.plans import plan_of
from helpers.records.console_events import (
    FAILED,
    FINISHED,
    FORMED,
    KILLED,
    SAVED,
    START,
    STARTED,
    Terminal,
    point,
    printed,
)
from orchestrator.display.chosen_metrics import ChosenMetrics
from orchestrator.display.console import make_console
from orchestrator.display.plain_text import duration, rate, size, sparkline
from orchestrator.display.report import errors_text, plan_table
from orchestrator.planning.plan import Node
from orchestrator.protocol.events import (
    ONLY_OWN,
    BestFound,
    CheckpointFailed,
    Event,
    MetricsLogged,
    RankProgress,
    Recovered,
    RunEnded,
    SampleSaved,
    StopRequested,
    StragglerFound,
    SystemMetricsLogged,
    TextSampled,
    WaitingForResources,
    WaitingInQueue,
    Warned,
    WorkerLost,
    Yielded,
)


def test_metrics_line_is_self_contained() -> None:
    lines = printed(
        STARTED,
        FORMED,
        point(1, 2, train__loss=2.3),
        point(120, 14, train__loss=0.23141, val__accuracy=0.971, perf__samples_per_s=8310.2),
    )
    assert lines[-1] == "step 120/500  loss 0.2314  val_acc 0.9710  8,310 samples/s  eta 38s"


def test_a_step_of_the_clock_silences_nothing() -> None:
    out, now = io.StringIO(), 0.0
    console = make_console(steps=500, world_size=2, stream=out, clock=lambda: now)
    for second in range(5):
        now = float(second)
        console.emit(point(100 * second + 100, second - (3600 if second > 2 else 0), train__loss=1.0))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/500" for step in range(100, 600, 100)]
    assert "eta 3.0s" in lines[1], "the speed, too"
    assert "eta 1.0s" in lines[3]


def test_metrics_at_most_once_a_second_and_first_and_last_always() -> None:
    points = [point(n, n * 0.1, train__loss=1.0) for n in range(1, 501)]
    lines = [line for line in printed(STARTED, *points, FINISHED) if line.startswith("step ")]
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps[0] == 1
    assert steps[-1] == 500
    assert len(steps) == pytest.approx(51, abs=1)


def test_a_long_evaluation_says_how_far_it_is_where_there_is_no_panel() -> None:
    def evaluated(at_s: float, done: int, total: int | None = 4000) -> RankProgress:
        return RankProgress(time=START + at_s, rank=0, step=3, phase="eval", evaluated=(done, total))

    silent = RankProgress(time=START + 60, rank=0, step=3, phase="checkpoint")
    lines = printed(evaluated(1, 10), evaluated(9, 90), evaluated(11, 110), evaluated(15, 150), evaluated(22, 1220),
                    evaluated(40, 3, None), silent)  # fmt: skip
    assert lines == ["evaluating: batch 110/4,000", "evaluating: batch 1,220/4,000", "evaluating: batch 3"]


def test_validation_is_shown_with_its_own_step_and_not_held_back() -> None:
    lines = printed(
        STARTED,
        point(100, 5, train__loss=0.5),
        point(100, 5.1, val__loss=0.4, val__accuracy=0.9),
        point(110, 5.2, train__loss=0.45),
    )
    assert lines[-2] == "step 100/500  val_loss 0.4000  val_acc 0.9000"
    assert lines[-1].startswith("step 110/500  loss 0.4500")


def test_a_line_has_the_figures_of_its_own_step_alone() -> None:
    lines = printed(
        STARTED,
        point(25, 5, val__loss=0.4),
        point(50, 5.1, val__loss=0.3),
        point(60, 6.5, train__loss=0.5),
        point(70, 6.6, train__loss=0.45),
        point(75, 6.7, val__loss=0.2),
    )
    shown = [line.partition("  eta")[0] for line in lines[-4:]]
    assert shown == [
        "step 25/500  val_loss 0.4000",
        "step 50/500  val_loss 0.3000",
        "step 60/500  loss 0.5000",
        "step 75/500  val_loss 0.2000",
    ]


@pytest.mark.parametrize("best", [None, "val/f1"])
def test_of_very_many_evaluations_some_have_a_line_and_the_best_one_always(best: str | None) -> None:
    def evaluated(step: int) -> MetricsLogged:
        return point(step, step / 1000, val__loss=0.1 if step == 77 else 1.0, val__f1=0.9 if step == 77 else 0.5)

    events: list[Event] = [evaluated(step) for step in range(1, 151)]
    events += [BestFound(time=START + 0.2, metric="val/f1", step=77, value=0.9)] if best else []
    lines = printed(STARTED, *events, FINISHED, chosen=ChosenMetrics(best=best))
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    assert steps == [*range(1, 21), 77, 150]


def test_the_metrics_of_a_step_stand_before_its_checkpoint() -> None:
    lines = printed(STARTED, point(30, 8.5, train__loss=0.5), point(40, 8.9, train__loss=0.4), SAVED)
    assert [line.split()[0] for line in lines[-3:]] == ["step", "step", "checkpoint"]
    assert lines[-2].startswith("step 40/500  loss 0.4000")


def test_last_metrics_stand_before_the_failure() -> None:
    lines = printed(STARTED, point(1, 1, train__loss=2.0), point(2, 1.1, train__loss=1.9), FAILED)
    last = next(n for n, line in enumerate(lines) if line.startswith("step 2/500"))
    assert lines[last + 1] == "rank 1 failed at step 412: ValueError: item 7 is broken"


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_no_escape_codes_where_there_is_no_terminal(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    text = "\n".join(printed(STARTED, FORMED, FAILED, TextSampled(text="a\x1b[31mb\x07"), FINISHED))
    assert "ab" in text
    assert not {c for c in text if c != "\n" and ord(c) < 32}


def test_no_escape_codes_on_a_terminal_that_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = "\n".join(printed(STARTED, FORMED, point(1, 2, train__loss=1), FINISHED, stream=Terminal()))
    assert "\x1b" not in text
    assert "step 1/500" in text


def test_every_event_has_words(golden: Golden) -> None:
    lines = printed(
        replace(STARTED, resumed_from_step=40),
        WaitingForResources(waited_s=12, wanted="4 workers", why="need 4 x {GPU: 1}; free 3"),
        FORMED,
        SAVED,
        CheckpointFailed(step=50, reason="No space left on device"),
        SystemMetricsLogged(step=1, metrics={"cpu": 1.0}),
        StopRequested(signal="SIGINT"),
        Warned(message="MLflow does not answer"),
        SampleSaved(step=40, name="poem", path="samples/step-000040-poem.txt"),
        TextSampled(name="poem", text="To be"),
    )
    golden("console/events", "\n".join(lines))


def test_a_recovery_says_what_happened_and_what_it_cost(golden: Golden) -> None:
    lost = WorkerLost(rank=1, display_name="rank 1", step=412, reason="it died", traceback="", log="", log_tail="")
    in_place = Recovered(
        generation=2, step=412, steps_lost=0, replaced=(1,), in_place=True, seconds=0.2,
        num_workers=2, num_workers_before=2,
    )  # fmt: skip
    smaller = replace(in_place, generation=3, step=400, steps_lost=12, replaced=(), num_workers=1)
    paused = replace(in_place, generation=4, replaced=(), planned="preempted")
    golden("console/recoveries", "\n".join(printed(lost, in_place, smaller, paused)))


def test_a_run_in_the_queue_says_what_goes_before_it_and_that_it_makes_room(golden: Golden) -> None:
    continued = Recovered(
        generation=2, step=40, steps_lost=0, replaced=(0, 1), in_place=False, seconds=4.1,
        num_workers=2, num_workers_before=2, planned="yielded",
    )  # fmt: skip
    why = "need 2 x {CPU: 1}; free 0"
    last = WaitingInQueue(waited_s=90, ahead=("gpt-ddp", "gpt-pipeline"), running=("resnet50-ddp",), why=why)
    first = WaitingInQueue(waited_s=1, ahead=(), running=(), why=why)
    unfit = WaitingInQueue(waited_s=2, ahead=(), running=("resnet50-ddp",), why=why, unfit=True)
    lines = printed(last, first, unfit, Yielded(step=40, to="gpt-ddp"), continued)
    golden("console/queue", "\n".join(lines))


def test_a_straggler_is_named_with_its_times(golden: Golden) -> None:
    found = StragglerFound(
        rank=1, display_name="rank 1", node="node-b", step=50, slower_by=2.0,
        compute_ms=6.0, others_compute_ms=3.0, data_wait_ms=0.0, others_data_wait_ms=0.01, throughput_loss=0.5,
    )  # fmt: skip
    golden("console/straggler", "\n".join(printed(found)))


def test_only_some_of_many_ranks_are_named() -> None:
    lines = printed(replace(FORMED, workers=tuple(f"node-{n}" for n in range(64))))
    assert lines[-1].endswith("rank 7 on node-7, and 56 more")


# Streams


def test_broken_pipe_is_swallowed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:  # noqa: PTH123 (a file descriptor has no path)
        printed(STARTED, FORMED, point(1, 1, train__loss=1.0), FINISHED, stream=stream)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # lets `with` flush what is left


def test_closed_stream_is_swallowed() -> None:
    stream = io.StringIO()
    stream.close()
    make_console(steps=1, world_size=1, stream=stream).emit(STARTED)


def test_a_stream_that_takes_ascii_alone_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    printed(STARTED, FORMED, Warned(message="größer → kleiner"), TextSampled(text="été"), FINISHED, stream=stream)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "gr??er ? kleiner" in text
    assert "+- sample" in text
    assert "?t?" in text


def test_emitting_from_several_threads_loses_nothing() -> None:
    out = io.StringIO()
    console = make_console(steps=500, world_size=2, stream=out)

    def warn(name: int) -> None:
        for n in range(50):
            console.emit(Warned(message=f"{name}-{n}"))

    threads = [threading.Thread(target=warn, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(out.getvalue().split("\n")) == sorted(
        ["", *(f"warning: {name}-{n}" for name in range(4) for n in range(50))]
    )


# Words and figures


def test_figures() -> None:
    assert [duration(s) for s in (0, 9.94, 9.96, 59.7, 185, 7500)] == ["0.0s", "9.9s", "10s", "1m00s", "3m05s", "2h05m"]
    assert [size(b) for b in (0, 999, 2_140_000, 5e15)] == ["0 B", "999 B", "2.14 MB", "5e+03 TB"]
    assert [size(b) for b in (999_499, 999_500, 999_999_999, 10**9)] == ["999 kB", "1 MB", "1 GB", "1 GB"]
    assert [rate(r) for r in (4.25, 99.94, 999.6, 8310.2)] == ["4.25", "99.9", "1,000", "8,310"]
    assert sparkline([0, 1, 2, float("nan")], unicode=True) == "▁▅█?"
    assert sparkline([1, 1], unicode=True, from_zero=True) == "██"


def test_a_stop_promises_no_checkpoint_where_there_is_nothing_to_save() -> None:
    stop = StopRequested(time=START + 8, signal="SIGTERM")
    script, evaluates = replace(STARTED, steps=0), replace(STARTED, evaluates=True, resumed_from_step=40)
    told = {
        "SIGTERM: stopping before the first step; send it again to stop at once": (STARTED, FORMED, stop),
        "SIGTERM: stopping; send it again to stop at once": (evaluates, FORMED, stop),
        "SIGTERM: waiting for the script, which SIGTERM asks to save and to end; send it again to stop at once": (
            *(script, FORMED, stop),
        ),
        "SIGTERM: writing a checkpoint before stopping; send it again to stop at once": (
            *(STARTED, FORMED, point(3, 7, train__loss=1.0), stop),
        ),
    }
    for text, events in told.items():
        assert printed(*events)[-1] == text


def test_plan_table_says_what_is_asked_what_is_there_and_who_gets_what(golden: Golden) -> None:
    nodes = (Node(node_id="a", name="laptop", cpus=4, gpus=0),)
    plan = plan_of(nodes, "strategy=ddp", "train.global_batch_size=65", "strategy.num_workers=2")
    golden("plan/uneven-shares", plan_table(plan, nodes))


def test_plan_table_summarises_many_workers_and_nodes(golden: Golden) -> None:
    nodes = tuple(Node(node_id=str(n), name=f"gpu-{n}", cpus=64, gpus=4) for n in range(16))
    plan = plan_of(nodes, "strategy=ddp", "train.global_batch_size=1050")
    golden("plan/many-workers", plan_table(plan, nodes))


def test_faults_text_has_one_bullet_a_error(golden: Golden) -> None:
    golden.says(errors_text(["a=1: too small", "b=2: too large;\nset it to 1"]))


# How a run has ended ------------------------------------------------------------------------------


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
    script = replace(STARTED, name="train", strategy="script", job="script", steps=0)
    interrupted = StopRequested(time=START, signal="SIGINT")
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
        "pages of MLflow": with_summary(mlflow_run_page="http://h/#/experiments/1/runs/a", mlflow_page="http://h/#/e"),
        "again after a late warning": printed(STARTED, FINISHED, Warned(message="12 points are missing")),
        "failure of the first rank": printed(STARTED, FORMED, FAILED, collateral, failed),
        "failure after one that was healed": printed(STARTED, FORMED, FAILED, replace(FORMED, generation=2), waited),
        "stop with a checkpoint": printed(*begun, SAVED, KILLED),
        "stop without a checkpoint": printed(*begun, KILLED),
        "a script without steps, stopped": printed(
            script, replace(KILLED, reason="stopped by SIGINT while its script ran; " + ONLY_OWN)
        ),
        "a script without steps, stopped while it ran": printed(script, interrupted, KILLED),
        "a script without steps, failed": printed(
            script, replace(FAILED, step=None), replace(FINISHED, status="FAILED", reason="rank 1 failed: ValueError")
        ),
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
