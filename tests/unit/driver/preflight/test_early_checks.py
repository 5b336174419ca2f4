"""What is refused before torch is imported, and what is left to the whole check."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.driver.preflight.early_checks import refuse_early
from orchestrator.records.run_dir import RunDir

JOB = """
from dataclasses import dataclass, field
from orchestrator import Job

@dataclass(frozen=True, kw_only=True)
class Line(Job):
    width: int
    name: str | None = None
    lr: float = None
    on: bool = True
    path: "int" = 1
    sizes: list[int] = field(default_factory=list)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(JOB)
    (tmp_path / "broken.py").write_text("def (")
    run = RunDir(tmp_path / "outputs" / "2026-05-01" / "12-30-01-alice")
    run.path.mkdir(parents=True)
    run.update_record(name="alice", state="finished")
    other = RunDir(tmp_path / "outputs" / "2026-05-01" / "12-30-02-carol")
    other.path.mkdir(parents=True)
    command = "python -m orchestrator.launch job=mine.Line job.width=3 train.steps=9 resume=never"
    other.update_record(name="carol", state="failed", command=command)
    other.config_file.write_text("job:\n  _target_: mine.Line\n  width: 3\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = (
    pytest.param("train.stps=3 strategy=dpp train.steps=0", marks=pytest.mark.needs("asynchronous", "scripts")),
    "job=mine.Line job.width=x job.lr=y job.on=7 job.wdth=3 strategy=single",
    "job=nothing.Line",
    pytest.param("strategy=script job.script=nothing.py", marks=pytest.mark.needs("scripts")),
    pytest.param("strategy=script job.script=broken.py job.kind=file", marks=pytest.mark.needs("scripts")),
    "resume=bob",
    "evaluate=bob/checkpoints/best",
    "start_from=outputs/2026-05-01/12-30-01-bob",
    *("resume=latest", "resume=true", "resume=best", "resume=null", "start_from=best", "evaluate=latest"),
    "resume=carol train.steps=20 seed=1",
    "resume=last",
    "evaluate=carol",
    "start_from=carol",
    pytest.param("tracking.uri=foo://x output_dir=/proc/x resume=bob", marks=pytest.mark.needs("tracking")),
    "tracking.sinks=[tensorbord]",
    "-- seed=1 | seed=x",
)


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_at_once(words: str, golden: Golden, directory: Path) -> None:
    runs = [run.split() for run in words.removeprefix("-- ").split("|")]
    with golden.raises(ConfigError, HERE=directory):
        refuse_early(runs, Redactor(), starts_here=True)


@pytest.mark.parametrize(
    "words",
    [
        "job=mine.Line job.width=3 job.name=3 job.lr=null job.path=x job.sizes=7",
        "job=mine.Line job.width=3.0 job.lr=1",
        "job=broken.Line job.x=1",
        "job=mine.other.Line",
        "job=nothing.Line cluster.py_modules=[elsewhere]",
        "resume=alice",
        "resume=carol job=mine.Other job.width=3",
        "resume=auto",
        "evaluate=outputs/2026-05-01/12-30-01-alice/checkpoints/step-00000007",
        "resume=memory://bucket/runs/a/b output_dir=memory://bucket/runs",
    ],
)
def test_what_only_an_import_or_a_store_can_tell_is_left_to_the_whole_check(words: str) -> None:
    refuse_early([words.split()], Redactor(), starts_here=True)


def test_what_starts_elsewhere_finds_its_runs_there() -> None:
    refuse_early([["resume=bob", "output_dir=/proc/x"]], Redactor(), starts_here=False)


@pytest.mark.slow
def test_a_refusal_needs_neither_torch_nor_ray() -> None:
    code = f"""
import json, sys
from orchestrator.launch import main
codes = [main(words.split()) for words in {REFUSED[:-1]!r}]
print(json.dumps([codes, sorted({{"torch", "ray", "mlflow", "numpy"}} & sys.modules.keys())]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [[2] * (len(REFUSED) - 1), []]
