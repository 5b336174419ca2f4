"""The points of a process that dies before it has handed them over."""

import io
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.redact import Redactor
from orchestrator.protocol.core_metrics import LOSS
from orchestrator.protocol.events import Warned
from orchestrator.protocol.messages import EvalPoint, TrainPoint, merged
from orchestrator.timeline import Span
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.control.spool import Spool, _ReportUnpickler, read_spool, remove_spool

DYING = """
import os, signal, sys
from pathlib import Path
from test_spool import Outbox, Redactor, Spool, point
outbox = Outbox(Redactor())
outbox.keep_in(Spool(Path(sys.argv[1])))
for step in range(1, 6):
    outbox.put_point(point(step))
    if step in (2, 3):
        outbox.collect({})
os.kill(os.getpid(), signal.SIGKILL)
"""


def point(step: int) -> TrainPoint:
    return TrainPoint(
        step=step,
        time=1.5,
        loss_sum=0.25,
        weight=8.0,
        step_ms=(1.0, 2.0),
        data_wait_ms=0.0,
        comm_share=None,
        spans=(Span(kind="F", stage=0, microbatch=1, start=0.0, end=1.0),),
        metrics={LOSS.name: LOSS.of(0.1)},
    )


def test_what_a_killed_process_had_not_handed_over_is_read(tmp_path: Path) -> None:
    """The answer with point 3 may have been under way. Points 1 and 2 were received: it was asked for more."""
    path = tmp_path / "spools" / "node-7"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    died = subprocess.run([sys.executable, "-c", DYING, str(path)], env=environment, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL
    assert list(read_spool(path)) == [(number, point(number + 1)) for number in (2, 3, 4)]
    remove_spool(path)
    assert list(path.parent.iterdir()) == []
    assert list(read_spool(path)) == []


def test_heartbeats_number_the_points(tmp_path: Path) -> None:
    outbox = Outbox(Redactor())
    outbox.keep_in(Spool(tmp_path / "node-7"))
    points = [point(1), EvalPoint(step=1, time=1.0, loss_sum=1.0, weight=1.0, sums={}), point(2)]
    outbox.put_point(points[0])
    first = outbox.collect({})
    outbox.put_event(Warned(message="a warning"))
    outbox.put_point(points[1])
    outbox.put_point(points[2])
    second = outbox.collect({})
    assert (first.first_report, second.first_report) == (0, 1)
    both = second.after(first)
    assert (both.first_report, both.points) == (0, tuple(points))
    assert merged([(3, second), (3, first), (4, first)]) == {3: both, 4: first}


def test_the_reports_of_an_outcome_are_kept_until_the_next_generation(tmp_path: Path) -> None:
    """The driver may ask for heartbeats while the outcome is under way."""
    path = tmp_path / "node-7"
    outbox = Outbox(Redactor())
    outbox.keep_in(Spool(path))
    outbox.put_point(point(1))
    last = outbox.collect_last()
    assert (last.first_report, last.points) == (0, (point(1),))
    for step in (2, 3):
        outbox.put_point(point(step))
        assert outbox.collect({}).points == (point(step),)
    assert list(read_spool(path)) == [(0, point(1)), (1, point(2)), (2, point(3))]
    outbox.begin_generation()
    outbox.collect({})
    outbox.collect({})
    assert list(read_spool(path)) == []


def test_nothing_but_points_is_read(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    path = tmp_path / "node-7"
    spool = Spool(path)
    spool.append(0, point(1))
    with path.with_name("node-7.0").open("ab") as file:
        file.write(pickle.dumps((1, Harmful())))
    spool.append(2, point(2))
    assert list(read_spool(path)) == [(0, point(1))]
    assert not (tmp_path / "harm").exists()
    with path.with_name("node-7.1").open("ab") as file:
        file.write(pickle.dumps((3, point(4)))[:-5])
    assert list(read_spool(path)) == [(0, point(1))], "the last point is cut off"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("orchestrator.protocol.metrics", "dataclasses.types.FunctionType"),
        ("orchestrator.protocol.events", "Mapping.register"),
        ("orchestrator.protocol.messages", "Config"),
        ("orchestrator.worker.control.spool", "Spool"),
        ("os", "mkdir"),
    ],
)
def test_only_classes_that_the_protocol_defines_are_found(tmp_path: Path, module: str, name: str) -> None:
    path = tmp_path / "node-7"
    spool = Spool(path)
    spool.append(0, point(1))
    reference = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93"
    with path.with_name("node-7.0").open("ab") as file:
        file.write(reference + pickle.TUPLE1 + b"(K\x01K\x02t.")
    assert list(read_spool(path)) == [(0, point(1))]
    with pytest.raises(pickle.UnpicklingError, match=re.escape(f"{module}.{name} is not part of a report")):
        _ReportUnpickler(io.BytesIO(reference + b".")).load()


def test_damage_ends_the_reading(tmp_path: Path) -> None:
    """A damaged length makes the unpickler raise OverflowError."""
    path = tmp_path / "node-7"
    Spool(path).append(0, point(1))
    with path.with_name("node-7.0").open("ab") as file:
        file.write(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f")
    assert list(read_spool(path)) == [(0, point(1))]


def test_secrets_do_not_reach_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "node-7"
    outbox = Outbox(Redactor(["hunter2-hunter2"]))
    outbox.keep_in(Spool(path))
    outbox.put_event(Warned(message="the password is hunter2-hunter2"))
    (warning,) = outbox.collect({}).events
    assert isinstance(warning, Warned)
    assert warning.message == "the password is ***"
    assert list(read_spool(path)) == [(0, warning)]
