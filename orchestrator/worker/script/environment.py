"""The environment variables of a rank's script: those that torchrun sets, and those of its run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.protocol.messages import Assignment
from orchestrator.script_api import CHECKPOINTS_VARIABLE, REPORT_VARIABLE
from orchestrator.worker.process.nccl_variables import flight_variables
from orchestrator.worker.script.at_start import sitecustomize

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
