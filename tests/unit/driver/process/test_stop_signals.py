"""Which signals stop a run, and what a further one does. A closed terminal sends SIGHUP, and its shell once more."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.submit.restarts import Child


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def hangup_ignored() -> Iterator[None]:
    """As a process that ``nohup`` has started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_counts_as_a_first_signal_only() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals() as stop:
        with stop.raising():
            send(signal.SIGHUP, signal.SIGHUP)
            assert (stop.received, stop.cause) == (signal.SIGHUP, "SIGHUP")
            send(signal.SIGTERM, signal.SIGHUP)
            assert stop.received == signal.SIGTERM
        with pytest.raises(SystemExit), stop.raising():
            send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) is before


def test_nohup_is_respected() -> None:
    with hangup_ignored(), StopSignals() as stop, Child(forward=True) as child:
        send(signal.SIGHUP)
        assert stop.received is None
        assert child.stop_signal is None
        assert child.run(["sh", "-c", "kill -HUP $$; exit 7"]).code == 7
    with Child(forward=True) as child:
        assert child.run(["sh", "-c", "kill -HUP $PPID; exec sleep 60"]).code == -signal.SIGHUP
    assert child.stop_signal == signal.SIGHUP
