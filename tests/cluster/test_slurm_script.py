"""The batch script of Slurm, run on this machine: without Slurm, and on the Ray that the run embeds."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.files.cluster_files import CLUSTER
from helpers.machines.commands import environment
from helpers.records.runs import losses, wait_for

STAND_INS = {
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        if [ "$1" = hostname ]; then echo '192.0.2.1 192.0.2.2'; else exec "$@"; fi
    """,
    "scontrol": """
        case $1 in
            show) echo node1 ;;
            requeue) echo "$2" >>requeued ;;
        esac
    """,
    "ray": """
        echo "$@" >ray_arguments
        while [ "$1" != -- ]; do shift; done
        unset RAY_ADDRESS
        exec "${@:2}"
    """,
}


@pytest.fixture
def sbatch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``sbatch("strategy=ddp", ...)`` runs the script in ``tmp_path``, as Slurm does on the first node of job 7."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "2",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        script = ["bash", CLUSTER / "slurm" / "train.sbatch", *words]
        started.append(
            subprocess.Popen(
                script, cwd=tmp_path, env=environment(**slurm, PATH=path), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_a_run_that_meets_its_time_limit_is_requeued_and_continued(
    sbatch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    words = ("strategy=ddp", "job=sleep", "train.steps=100", "train.log_every=5", "tracking=none")
    journals = "outputs/slurm-7/*/*/metrics.jsonl"
    first = sbatch(*words, "job.forward_ms=10")
    wait_for(lambda: [f for f in tmp_path.glob(journals) if losses(f.parent)], "the first steps", timeout_s=150)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=150)
    (journal,) = tmp_path.glob(journals)
    record = journal.with_name("run.json")
    assert json.loads(record.read_text())["state"] == "killed", output
    assert (tmp_path / "requeued").read_text() == "7\n", output
    assert "--address 192.0.2.1:6379 --min-nodes 1" in (tmp_path / "ray_arguments").read_text()

    second = sbatch(*words, "job.forward_ms=0.1")
    output, _ = second.communicate(timeout=150)
    assert second.returncode == 0, output
    assert "resumed from step" in output
    assert list(tmp_path.glob(journals)) == [journal]
    assert json.loads(record.read_text())["state"] == "finished"
    assert (tmp_path / "requeued").read_text() == "7\n", "a run that has finished is not queued again"
