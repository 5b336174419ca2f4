"""What a script reports, on its way to the points of its rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

import orchestrator
from orchestrator import script_api
from orchestrator.protocol.metrics import Metric
from orchestrator.worker.script.reports import LONGEST_LINE, Lines, Reports, ReportSocket


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_api, "_connection", None)
    monkeypatch.setattr(script_api, "_steps", 0)


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
