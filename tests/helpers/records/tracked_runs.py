"""Runs to upload to MLflow, without training, and what MLflow has of them."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from PIL import Image

from orchestrator.config.operation import TrackingConfig
from orchestrator.protocol.events import MetricsLogged, RunEnded, RunStarted, SampleSaved
from orchestrator.records import run_dir as rundir
from orchestrator.records.journal import Journal, read_metrics
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

DEAD_PROCESS = {**this_process(), "pid": 2**22 - 1}
"""A driver on this machine that no longer runs."""


def tracking(
    uri: str | None, *, flush_timeout_s: float = 30.0, request_timeout_s: float = 5.0, upload_every_s: float = 0.0
) -> TrackingConfig:
    return TrackingConfig(
        uri=uri,
        experiment="tests",
        request_timeout_s=request_timeout_s,
        upload_every_s=upload_every_s,
        flush_timeout_s=flush_timeout_s,
        background_timeout_s=120.0,
        log_model=False,
        log_dataset=False,
        system_metrics_every_s=0,
        tensorboard=False,
        sinks=(),
    )


def new_run(tmp_path: Path, uri: str | None, *, name: str = "digits-ddp", **record: Any) -> RunDir:
    """A run that this process drives; ``record`` changes keys of its ``run.json``."""
    run_dir = rundir.create(tmp_path / "outputs", name)
    values = {
        "uid": uuid.uuid4().hex,
        "name": name,
        "state": "running",
        "driver": this_process(),
        "params": {"train.steps": 10, "job.hidden": "x" * 600, "time": 1},
        "tags": {"strategy": "ddp", "world_size": "2"},
        "tracking": {"uri": uri, "experiment": "tests", "request_timeout_s": 5.0, "flush_timeout_s": 30.0},
        "sweep": None,
    }
    run_dir.update_record(**{**values, **record})
    return run_dir


def ended_run(tmp_path: Path, uri: str | None, status: str = "FINISHED", **record: Any) -> RunDir:
    """A run that is over, of which MLflow has nothing."""
    run_dir = new_run(tmp_path, uri, **record)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 11))
    end(journal, run_dir, status, final_loss=0.1)
    journal.close()
    return run_dir


def start(journal: Journal) -> None:
    journal.emit(RunStarted(name="digits-ddp", run_dir="", strategy="ddp", job="digits", world_size=2, steps=10))


def log(journal: Journal, steps: Iterable[int]) -> None:
    """Two values at each step."""
    for step in steps:
        journal.emit(MetricsLogged(step=step, metrics={"train/loss": 1 / step, "perf/step_ms": 5.0}))


def save_samples(journal: Journal, run_dir: RunDir, *steps: int) -> None:
    """An image and a text at each step."""
    run_dir.samples.mkdir(exist_ok=True)
    for step in steps:
        image, text = run_dir.sample_file(step, "digits", "png"), run_dir.sample_file(step, "says", "txt")
        Image.new("RGB", (300, 600), (step, 0, 0)).save(image)
        text.write_text(f"step {step}")
        for name, path in (("digits", image), ("says", text)):
            journal.emit(SampleSaved(step=step, name=name, path=str(path.relative_to(run_dir.path))))


def end(journal: Journal, run_dir: RunDir, status: str = "FINISHED", **summary: Any) -> None:
    run_dir.update_record(state=status.lower(), summary=summary)
    journal.emit(RunEnded(status=status, exit_code=0, reason="", summary=summary))


def expected(run_dir: RunDir, name: str = "train/loss") -> list[tuple[int, float]]:
    """The steps and values of a metric in the journal."""
    return [(step, metrics[name]) for step, _, metrics in read_metrics(run_dir) if name in metrics]


def follower_of(run_dir: RunDir) -> psutil.Process | None:
    """The detached process that uploads a run; None before it has detached."""
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(ProcessLookupError):  # the one that detached it ends meanwhile
            ours = str(run_dir.path) in (process.info["cmdline"] or ())
            if ours and os.sched_getscheduler(process.pid) == os.SCHED_IDLE:
                return process
    return None


def has_imported_mlflow(follower: psutil.Process) -> bool:
    """Whether the process has mapped a library that only MLflow's import brings."""
    return any("numpy" in library.path for library in follower.memory_maps())


def client_of(uri: str) -> MlflowClient:
    from orchestrator.features.tracking.mlflow import connect  # which tests of the core do without

    return connect(uri, request_timeout_s=10)


def run_of(uri: str, run_dir: RunDir) -> Run:
    """The run of MLflow, which there must be exactly once."""
    client = client_of(uri)
    experiment = client.get_experiment_by_name("tests")
    uid = run_dir.read_record()["uid"]
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`orchestrator.run_uid` = '{uid}'")
    return found


def history(uri: str, run_id: str, name: str = "train/loss") -> list[tuple[int, float]]:
    """The steps and values of a metric in MLflow."""
    return [(m.step, m.value) for m in client_of(uri).get_metric_history(run_id, name)]


def artifacts(uri: str, run_id: str, folder: str) -> list[str]:
    return sorted(f.path for f in client_of(uri).list_artifacts(run_id, folder))
