"""Training through an MLflow server that a team shares: it dies and comes back, and it refuses a wrong password."""

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.machines import commands
from helpers.records.runs import wait_for, wait_for_step
from helpers.records.tracked_runs import artifacts, expected, history, run_of
from helpers.servers.team_server import ADMIN, ADMIN_PASSWORD, TeamServer, team_server
from orchestrator import sync
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir

USER, PASSWORD, WRONG_PASSWORD = "ada", "correct-Xx44Yy55", "mistaken-Zz66Aa77"

RUN = (
    "strategy=single",
    "tracking.experiment=tests",
    "tracking.log_model=false",
    "tracking.log_dataset=false",
    "train.log_every=5",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    """A server with a user who is no administrator, and an experiment that somebody else has created."""
    with team_server(tmp_path_factory.mktemp("server")) as server:
        as_admin(server, "users/create", username=USER, password=PASSWORD)
        as_admin(server, "experiments/create", name="tests")
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with which the commands, and this process, talk to the server."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)


def as_admin(server: TeamServer, method: str, **values: str) -> None:
    login = base64.b64encode(f"{ADMIN}:{ADMIN_PASSWORD}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    url = f"{server.uri}/api/2.0/mlflow/{method}"
    request = urllib.request.Request(url, json.dumps(values).encode(), headers)
    urllib.request.urlopen(request, timeout=10).close()


@pytest.mark.campaign
def test_a_server_that_is_killed_loses_and_doubles_no_point(server: TeamServer, tmp_path: Path) -> None:
    words = ("job._target_=helpers.jobs.leisurely_job.Leisurely", "train.steps=300", "tracking.upload_every_s=0.2")
    process = commands.start(*RUN, *words, f"tracking.uri={server.uri}", "tracking.flush_timeout_s=60", cwd=tmp_path)
    run_dir = RunDir(wait_for_step(tmp_path, 5))
    wait_for(lambda: read_cursor(run_dir).points)
    server.kill()
    wait_for(lambda: read_cursor(run_dir).error)
    server.start()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    run = run_of(server.uri, run_dir)
    assert run.info.status == "FINISHED"
    names = {name for _, _, metrics in read_metrics(run_dir) for name in metrics}
    assert {"train/loss", "perf/step_ms"} < names
    for name in names:
        assert history(server.uri, run.info.run_id, name) == expected(run_dir, name)
    assert "logs/rank-0.log" in artifacts(server.uri, run.info.run_id, "logs")
    assert files_with(PASSWORD, tmp_path, server.folder, server.database) == []
    assert PASSWORD not in output


@pytest.mark.campaign
def test_a_run_with_a_wrong_password_finishes_and_is_uploaded_with_the_right_one(
    server: TeamServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", WRONG_PASSWORD)
    words = ("train.steps=20", f"tracking.uri={server.uri}", "tracking.flush_timeout_s=3",
             "tracking.background_timeout_s=60")  # fmt: skip
    done = commands.run(*RUN, *words, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stdout
    run_dir = RunDir(wait_for_step(tmp_path, 20))
    assert f"next: orchestrator sync {run_dir.path}" in done.stdout

    assert sync.main([str(run_dir.path)]) == 1
    assert f"{server.uri}: HTTP 401: it refuses the login; set MLFLOW_TRACKING_USERNAME" in capsys.readouterr().err
    assert files_with(WRONG_PASSWORD, tmp_path) == []
    assert WRONG_PASSWORD not in done.stdout
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    assert sync.main([str(run_dir.path)]) == 0
    assert run_of(server.uri, run_dir).info.status == "FINISHED"


def files_with(text: str, *folders: Path) -> list[Path]:
    """The files that contain ``text`` as it is, or as the header of a request has it."""
    forms = (text.encode(), base64.b64encode(f"{USER}:{text}".encode()))
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert len(files) >= 4
    return [file for file in files if any(form in file.read_bytes() for form in forms)]
