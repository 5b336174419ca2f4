"""What the console shows of the output of rank 0."""

import subprocess
import sys
from pathlib import Path

from orchestrator.worker.process.shown_lines import BURST, LineLimit, LogTail

WITH_OUTPUT = """
import os, subprocess, sys, warnings, logging
from pathlib import Path
from orchestrator.worker.process.output import RankOutput, print_error
output = RankOutput(lambda stream: stream)
print("before")
output.redirect(Path(sys.argv[1]))
print("printed")
os.write(1, b"written in C\\n")
warnings.warn("warned")
logging.getLogger("job").warning("logged")
subprocess.run(["echo", "said by a child"])
if os.fork() == 0:
    print("a loader process")
    os._exit(0)
os.wait()
try:
    1 / 0
except ZeroDivisionError:
    print_error()
print("after the error")
lines, left_out = output.shown_lines()
Path(sys.argv[2]).write_text(repr((lines, left_out)))
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_all_that_reaches_the_log_is_shown_but_what_the_console_is_told_elsewhere(tmp_path: Path) -> None:
    log, found = tmp_path / "rank-0.log", tmp_path / "found"
    subprocess.run([sys.executable, "-c", WITH_OUTPUT, log, found], check=True, timeout=60)
    lines, left_out = eval(found.read_text())
    expected = ["printed", "written in C", "UserWarning: warned", "logged", "said by a child", "a loader process"]
    assert [line for line in lines if "warnings.warn" not in line] != []
    for one, line in zip([*expected, "after the error"], [x for x in lines if "warnings.warn" not in x], strict=True):
        assert line.endswith(one)
    assert left_out == 0
    assert "ZeroDivisionError" in log.read_text()


def tail_of(path: Path, clock: Clock) -> LogTail:
    path.touch()
    tail = LogTail(clock)
    tail.follow(path)
    return tail


def test_a_bar_is_shown_now_and_then_and_at_its_end(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "log"
    tail = tail_of(log, clock)
    with log.open("ab", buffering=0) as file:
        shown = []
        for percent in range(101):
            file.write(f"\r{percent}%|##".encode())
            shown += tail.take()[0]
            clock.now += 0.2
        file.write(b"\nnext\n")
        shown += tail.take()[0]
    assert shown == ["0%|##", "50%|##", "100%|##", "100%|##", "next"]


def test_junk_long_lines_blank_ones_and_a_line_without_an_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = tail_of(log, Clock())
    with log.open("ab", buffering=0) as file:
        file.write(b"\xff\x00\n\n" + b"x" * 600 + b"\nno end")
        lines, _ = tail.take()
        assert lines == ["\ufffd\x00", "x" * 500 + "... (100 more characters)"]
        assert tail.take() == ([], 0)
        assert tail.take(final=True) == (["no end"], 0)


def test_the_lines_of_an_earlier_part_come_before_those_of_the_next_one(tmp_path: Path) -> None:
    tail = tail_of(tmp_path / "one", Clock())
    (tmp_path / "one").write_text("first\nhalf")
    (tmp_path / "two").write_text("of another process\n")
    tail.follow(tmp_path / "two")
    with (tmp_path / "two").open("a") as file:
        file.write(" a line\n")
    assert tail.take()[0] == ["first", "half a line"]


def test_a_flood_is_counted_and_not_kept(tmp_path: Path) -> None:
    tail = tail_of(tmp_path / "log", Clock())
    number = 300_000
    (tmp_path / "log").write_text("a line of a flood\n" * number)
    lines, left_out = tail.take()
    assert len(lines) + left_out == number
    assert len(lines) < number / 2


def test_lines_are_limited_in_rate_and_the_others_counted() -> None:
    clock = Clock()
    limit = LineLimit(clock)
    lines = [f"line {i}" for i in range(1000)]
    told, *kept = limit.take(lines, log="rank-0.log")
    assert told == f"({1000 - BURST:,} lines are only in rank-0.log)"
    assert kept == lines[-BURST:]
    assert limit.take(lines, log="rank-0.log") == ()
    clock.now += 1
    assert limit.take(lines, log="rank-0.log") == tuple(lines[-5:]), "it has told so a second ago"
    clock.now += 5
    assert limit.take(lines, left_out=7, log="rank-0.log")[0] == "(2,977 lines are only in rank-0.log)"
    assert limit.take(lines, log="rank-0.log", final=True)[0] == "(1,000 lines are only in rank-0.log)"
    clock.now += 100
    assert limit.take(["a"], log="rank-0.log") == ("a",)
