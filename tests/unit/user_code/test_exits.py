"""Code of the user that ends the process: refused with its place; signals and our own exits pass."""

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.files.golden import Golden
from orchestrator.driver.process.signals import StopSignals
from orchestrator.model.partial_init import build_fake
from orchestrator.user_code.errors import JobError, error_text, exits_refused, readable

CPU = torch.device("cpu")


def leave() -> None:
    sys.exit("no data")


def leave_inside() -> Any:
    leave()


def interrupt() -> Any:
    raise KeyboardInterrupt


def end_a_generator() -> Any:
    raise GeneratorExit


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (leave_inside, r"leave_inside calls sys.exit\('no data'\) \(test_exits.py, line \d+\), which would end the"),
        (interrupt, r"interrupt raises KeyboardInterrupt \(test_exits.py, line \d+\)"),
        (end_a_generator, r"end_a_generator raises GeneratorExit \(test_exits.py, line \d+\)"),
    ],
)
def test_the_code_and_its_place_are_named(call: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(JobError, match=text) as raised, exits_refused():
        build_fake(call, CPU)
    assert pickle.loads(pickle.dumps(raised.value)).errors == raised.value.errors  # it may come from a child process


def leave_hard() -> Any:
    os._exit(0)


def test_a_hard_exit_is_refused_where_nobody_would_notice_it() -> None:
    place = r"leave_hard calls os._exit\(0\) \(test_exits.py, line \d+\), which would end the process without a reason"
    with pytest.raises(JobError, match=place), exits_refused(hard=True), exits_refused():
        build_fake(leave_hard, CPU)


@pytest.mark.parametrize("hard", [False, True])
def test_a_hard_exit_passes_in_a_fork_and_outside(hard: bool) -> None:
    with exits_refused(hard=True):
        pass
    with exits_refused(hard=hard):
        if (pid := os.fork()) == 0:
            leave_hard()
        assert os.waitpid(pid, 0)[1] == 0
    child = multiprocessing.get_context("fork").Process(target=leave_hard)
    child.start()
    child.join(20)
    assert child.exitcode == 0


def test_ctrl_c_passes() -> None:
    def busy() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    with pytest.raises(KeyboardInterrupt), exits_refused():
        busy()


def test_the_end_of_a_generator_passes() -> None:
    seen = []

    def numbers() -> Iterator[int]:
        with exits_refused():
            try:
                yield 1
            finally:
                seen.append("closed")

    for _ in numbers():
        break
    assert seen == ["closed"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_the_second_signal_of_a_run_passes(number: int, error: type[BaseException]) -> None:
    with StopSignals() as stop, pytest.raises(error), exits_refused(), stop.raising():
        send_twice(number)


def send_twice(number: int) -> None:
    for _ in range(2):
        os.kill(os.getpid(), number)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_readable_text_has_one(golden: Golden) -> None:
    with pytest.raises(Unreadable) as failed:
        raise Unreadable
    error = readable(failed.value)
    golden.says(error)
    assert error.__traceback__ is failed.value.__traceback__
    plain = KeyError("a")
    assert readable(plain) is plain
    assert error_text(plain) == "KeyError: 'a'"
