"""Which version of the code runs: the facts of its git repository."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "ORCHESTRATOR_GIT"
"""Carries the facts to where the code has no repository, such as the directory of a submitted job."""
_TIMEOUT_S = 5.0


def git_facts(directory: Path) -> Mapping[str, str]:
    """Return ``git_commit``, ``git_branch`` and ``git_dirty`` (``true`` or ``false``) of the code in ``directory``.

    Empty without a repository or without git. A submitted job has the facts of the directory that it came from.
    """
    if carried := os.environ.get(VARIABLE):
        try:
            return {str(k): str(v) for k, v in json.loads(carried).items()}
        except (ValueError, AttributeError):
            return {}
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD")
    return {"git_commit": commit, "git_branch": branch or "", "git_dirty": str(changed != "").lower()}


def carried(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that carries ``facts`` to a job; nothing if there are none."""
    return {VARIABLE: json.dumps(dict(facts))} if facts else {}


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=directory, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
