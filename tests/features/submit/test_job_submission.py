"""What is submitted to a Ray cluster, and what is refused before anything is sent."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path, PurePath
from typing import Any

import pytest

from helpers.files.golden import Golden
from helpers.machines.commands import environment
from helpers.servers.job_server import job_server
from orchestrator import doctor, queue, submit
from orchestrator.compat.ray.code_packages import make_package
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.driver.code.shipped_code import size_errors
from orchestrator.driver.process.origin import HERE, who_asks
from orchestrator.features.submit.job_submission import JobServer, Submission, make_submission
from orchestrator.features.submit.submitted import checked
from orchestrator.records.git import GitFacts, carried, git_facts

pytestmark = pytest.mark.slow  # processes that follow a job

FACTS = GitFacts(commit="abc", branch="main", dirty=False)


PROJECT = {
    "own_job.py": """
from dataclasses import dataclass
from jobs.digits import Digits
from own_parts.inner import layers

@dataclass(frozen=True, kw_only=True)
class Own(Digits):
    texts: str = "data/texts.txt"
    cache: str = "cache"
""",
    "own_parts/__init__.py": "",
    "own_parts/inner.py": "layers = 2",
    "data/texts.txt": "a text",
    "cache/left": "from before",
}


def test_files_of_the_user_travel_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job finds them there, whatever is in the directory of the command."""
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "code"
    for path in ("code/conf/job/there.yaml", "code/own/job/named.yaml", "conf/job/here.yaml"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("_target_: jobs.toy.Toy\n")

    def target(*words: str) -> str:
        (config,) = checked(words, code, Redactor(), sweep=False)
        return config.job.target

    assert target("job=there") == target("--config-dir=own", "job=named") == "jobs.toy.Toy"
    (code / ".rayignore").write_text("conf\n")
    for words, error in [
        (["job=here"], "job=here: unknown"),
        (["--config-dir=../conf", "job=here"], "--config-dir=../conf: does not travel"),
        (["job=there"], f"conf/job/there.yaml: {code}/conf/job/there.yaml does not travel"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(error)):
            target(*words)


@pytest.mark.parametrize("ignored", ["own_job.py", "own_*/inner.py", "own_parts", "*.txt", ""])
@pytest.mark.parametrize("ignore_file", [".gitignore", ".rayignore"])
def test_what_an_ignore_file_keeps_from_travelling_is_refused_if_the_job_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: str, ignore_file: str
) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ignore_file).write_text(f"cache\n{ignored}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    missing = [name for name in PROJECT if ignored and name != "cache/left" and PurePath(name).match(ignored)]
    missing += [name for name in PROJECT if ignored == "own_parts" and name.startswith("own_parts/")]

    def errors() -> list[str]:
        try:
            checked(["strategy=single", "job._target_=own_job.Own"], tmp_path, Redactor(), sweep=False)
        except ConfigError as e:
            return list(e.errors)
        finally:
            for name in [name for name in sys.modules if name.startswith("own_")]:
                del sys.modules[name]
        return []

    refused = errors()
    assert [e.split(" does not travel")[0] for e in refused] == [
        f"{'job.texts=data/texts.txt' if name.endswith('.txt') else 'job._target_=own_job.Own'}: {tmp_path / name}"
        for name in sorted(missing)
    ]
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    assert errors() == (refused if ignore_file == ".rayignore" else [])
    monkeypatch.delenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE")
    monkeypatch.chdir(tmp_path.parent)
    assert [str(tmp_path / "own_job.py") in e for e in errors()] == ([True] if ignored == "own_job.py" else [])


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
        variables={"MLFLOW_TRACKING_URI": "http://host:5000"},
    )
    assert job.id == "first-try-1"
    assert shlex.split(job.entrypoint) == ["python", "-m", "orchestrator.launch", *words]
    assert job.env == {
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "PYTHONUNBUFFERED": "1",
        **HERE.variables(),
        **carried(FACTS),
        "MLFLOW_TRACKING_URI": "http://host:5000",
    }
    assert job.metadata["strategy"] == "ddp"
    assert job.metadata["job_name"] == job.metadata["run"]
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


def with_holes(path: Path, size_mib: int) -> Path:
    """A file of this size, which takes no space."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_mib << 20)
    return path


def test_a_directory_that_is_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    """Ray's dashboard takes 100 MiB, and leaves out what no job needs."""
    for name in ("model.bin", "ignored.bin", ".git/pack", "__pycache__/code.pyc"):
        with_holes(tmp_path / name, 150)
    (tmp_path / "code.py").write_text("pass\n")
    (tmp_path / ".rayignore").write_text("ignored.bin\n")
    with pytest.raises(ConfigError) as refused:
        checked(["strategy=ddp"], tmp_path, Redactor(), sweep=False)
    (error,) = refused.value.errors
    sizes = "157 MB in 3 files, and Ray takes less than 105 MB"
    assert error.startswith(f"--working-dir={tmp_path}: {sizes}; the largest: model.bin (157 MB)")
    assert "ignored.bin" not in error
    (tmp_path / ".rayignore").write_text("*.bin\n")
    assert checked(["strategy=ddp"], tmp_path, Redactor(), sweep=False)


def test_many_small_files_are_counted_with_their_entries_in_the_package(tmp_path: Path) -> None:
    files = [tmp_path / "data" / f"{number:>0100}" for number in range(50)]
    for file in files:
        with_holes(file, 0)
    package = make_package(tmp_path / "data", tmp_path / "data.zip")
    assert size_errors(tmp_path / "data", what="it", limit=package.stat().st_size)
    assert size_errors(tmp_path / "data", what="it", limit=package.stat().st_size * 11 // 10) == []


@pytest.mark.parametrize("name", ["library/model.bin", "wheel-1.0-py3-none-any.whl"])
def test_a_module_that_is_too_large_is_refused(name: str, tmp_path: Path) -> None:
    module = with_holes(tmp_path / name, 150).relative_to(tmp_path).parts[0]
    working_dir = tmp_path / "code"
    working_dir.mkdir()
    with pytest.raises(ConfigError) as refused:
        checked(["strategy=ddp", f"cluster.py_modules=[{tmp_path / module}]"], working_dir, Redactor(), sweep=False)
    (error,) = refused.value.errors
    assert error.startswith(f"cluster.py_modules={tmp_path / module}: 157 MB in 1 file, ")


def test_compiled_files_do_not_travel_so_the_same_code_travels_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each verb on a cluster brings our package along, whose compiled files are written as it runs."""
    library, working_dir = tmp_path / "library", tmp_path / "code"
    for directory in (library, working_dir):
        (directory / "deep").mkdir(parents=True)
        (directory / "deep" / "code.py").write_text(f"# {directory.name}\n")
    with job_server() as dashboard:
        for number in range(2):
            for directory in (library, working_dir):
                (directory / "deep" / "__pycache__").mkdir(exist_ok=True)
                (directory / "deep" / "__pycache__" / "code.pyc").write_text(f"{number}")
            job = Submission(id=f"job-{number}", entrypoint="true", working_dir=working_dir, py_modules=[library])
            JobServer(dashboard.url).submit(job)
        assert len(dashboard.jobs) == 2
        assert sorted(dashboard.files()) == [["deep/code.py"], ["library/deep/code.py"]]
    assert not caplog.records, "what Ray logs of the packages is not for users"


def test_a_single_file_travels_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("pass\n")
    with job_server() as dashboard:
        JobServer(dashboard.url).submit(Submission(id="one", entrypoint="true", py_modules=[tmp_path / "module.py"]))
        assert dashboard.files() == [["module.py"]]


def test_the_suggested_command_resumes_a_run_that_was_not_named() -> None:
    assert submit.resuming(["strategy=ddp"]) == ["strategy=ddp", "resume=auto"]
    assert submit.resuming(["strategy=ddp", "resume=never"]) == ["strategy=ddp", "resume=auto"]
    assert submit.resuming(["resume=outputs/a", "strategy=ddp"]) == ["resume=outputs/a", "strategy=ddp"]


def test_restarts_are_for_a_single_run(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert submit.main(["-m", "--restarts", "2", "strategy=ddp,single"]) == 2
    golden.says(capsys.readouterr().err)


def test_no_dashboard_at_the_address(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert submit.main(["--address", "http://127.0.0.1:1", "--attach", "x"]) == 2
    golden.says(capsys.readouterr().err)
    assert submit.main(["--address", "127.0.0.1:6379", "--attach", "x"]) == 2
    golden.says(capsys.readouterr().err)


def test_a_job_has_the_git_facts_of_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_facts(tmp_path) is None
    for name, value in carried(FACTS).items():
        monkeypatch.setenv(name, value)
    assert git_facts(tmp_path) == FACTS


LOG = """\
2026-11-23 10:00:00,123\tINFO job_manager.py:568 -- Runtime env is setting up.
Running entrypoint for job mine: python -m orchestrator.launch strategy=ddp
2026-11-23 10:00:01,456\tINFO worker.py:1694 -- Using address 10.0.0.1:6379 set in the environment variable RAY_ADDRESS
step 1, loss 2.3
2026-11-23 10:00:02,789\tWARNING of a job of the user
"""


def test_ctrl_c_ends_the_following_and_leaves_no_trace_of_ray_or_python(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "orchestrator", "submit", "--attach", "mine"]
    with job_server(LOG, goes_on=True) as dashboard:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        following = subprocess.Popen([*words, "--address", dashboard.url], cwd=tmp_path, env=environment(), **pipes)
        try:
            assert following.stdout is not None
            lines = [following.stdout.readline() for _ in range(2)]
            following.send_signal(signal.SIGINT)
            rest, errors = following.communicate(timeout=60)
        finally:
            following.kill()
    assert lines == ["step 1, loss 2.3\n", "2026-11-23 10:00:02,789\tWARNING of a job of the user\n"]
    assert (following.returncode, rest) == (130, "")
    assert re.fullmatch(r"\nthe job goes on; stop it with: .*ray job stop mine .*\n", errors), errors


def test_a_verb_brings_the_package_and_the_doctor_uses_that_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_server() as dashboard:
        assert queue.main(["list", "--address", dashboard.url]) == 0
        (files,) = dashboard.files()
        assert "orchestrator/verb_in_job.py" in files
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard.url)
        assert queue.main(["cancel", "mine"]) == 0
        assert doctor.main(["job=gpt", "--json"]) == 0
        entrypoints = [job["entrypoint"].removeprefix("python -m orchestrator.verb_in_job ") for job in dashboard.jobs]
        assert entrypoints == ["queue list", "queue cancel mine", "doctor job=gpt --json"]
        assert ["py_modules" in job["runtime_env"] for job in dashboard.jobs] == [True, True, False]
        origin = json.loads(dashboard.jobs[0]["runtime_env"]["env_vars"]["ORCHESTRATOR_ORIGIN"])
        assert origin["user"] == who_asks()


def test_a_verb_ends_with_its_job_without_rays_tail_of_the_log_which_is_seconds_late(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with job_server("INFO of Ray\n\x1eout a table\n\x1eerr a note\n") as dashboard:
        assert queue.main(["list", "--address", dashboard.url]) == 0
        *requests, last = dashboard.requests
    assert capsys.readouterr() == ("a table\n", "a note\n")
    assert not [request for request in requests if request.endswith("/tail")]
    assert last.startswith("DELETE /api/jobs/orchestrator-queue-")


def test_a_verb_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with job_server("No module named rich\n", exit_code=3) as dashboard:
        assert queue.main(["list", "--address", dashboard.url]) == 3
    assert capsys.readouterr() == ("", "No module named rich\n")


def test_a_verb_that_writes_much_is_followed_and_ctrl_c_ends_its_job(tmp_path: Path) -> None:
    """No line of it is lost or shown twice."""
    words = [sys.executable, "-m", "orchestrator", "logs", "mine", "--follow"]
    lines = [f"line {number}\n" for number in range(4_000)]
    log, later = ("".join(f"\x1eout {line}" for line in some) for some in (lines[:-1], lines[-1:]))
    with job_server(log, later=later, goes_on=True) as dashboard:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        verb = subprocess.Popen([*words, "--address", dashboard.url], cwd=tmp_path, env=environment(), **pipes)
        try:
            assert verb.stdout is not None
            assert [verb.stdout.readline() for _ in lines] == lines
            verb.send_signal(signal.SIGINT)
            rest, errors = verb.communicate(timeout=60)
        finally:
            verb.kill()
        last_requests = [
            request.replace(dashboard.jobs[0]["submission_id"], "ID") for request in dashboard.requests[-3:]
        ]
    assert (verb.returncode, rest, errors) == (130, "", "")
    assert last_requests == ["POST /api/jobs/ID/stop", "GET /api/jobs/ID", "DELETE /api/jobs/ID"]
