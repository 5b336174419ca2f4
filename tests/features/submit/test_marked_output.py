"""What a verb prints in a job of Ray, as the reader of the job's log prints it again."""

import faulthandler
import sys

import pytest

from orchestrator.features.submit.marked_output import MarkedLog, marked_output


def log_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What a command leaves in the log of its job."""
    print("Runtime env is setting up.")
    with marked_output():
        print("a table")
        print("a warning", file=sys.stderr)
        sys.stdout.write("two\nlines, and no end")
    print("Traceback")
    return capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_stdout_and_stderr_are_apart_again(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In whatever pieces the log comes."""
    text = log_of(capsys)
    log = MarkedLog()
    for start in range(0, len(text), size):
        log.write(text[start : start + size])
    log.end()
    printed = capsys.readouterr()
    assert printed.out == "a table\ntwo\nlines, and no end\n"
    assert printed.err == "a warning\nTraceback\n"
    assert (log.preamble, log.has_marks) == (["Runtime env is setting up."], True)


def test_a_command_that_does_not_start_leaves_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    log = MarkedLog()
    log.write("No module named rich\nexit")
    log.end()
    assert (log.preamble, log.has_marks) == (["No module named rich", "exit"], False)
    assert capsys.readouterr() == ("", "")


def test_a_library_may_write_below_as_faulthandler_does_which_ray_enables(capfd: pytest.CaptureFixture[str]) -> None:
    with marked_output():
        print("a warning", file=sys.stderr)
        faulthandler.dump_traceback()
    marked, *stack = capfd.readouterr().out.split("\n")
    assert marked.endswith(" a warning")
    assert "(most recent call first)" in stack[0]
