"""The command, started in the directory of a test and ended with it."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.machines import commands


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``launch("strategy=ddp", ...)`` starts the command in an empty directory."""
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str, **env: str) -> subprocess.Popen[str]:
        started.append(commands.start(*overrides, cwd=tmp_path, **env))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(10)
