"""What a script tells of its progress."""

import json
import math
import os
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import orchestrator
from orchestrator import script_api
from orchestrator.features.scripts.child_process import LONGEST_LINE, MOST_STEP_TIMES, Lines, Reports, ReportSocket
from orchestrator.planning.mesh import Mesh
from orchestrator.policy.aggregate import Aggregator
from orchestrator.protocol.metrics import Metric
from orchestrator.script_api import LARGEST_REPORT_BYTES, MOST_STEPS


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_api, "_connection", None)
    monkeypatch.setattr(script_api, "_steps", 0)


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportSocket]:
    with ReportSocket() as reports:
        monkeypatch.setenv(script_api.REPORT_VARIABLE, str(reports.path))
        yield reports


def received(socket: ReportSocket, connections: int = 1) -> list[dict[str, Any]]:
    """What has been sent through that many connections, which are closed by now."""
    found = []
    for _ in range(connections):
        connection, _ = socket.listener.accept()
        with connection.makefile() as lines:
            found += [json.loads(text) for text in lines]
    return found


def closed() -> None:
    assert script_api._connection is not None
    script_api._connection.close()


def line(**changes: Any) -> bytes:
    values = {"time": 10.0, "step": 1, "steps": None, "loss": 0.5, "samples": 8.0, "metrics": {}}
    return json.dumps(values | changes).encode()


def test_reports_arrive_at_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReportSocket() as reports:
        monkeypatch.setenv(script_api.REPORT_VARIABLE, str(reports.path))
        orchestrator.report(loss=0.5, samples=8, steps=20, accuracy=0.25)
        orchestrator.report(step=7)
        connection, _ = reports.listener.accept()
        sent = [json.loads(text) for text in connection.recv(1 << 16).splitlines()]
    assert [(s["step"], s["steps"], s["loss"], s["samples"], s["metrics"]) for s in sent] == [
        (1, 20, 0.5, 8.0, {"accuracy": 0.25}),
        (7, None, None, 0.0, {}),
    ]
    orchestrator.report()  # the worker has gone: no error


def test_outside_of_a_run_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(script_api.REPORT_VARIABLE, raising=False)
    monkeypatch.delenv(script_api.CHECKPOINTS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    orchestrator.report(loss=object(), samples=8)
    assert orchestrator.checkpoint_dir().is_dir()
    monkeypatch.setenv(script_api.CHECKPOINTS_VARIABLE, str(tmp_path / "of-run"))
    assert orchestrator.checkpoint_dir() == tmp_path / "of-run"


def test_a_report_becomes_a_point() -> None:
    reports = Reports()
    first = reports.point(line())
    second = reports.point(line(step=3, time=11.0, steps=30, loss=None, metrics={"accuracy": 0.5, "val/loss": 2.0}))
    assert first is not None
    assert second is not None
    assert (first.loss_sum, first.weight, first.samples, first.step_ms) == (4.0, 8.0, 8.0, ())
    assert (second.loss_sum, second.weight, second.samples, second.step_ms) == (0.0, 0.0, 8.0, (500.0, 500.0))
    assert second.metrics == {"train/accuracy": Metric(0.5, "mean"), "val/loss": Metric(2.0, "mean")}
    assert (reports.step, reports.steps) == (3, 30)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b'{"a": 1}'])
def test_other_lines_are_no_reports(text: bytes) -> None:
    assert Reports().point(text) is None


def test_a_stream_is_cut_into_lines() -> None:
    lines = Lines()
    assert lines.add(b"a\nb") == [b"a"]
    assert lines.add(b"c\n\n") == [b"bc", b""]
    lines.add(b"x" * 3 * LONGEST_LINE)
    assert len(lines.rest) == LONGEST_LINE


NOT_A_NUMBER = "0.5", b"1", [1.0], {"a": 1}, object(), 1j, torch.ones(2), np.ones(2), torch.ones(1, device="meta")
NOT_WHOLE = 0.5, -1, math.inf, math.nan, True, MOST_STEPS + 1, torch.tensor(0.5), Decimal("0.1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("step", "steps", "loss", "samples", "accuracy") for value in NOT_A_NUMBER),
        *((name, value) for name in ("step", "steps") for value in NOT_WHOLE),
        *(("samples", value) for value in (-1, math.inf, math.nan, True)),
        *((name, 10**400) for name in ("step", "samples", "loss", "accuracy")),
    ],
)
def test_the_line_that_reports_no_number_is_told_which(socket: ReportSocket, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"orchestrator\.report: {name}=.*: (expected|too large)"):
        orchestrator.report(**{name: value})
    orchestrator.report()
    closed()
    (sent,) = received(socket)
    assert sent["step"] == 1, "what is refused is no step"


@pytest.mark.parametrize(
    "value", [7, 7.0, np.int64(7), np.float32(7), torch.tensor(7), torch.tensor([[7.0]]), Decimal(7), Fraction(7)]
)
def test_numbers_of_every_kind_are_reported(socket: ReportSocket, value: Any) -> None:
    orchestrator.report(step=value, steps=value, loss=value, samples=value, accuracy=value, none=None, yes=True)
    closed()
    (sent,) = received(socket)
    assert {key: sent[key] for key in ("step", "steps", "loss", "samples")} == dict.fromkeys(
        ("step", "steps", "loss", "samples"), 7
    )
    assert sent["metrics"] == {"accuracy": 7, "yes": 1}


def test_a_loss_that_is_not_finite_is_reported(socket: ReportSocket) -> None:
    orchestrator.report(loss=math.nan, worst=-math.inf, samples=2)
    closed()
    (sent,) = received(socket)
    point = Reports().point(json.dumps(sent).encode())
    assert point is not None
    assert math.isnan(point.loss_sum)
    assert point.metrics["train/worst"].value == -math.inf


def test_large_reports_arrive_whole(socket: ReportSocket) -> None:
    names = [f"größe/{i:05}" for i in range(5000)]
    sending = threading.Thread(target=lambda: (orchestrator.report(**dict.fromkeys(names, 0.5)), closed()))
    sending.start()
    connection, _ = socket.listener.accept()
    lines, found = Lines(LARGEST_REPORT_BYTES), []
    while chunk := connection.recv(1 << 16):
        found += lines.add(chunk)
    sending.join()
    point = Reports().point(found[0])
    assert point is not None
    assert list(point.metrics) == names
    with pytest.raises(ValueError, match="so divide it"):
        orchestrator.report(**{"x" * LARGEST_REPORT_BYTES: 1})


def test_threads_and_forks_send_whole_lines(socket: ReportSocket) -> None:
    def send(count: int) -> None:
        for i in range(count):
            orchestrator.report(step=i, **{f"metric_{j}": i for j in range(50)})

    threads = [threading.Thread(target=send, args=(20,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if (child := os.fork()) == 0:
        send(20)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    closed()
    assert sorted(sent["step"] for sent in received(socket, connections=2)) == sorted([*range(20)] * 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": math.nan}, {"step": math.inf}, {"step": "x"}, {"steps": math.inf}, {"loss": "x"}, {"samples": -1},
        {"samples": math.inf}, {"metrics": [1]}, {"metrics": {"a": "x"}}, {"time": math.nan}, {"step": 2**70},
    ],
)  # fmt: skip
def test_what_other_programs_send_cannot_end_the_worker(changes: dict[str, Any]) -> None:
    reports = Reports()
    assert reports.point(line(**changes)) is None
    assert (reports.step, reports.steps) == (0, 0)


def test_a_step_may_be_a_token() -> None:
    reports, run = Reports(), Aggregator(mesh=Mesh(), global_batch_size=1, tokens_per_sample=None)
    assert reports.point(line(step=10**6)) is not None
    point = reports.point(line(step=10**12, time=12.0, samples=64.0))
    assert point is not None
    assert len(point.step_ms) == MOST_STEP_TIMES
    logged = run.add(0, point)
    assert logged is not None
    assert logged.metrics["perf/samples_per_s"] == pytest.approx(32)


def test_a_clock_that_is_set_back_gives_no_times() -> None:
    reports = Reports()
    reports.point(line(time=10.0))
    for time in (10.0, 9.0):
        point = reports.point(line(step=reports.step + 1, time=time))
        assert point is not None
        assert point.step_ms == ()


def test_infinite_losses_of_both_signs_are_no_error() -> None:
    run = Aggregator(mesh=Mesh(replicate=2), global_batch_size=1, tokens_per_sample=None)
    logged = None
    for rank, loss in enumerate((math.inf, -math.inf)):
        point = Reports().point(line(loss=loss, metrics={"a": loss, "b": 1e308}))
        assert point is not None
        logged = run.add(rank, point)
    assert logged is not None
    assert math.isnan(logged.metrics["train/loss"])
    assert math.isnan(logged.metrics["train/a"])
