"""Where the code of a job comes from: its file, its commit, and who runs it."""

from __future__ import annotations

import getpass
import inspect
import os
from pathlib import Path

from orchestrator.job import Job
from orchestrator.records.git import VARIABLE, git_facts, name_in_repository


def source_of(job: Job) -> dict[str, str]:
    """Return the origin of the code of ``job``, under MLflow's names without their prefix ``mlflow.``.

    Git's values are left out if no commit has the job's file, or if git is missing or slow.
    """
    target = f"{type(job).__module__}.{type(job).__qualname__}"
    found = {"user": _user(), "source.type": "LOCAL", "source.name": target}
    try:
        file = Path(inspect.getfile(type(job))).resolve()
    except (OSError, TypeError):  # a class of a notebook or of standard input
        return found
    name = name_in_repository(file)
    facts = git_facts(file.parent) if name or VARIABLE in os.environ else None
    if facts is None:
        return found
    return {
        **found,
        **({"source.name": name} if name else {}),
        "source.git.commit": facts.commit,
        "source.git.branch": facts.branch,
        "source.git.dirty": str(facts.dirty).lower(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "unknown"
