"""Whole runs: what a person gets from one command."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from helpers.conformance.reference import plain_losses
from helpers.jobs.leisurely_job import Leisurely
from helpers.records.runs import events, in_campaign, losses, series, wait_for, wait_for_step
from orchestrator.features.tracking.mlflow import connect
from orchestrator.records import lease
from orchestrator.records.json_file import read_json
from orchestrator.records.lock import changed_at
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import load

LINES = {
    "train/loss", "train/samples_seen", "train/epoch", "train/lr", "train/grad_norm", "val/loss",
    "val/accuracy", "perf/samples_per_s", "perf/samples_per_s_per_worker", "perf/step_ms",
    "perf/comm_pct", "perf/data_wait_pct",
}  # fmt: skip
BARS = {"samples_per_s", "step_ms_p50", "step_ms_p95", "final_loss", "steps", "startup_s", "restarts", "others_cpu_pct"}


@pytest.mark.fast
def test_digits_at_defaults(run: Callable[..., Any]) -> None:
    result = run("strategy=ddp", tracking="default")
    assert (result.status, result.exit_code) == ("FINISHED", 0)
    assert result.summary["val_accuracy"] >= 0.97
    run_dir = RunDir(result.run_dir)
    wait_for(lambda: run_dir.read_record()["summary"].get("mlflow_run_id"), "the upload, which may outlast the run")
    record = run_dir.read_record()
    assert record["state"] == "finished"
    assert record["summary"].keys() >= BARS | {"startup", "steps_lost", "recovery_s"}
    for name in ("metrics.jsonl", "events.jsonl", "config.yaml", "logs/rank-0.log", "logs/rank-1.log"):
        assert (result.run_dir / name).is_file()
    assert [p.name for p in sorted((result.run_dir / "checkpoints").iterdir())] == [
        "step-00000300", "step-00000400", "step-00000500",
    ]  # fmt: skip

    assert {metric["name"] for metric in record["metrics"]} >= {"train/loss", "train/lr", "perf/step_ms"}

    client = connect(record["tracking"]["uri"], request_timeout_s=10)
    wait_for(lambda: client.get_run(record["mlflow_run_id"]).info.status == "FINISHED", "the end of the run in MLflow")
    tracked = client.get_run(record["mlflow_run_id"])
    assert tracked.data.metrics.keys() >= LINES | {f"summary/{name}" for name in BARS}
    history = client.get_metric_history(record["mlflow_run_id"], "train/loss")
    assert {m.step: m.value for m in history} == losses(result.run_dir)
    assert tracked.data.tags["strategy"] == "ddp"
    assert tracked.data.params["train.steps"] == "500"
    assert not any(v.startswith("/") for v in tracked.data.params.values())


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_compiled_pipeline_has_equal_losses_and_continues_without_the_compiler(run: Callable[..., Any]) -> None:
    words = ("strategy=pipeline", "job.depth=3", "train.log_every=1", "train.eval_every=0")
    compiled = run(*words, "train.steps=8", "train.compile=true")
    assert compiled.exit_code == 0, compiled.reason
    plain = run(*words, "train.steps=8")
    curve = losses(plain.run_dir)
    assert losses(compiled.run_dir) == {step: pytest.approx(loss, rel=1e-4) for step, loss in curve.items()}
    (seconds,) = {value for step, value in series(compiled.run_dir, "perf/compile_s").items() if step > 1}
    assert seconds > 0
    assert set(series(compiled.run_dir, "perf/recompiles").values()) == {0}
    resumed = run(*words, "train.steps=10", f"resume={compiled.run_dir}")
    assert resumed.exit_code == 0, resumed.reason


@pytest.mark.campaign
def test_a_run_that_ended_early_is_evaluated_under_another_strategy(run: Callable[..., Any]) -> None:
    common = ("job.hidden=32", "train.eval_splits=[val,train]")
    patience = ("checkpoint.best=val/loss", "train.stop_after=1", "train.stop_min_delta=1000")
    trained = run("strategy=ddp", *common, *patience, "train.eval_every=10", "train.steps=100")
    assert (trained.status, trained.summary["steps"]) == ("FINISHED", 20)
    assert trained.reason.startswith(
        "ended early: train.stop_after=1: val/loss has not improved in the last evaluation"
    )
    best = RunDir(trained.run_dir).read_record()["best"]
    assert best == {"metric": "val/loss", "step": 20, "value": series(trained.run_dir, "val/loss")[20]}
    assert (trained.summary["best_step"], trained.summary["best_val_loss"]) == (20, best["value"])
    before = (trained.run_dir / "run.json").read_bytes()

    done = run("strategy=single", *common, f"evaluate={trained.run_dir}/checkpoints/best")
    assert (done.status, done.summary["steps"]) == ("FINISHED", 20)
    for name in ("val/loss", "val/accuracy", "train_eval/loss"):
        assert series(done.run_dir, name) == {20: pytest.approx(series(trained.run_dir, name)[20], rel=1e-5)}
    assert series(done.run_dir, "train/loss") == {}
    assert not list(done.run_dir.glob("checkpoints/step-*"))
    assert (trained.run_dir / "run.json").read_bytes() == before

    words = ("strategy=single", *common, "train.steps=25", "train.log_every=1")
    new = run(*words, f"start_from={trained.run_dir}/checkpoints/best", "resume=auto", "name=new")
    assert (new.status, new.summary["steps"]) == ("FINISHED", 25)
    assert RunDir(new.run_dir).read_record()["started_from"] == {"run": str(trained.run_dir), "step": 20}
    assert (trained.run_dir / "run.json").read_bytes() == before
    whole = losses(run(*words).run_dir)
    assert losses(new.run_dir) == {step: pytest.approx(whole[step], rel=1e-5) for step in range(21, 26)}


def stop_at(step: int, number: signal.Signals, *, below: Path) -> None:
    """Send this process a signal once the run below a directory has logged a step."""

    def watch() -> None:
        wait_for_step(below, step)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


TO_BE_STOPPED = (
    "train.steps=100", "train.log_every=1", "train.eval_every=25",
    "job._target_=helpers.jobs.leisurely_job.Leisurely", "job.frozen=true", "name=stopped",
)  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "number", "code", "only_trained", "tracking"),
    [
        ("single", signal.SIGINT, 130, True, "none"),
        *in_campaign(
            ("ddp", signal.SIGINT, 130, True, "none"),
            ("ddp", signal.SIGTERM, 143, False, "default"),
        ),
    ],
)
def test_stop_and_resume_is_the_same_run(
    run: Callable[..., Any],
    strategy: str,
    number: signal.Signals,
    code: int,
    only_trained: bool,
    tracking: str,
) -> None:
    words = (
        f"strategy={strategy}",
        *TO_BE_STOPPED,
        f"checkpoint.only_trained={only_trained}",
        f"tracking.uri=sqlite:///{Path.cwd()}/mlflow.db",
    )
    uninterrupted = {"train/loss": pytest.approx(plain_losses(Leisurely(frozen=True, pause_ms=0), batch=64, steps=100))}
    if strategy != "single":
        whole = run(*words, "job.pause_ms=0", f"output_dir={Path.cwd()}/uninterrupted")
        uninterrupted = {name: series(whole.run_dir, name) for name in ("train/loss", "val/loss", "train/lr")}
    stop_at(10, number, below=Path.cwd())
    stopped = run(*words, "job.pause_ms=200", tracking=tracking)
    assert (stopped.status, stopped.exit_code) == ("KILLED", code)
    assert len(events(stopped.run_dir, "stop_requested")) == len(events(stopped.run_dir, "run_ended")) == 1
    at = stopped.summary["steps"]
    assert 10 <= at < 100
    checkpoint = stopped.run_dir / "checkpoints" / f"step-{at:08d}"
    assert ("hidden0.weight" in load(checkpoint).model) != only_trained

    resumed = run(*words, "job.pause_ms=0", "resume=auto", tracking=tracking)
    assert (resumed.status, resumed.run_dir) == ("FINISHED", stopped.run_dir)
    assert {name: series(resumed.run_dir, name) for name in uninterrupted} == uninterrupted
    if tracking == "none":
        return

    run_dir = RunDir(resumed.run_dir)
    run_id = wait_for(lambda: run_dir.read_record().get("mlflow_run_id"), "the upload, which may outlast the run")
    client = connect(f"sqlite:///{Path.cwd()}/mlflow.db", request_timeout_s=10)
    wait_for(lambda: client.get_run(run_id).info.status == "FINISHED", "the end of the run in MLflow")
    points = [(m.step, m.value) for m in client.get_metric_history(run_id, "train/loss")]
    assert sorted(points) == sorted(uninterrupted["train/loss"].items())


@pytest.mark.campaign
def test_a_driver_keeps_its_lease_until_the_end_is_recorded(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs are masked before that, which takes as long as their size; here, as long as a pipe is open."""
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.1)
    states: list[str] = []

    def hold() -> None:
        (logs,) = wait_for(lambda: list(tmp_path.glob("outputs/*/*/logs")), "a run")
        run_dir = RunDir(logs.parent)
        os.mkfifo(logs / "long.log")
        with (logs / "long.log").open("w"):
            os.utime(run_dir.lease_file, (1, 1))
            wait_for(lambda: changed_at(run_dir.lease_file) > 1, "a renewal", timeout_s=20)
            states.append(run_dir.read_record()["state"])

    holder = threading.Thread(target=hold)
    holder.start()
    result = run("strategy=single", "train.steps=1", "train.eval_every=0")
    holder.join(timeout=30)
    assert result.exit_code == 0
    assert states == ["running"]
    assert read_json(result.run_dir / "run.json")["state"] == "finished"


def test_rays_records_of_tasks_have_no_heartbeats() -> None:
    """With two from each worker in a second, ``ray summary tasks`` would show little else."""
    recorded = {event["name"] for event in ray.timeline()}
    assert any("open_store" in name for name in recorded), recorded
    assert not any("heartbeat" in name for name in recorded)


@pytest.mark.campaign
def test_a_stopped_pipeline_shows_its_last_step(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(14, signal.SIGINT, below=tmp_path)
    result = run(
        "strategy=pipeline", "strategy.num_microbatches=4", "job=sleep", "job.forward_ms=1", "train.steps=1000",
        "train.global_batch_size=8", "train.log_every=2", "train.eval_every=0", tracking="default",
    )  # fmt: skip
    assert result.status == "KILLED"
    measured = series(result.run_dir, "pipeline/bubble_pct")
    assert min(measured) == 12, "the first ten steps warm up"
    assert series(result.run_dir, "pipeline/bubble_theory_pct") == dict.fromkeys(measured, pytest.approx(100 / 5))
    for stage in (0, 1):
        for name in ("busy_pct", "peak_memory_mb"):
            assert series(result.run_dir, f"pipeline/stage_{stage}_{name}").keys() == measured.keys()

    summary = json.loads((result.run_dir / "run.json").read_text())["summary"]
    assert 0 < summary["bubble_pct"] < 100
    assert summary["bubble_theory_pct"] == pytest.approx(100 / 5)
    assert summary["peak_memory_mb"] == max(series(result.run_dir, "perf/peak_memory_mb").values())
    timeline = result.run_dir / "timeline.json"
    assert f"; timeline: {timeline}" in capsys.readouterr().out.replace("\n", "")
    assert json.loads(timeline.read_text())["otherData"]["step"] == max(measured)

    wait_for(lambda: read_json(result.run_dir / "tracking.json").get("closed_at"), timeout_s=30)
    client = connect(f"sqlite:///{tmp_path}/mlflow.db", request_timeout_s=10)
    run_id = read_json(result.run_dir / "tracking.json")["run_id"]
    assert client.get_run(run_id).data.metrics["summary/bubble_pct"] == pytest.approx(summary["bubble_pct"], rel=1e-4)
    assert "timeline.json" in {f.path for f in client.list_artifacts(run_id)}
