"""A probe that is not up yet, or has died, says nothing about its node."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from helpers.records.runs import wait_for
from orchestrator.driver.nodes import node_watch
from orchestrator.driver.nodes.node_watch import NodeWatch, stopped_processes

NO_ANSWER = {1: False}


@pytest.fixture
def watch() -> Iterator[NodeWatch]:
    """A watch that takes this machine for another one, and probes it."""
    with NodeWatch(timeout_s=3) as made:
        made._own_node = ""
        yield made


@pytest.fixture
def node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def test_a_node_is_not_silent_before_its_probe_is_up(watch: Any, node: str) -> None:
    assert watch.silent({node: NO_ANSWER}, 0.0) == []
    assert watch.silent({node: NO_ANSWER}, 100.0) == [], "the probe has had no time to start"
    wait_until_heard(watch, node, 101.0)
    probe = psutil.Process(probe_pid())
    probe.suspend()
    try:
        now = itertools.count(104.5, 3.5)  # an answer may be on its way, which counts when it is taken
        wait_for(lambda: watch.silent({node: NO_ANSWER}, next(now)) == [node])
        assert watch.silent({node: {1: True}}, next(now)) == [], "a worker has answered"
    finally:
        probe.kill()
        probe.wait(10)


def test_a_probe_that_dies_is_started_again(watch: Any, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "PROBE_RESTART_S", 0.0)
    wait_until_heard(watch, node, 1.0)
    first = probe_pid()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: watch.silent({node: NO_ANSWER}, 2.0) == [] and watch._probes[node].heard_at is None)
    assert watch.silent({node: NO_ANSWER}, 100.0) == []
    wait_until_heard(watch, node, 101.0)
    assert probe_pid() != first


def test_a_probe_knows_which_processes_are_stopped(watch: Any, node: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        assert stopped_processes([child.pid, 2**30]) == frozenset()
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: watch.silent({node: {child.pid: False}}, 1.0) == [] and watch._probes[node].stopped)
        assert watch._probes[node].stopped == {child.pid}
    finally:
        child.kill()
        child.wait(10)


def test_a_node_on_which_no_raylet_answers_is_gone(watch: Any, node: str) -> None:
    assert not watch.find_gone([node]), "it has not been watched"
    wait_until_heard(watch, node, 1.0)
    assert not watch.find_gone([node])
    with socket.create_server(("127.0.0.1", 0)) as closed:
        watch._raylets[node] = closed.getsockname()
    assert watch.find_gone([node]) == [node]
    watch._own_node = node
    assert not watch.find_gone([node]), "the driver is there"


def wait_until_heard(watch: Any, node: str, now: float) -> None:
    wait_for(lambda: watch.silent({node: NO_ANSWER}, now) == [] and watch._probes[node].heard_at == now)


def probe_pid() -> int:
    (found,) = [p.pid for p in psutil.Process().children(recursive=True) if is_probe(p)]
    return found


def is_probe(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
        return "ray::NodeProbe" in "".join(process.cmdline())
    return False
