"""Hosts whose link is cut: a run goes on without them, and its other side writes nothing more."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.machines.hosts import Host, hosts, start_ray
from helpers.records.runs import events_below, wait_for, wait_for_step

WORDS = ("tracking=none", "train.log_every=1", "train.eval_every=0", "checkpoint.every=10")
JOB = ("job._target_=helpers.jobs.leisurely_job.Leisurely", "job.momentum=0")
STEP_WITH_PROBES = 200
"""At this step, some seconds after the first one, the probes of all nodes are up."""


def launched(host: Host, *overrides: str, cwd: Path) -> subprocess.Popen[str]:
    """Our command on ``host``, whose output goes to a file in ``cwd``."""
    words = (sys.executable, "-m", "orchestrator.launch", "cluster=auto", *WORDS, *JOB, *overrides)
    with (cwd / "output").open("w") as output:
        process: subprocess.Popen[str] = host.start(*words, cwd=cwd, env={}, stdout=output, stderr=subprocess.STDOUT)
    return process


def recovered(folder: Path) -> dict[str, Any]:
    """The recovery of the run below ``folder``, as soon as there is one."""
    (event,) = wait_for(lambda: events_below(folder, "recovered"), "recovery")
    assert isinstance(event, dict)
    return event


@pytest.mark.campaign
def test_a_link_is_cut_and_mended(tmp_path: Path) -> None:
    """The run continues at the head while the link is cut; the other side, which cannot know, writes nothing more."""
    with hosts("other", "head") as (other, head):
        start_ray({head: 1, other: 1})
        run = launched(head, "strategy.num_workers=[1,2]", "train.steps=1000", cwd=tmp_path)
        wait_for_step(tmp_path, STEP_WITH_PROBES, timeout_s=90)
        (started,) = events_below(tmp_path, "generation_started")
        place, _, pid = started["workers"][0].rpartition(" ")
        assert other.address in place, "ranks go by address: rank 0, which saves, is on the other host"

        other.script("ip link set eth0 down")
        back = recovered(tmp_path)
        assert (back["num_workers"], back["in_place"], back["steps_lost"]) == (1, True, 0)
        (lost,) = events_below(tmp_path, "worker_lost")
        assert "has not answered" in lost["reason"]
        other.script("ip link set eth0 up")
        assert run.wait(120) == 0, (tmp_path / "output").read_text()
        wait_for(lambda: other.run("test", "-d", f"/proc/{pid}")[0] == 1, "the end of the worker that was cut off")
    saved = [e["step"] for e in events_below(tmp_path, "checkpoint_saved")]
    assert saved == sorted(saved)
    assert saved[-1] == 1000


@pytest.mark.campaign
def test_a_run_of_a_fixed_size_leaves_a_silent_host_at_once(tmp_path: Path) -> None:
    """Ray, which would find out after a minute that the host is dead, never does so here."""
    with hosts("first", "second", "third") as all_hosts:
        patient = {"RAY_health_check_failure_threshold": "10000"}
        start_ray(dict.fromkeys(all_hosts, 1), env=dict.fromkeys(all_hosts, patient))
        first, *others = all_hosts
        run = launched(first, "strategy.num_workers=2", "train.steps=100000", cwd=tmp_path)
        wait_for_step(tmp_path, STEP_WITH_PROBES, timeout_s=90)
        (started,) = events_below(tmp_path, "generation_started")
        before = {host for host in all_hosts if any(host.address in worker for worker in started["workers"])}
        cut_off = next(host for host in others if host in before)
        cut_off.script("ip link set eth0 down")
        back = recovered(tmp_path)
    run.wait(10)
    assert (back["num_workers"], back["in_place"], back["steps_lost"]) == (2, True, 0)
    _, again = events_below(tmp_path, "generation_started")
    (free,) = set(all_hosts) - before
    assert any(free.address in worker for worker in again["workers"])
