"""A terminal that closes, or a pipe that nobody reads any more, does not fail the command that writes to it."""

import contextlib
import os
import pty
import signal
import sys

import pytest

from orchestrator import cli
from orchestrator.display.terminal import closing_interrupts, lasting_output


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_output_that_nobody_can_receive_is_dropped(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    there, here = os.pipe() if kind == "pipe" else pty.openpty()
    with os.fdopen(here, "w") as stream, contextlib.redirect_stdout(stream), lasting_output():
        print("seen", flush=True)
        assert os.read(there, 99).startswith(b"seen")
        os.close(there)
        for _ in range(3):
            print("lost" * 10_000, flush=True)
        print("to somebody else", file=sys.stderr)
    assert capsys.readouterr().err == "to somebody else\n"


def test_what_is_buffered_at_the_end_is_dropped() -> None:
    there, here = os.pipe()
    with os.fdopen(here, "w") as stream, contextlib.redirect_stdout(stream), lasting_output():
        os.close(there)
        print("lost")


@pytest.mark.parametrize("words", [["--help"], ["schema"], ["runs", "--output-dir", "nowhere"]])
def test_a_verb_whose_output_nobody_reads_ends_as_otherwise(words: list[str]) -> None:
    there, here = os.pipe()
    with os.fdopen(here, "w") as stream, contextlib.redirect_stdout(stream):
        os.close(there)
        assert cli.main(words) == 0


def test_other_errors_of_a_stream_stay() -> None:
    with os.fdopen(os.open("/dev/full", os.O_WRONLY), "w") as full, contextlib.redirect_stdout(full):
        with pytest.raises(OSError, match="No space left"), lasting_output():
            print("text", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_closed_terminal_interrupts_once() -> None:
    def hang_up() -> None:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)  # of the shell
            cleaned.append(True)

    cleaned: list[bool] = []
    with pytest.raises(KeyboardInterrupt), closing_interrupts():
        hang_up()
    assert cleaned
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with closing_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
