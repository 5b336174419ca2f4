"""SIGTERM in every phase of a run: the last completed step is saved in time, or the verdict says why it is not."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.jobs.blocking_job import blocked_at
from helpers.records.runs import events, run_dirs, series, wait_for
from orchestrator.state.checkpoint import list_checkpoints
from orchestrator.state.manifest import read_manifest

pytestmark = pytest.mark.timeout(300)

GRACE_S = 12
STEPS = 6
WORDS = (
    "job._target_=helpers.jobs.blocking_job.Blocking", "tracking=none", "cluster=local", f"train.steps={STEPS}",
    "train.global_batch_size=32", "train.eval_every=2", "train.log_every=1", f"cluster.stop_grace_s={GRACE_S}",
)  # fmt: skip
SAVED = {
    "evaluation": 2, "predictions": 2, "sample": 2, "on_evaluation_end": 2, "on_step_end": 3, "on_run_end": STEPS,
    "last evaluation": STEPS, "last sample": STEPS,
}  # fmt: skip
"""The step whose checkpoint a stop in each phase leaves; the next one if other ranks have begun it."""


def words(phase: str, folder: Path, strategy: str, at: int) -> tuple[str, ...]:
    callback = f"{{_target_:helpers.jobs.blocking_job.BlockingCallback,phase:{phase},folder:{folder},at:{at}}}"
    callbacks = f"callbacks=[{callback}]" if phase.startswith("on_") else f"job.phase={phase}"
    return (f"strategy={strategy}", *WORDS, callbacks, f"job.folder={folder}", f"job.at={at}")


def stopped_where_it_blocks(process: subprocess.Popen[str], folder: Path) -> tuple[str, float]:
    """What a run has printed, and how long it has taken to stop."""
    wait_for(lambda: list(blocked_at(folder)), "the phase")
    time.sleep(1.0)
    everyone = [p for p in psutil.Process(process.pid).children(recursive=True) if "Agent" not in p.name()]
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    took_s = time.monotonic() - began
    assert not psutil.wait_procs(everyone, timeout=45)[1]
    return output, took_s


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("phase", SAVED)
def test_the_last_completed_step_is_saved(
    launch: Callable[..., Any], tmp_path: Path, phase: str, strategy: str
) -> None:
    step = SAVED[phase]
    overrides = words(phase.removeprefix("last "), tmp_path, strategy, step)
    step += phase == "on_step_end" and strategy != "single"
    output, took_s = stopped_where_it_blocks(launch(*overrides), tmp_path)
    (run_dir,) = run_dirs(tmp_path)
    assert took_s < GRACE_S + 15
    if phase != "on_run_end":  # which may take all the time there is, because everything is saved
        assert f"stopped by SIGTERM at step {step}" in output
        assert took_s < GRACE_S
    assert read_manifest(list_checkpoints(run_dir / "checkpoints")[-1])["step"] == step
    assert f"resume={run_dir}" in output
    assert json.loads((run_dir / "run.json").read_text())["state"] == "killed"
    (tmp_path / "go").touch()
    again = launch(*overrides, f"resume={run_dir}")
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert series(run_dir, "val/loss").keys() == {2, 4, STEPS}
    assert series(run_dir, "train/loss").keys() == set(range(1, STEPS + 1))
    assert [event["step"] for event in events(run_dir, "sample_saved")] == [2, 4, STEPS]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("phase", "strategy"),
    [("dataset", "ddp"), ("model", "ddp"), ("comparison", "ddp"), ("on_run_begin", "single")],
)
def test_before_the_first_step_there_is_nothing_to_save(
    launch: Callable[..., Any], tmp_path: Path, phase: str, strategy: str
) -> None:
    overrides = words(phase, tmp_path, strategy, int(phase == "comparison"))
    output, took_s = stopped_where_it_blocks(launch(*overrides, "train.check=always"), tmp_path)
    assert took_s < GRACE_S + 15
    assert "stopped by SIGTERM" in output
    (run_dir,) = run_dirs(tmp_path)
    assert list_checkpoints(run_dir / "checkpoints") == []


@pytest.mark.campaign
def test_a_step_that_does_not_end_is_named(launch: Callable[..., Any], tmp_path: Path) -> None:
    overrides = (*words("step", tmp_path, "ddp", 4), "checkpoint.every=2")
    output, took_s = stopped_where_it_blocks(launch(*overrides), tmp_path)
    assert took_s < GRACE_S + 15
    assert "did not end within cluster.stop_grace_s, in a training step" in output
    (run_dir,) = run_dirs(tmp_path)
    assert f"resume={run_dir}" in output
    assert read_manifest(list_checkpoints(run_dir / "checkpoints")[-1])["step"] == 2
