"""``breakpoint()`` in a process without a terminal, and where a debugger holds a thread."""

import os
import pdb
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from helpers.files.golden import Golden
from helpers.records.runs import wait_for
from orchestrator.driver.process.signals import StopSignals
from orchestrator.user_code.breakpoints import REFUSAL, VARIABLE, held_at, place
from orchestrator.user_code.errors import JobError
from orchestrator.worker.process.output import training_frame


def test_a_breakpoint_without_a_terminal_says_where_it_is(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv(VARIABLE, REFUSAL)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)  # pytest has one of its own
    with golden.raises(JobError, LINE=str(sys._getframe().f_lineno + 1)):
        breakpoint()


def test_a_thread_at_the_prompt_of_a_debugger_is_held_where_it_was_asked_to_stop() -> None:
    reading, writing = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True))
    places = []

    def work() -> None:
        debugger = pdb.Pdb(stdin=reading, stdout=SimpleNamespace(write=lambda _: 0, flush=lambda: None), nosigint=True)
        places.append(f"test_breakpoints.py:{sys._getframe().f_lineno + 2}")
        debugger.set_trace()
        places.append("here")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert wait_for(lambda: held_at(training_frame(thread.ident)) in places, timeout_s=20)
    finally:
        writing.write("c\n")
        writing.close()
        thread.join(20)
    assert places[-1] == "here"
    reading.close()


@pytest.mark.parametrize("module", ["debugpy.public_api", "pydevd", "ray.util.rpdb", "ipdb.__main__", "pudb"])
def test_other_debuggers_are_known(module: str) -> None:
    frames: dict[str, object] = {"__name__": module, "sys": sys}
    exec("def wait(ask): return ask(sys._getframe())", frames)
    line = sys._getframe().f_lineno + 1
    assert frames["wait"](held_at) == f"test_breakpoints.py:{line}"  # type: ignore[operator]


def test_waiting_alone_is_not_being_held() -> None:
    assert held_at(sys._getframe()) is None
    assert held_at(None) is None
    assert place(sys._getframe()).startswith("test_breakpoints.py:")


def test_ctrl_c_at_the_prompt_of_a_debugger_is_for_the_debugger() -> None:
    frames: dict[str, object] = {"__name__": "pdb", "os": os}
    exec(f"def prompt():\n    os.kill(os.getpid(), {signal.SIGINT:d})", frames)
    with StopSignals() as stop:
        with pytest.raises(KeyboardInterrupt):
            frames["prompt"]()  # type: ignore[operator]
        assert stop.received is None
