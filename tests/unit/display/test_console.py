"""The console: what a person reads while a run goes on, and after it."""

from __future__ import annotations

import io
import os
import re
import threading
from dataclasses import replace
from typing import IO

import pytest
from rich.cells import cell_len
from rich.console import Console

from orchestrator.config.compose import compose
from orchestrator.display.console import make_console
from orchestrator.display.panel import RunView, draw
from orchestrator.display.report import errors_text, plan_table
from orchestrator.display.text import duration, size, sparkline
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.protocol.events import (
    BestFound,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GenerationStarted,
    MetricsLogged,
    RankProgress,
    Recovered,
    RunEnded,
    RunStarted,
    SampleSaved,
    StopRequested,
    StragglerFound,
    SystemMetricsLogged,
    TextSampled,
    WaitingForResources,
    WaitingInQueue,
    Warned,
    WorkerFailed,
    WorkerLost,
    Yielded,
)
from orchestrator.strategies import registry

START = 1_000_000.0
STARTED = RunStarted(
    time=START, name="digits-ddp", run_dir="/runs/1", strategy="ddp", job="digits", world_size=2, steps=500
)
FORMED = GenerationStarted(
    time=START + 1, generation=1, backend="gloo", device="cpu", precision="fp32", workers=("node-a", "node-b")
)
FAILED = WorkerFailed(
    display_name="rank 1",
    time=START + 20,
    rank=1,
    step=412,
    reason="ValueError: item 7 is broken",
    traceback="Traceback (most recent call last):\n  File 'job.py', line 3\nValueError: item 7 is broken",
    log="/runs/1/logs/rank-1.log",
    log_tail="\x1b[31mloading\x1b[0m\rdone",
)
SAVED = CheckpointSaved(
    time=START + 9, step=40, path="/runs/1/checkpoints/40", seconds=0.03, stall_ms=1.0, size_bytes=2_100_000
)
FINISHED = RunEnded(
    time=START + 21.4,
    status="FINISHED",
    exit_code=0,
    reason="",
    summary={"steps": 500, "samples_per_s": 8210.4, "final_loss": 0.0123, "val_loss": 0.1, "val_accuracy": 0.978},
    next_commands=("python -m orchestrator.compare --last 5", "mlflow ui --backend-store-uri sqlite:////runs/m.db"),
)
KILLED = RunEnded(time=START + 12, status="KILLED", exit_code=130, reason="SIGINT", summary={})


def point(step: int, at_s: float, **figures: float) -> MetricsLogged:
    metrics = {f"{name.replace('__', '/')}": value for name, value in figures.items()}
    return MetricsLogged(time=START + at_s, step=step, metrics=metrics)


def progress(rank: int, step: int, step_ms: float | None = 6.0, node: str = "node-a") -> RankProgress:
    return RankProgress(time=START, rank=rank, step=step, phase="train", step_ms=step_ms, node=node)


def printed(*events: Event, stream: IO[str] | None = None) -> list[str]:
    out, now = stream or io.StringIO(), START
    console = make_console(steps=500, world_size=2, stream=out, clock=lambda: now)
    for event in events:
        now = event.time
        console.emit(event)
    console.close()
    return out.getvalue().splitlines() if isinstance(out, io.StringIO) else []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What a terminal shows after all of it: rows that are long stay long."""
        rows, row = [""], 0
        for code, text in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|(\r|\n|[^\x1b\r\n]+)", self.getvalue()):
            if code.endswith("A"):
                row -= int(code[:-1] or 1)
            elif code.endswith("K"):
                rows[row] = ""
            elif text == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif text and text != "\r":
                rows[row] += text
        return rows


# Plain lines


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
    shown = [line.partition("  eta")[0] for line in lines[-3:]]
    assert shown == ["step 25/500  val_loss 0.4000", "step 60/500  loss 0.5000", "step 75/500  val_loss 0.2000"]


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


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_codes_on_a_terminal_without_color(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    text = "\n".join(printed(STARTED, FORMED, point(1, 2, train__loss=1), FINISHED, stream=Terminal()))
    assert "\x1b" not in text
    assert "step 1/500" in text


def test_every_event_has_words() -> None:
    text = "\n".join(
        printed(
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
    )
    assert "step-000040" not in text, "the verdict names the folder"
    for words in (
        "strategy ddp, job digits, 2 workers",
        "/runs/1",
        "resumed from step 40",
        "waiting 12s for 4 workers: need 4 x {GPU: 1}; free 3",
        "gloo on cpu in fp32: rank 0 on node-a, rank 1 on node-b",
        "checkpoint of step 40 saved (2.1 MB in 0.03 s)",
        "warning: cannot write the checkpoint of step 50: No space left on device; training continues",
        "SIGINT: writing a checkpoint before stopping; send it again to stop at once",
        "warning: MLflow does not answer",
        "poem",
        "To be",
    ):
        assert words in text


def test_a_recovery_says_what_happened_and_what_it_cost() -> None:
    lost = WorkerLost(rank=1, display_name="rank 1", step=412, reason="it died", traceback="", log="", log_tail="")
    in_place = Recovered(
        generation=2, step=412, steps_lost=0, replaced=(1,), in_place=True, seconds=0.2,
        num_workers=2, num_workers_before=2,
    )  # fmt: skip
    smaller = replace(in_place, generation=3, step=400, steps_lost=12, replaced=(), num_workers=1)
    paused = replace(in_place, generation=4, replaced=(), planned="preempted")
    assert printed(lost, in_place, smaller, paused) == [
        "rank 1 lost at step 412: it died",
        "recovered at step 412 after 0.2 s: rank 1 replaced, no step lost (generation 2)",
        "recovered at step 400 after 0.2 s: 1 worker instead of 2, 12 steps lost (generation 3)",
        "continued at step 412 after 0.2 s: process group formed again, no step lost (generation 4)",
    ]


def test_a_run_in_the_queue_says_what_goes_before_it_and_that_it_makes_room() -> None:
    continued = Recovered(
        generation=2, step=40, steps_lost=0, replaced=(0, 1), in_place=False, seconds=4.1,
        num_workers=2, num_workers_before=2, planned="yielded",
    )  # fmt: skip
    why = "need 2 x {CPU: 1}; free 0"
    last = WaitingInQueue(waited_s=90, ahead=("gpt-ddp", "gpt-pipeline"), running=("resnet50-ddp",), why=why)
    first = WaitingInQueue(waited_s=1, ahead=(), running=(), why=why)
    unfit = WaitingInQueue(waited_s=2, ahead=(), running=("resnet50-ddp",), why=why, unfit=True)
    assert printed(last, first, unfit, Yielded(step=40, to="gpt-ddp"), continued) == [
        "waiting 1m30s in the queue, place 3; before it: gpt-ddp, gpt-pipeline; running: resnet50-ddp; "
        "need 2 x {CPU: 1}; free 0",
        "waiting 1.0s in the queue, place 1; need 2 x {CPU: 1}; free 0",
        "waiting 2.0s in the queue, without a place; running: resnet50-ddp; need 2 x {CPU: 1}; free 0",
        "yielded to gpt-ddp at step 40: the run continues when there is room again",
        "continued at step 40 after 4.1 s: it is the run's turn again with 2 workers, no step lost (generation 2)",
    ]


def test_a_straggler_is_named_with_its_times() -> None:
    found = StragglerFound(
        rank=1, display_name="rank 1", node="node-b", step=50, slower_by=2.0,
        compute_ms=6.0, others_compute_ms=3.0, data_wait_ms=0.0, others_data_wait_ms=0.01, throughput_loss=0.5,
    )  # fmt: skip
    assert "".join(printed(found)) == (
        "warning: rank 1 on node-b is 2.0 times slower than the others, which costs the run 50% of its throughput: "
        "it computes 6 ms per step (the others 3 ms) and waits 0 ms for data (the others 0.01 ms)"
    )


def test_only_some_of_many_ranks_are_named() -> None:
    lines = printed(replace(FORMED, workers=tuple(f"node-{n}" for n in range(64))))
    assert lines[-1].endswith("rank 7 on node-7, and 56 more")


# The verdict


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


# The live panel


def drawn(view: RunView, *, width: int = 80, height: int = 24, unicode: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(draw(view, width=width, height=height, now=START + 30, unicode=unicode))
    return out.getvalue().splitlines()


def view_of(*events: Event, world_size: int = 2) -> RunView:
    view = RunView(steps=500, world_size=world_size)
    formed = replace(FORMED, workers=tuple(f"node-{rank}" for rank in range(world_size)))
    for event in (STARTED, formed, *events):
        view.update(event, event.time)
    return view


def busy_view(world_size: int, slow_rank: int) -> RunView:
    points = [
        point(n, n / 10, train__loss=2.3 / n, perf__samples_per_s=8000.0 + n, val__accuracy=0.9) for n in range(1, 301)
    ]
    ranks = [
        progress(r, 300, 11.4 if r == slow_rank else 6.1, node=f"a-node-with-a-long-name-{r}")
        for r in range(world_size)
    ]
    return view_of(*points, *ranks, SAVED, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 8, 9, 64])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 40), (80, 24), (60, 14), (48, 9), (30, 24), (80, 4)])
def test_the_panel_fits_its_terminal(width: int, height: int, world_size: int) -> None:
    lines = drawn(busy_view(world_size, 0), width=width, height=height)
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) < height
    assert "300/500" in "\n".join(lines)
    if world_size > 1 and any("rank  " in line for line in lines):
        assert any("◀ slowest" in line for line in lines)


@pytest.mark.parametrize("height", range(5, 16))
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_a_low_panel_fits_its_terminal(height: int, world_size: int) -> None:
    assert len(drawn(busy_view(world_size, slow_rank=1), height=height)) < height
    few_figures = view_of(*(progress(r, 300) for r in range(world_size)), world_size=world_size)
    assert len(drawn(few_figures, height=height)) < height


def test_the_panel_shows_figures_and_every_rank() -> None:
    text = "\n".join(drawn(busy_view(4, slow_rank=2), width=120))
    for words in (
        "digits-ddp (ddp, digits, 4 workers)",
        "60%",
        "30s",
        "eta 20s",
        "0.007667",
        "8,300",
        "accuracy 0.9000",
    ):
        assert words in text
    assert "▁" in text
    assert [line for line in text.splitlines() if "slowest" in line] == [
        line for line in text.splitlines() if "a-node-with-a-long-name-2" in line
    ]


def test_the_slowest_of_many_ranks_is_among_those_shown() -> None:
    lines = drawn(busy_view(64, slow_rank=61))
    assert [line.split()[1] for line in lines if "slowest" in line] == ["61"]
    assert any("and 56 more" in line for line in lines)


def test_ranks_that_are_about_as_fast_are_not_marked() -> None:
    assert view_of(progress(0, 5, 6.0), progress(1, 5, 7.0)).slowest() is None
    assert view_of(progress(0, 5, 6.0), progress(1, 5, 8.0)).slowest() == 1
    assert view_of(progress(0, 5, 6.0), progress(1, 5, None)).slowest() is None


def test_the_panel_in_ascii() -> None:
    view = busy_view(4, slow_rank=1)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    console.print(draw(view, width=80, height=24, now=START + 30, unicode=False))  # raises if it cannot be encoded
    assert "< slowest" in "\n".join(drawn(view, unicode=False))


def test_eta_is_right_when_points_come_in_batches() -> None:
    view = view_of(*(point(n, 2 + n / 1e6) for n in range(1, 101)))
    assert view.eta_s() is None
    for second in (1, 2):
        for n in range(1, 101):
            logged = point(100 * second + n, 2 + second + n / 1e6)
            view.update(logged, logged.time)
    assert view.eta_s() == pytest.approx(2.0, rel=1e-3)


def test_a_recovery_may_go_back() -> None:
    view = view_of(point(300, 30, train__loss=1.0))
    view.update(replace(FORMED, generation=2), START + 5)
    for rank in range(2):
        view.update(progress(rank, 280), START + 5)
    assert view.step == 280


def test_on_a_terminal_the_panel_goes_and_the_verdict_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    printed(STARTED, FORMED, point(1, 2, train__loss=2.0), Warned(message="slow"), FINISHED, stream=stream)
    text = stream.getvalue()
    assert "1/500" in text  # in the panel
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    shown = [line.split(":")[0] for line in stream.screen() if line]
    assert shown == [
        "digits-ddp",
        "run directory",
        "gloo on cpu in fp32",
        "warning",
        "finished",
        "run directory",
        "next",
        "next",
    ]
    assert not [t for t in threading.enumerate() if type(t).__name__ == "_RefreshThread" and not t.done.is_set()]


# Words and figures


def test_figures() -> None:
    assert [duration(s) for s in (0, 9.94, 9.96, 59.7, 185, 7500)] == ["0.0s", "9.9s", "10s", "1m00s", "3m05s", "2h05m"]
    assert [size(b) for b in (0, 999, 2_140_000, 5e15)] == ["0 B", "999 B", "2.14 MB", "5e+03 TB"]
    assert [size(b) for b in (999_499, 999_500, 999_999_999, 10**9)] == ["999 kB", "1 MB", "1 GB", "1 GB"]
    assert sparkline([0, 1, 2, float("nan")], unicode=True) == "▁▅█?"
    assert sparkline([1, 1], unicode=True, from_zero=True) == "██"


def plan_for(*overrides: str, nodes: tuple[Node, ...]) -> Plan:
    errors: list[str] = []
    config, _ = compose(list(overrides), errors, registry.config_class)
    assert config is not None, errors
    return make_plan(config, registry.load(config.strategy.name), nodes, oversubscribe_cpus=False)


def test_plan_table_says_what_is_asked_what_is_there_and_who_gets_what() -> None:
    nodes = (Node(node_id="a", name="laptop", cpus=4, gpus=0),)
    plan = plan_for("strategy=ddp", "train.global_batch_size=65", "strategy.num_workers=2", nodes=nodes)
    text = plan_table(plan, nodes)
    assert "strategy ddp, job digits, 500 steps of 65 samples" in text
    assert "1 node: laptop (4 CPUs)" in text
    assert "2 workers on cpu" in text
    shares = [line.split()[:3] for line in text.splitlines() if "%" in line]
    assert shares == [["0", "33", "50.8%"], ["1", "32", "49.2%"]]
    assert [f"  note: {note}" for note in plan.notes] == [line for line in text.splitlines() if "note:" in line]


def test_plan_table_summarises_many_workers_and_nodes() -> None:
    nodes = tuple(Node(node_id=str(n), name=f"gpu-{n}", cpus=64, gpus=4) for n in range(16))
    text = plan_table(plan_for("strategy=ddp", "train.global_batch_size=1050", nodes=nodes), nodes)
    assert "16 nodes: 16 with 64 CPUs and 4 GPUs" in text
    assert [line.split()[:3] for line in text.splitlines() if "%" in line] == [
        ["0-25", "(26)", "17"],
        ["26-63", "(38)", "16"],
    ]


def test_faults_text_has_one_bullet_a_error() -> None:
    assert errors_text(["a=1: too small", "b=2: too large;\nset it to 1"]).splitlines() == [
        "cannot start: 2 errors",
        "  - a=1: too small",
        "  - b=2: too large;",
        "    set it to 1",
    ]
