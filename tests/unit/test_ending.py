"""What the end of a run suggests to type next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.driver.ending import RunEnding
from orchestrator.driver.origin import HERE
from orchestrator.driver.result import RunResult
from orchestrator.records import run_dir as rundir


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_is_offered_to_resume_only_if_it_has_a_checkpoint(saved: bool, tmp_path: Path) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    if saved:
        (run_dir.checkpoints / "step-00000003").mkdir(parents=True)
        (run_dir.checkpoints / "step-00000003" / "manifest.json").write_text("{}")
    nothing: Any = None
    untracked: Any = SimpleNamespace(uri=None)
    ending = RunEnding(
        plan=nothing,
        run_dir=run_dir,
        tracking=untracked,
        uploader=nothing,
        records=nothing,
        journal=nothing,
        console=nothing,
        redactor=nothing,
        resume_command="continue it",
        origin=HERE,
    )
    failed = RunResult(status="FAILED", exit_code=1, reason="", run_dir=run_dir.path, url=None)
    assert ("continue it" in ending._next_commands(failed, is_uploaded=True)) == saved
