import itertools

import pytest

from helpers.records.runs import wait_for
from orchestrator.display.terminal import still_working


def test_a_long_block_speaks_now_and_then_and_no_longer_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, printed = itertools.count(1), ""

    def has_spoken() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return "at work 3\n" in printed

    with still_working(lambda: f"at work {next(numbers)}", every_s=0.01):
        wait_for(has_spoken, timeout_s=30, poll_s=0.01)
    assert printed.startswith("at work 1\nat work 2\n")
    said = next(numbers)
    with still_working(lambda: f"at work {next(numbers)}", every_s=100):
        pass
    assert next(numbers) == said + 1
