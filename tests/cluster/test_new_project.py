"""A project of ``orchestrator new`` works at once: its test, and the command that it names."""

import subprocess
import sys
from pathlib import Path

from orchestrator.new import main


def test_the_commands_that_a_new_project_names_work(tmp_path: Path) -> None:
    project = tmp_path / "two_spirals"
    assert main([str(project)]) == 0
    short = ("strategy=ddp", "strategy.num_workers=2", "train.steps=20", "tracking=none")
    for words in (
        ["pytest", "-q", "-p", "no:cacheprovider"],
        ["orchestrator.launch", "job=two_spirals", *short],
    ):
        ran = subprocess.run(
            [sys.executable, "-m", *words], cwd=project, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ("2 passed" if "pytest" in words else "finished: 20 steps") in ran.stdout
