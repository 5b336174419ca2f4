"""One trial of the campaign: a run that something disturbs, compared with the undisturbed run of the same layout."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import orchestrator
from helpers.faults.layouts import LAYOUTS as FAULT_LAYOUTS
from helpers.faults.layouts import Layout, Tolerance
from helpers.faults.outcome import Outcome, differences, leftovers, outcome_of
from orchestrator.features.tracking.uri import sqlite_path
from orchestrator.records.run_dir import RunDir

STEPS = 30
CHECKPOINT_EVERY = 10
OVERRIDES = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=10",
    f"checkpoint.every={CHECKPOINT_EVERY}",
    "job.hidden=16",
    "job.depth=3",
    "recovery.backoff_s=0.1",
)
TRIAL_TIMEOUT_S = 300.0
"""The longest trial, also on a busy machine; on a quiet one, it takes about 30 s."""
UPLOAD_TIMEOUT_S = 180.0
"""How long an upload to MLflow may go on after the command, as it does on a busy machine."""
UPLOAD_POLL_S = 0.5
SWEEP_TAG = "orchestrator.sweep_id"
"""The tag of a sweep's own run in MLflow."""
STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that was stopped from elsewhere."""


OWN_OPTIMIZER = ("job._target_=stalling_job.Stalling", "job.fading=true")
LAYOUTS = FAULT_LAYOUTS | {
    f"{name}, own optimizer": replace(FAULT_LAYOUTS[name], words=(*FAULT_LAYOUTS[name].words, *OWN_OPTIMIZER))
    for name in ("ddp", "pipeline with copies")
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of trouble may use: a layout, an empty folder, and a generator for what it draws.

    Attributes:
        tracking_uri: MLflow's database, which the trials share; None for runs that upload nothing.
        experiment: the MLflow experiment of this trial alone.
        scheme: ``file://`` if the runs use their directory as a store.
    """

    layout: Layout
    folder: Path
    rng: random.Random
    tracking_uri: str | None = None
    experiment: str = ""
    scheme: str = ""

    @property
    def output_dir(self) -> Path:
        return self.folder / "outputs"

    @property
    def location(self) -> str:
        """The output directory as a path or URL."""
        return f"{self.scheme}{self.output_dir}"

    def part(self, name: str) -> Setting:
        """Return the setting of one of several commands of the trial, with a folder of its own."""
        folder = self.folder / name
        folder.mkdir()
        return replace(self, folder=folder)

    @property
    def overrides(self) -> tuple[str, ...]:
        if self.tracking_uri is None:
            tracking = ("tracking=none",)
        else:
            tracking = (
                f"tracking.uri={self.tracking_uri}",
                f"tracking.experiment={self.experiment}",
                "tracking.log_model=false",
            )
        return (*self.layout.words, *OVERRIDES, *tracking, f"output_dir={self.location}")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a disturbed run ended.

    Attributes:
        problems: what was wrong that only its kind of trouble knows of.
        others: the other runs of the trial, which promise the same.
    """

    exit_code: int
    reason: str
    record: Mapping[str, Any]
    outcome: Outcome
    problems: tuple[str, ...] = ()
    others: tuple[Ended, ...] = ()

    @property
    def state(self) -> str:
        """The state that ``run.json`` has to have for the exit code."""
        return {0: "finished", STOPPED: "killed"}.get(self.exit_code, "failed")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of trouble, and what is promised under it: the exit codes, and whether workers are lost.

    ``disturb(setting, drawn)`` runs the layout, disturbs it, and appends to ``drawn`` what it has chosen to do.
    Without lost workers, nothing is recovered and no step is repeated. A tracked run is compared with its MLflow run.
    """

    disturb: Callable[[Setting, list[str]], Ended]
    exit_codes: tuple[int, ...] = (0,)
    loses_workers: bool = False
    tracked: bool = False

    @property
    def max_steps_lost(self) -> int:
        """The most steps that one recovery may repeat.

        A checkpoint that was being written is lost with its writer, so that the run continues from the one before.
        """
        return 2 * CHECKPOINT_EVERY if self.loses_workers else 0


class TrialId(NamedTuple):
    """Which trial it is. It determines everything that the trial draws."""

    seed: int
    number: int
    kind: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial and its verdict.

    Attributes:
        problems: empty if it passed.
        skipped: why this machine cannot run it; empty if it can.
    """

    id: TrialId
    drawn: tuple[str, ...]
    problems: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0
    restarts: int = 0
    recovery_s: tuple[float, ...] = ()
    steps_lost: int = 0

    @property
    def passed(self) -> bool:
        return not self.problems


def train(setting: Setting, *overrides: str) -> Ended:
    """Run the layout in this process, on the Ray that it is connected to.

    Raises:
        KeyboardInterrupt: the run was interrupted.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        result = orchestrator.run([*setting.overrides, *overrides])
    assert result is not None
    if result.status == "KILLED":
        raise KeyboardInterrupt
    return ended(RunDir(result.run_dir), exit_code=result.exit_code, reason=result.reason)


def ended(run_dir: RunDir, *, exit_code: int, reason: str) -> Ended:
    """Read what a finished run has left behind."""
    outcome = outcome_of(run_dir.path, STEPS)
    return Ended(exit_code=exit_code, reason=reason, record=run_dir.read_record(), outcome=outcome)


def run_trial(trial_id: TrialId, kind: Kind, setting: Setting, expected: Outcome) -> Trial:
    """Run one trial, and compare what came of it with what is promised.

    Args:
        trial_id: which one it is, for the report.
        kind: what disturbs the run.
        setting: where it runs.
        expected: the outcome of the undisturbed run.
    """
    drawn: list[str] = []
    start = time.monotonic()
    try:
        run = kind.disturb(setting, drawn)
    except pytest.skip.Exception as e:
        return Trial(id=trial_id, drawn=tuple(drawn), skipped=str(e))
    except Exception as e:
        return Trial(id=trial_id, drawn=tuple(drawn), problems=(f"{type(e).__name__}: {e}",))
    seconds = time.monotonic() - start
    runs = (run, *run.others)
    problems = list(run.problems)
    for each in runs:
        problems += broken_promises(kind, each, expected, setting.layout.tolerance)
    problems = problems or wrong_upload(setting, runs)
    problems += leftovers(timeout_s=10)
    problems += [f"it took {seconds:.0f} s"] * (seconds > TRIAL_TIMEOUT_S)
    summary = run.record.get("summary", {})
    return Trial(
        id=trial_id,
        drawn=tuple(drawn),
        problems=tuple(problems),
        seconds=seconds,
        restarts=summary.get("restarts", 0),
        recovery_s=tuple(summary.get("recovery_s", ())),
        steps_lost=summary.get("steps_lost", 0),
    )


def broken_promises(kind: Kind, run: Ended, expected: Outcome, tolerance: Tolerance | None) -> list[str]:
    """Describe where a run differs from what its kind of trouble allows."""
    if run.exit_code not in kind.exit_codes:
        return [f"exit {run.exit_code}: {run.reason}"]
    problems = []
    if run.exit_code == 0 and run.outcome.weights is None:
        problems.append("exit 0 without the last checkpoint")
    if run.record.get("state") != run.state:
        problems.append(f"run.json says {run.record.get('state')}, not {run.state}")
    summary = run.record.get("summary", {})
    restarts, steps_lost = summary.get("restarts", 0), summary.get("steps_lost", 0)
    if restarts and not kind.loses_workers:
        problems.append(f"{restarts} recoveries, but no worker was harmed")
    if steps_lost > restarts * kind.max_steps_lost:
        problems.append(f"{steps_lost} steps lost in {restarts} recoveries")
    keeps_all = not kind.loses_workers and run.exit_code != STOPPED
    if keeps_all and (missing := expected.losses.keys() - run.outcome.losses.keys()):
        problems.append(f"no loss of the steps {sorted(missing)}")
    return problems + differences(run.outcome, expected, tolerance)


def wrong_upload(setting: Setting, runs: Sequence[Ended]) -> list[str]:
    """Describe how what MLflow has of the runs of a trial differs from them, after a wait for the upload."""
    if setting.tracking_uri is None:
        return []
    expected = sorted((run.state.upper(), sorted(run.outcome.losses.items())) for run in runs)
    deadline = time.monotonic() + UPLOAD_TIMEOUT_S
    while (found := uploaded(setting)) != expected and time.monotonic() < deadline:
        time.sleep(UPLOAD_POLL_S)
    states, expected_states = ([state for state, _ in each] for each in (found, expected))
    if states != expected_states:
        return [f"MLflow has {states}, not {expected_states}"]
    return ["the losses in MLflow differ from those of the journal"] * (found != expected)


def uploaded(setting: Setting) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the status of each run of a trial in MLflow, and its losses by step. A sweep's own run is left out."""
    from mlflow import MlflowClient

    assert setting.tracking_uri is not None
    database = sqlite_path(setting.tracking_uri)
    if database is None or not database.exists():  # a client would create it, while the upload does too
        return []
    client = MlflowClient(setting.tracking_uri)
    experiment = client.get_experiment_by_name(setting.experiment)
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    return sorted(
        (run.info.status, sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")))
        for run in found
        if SWEEP_TAG not in run.data.tags
    )
