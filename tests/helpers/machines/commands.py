"""Our command as a process of its own, which this process lends neither its Ray nor its path."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.records.runs import PYTHONPATH


def environment(**changes: str) -> dict[str, str]:
    """That of this process without the variables of Ray, with the jobs of ``helpers`` on the path, and ``changes``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_worker_niceness": "0", "PYTHONPATH": PYTHONPATH, **changes}


def start(*overrides: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """Start ``python -m orchestrator.launch`` in ``cwd`` and in a session of its own, with output and errors in one."""
    return subprocess.Popen(_command(overrides), **_options(cwd, env), start_new_session=True)


def run(*overrides: str, cwd: Path, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m orchestrator.launch`` in ``cwd`` to its end, with output and errors in one."""
    return subprocess.run(_command(overrides), **_options(cwd, env), timeout=timeout_s)


def _command(overrides: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "orchestrator.launch", *overrides]


def _options(cwd: Path, env: dict[str, str]) -> dict[str, Any]:
    return {
        "cwd": cwd, "env": environment(**env), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True,
    }  # fmt: skip
