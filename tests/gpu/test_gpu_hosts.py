"""Hosts with networks of their own that share a GPU: NCCL connects them by sockets."""

import threading
from pathlib import Path

import pytest

from helpers.machines.hosts import Host, hosts, start_ray
from helpers.machines.shared_gpu import variables_of_host
from helpers.records.runs import events, wait_for_step

STEPS = 400
WORDS = (
    "tracking=none",
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=0",
    "train.precision=fp32",
    "strategy=ddp",
    "strategy.num_workers=[1,2]",
    "job._target_=helpers.jobs.leisurely_job.Leisurely",
    "job.pause_ms=50",
)


@pytest.mark.timeout(400)
def test_a_run_on_one_host_grows_to_another(tmp_path: Path) -> None:
    """If it fails, NCCL keeps an address of the first generation that another host cannot reach."""
    with hosts("first", "second") as (first, second):
        env = {host: variables_of_host(host.name) for host in (first, second)}
        start_ray({first: 1}, env)
        joining = threading.Thread(target=join_later, args=(tmp_path, first, second, env), daemon=True)
        joining.start()
        code, output = first.launch(*WORDS, cwd=tmp_path, timeout_s=300, **env[first])
        joining.join(10)
    assert code == 0, output
    (record,) = tmp_path.glob("outputs/*/*/run.json")
    run_dir = record.parent
    assert [len(e["workers"]) for e in events(run_dir, "generation_started")] == [1, 2]
    assert [(e["planned"], e["in_place"]) for e in events(run_dir, "recovered")] == [("growing", True)]


def join_later(folder: Path, first: Host, second: Host, env: dict[Host, dict[str, str]]) -> None:
    wait_for_step(folder, 20)
    start_ray({second: 1}, env, head=first)
