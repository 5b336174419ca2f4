"""Two hosts whose link is cut: two network namespaces of this machine, joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.commands import environment
from helpers.runs import events_below, wait_for, wait_for_step

BIN = Path(sys.executable).parent
HEAD, OTHER = "10.93.7.2", "10.93.7.1"
"""Ranks go by address: rank 0, which saves, is on the other host."""
PORT = 20_000 + os.getpid() % 10_000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


class Hosts:
    """``head`` and ``other``, the names of their namespaces."""

    def __init__(self, tag: str):
        self.head, self.other = f"head-{tag}", f"other-{tag}"
        self._started: list[subprocess.Popen[Any]] = []

    def connect(self) -> None:
        for host in (self.head, self.other):
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", self.head, "type", "veth", "peer", "name", "cable", "netns", self.other)
        for host, address in ((self.head, HEAD), (self.other, OTHER)):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")

    def cut(self) -> None:
        ip("-n", self.other, "link", "set", "cable", "down")

    def mend(self) -> None:
        ip("-n", self.other, "link", "set", "cable", "up")

    def start(self, host: str, *words: str | Path, cwd: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", host, *words],
            cwd=cwd,
            env=environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="c" * 40),
            stdout=(cwd / f"{len(self._started)}.out").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self._started.append(process)
        return process

    def remove(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    for member in psutil.Process(process.pid).children(recursive=True):
                        member.kill()
                process.kill()
                process.wait(10)
        for host in (self.head, self.other):
            for pid in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs the `ip` command and root, to make hosts of network namespaces")
    made = Hosts(str(os.getpid()))
    try:
        try:
            made.connect()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"this machine makes no network namespaces: {e.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_a_link_is_cut_and_mended(hosts: Hosts, tmp_path: Path) -> None:
    """The run continues at the head while the link is cut; the other side, which cannot know, writes nothing more."""
    ray_ = [BIN / "ray", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    hosts.start(hosts.head, *ray_, "--head", f"--node-ip-address={HEAD}", f"--port={PORT}",
                "--include-dashboard=false", cwd=tmp_path)  # fmt: skip
    launch = [sys.executable, "-m", "orchestrator.launch", f"cluster.address={HEAD}:{PORT}", "tracking=none"]
    asked = [*launch, "strategy.num_workers=2", "plan=true"]
    hosts.start(hosts.other, *ray_, f"--node-ip-address={OTHER}", f"--address={HEAD}:{PORT}", cwd=tmp_path)

    def both_are_there() -> bool:
        return hosts.start(hosts.head, *asked, cwd=tmp_path).wait(60) == 0

    wait_for(both_are_there, "two nodes", timeout_s=90)
    words = ["strategy.num_workers=[1,2]", "train.steps=600", "train.log_every=1", "train.eval_every=0"]
    job = ["job._target_=helpers.leisurely_job.Leisurely", "checkpoint.every=10", "job.momentum=0"]
    run = hosts.start(hosts.head, *launch, *words, *job, cwd=tmp_path)
    wait_for_step(tmp_path, 40, timeout_s=90)
    (started,) = events_below(tmp_path, "generation_started")
    cut_off = psutil.Process(int(started["workers"][0].rpartition(" ")[2]))
    assert OTHER in started["workers"][0]

    hosts.cut()
    (lost,) = wait_for(lambda: events_below(tmp_path, "worker_lost"), "a loss")
    assert "has not answered" in lost["reason"]
    (back,) = wait_for(lambda: events_below(tmp_path, "recovered"), "recovery")
    assert (back["num_workers"], back["in_place"], back["steps_lost"]) == (1, True, 0)
    hosts.mend()
    assert run.wait(120) == 0
    wait_for(lambda: not cut_off.is_running(), "the end of the worker that was cut off", timeout_s=60)
    saved = [e["step"] for e in events_below(tmp_path, "checkpoint_saved")]
    assert saved == sorted(set(saved))
    assert saved[-1] == 600
