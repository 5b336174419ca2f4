"""What a script tells of itself: its progress, and why it has failed."""

import json
from typing import Any

import pytest

import orchestrator
from helpers.files.golden import Golden
from orchestrator import script_api
from orchestrator.policy.failure import Outcomes
from orchestrator.protocol.messages import Failure, Outcome
from orchestrator.protocol.metrics import Metric
from orchestrator.worker.script.child_process import LONGEST_LINE, Lines, Reports, ReportSocket
from orchestrator.worker.script.script_failure import last_traceback, script_failure


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


RAISED = """\
loading
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: bad value"""
CAUSED = f"""\
Traceback (most recent call last):
  File "train.py", line 1, in read
KeyError: 'x'

During handling of the above exception, another exception occurred:

{RAISED.partition(chr(10))[2]}
"""


def failure(exit_code: int = 1, output: str = "", error_file: str = "", *, after_end: bool = False) -> Failure:
    return script_failure(exit_code, output, error_file=error_file, log_tail="tail", time=1.0, after_end=after_end)


@pytest.mark.parametrize(
    "after", ["", "\nException ignored in: <function f>\nTraceback (most recent call last):\n  x\nE: y"]
)
@pytest.mark.parametrize("output", [RAISED, CAUSED])
def test_the_exception_that_ended_it_is_the_message(output: str, after: str) -> None:
    found = failure(output=output + after)
    assert found.message == "ValueError: bad value"
    assert found.traceback == RAISED.partition("\n")[2]
    assert (found.collateral, found.final, found.log_tail) == (False, False, "")


@pytest.mark.parametrize(
    ("exit_code", "output", "message"),
    [
        (3, "", "the script ended with exit code 3"),
        (
            2,
            "usage: train.py\ntrain.py: error: no data\n\n",
            "the script ended with exit code 2: train.py: error: no data",
        ),
        (-9, "step 1", "the script was ended by SIGKILL: step 1"),
        (-200, "", "the script was ended by signal 200"),
    ],
)
def test_without_a_traceback_the_exit_code_and_the_last_line(exit_code: int, output: str, message: str) -> None:
    found = failure(exit_code, output)
    assert (found.message, found.traceback, found.log_tail) == (message, "", "tail")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:7",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_lost_connection_follows_from_another_failure(error: str) -> None:
    output = f'Traceback (most recent call last):\n  File "t.py", line 1\n{error}'
    assert failure(output=output).collateral
    assert failure(output="", after_end=True).collateral


def test_a_taken_port_has_a_remedy() -> None:
    error = "Traceback (most recent call last):\n  x\nOSError: [Errno 98] Address already in use"
    assert "let it use MASTER_PORT" in failure(output=error).message


def test_what_record_has_written_is_preferred() -> None:
    written = {
        "message": {"message": "RuntimeError: x", "extraInfo": {"py_callstack": "Traceback\n  y\n", "timestamp": "1"}}
    }
    found = failure(output=RAISED, error_file=json.dumps(written))
    assert (found.message, found.traceback) == ("RuntimeError: x", "Traceback\n  y")
    assert failure(output=RAISED, error_file="{").message == "ValueError: bad value"


def test_a_connection_that_others_have_closed_in_order_shows_that_the_ranks_disagree(golden: Golden) -> None:
    closed = failure(output="Traceback (most recent call last):\n  x\nRuntimeError: Connection closed by peer")
    outcomes = Outcomes(3)
    outcomes.add(0, Outcome(status="failed", step=1, failure=closed))
    assert outcomes.failure(0) == closed
    outcomes.add(2, Outcome(status="done", step=1))
    golden.says(outcomes.failure(0).message)


def test_no_traceback() -> None:
    assert last_traceback("a\nb") == ""
