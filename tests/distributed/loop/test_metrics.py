"""Step times and the figures of a logged point."""

import threading
import time
from collections.abc import Mapping, Sequence

import psutil
import pytest
import torch
from torch import Tensor

from helpers.conformance.training import CPU
from orchestrator.protocol.messages import TrainPoint
from orchestrator.timeline import Span
from orchestrator.worker.measure.meters import CpuMeter, GpuMeter, system_metrics
from orchestrator.worker.measure.step_metrics import NonFiniteError, StepTimer, Window, peak_memory_mb

NAN = float("nan")


def window(*, total_steps: int = 4, first_step: int = 0) -> Window:
    made = Window(device=CPU, total_steps=total_steps, first_step=first_step)
    made.timer.restart()
    return made


def add(into: Window, step: int, loss: float = 1.0, *, weight: float = 1.0, skipped: bool = False) -> None:
    into.add(step, torch.tensor(loss), torch.tensor(weight), skipped=skipped)


def close(
    window: Window,
    *,
    grad_norm: float | None = None,
    comm_ms: float | None = 0.0,
    spans: Sequence[Span] = (),
    sums: Mapping[str, Tensor] | None = None,
) -> TrainPoint:
    norm = None if grad_norm is None else torch.tensor(grad_norm)
    return window.close(
        samples_seen=8, epoch=0.5, lr=0.1, grad_norm=norm, sums=sums or {}, comm_ms=comm_ms, spans=spans, metrics={}
    )


@pytest.fixture
def wait(monkeypatch):
    """A clock that moves only when it is told to."""
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    return wait


def test_times_are_those_between_marks_without_what_restart_leaves_out(wait):
    timer = StepTimer(CPU)
    timer.restart()
    for pause_s in (0.01, 0.03):
        wait(pause_s)
        timer.mark()
    wait(0.3)  # an evaluation
    timer.restart()
    wait(0.02)
    timer.mark()
    assert timer.drain() == pytest.approx([10, 30, 20])
    assert timer.drain() == []
    wait(0.01)
    timer.mark()
    assert timer.drain() == pytest.approx([10]), "the last mark begins the next window"


def test_a_restart_between_two_windows_is_left_out_too(wait):
    timer = StepTimer(CPU)
    timer.restart()
    timer.mark()
    timer.drain()
    wait(0.3)
    timer.restart()
    wait(0.01)
    timer.mark()
    assert timer.drain() == pytest.approx([10])


def test_a_point_sums_its_window_and_the_next_starts_empty():
    w = window()
    add(w, 1, 3.0, weight=2.0)
    add(w, 2, 5.0, weight=4.0)
    with w.data_wait.waiting():
        time.sleep(0.01)
    point = close(w, grad_norm=0.5)
    assert (point.step, point.loss_sum, point.weight, point.comm_share) == (2, 8.0, 6.0, 0.0)
    values = {name: metric.value for name, metric in point.metrics.items()}
    assert values == {"train/samples_seen": 8, "train/epoch": 0.5, "train/lr": 0.1, "train/grad_norm": 0.5}
    assert point.data_wait_ms >= 5.0
    add(w, 3, 7.0, weight=1.0)
    point = close(w)
    assert (point.step, point.loss_sum, point.weight) == (3, 7.0, 1.0)
    assert "train/grad_norm" not in point.metrics
    assert point.data_wait_ms == 0.0


@pytest.mark.parametrize(
    ("total_steps", "first_step", "warm_up"), [(100, 0, 10), (20, 0, 4), (3, 0, 0), (100, 40, 10), (20, 40, 4)]
)
def test_warm_up_steps_are_left_out(total_steps, first_step, warm_up):
    w = window(total_steps=total_steps, first_step=first_step)
    timed = []
    for step in range(first_step + 1, first_step + total_steps + 1):
        add(w, step)
        timed += [step] * len(close(w).step_ms)
    assert timed == list(range(first_step + warm_up + 1, first_step + total_steps + 1))


def test_warm_up_within_a_window():
    w = window(total_steps=20)
    for step in range(1, 8):
        add(w, step)
    assert len(close(w).step_ms) == 3


def test_waiting_is_a_part_of_the_last_steps_own_time():
    w = window()
    for step in range(1, 5):
        add(w, step)
    time.sleep(0.1)
    add(w, 5)
    share = close(w, comm_ms=50.0).comm_share
    assert share is not None
    assert 0 < share <= 0.5
    add(w, 6)
    assert close(w, comm_ms=None).comm_share is None


def test_spans_are_told_after_warm_up_alone():
    spans = (Span(kind="F", stage=0, microbatch=0, start=1.0, end=2.0),)
    w = window(total_steps=10)
    add(w, 2)
    assert close(w, spans=spans).spans == ()
    add(w, 3)
    assert close(w, spans=spans).spans == spans


def test_peak_memory_is_that_of_this_process_and_stays():
    held = torch.ones(50_000_000)  # 200 MB
    while_held_mb = peak_memory_mb(CPU)
    del held
    after_mb = peak_memory_mb(CPU)
    assert while_held_mb is not None
    assert while_held_mb > 200
    assert after_mb == pytest.approx(while_held_mb, rel=0.01)  # the kernel counts in batches of pages
    assert psutil.Process().memory_info().rss / 1e6 < while_held_mb - 150


def test_skipped_steps_count_in_time_alone():
    w = window()
    add(w, 1, 2.0)
    add(w, 2, NAN, skipped=True)
    point = close(w, grad_norm=1.0)
    assert (point.step, point.loss_sum, point.weight, len(point.step_ms)) == (2, 2.0, 1.0, 2)
    add(w, 3, NAN, skipped=True)
    point = close(w, grad_norm=NAN)
    assert (point.step, point.loss_sum, point.weight) == (3, 0.0, 0.0)
    add(w, 4, 2.0)
    add(w, 5, 2.0, skipped=True)
    assert close(w, grad_norm=NAN).loss_sum == 2.0


def test_a_loss_that_is_not_finite_is_told_with_its_step():
    w = window()
    add(w, 11)
    add(w, 12, NAN, skipped=True)
    add(w, 13, float("inf"))
    add(w, 14, NAN)
    for look in (w.check_finite, lambda: close(w)):
        with pytest.raises(NonFiniteError, match=r"the loss became inf at step 13;.*train\.on_nonfinite=skip"):
            look()


def test_a_gradient_that_is_not_finite_is_told_with_its_step():
    w = window()
    add(w, 5)
    with pytest.raises(NonFiniteError, match="the gradient norm became nan at step 5"):
        close(w, grad_norm=NAN)


def test_large_finite_losses_are_no_error():
    w = window()
    add(w, 1, 3e38)
    add(w, 2, 3e38)
    w.check_finite()


def test_readings_of_the_node():
    readings = system_metrics(CpuMeter(), GpuMeter())
    assert readings["system_memory_usage_megabytes"] > 0
    assert 0 <= readings["system_memory_usage_percentage"] <= 100


def test_the_cpu_is_read_from_any_thread():
    meter, readings = CpuMeter(), []
    for _ in range(2):
        used = psutil.Process().cpu_times().user
        while psutil.Process().cpu_times().user < used + 0.2:
            pass
        thread = threading.Thread(target=lambda: readings.append(meter.percent()))
        thread.start()
        thread.join()
    assert all(reading is not None and 0 < reading <= 100 for reading in readings), readings
