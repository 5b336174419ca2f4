"""Runs that were uploaded to MLflow are compared like their directories."""

import json
from pathlib import Path

import pytest

from helpers.records.tracked_runs import new_run
from orchestrator.compare import main
from orchestrator.features.tracking.mlflow import MlflowBackend
from orchestrator.features.tracking.transfer import Transfer
from orchestrator.protocol.events import MetricsLogged
from orchestrator.records.journal import Ending, Journal


def upload(tmp_path: Path, uri: str, strategy: str, samples_per_s: float) -> None:
    run_dir = new_run(
        tmp_path,
        uri,
        name=f"digits-{strategy}",
        strategy=strategy,
        job="digits",
        params={"train.steps": 3, "job.hidden": 32, "seed": 0},
        tags={"strategy": strategy, "job": "digits", "world_size": "1" if strategy == "single" else "2"},
        sweep={"id": "abc", "name": "strategy=single,ddp"},
    )
    journal = Journal(run_dir)
    for step in (1, 2, 3):
        metrics = {"train/loss": 1.0 / step, "train/samples_seen": 64.0 * step}
        journal.emit(MetricsLogged(time=1e9 + 2 * step, step=step, metrics=metrics))
    journal.close()
    summary = {"samples_per_s": samples_per_s, "final_loss": 0.25}
    Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5)).push(
        Ending(status="FINISHED", time=1e9 + 9, summary=summary)
    )


def test_runs_are_read_from_mlflow_alone(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(tmp_path, uri, "single", 4000.0)
    upload(tmp_path, uri, "ddp", 7000.0)
    words = ["--mlflow", uri, "--json", "--target-loss", "0.5"]
    assert main([*words, "--last", "2"]) == 0
    single, ddp = json.loads(capsys.readouterr().out)["runs"]
    assert (single["strategy"], ddp["strategy"], ddp["workers"], ddp["state"]) == ("single", "ddp", 2, "finished")
    assert (ddp["relative_speed"], ddp["scaling_efficiency"], ddp["seconds_to_target_loss"]) == (1.75, 0.875, 2.0)
    for sweep in ("ab", "last"):
        assert main([*words, "--sweep", sweep]) == 0
        assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    assert main([*words, "--sweep", "none"]) == 2
    monkeypatch.chdir(tmp_path)
    assert main(["--mlflow", uri, "--last", "1", "--picture", "one.png"]) == 0
    assert (tmp_path / "one.png").is_file()


@pytest.mark.parametrize(
    ("given", "code", "message"), [("localhost:1", 2, "did you mean http://"), ("http://127.0.0.1:1", 1, "127.0.0.1:1")]
)
def test_a_server_that_cannot_be_read_is_named(
    given: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mlflow", given]) == code
    assert message in capsys.readouterr().err
