"""The process of a script: its environment variables, which are those of torchrun and of its run; its start and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from orchestrator.protocol.messages import Assignment
from orchestrator.records.lock import end_with_parent
from orchestrator.script_api import CHECKPOINTS_VARIABLE, REPORT_VARIABLE
from orchestrator.worker.process.network import flight_variables
from orchestrator.worker.script.at_start import sitecustomize

IDLE_SHARE = 0.02
"""A script that uses a smaller share of a CPU, with its children, does nothing."""


class ScriptProcess:
    """A program in a process group of its own, which ends with the thread that has started it.

    Attributes:
        output: the descriptor from which its stdout and stderr are read.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        self._cpu_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None as long as the script runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the script and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def abort(self) -> None:
        """Send SIGABRT to the script alone, at which a Python process with a fault handler writes its stacks."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGABRT)

    def close(self) -> None:
        """Kill the script with the processes that it has started, unless it has ended in order: they may go on then."""
        if self.exit_code() != 0:
            self.send(signal.SIGKILL)
            self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def has_worked(self, seconds: float) -> bool:
        """Return whether it has computed in the ``seconds`` since the last call, with its children."""
        used_s = 0.0
        with contextlib.suppress(psutil.Error):
            script = psutil.Process(self._process.pid)
            for process in (script, *script.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    used_s += times.user + times.system
        worked_s, self._cpu_s = used_s - self._cpu_s, used_s
        return worked_s > IDLE_SHARE * seconds


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def installed_packages(paths: Iterable[str]) -> list[str]:
    """Return the directories in ``sys.path`` with packages that only this worker has installed, for ``cluster.pip``."""
    own = (Path(sys.prefix), Path(sys.base_prefix))
    return [p for p in paths if Path(p).name == "site-packages" and not any(Path(p).is_relative_to(o) for o in own)]


def script_environment(
    own: Mapping[str, str],
    assignment: Assignment,
    *,
    packages: Sequence[str] = (),
    reports: Path,
    errors: Path,
    checkpoints: Path,
    record: Path | None,
) -> dict[str, str]:
    """Return the environment of the script of one rank.

    Args:
        own: the environment of the worker.
        assignment: the generation, and the rank in it.
        packages: the directories of :func:`installed_packages`.
        reports: the socket for the reports of the script.
        errors: where a function that torch's ``record`` decorates writes its error.
        checkpoints: the directory that restarts find again.
        record: the socket on which a script in Python tells what it has enqueued; None for any other program.
    """
    places, rank = assignment.places, assignment.global_rank
    node = places[rank].node
    local = [r for r, place in enumerate(places) if place.node == node]
    world_size, num_nodes = str(len(places)), str(len({place.node for place in places}))
    recovery = assignment.config.recovery
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local.index(rank)),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": assignment.store_host,
        "MASTER_PORT": str(assignment.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of the generation, so that no port has to be found free
        "TORCHELASTIC_RUN_ID": assignment.run_uid,
        "TORCHELASTIC_RESTART_COUNT": str(assignment.failures),
        "TORCHELASTIC_MAX_RESTARTS": str(recovery.max_failures),
        "TORCHELASTIC_ERROR_FILE": str(errors),
        REPORT_VARIABLE: str(reports),
        CHECKPOINTS_VARIABLE: str(checkpoints),
    }
    if "OMP_NUM_THREADS" not in assignment.config.cluster.env:
        values["OMP_NUM_THREADS"] = str(assignment.plan.threads_per_worker)
    paths = list(packages)
    if record is not None:
        values[sitecustomize.RECORD_VARIABLE] = str(record)
        paths.insert(0, str(Path(sitecustomize.__file__).parent))  # which has to be the first
    if paths:
        values["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [own.get("PYTHONPATH")])])
    tracking = assignment.config.tracking
    if rank == 0 and assignment.tracked_as is not None and tracking.uri is not None:
        values |= {
            "MLFLOW_TRACKING_URI": tracking.uri,
            "MLFLOW_EXPERIMENT_NAME": tracking.experiment,
            "MLFLOW_RUN_ID": assignment.tracked_as,
        }
    gpus = [places[r].gpu for r in local]
    if None not in gpus:
        values[VISIBLE_GPUS] = ",".join(map(str, gpus))  # torchrun's scripts choose theirs by LOCAL_RANK
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**defaults, **flight_variables(own), **own, **values}
