"""Runs whose ``output_dir`` is a URL, on a real S3 server."""

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import boto3
import psutil
import pytest

from helpers.records.runs import wait_for
from helpers.servers.object_store import (  # noqa: F401 - s3 is a fixture
    BUCKET,
    OUTPUT,
    TIMEOUT_S,
    S3Server,
    s3,
    stored,
    stored_lines,
    the_run,
)
from orchestrator import compare
from orchestrator.config.compose import compose
from orchestrator.driver.preflight.run_config import environment_errors
from orchestrator.records.journal import read_points
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.remote import Remote, StorageError
from orchestrator.strategies import registry

SLOW = ("strategy=single", "job._target_=helpers.jobs.leisurely_job.Leisurely",
        "job.pause_ms=100", "train.eval_every=0", "train.log_every=1", "tracking=none", "cluster=local",
        f"output_dir={OUTPUT}", "storage.upload_every_s=1")  # fmt: skip


def last_step(run: Remote | None) -> int:
    """The last step in the journal on the store."""
    lines = [] if run is None or "metrics.jsonl" not in stored(run.url) else stored_lines(run, "metrics.jsonl")
    return max((int(line["step"]) for line in lines), default=0)


def losses(run: Remote) -> dict[int, float]:
    points = [p for p in read_points(run.read("metrics.jsonl")) if "train/loss" in p.metrics]
    assert len({point.step for point in points}) == len(points), "double points"
    return {point.step: point.metrics["train/loss"] for point in points}


def saved(run: Remote | None) -> list[str]:
    """The complete checkpoints on the store."""
    return [] if run is None else [name for name in stored(run.url) if name.endswith("/manifest.json")]


def test_a_killed_run_continues_from_the_store_which_is_away_for_a_while(
    s3: S3Server,  # noqa: F811
    launch: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*SLOW, f"storage.staging_dir={tmp_path / 'staging'}")
    first = launch(*words, "train.steps=2000", "checkpoint.every=10")
    # A condition reads what is on the store, and the server answers in Python.
    run = wait_for(
        lambda: (found := the_run()) is not None and last_step(found) > 15 and saved(found) and found, poll_s=1
    )
    everyone = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end with the others
            process.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    psutil.wait_procs(everyone, timeout=30)
    before = losses(run)
    shutil.rmtree(tmp_path / "staging")

    newest = max(int(name.split("/")[1].removeprefix("step-")) for name in saved(run))
    last = newest + 100
    until = tmp_path / "until"
    second = launch(
        *words,
        f"train.steps={last}",
        "checkpoint.every=20",
        "resume=auto",
        "storage.timeout_s=5",
        f"job.until={until}",
    )
    wait_for(lambda: last_step(run) > max(before) + 5, poll_s=1)
    s3.process.send_signal(signal.SIGSTOP)  # the store is away, from before a checkpoint until after it
    until.touch()
    (journal,) = (tmp_path / "staging").glob("*/*/*/metrics.jsonl")
    wait_for(lambda: f'"step": {newest + 80},' in journal.read_text())
    s3.process.send_signal(signal.SIGCONT)
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert f"run directory: {run}" in output
    assert str(tmp_path / "staging") not in output
    assert f"checkpoints/step-{last:08d}/manifest.json" in saved(run)
    record = json.loads(run.read("run.json"))
    assert (record["state"], record["location"]) == ("finished", run.url)
    after = losses(run)
    not_uploaded = set(range(max(before) + 1, newest + 1))  # the checkpoint may reach the store before the journal does
    assert set(after) == set(range(1, last + 1)) - not_uploaded
    assert {step: after[step] for step in before} == before
    starts = [e["resumed_from_step"] for e in stored_lines(run, "events.jsonl") if e["event"] == "run_started"]
    assert starts == [None, newest]
    assert run.read("logs/rank-0.log").decode().count("worker process ") == 2, "the logs of both launches"
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table leaves columns out
    assert compare.main(["--no-picture", run.url]) == 0
    assert "finished" in capsys.readouterr().out


def test_a_bucket_that_does_not_exist_is_refused(s3: S3Server, tmp_path: Path) -> None:  # noqa: F811
    words = ["output_dir=s3://nowhere/runs", f"storage.staging_dir={tmp_path}", "tracking=none"]
    config, _ = compose(words, [], registry.config_class)
    assert config is not None
    (error,) = environment_errors(config)
    assert error.startswith("output_dir=s3://nowhere/runs: cannot write .probe-")
    assert error.endswith("; create the bucket")


def test_credentials_that_are_wrong_are_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    s3.require_credentials()
    with pytest.raises(StorageError, match=r"output_dir=s3://training/runs: .*give every node credentials"):
        Remote(OUTPUT, timeout_s=5).read("run.json")


def test_names_that_lead_out_of_a_run_are_ignored(s3: S3Server, tmp_path: Path) -> None:  # noqa: F811
    """The names of objects are free, and a run on a store is fetched to paths of the same names."""
    run = Remote(f"{OUTPUT}/2026-11-22/15-00-00-run", TIMEOUT_S)
    client = boto3.client("s3", endpoint_url=s3.environment["AWS_ENDPOINT_URL"])
    for name in ("run.json", "logs/rank-0.log", "logs/../../up.log", "logs/../../../../further.log", "../beside.json"):
        client.put_object(Bucket=BUCKET, Key=f"runs/2026-11-22/15-00-00-run/{name}", Body=b"{}")
    assert sorted(entry.name for entry in run.list()) == ["logs", "run.json"]
    assert [entry.name for entry in run.child("logs").list(recursive=True)] == ["rank-0.log"]
    run_dir = RunDir(tmp_path / "staged" / "run", run)
    fetch(run_dir)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rank-0.log"]
