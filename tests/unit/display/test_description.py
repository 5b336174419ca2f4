"""The end of a run in words, and where the code of a job comes from."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.files.golden import Golden
from jobs.digits import Digits
from orchestrator.display.run_end import describe_run
from orchestrator.driver.preflight.record import source_of
from orchestrator.strategies.external.job import Script

MESH = {"data_parallel_size": 2, "pipeline_parallel_size": 1, "num_shards": 0}
RECORD: dict[str, Any] = {
    "job": "digits",
    "strategy": "ddp",
    "started": 100.0,
    "ended": 103.3,
    "plan": {"device": "cpu", "mesh": MESH},
}
SUMMARY = {"steps": 200, "samples_per_s": 9016.3, "step_ms_p50": 6.5657, "final_loss": 0.030958, "restarts": 0}


def test_a_run_that_finished(golden: Golden) -> None:
    summary = {
        **SUMMARY,
        "val_accuracy": 0.98328,
        "limit": "limited by gradients; try bf16",
        "startup_s": 1.86,
        "waited_s": 0.2,
        "queue_s": 0.1,
    }
    golden("page/finished", describe_run(RECORD, summary, status="FINISHED", reason=""))


def test_a_pipeline_that_recovered_and_a_run_that_failed(golden: Golden) -> None:
    plan = {"device": "cuda", "mesh": {"data_parallel_size": 2, "pipeline_parallel_size": 4}}
    summary = {**SUMMARY, "bubble_pct": 31.2, "bubble_theory_pct": 20.0}
    healed = {**summary, "restarts": 2, "recovery_s": [0.53, 1.21], "steps_lost": 1}
    text = describe_run({**RECORD, "plan": plan, "strategy": "ddp_pipeline"}, healed, status="FINISHED", reason="")
    golden.says(text)
    servers = {"device": "cpu", "mesh": {**MESH, "num_shards": 1}}
    changed = {"source": {"source.git.dirty": "true"}}
    golden.says(describe_run({**RECORD, **changed}, SUMMARY, status="FINISHED", reason=""))
    served = {**RECORD, "plan": servers}
    failed = describe_run(served, {"steps": 1}, status="FAILED", reason="rank 1: loss is NaN\nat x")
    golden.says(failed)


def test_a_resumed_run_says_so() -> None:
    record = {**RECORD, "tags": {"resumed_from_step": "100"}}
    text = describe_run(record, SUMMARY, status="FINISHED", reason="")
    assert "finished in 3.3s. It was resumed from step 100." in text.replace(" after 200 steps", "").replace(
        " 200 steps", ""
    )


def load(path: Path, *, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def test_the_commit_is_that_of_the_jobs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    file = tmp_path / "tasks" / "mine.py"
    file.write_text("from jobs.digits import Digits\nclass Mine(Digits): pass\n")
    module = load(file, name="mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    job = module.Mine(hidden=8, depth=1, lr=0.1, momentum=0.9)
    assert "source.git.commit" not in source_of(job)
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "without the file")
    found = source_of(job)
    assert found["source.name"] == "mine.Mine"
    assert "source.git.commit" not in found, "that commit does not have the file"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "with the file")
    found = source_of(job)
    assert found["source.name"] == "tasks/mine.py"
    assert found["source.git.commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert (found["source.git.branch"], found["source.git.dirty"]) == ("main", "false")
    file.write_text(file.read_text() + "# changed\n")
    assert source_of(job)["source.git.dirty"] == "true"


def test_the_commit_of_a_script_is_that_of_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print()\n")
    monkeypatch.chdir(tmp_path / "src")
    job = Script(script="train.py")
    assert source_of(job)["source.name"] == "train.py"
    assert "source.git.commit" not in source_of(job), "nor that of this package"
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "with the file")
    found = source_of(job)
    assert (found["source.name"], found["source.git.commit"]) == ("src/train.py", git(tmp_path, "rev-parse", "HEAD"))
    other = source_of(Script(script="my.module", kind="module"))
    assert other["source.name"] == "my.module"
    assert "source.git.commit" not in other


def test_a_run_does_not_need_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert source_of(Digits(hidden=8, depth=1, lr=0.1, momentum=0.9))["source.name"] == "jobs.digits.Digits"
