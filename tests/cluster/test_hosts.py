"""Training across hosts that have their own networks, names and processes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.files.wheels import make_wheel
from helpers.machines.hosts import NAME_SERVER, Host, hosts, start_ray
from helpers.records.runs import events, losses

WORDS = ("tracking=none", "train.steps=10", "train.log_every=1", "train.eval_every=0")
LONGEST_RENDEZVOUS_S = 5.0
"""Less than the look-up of one name, for which the name server of the hosts is asked twice for 5 s."""
PROBE = """
import contextlib, os, socket, subprocess, sys
from orchestrator.features.doctor.network_probe import NetworkProbe

address, probe, ports = os.environ["ADDRESS"], NetworkProbe(), sys.argv[1:]
if not ports:
    questions = socket.socket(type=socket.SOCK_DGRAM)
    questions.bind((os.environ["NAME_SERVER"], 53))
    questions.setblocking(False)
port = int(ports[0]) if ports else probe.open_store(address, 60)
other = None if ports else subprocess.Popen([sys.executable, "-c", os.environ["PROBE"], str(port)])
probe.measure(rank=len(ports), world_size=2, store=(address, port), address=address, on_gpu=False, timeout_s=60)
if other is not None:
    assert other.wait() == 0
    with contextlib.suppress(BlockingIOError):
        print("asked", questions.recv(500))
"""
"""Two processes form a group where this one is the name server."""


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Host, Host]]:
    """A cluster of a host with three CPUs and one with a single CPU."""
    with hosts("first", "second") as (first, second):
        start_ray({first: 3, second: 1}, env={second: {"NCCL_ALGO": "Ring"}})
        yield first, second


def trained(host: Host, *overrides: str, cwd: Path, **env: str) -> Path:
    """Train with the command on ``host``; returns the run directory."""
    code, output = host.launch(*WORDS, *overrides, cwd=cwd, **env)
    assert code == 0, output
    return Path(next(line for line in output.splitlines() if line.startswith("run directory: ")).partition(": ")[2])


@pytest.fixture(scope="module")
def ddp_run(two: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``ddp`` on both hosts, whose ranks print environment variables."""
    return trained(
        two[0],
        "strategy=ddp",
        "strategy.num_workers=4",
        "job._target_=helpers.jobs.faulty_jobs.Environed",
        "job.variables=[NCCL_DEBUG,NCCL_ALGO,LANG,OWN_NAME,GLOO_SOCKET_IFNAME]",
        "cluster.env.LANG=C.utf8",
        "cluster.env.OWN_NAME=null",
        cwd=tmp_path_factory.mktemp("ddp"),
        NCCL_DEBUG="WARN",
        NCCL_ALGO="Tree",
        OWN_NAME="driver",
    )


@pytest.mark.campaign
def test_ranks_on_uneven_hosts_find_each_other_and_learn_what_one_process_learns(
    two: tuple[Host, Host], ddp_run: Path, tmp_path: Path
) -> None:
    first, second = two
    expected = losses(trained(first, "strategy=single", cwd=tmp_path))
    for run in (ddp_run, trained(first, "strategy=ddp_pipeline", "strategy.num_workers=4", cwd=tmp_path)):
        (started,) = events(run, "generation_started")
        nodes = [worker.partition(" pid ")[0] for worker in started["workers"]]
        assert nodes == [*[f"first ({first.address})"] * 3, f"second ({second.address})"]
        summary: dict[str, Any] = json.loads((run / "run.json").read_text())["summary"]
        assert summary["startup"]["rendezvous_s"] < LONGEST_RENDEZVOUS_S
        assert losses(run) == pytest.approx(expected, rel=1e-3), run


@pytest.mark.campaign
def test_environment_variables_reach_the_ranks_of_all_hosts(ddp_run: Path) -> None:
    """What Ray was started with on a host stays."""
    for rank, algorithm in enumerate(["Tree", "Tree", "Tree", "Ring"]):
        printed = (ddp_run / "logs" / f"rank-{rank}.log").read_text()
        assert f"NCCL_DEBUG=WARN NCCL_ALGO={algorithm} LANG=C.utf8 OWN_NAME=driver GLOO_SOCKET_IFNAME=eth0" in printed


@pytest.mark.campaign
def test_workers_without_room_are_refused_with_what_each_host_has(two: tuple[Host, Host], tmp_path: Path) -> None:
    code, output = two[0].launch(*WORDS, "strategy=ddp", "strategy.num_workers=5", cwd=tmp_path)
    assert code == 2, output
    assert "3 CPUs and 0 GPUs" in output
    assert "1 CPUs and 0 GPUs" in output


@pytest.mark.campaign
def test_a_failure_names_the_host(two: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = two
    job = ("job._target_=helpers.jobs.faulty_jobs.Faulty", "job.rank=3", "recovery.max_failures=0")
    code, output = first.launch(*WORDS, "strategy=ddp", "strategy.num_workers=4", *job, cwd=tmp_path)
    assert code == 1, output
    assert output.count(f"warning: the Ray on {first.address} asks for no token") == 1
    failed = f"rank 3 on second ({second.address}) failed at step 4: RuntimeError: the planted fault"
    assert failed in output.splitlines()
    assert f"failed: {failed.replace(' failed', '')}" in output.splitlines()[-6:]
    (record,) = tmp_path.glob("outputs/*/*/run.json")
    assert json.loads(record.read_text())["reason"].startswith(failed)


def test_the_doctor_asks_no_name_server_for_the_names_of_nodes() -> None:
    """One that does not answer would delay its measurement of the network by 10 s."""
    with hosts("alone") as (host,):
        host.script(f"ip address add {NAME_SERVER}/24 dev eth0")
        variables = {"PROBE": PROBE, "ADDRESS": host.address, "NAME_SERVER": NAME_SERVER}
        code, output = host.run(sys.executable, "-c", PROBE, **variables)
    assert code == 0, output
    assert "asked" not in output


@pytest.mark.campaign
def test_a_host_on_which_pip_fails_is_named_with_its_reason(two: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = two
    make_wheel(tmp_path, "wheel_of_first")
    second.mount_empty(tmp_path)
    packages = f"cluster.pip=['--no-index','--find-links={tmp_path}',wheel_of_first]"
    code, output = first.launch(*WORDS, "strategy=ddp", "strategy.num_workers=4", packages, cwd=tmp_path)
    assert code == 1, output
    assert (
        "cluster.pip cannot be installed on second: ERROR: No matching distribution found for wheel_of_first" in output
    )
    assert "Traceback" not in output
