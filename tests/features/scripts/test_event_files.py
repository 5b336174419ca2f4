"""Scalars from the event files that scripts write for TensorBoard."""

import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.features.scripts.child_process import Reports, ScriptProcess
from orchestrator.features.scripts.event_files import MARK, EventFiles
from orchestrator.script_api import REPORT_VARIABLE


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def event(step: int, tag: str, value: bytes, *, time: float = 10.0) -> bytes:
    whole = field(5, field(1, field(1, tag.encode()) + value))
    return b"\x09" + struct.pack("<d", time) + (bytes([16, step]) if step else b"") + whole


def number(value: float) -> bytes:
    return b"\x15" + struct.pack("<f", value)


def tensor(dtype: int, place: int, content: bytes) -> bytes:
    return field(8, bytes([8, dtype]) + field(place, content))


def record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


def read(path: Path, *records: bytes) -> list[tuple[int, float, dict[str, float]]]:
    path.write_bytes(b"".join(map(record, records)))
    return EventFiles().read([path])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"events.out.{MARK}.1"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (number(0.5), 0.5),
        (number(math.inf), math.inf),
        (tensor(1, 5, struct.pack("<f", 0.25)), 0.25),
        (tensor(2, 6, struct.pack("<d", 0.1)), 0.1),
        (tensor(1, 4, struct.pack("<f", 2.0)), 2.0),
        (tensor(1, 4, struct.pack("<2f", 2.0, 3.0)), None),  # a histogram, say
        (tensor(7, 8, b"a text"), None),
        (b"", None),
    ],
)
def test_a_value_of_one_number_is_a_scalar(value: bytes, expected: float | None, path: Path) -> None:
    assert read(path, event(3, "val/acc", value)) == ([] if expected is None else [(3, 10.0, {"val/acc": expected})])


def test_scalars_of_one_step_come_together_and_each_tag_has_its_own_steps(path: Path) -> None:
    found = read(
        path,
        event(100, "loss", number(2.0)),
        event(100, "lr", number(0.5), time=11.0),
        event(0, "epoch/acc", number(0.25), time=12.0),
        event(101, "loss", number(1.0), time=13.0),
    )
    assert found == [(100, 11.0, {"loss": 2.0, "lr": 0.5}), (0, 12.0, {"epoch/acc": 0.25}), (101, 13.0, {"loss": 1.0})]


def test_a_file_is_read_as_it_grows_and_what_is_not_complete_waits(path: Path) -> None:
    whole = [record(event(step, "loss", number(step))) for step in (1, 2, 3)]
    files = EventFiles()
    path.write_bytes(whole[0] + whole[1][:20])
    assert [step for step, _, _ in files.read([path, path])] == [1]
    assert files.read([path]) == []
    path.write_bytes(b"".join(whole))
    assert [step for step, _, _ in files.read()] == [2, 3]
    path.unlink()
    assert files.read() == []


@pytest.mark.parametrize(
    "noise", [b"", b"\xff" * 30, b"\x0a\x7f", b"\x08", bytes(2 << 20), event(1, "loss", number(1.0), time=math.nan)]
)
def test_what_is_no_scalar_hides_none(noise: bytes, path: Path) -> None:
    assert read(path, noise, event(1, "loss", number(1.0)), noise) == [(1, 10.0, {"loss": 1.0})]


def test_a_file_of_anything_else_has_none(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)
    assert EventFiles().read([path]) == []


def test_the_files_that_a_script_and_its_children_have_open_are_found(path: Path) -> None:
    code = f"file = open({str(path)!r}, 'wb'); print('open', flush=True); __import__('time').sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    script = ScriptProcess([sys.executable, "-c", parent], {REPORT_VARIABLE: str(path.with_name("reports"))})
    try:
        with open(script.output, "rb", closefd=False) as output:
            assert output.readline() == b"open\n"
        assert script.open_files(MARK) == [path]
        assert script.open_files("other") == []
    finally:
        script.close(done=False)


def test_the_step_of_an_event_file_is_progress_unless_the_script_reports_its_own() -> None:
    reports = Reports()
    for step in (5, 3):
        reports.note_step(step)
    assert reports.step == 5
    assert (
        reports.point(b'{"time": 1, "step": 2, "steps": null, "loss": null, "samples": 0, "metrics": {}}') is not None
    )
    reports.note_step(9)
    assert reports.step == 2


@pytest.mark.slow
def test_files_of_torch_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys, torch\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
        "writer = SummaryWriter(sys.argv[1])\n"
        "writer.add_scalar('loss', 0.5, 7)\n"
        "writer.add_scalar('new', 0.25, 1_000_000, new_style=True)\n"
        "writer.add_scalar('double', 0.1, 8, new_style=True, double_precision=True)\n"
        "writer.add_histogram('weights', torch.arange(9.0), 8)\n"
        "writer.add_text('notes', 'a text', 8)\n"
        "writer.add_image('image', torch.zeros(1, 4, 4), 8)\n"
        "writer.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=120)
    found = EventFiles().read(tmp_path.glob(f"*{MARK}*"))
    assert [(step, values) for step, _, values in found] == [
        (7, {"loss": 0.5}), (1_000_000, {"new": 0.25}), (8, {"double": pytest.approx(0.1)}),
    ]  # fmt: skip
