"""A script of the user as a run: its restart, its reports, its MLflow run, and its verdict."""

from collections.abc import Callable
from typing import Any

import pytest
from mlflow import MlflowClient

from helpers.ranks.script_runs import SCRIPTS
from helpers.records.runs import events, in_campaign, losses, series, wait_for
from orchestrator.records.run_dir import RunDir


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tracking", ["none", *in_campaign("default")])
def test_a_script_restarts_from_what_it_has_saved(
    run: Callable[..., Any], capfd: pytest.CaptureFixture[str], tracking: str
) -> None:
    result = run(
        "strategy=script",
        f"job.script={SCRIPTS / 'reporting.py'}",
        "strategy.num_workers=2",
        "recovery.max_failures=1",
        "tracking.request_timeout_s=60",
        tracking=tracking,
    )
    assert (result.status, result.exit_code, result.summary["restarts"]) == ("FINISHED", 0, 1)
    run_dir = RunDir(result.run_dir)
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["rank"] == 1
    assert lost["reason"].startswith("the script was ended by SIGKILL")
    logged = losses(result.run_dir)
    assert logged.keys() >= {11, 20}, "the steps after the restart count"
    assert series(result.run_dir, "train/accuracy")[20] == 1
    assert result.summary["samples_per_s"] > 0
    output = capfd.readouterr().out
    assert "[rank 1] began at 10, run none" in output
    if tracking == "none":
        assert "[rank 0] began at 10, run none" in output
        return

    assert logged.keys() >= {1, 9, 10}, (
        "and those before it, which the import of MLflow gives the driver time to collect"
    )
    wait_for(lambda: run_dir.read_record()["summary"].get("mlflow_run_id"), "the upload, which may outlast the run")
    record = run_dir.read_record()
    assert f"[rank 0] began at 10, run {record['mlflow_run_id']}" in output
    client = MlflowClient(record["tracking"]["uri"])
    tracked = client.get_run(record["mlflow_run_id"])
    assert {"own", "train/loss"} <= tracked.data.metrics.keys()
    assert [m.value for m in client.get_metric_history(record["mlflow_run_id"], "own")] == [0.0]


@pytest.mark.campaign
@pytest.mark.timeout(120)
def test_the_exception_of_a_script_is_the_verdict(run: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Its traceback is shown once, although both ranks print it."""
    result = run(
        "strategy=script",
        f"job.script={SCRIPTS / 'torch_ddp.py'}",
        "job.args=--fail-at 2",
        "strategy.num_workers=2",
    )
    assert (result.status, result.exit_code) == ("FAILED", 1)
    failed = "rank 1 failed: ValueError: told to fail at step 2 (torch_ddp.py:"
    assert result.reason.startswith(failed)
    assert result.reason.endswith(': raise ValueError(f"told to fail at step {step}"))')
    output = capfd.readouterr().out
    assert "[rank 1] Traceback" not in output
    assert output.count("in <module>") == 1
