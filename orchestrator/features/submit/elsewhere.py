"""A verb that acts on the runs of a cluster, which is run there as a job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO, cast

import orchestrator
from orchestrator.driver.process.origin import origin_of_submission
from orchestrator.features.submit.job_submission import JobServer, Submission
from orchestrator.features.submit.marked_output import MarkedLog

_PACKAGE = Path(orchestrator.__file__).resolve().parent
INSTALLED_THERE = ("doctor",)
"""The verbs about the installation of the cluster itself, and not about its runs."""


def run_as_job(verb: str, words: Sequence[str], address: str) -> int:
    """Run ``orchestrator <verb> <words>`` on the head node of a cluster.

    It runs with the code of this process, or with the code of the head if it is in :data:`INSTALLED_THERE`.

    Args:
        verb: the name of the verb.
        words: its arguments, without ``--address``.
        address: the URL of Ray's dashboard.

    Returns:
        The exit code of the verb; 143 if someone has stopped the job.

    Raises:
        ConfigError: there is no cluster, or it refuses the job.
        ConnectionError: the cluster does not answer any more.
    """
    server = JobServer(address)
    origin = origin_of_submission(
        (), given_address=address, address=address, working_dir=".", restarts=None, ray=server.ray_command
    )
    job = Submission(
        id=f"orchestrator-{verb}-{datetime.now():%m%d-%H%M%S}-{os.urandom(2).hex()}",
        entrypoint=shlex.join(["python", "-m", "orchestrator.verb_in_job", verb, *words]),
        py_modules=[] if verb in INSTALLED_THERE else [_PACKAGE],
        env={**origin.variables(), **_terminal()},
        metadata={"job_name": f"orchestrator {verb}"},
    )
    log = MarkedLog()
    try:
        server.submit(job)
        exit_code = server.follow(job.id, cast(TextIO, log), is_new=True)
    finally:
        server.remove(job.id)
    log.end()
    if exit_code != 0 and not log.has_marks:
        sys.stderr.writelines(f"{line}\n" for line in log.preamble)
    return exit_code


def _terminal() -> dict[str, str]:
    """Variables that let the verb write for the terminal here."""
    width = {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}
    return {"PYTHONUTF8": "1", **width}
