"""What is submitted to a Ray cluster, and what is refused before anything is sent."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator import submit
from orchestrator.config.redact import Redactor
from orchestrator.driver.job_submission import make_submission
from orchestrator.driver.origin import HERE
from orchestrator.driver.packages import size_errors
from orchestrator.driver.preflight.submitted import checked
from orchestrator.records.git import GitFacts, carried, git_facts

FACTS = GitFacts(commit="abc", branch="main", dirty=False)


def test_the_job_is_the_launch_with_a_readable_id_and_the_stop_grace(tmp_path: Path) -> None:
    words = ["strategy=ddp", "name=first try", "cluster.stop_grace_s=50"]
    redactor = Redactor()
    configs = checked(words, tmp_path, redactor, sweep=False)
    job = make_submission(
        configs,
        words,
        working_dir=tmp_path,
        source=FACTS,
        suffix="1",
        origin=HERE,
        redactor=redactor,
    )
    assert job.id == "first-try-1"
    assert shlex.split(job.entrypoint) == ["python", "-m", "orchestrator.launch", *words]
    assert job.env == {
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "PYTHONUNBUFFERED": "1",
        **HERE.variables(),
        **carried(FACTS),
    }
    assert job.metadata["strategy"] == "ddp"
    assert job.metadata["git_commit"] == "abc"


def test_a_sweep_is_one_job(tmp_path: Path) -> None:
    words = ["strategy=ddp,single", "job=digits"]
    configs = checked(words, tmp_path, Redactor(), sweep=True)
    job = make_submission(
        configs, ["-m", *words], working_dir=tmp_path, source=None, suffix="1", origin=HERE, redactor=Redactor()
    )
    assert job.id == "digits-sweep-of-2-1"
    assert job.metadata["strategy"] == "ddp,single"


def test_modules_go_to_the_whole_job_whose_workers_inherit_them(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("")
    words = ["strategy=ddp", f"cluster.py_modules=[{tmp_path / 'module.py'}]"]
    configs = checked(words, tmp_path, Redactor(), sweep=False)
    job = make_submission(
        configs, words, working_dir=tmp_path, source=None, suffix="1", origin=HERE, redactor=Redactor()
    )
    assert job.py_modules == [tmp_path / "module.py"]
    assert shlex.split(job.entrypoint)[3:] == ["strategy=ddp", "cluster.py_modules=[]"]


def test_a_secret_of_the_command_is_masked_in_the_metadata(tmp_path: Path) -> None:
    words = ["tracking.uri=https://me:hunter22@host"]
    redactor = Redactor()
    configs = checked(words, tmp_path, redactor, sweep=False)
    job = make_submission(configs, words, working_dir=tmp_path, source=None, suffix="1", origin=HERE, redactor=redactor)
    assert "hunter22" not in str(job.metadata)


def test_all_errors_are_shown_at_once_and_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["strategy=ddpp", "train.stpes=3"]) == 2
    printed = capsys.readouterr().err
    assert "did you mean ddp?" in printed
    assert "did you mean train.steps?" in printed
    assert submit.main(["strategy=ddp", "cluster=local"]) == 2
    assert "cluster=local: " in capsys.readouterr().err


def test_a_directory_that_is_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    for name in ("model.bin", "ignored.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(600 << 20)  # a hole
    (tmp_path / "code.py").write_text("pass\n")
    (tmp_path / ".rayignore").write_text("ignored.bin\n")
    (error,) = size_errors(tmp_path, what="the directory")
    assert "the largest: model.bin (629 MB)" in error
    assert "ignored" not in error.partition("Name what")[0]
    (tmp_path / ".rayignore").write_text("*.bin\n")
    assert size_errors(tmp_path, what="the directory") == []


def test_restarts_are_for_a_single_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["-m", "--restarts", "2", "strategy=ddp,single"]) == 2
    assert "--restarts=2: only for a single run" in capsys.readouterr().err


def test_no_dashboard_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["--address", "http://127.0.0.1:1", "--attach", "x"]) == 2
    assert "--address=http://127.0.0.1:1: no Ray dashboard answers there" in capsys.readouterr().err
    assert submit.main(["--address", "127.0.0.1:6379", "--attach", "x"]) == 2
    assert "expected the dashboard's URL, such as http://127.0.0.1:8265" in capsys.readouterr().err


def test_a_job_has_the_git_facts_of_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_facts(tmp_path) is None
    for name, value in carried(FACTS).items():
        monkeypatch.setenv(name, value)
    assert git_facts(tmp_path) == FACTS
