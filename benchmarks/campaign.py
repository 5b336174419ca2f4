"""Random faults in every phase, under six strategies: each run has to end as if there had been none.

python benchmarks/campaign.py --trials 200 --slow 50

A trial is one run with one to three faults, drawn from a seed. It passes if the run finishes, leaves no process,
placement group or shared memory behind and, where the strategy is deterministic, has the losses and weights of an
undisturbed run.

A slow trial is one run without faults, but with one to three kinds of stalls (``stalling_job.py``). It passes if no
worker is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import ray
import torch
from arms import RESULTS
from rounds import table
from safetensors.torch import load_file

import orchestrator
from orchestrator.policy.recovery import GENERATIONS_WITHOUT_PROGRESS
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir

STEPS = 30
OVERRIDES = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=10",
    "checkpoint.every=10",
    "job.hidden=16",
    "job.depth=3",
    "tracking=none",
    "recovery.backoff_s=0.1",
    "recovery.hang_max_s=20",
)
FAULTY = ("recovery.hang_min_s=2",)
SLOW = (
    "job._target_=stalling_job.Stalling",
    "recovery.hang_min_s=4",
    "recovery.build_max_s=20",
    "recovery.max_failures=0",
)
STALLS = {
    "job.build_s": (2, 14),
    "job.compile_s": (1, 14),
    "job.open_s": (1, 14),
    "job.disk_s": (0.2, 1),
    "job.val_s": (0.02, 0.1),
}
"""The shortest and the longest pause of each kind, in seconds. Several slow samples may be in one batch."""
TRIAL_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A strategy with its settings.

    ``tolerance`` is the relative one for losses and weights; None if they vary between undisturbed runs.
    """

    overrides: tuple[str, ...]
    ranks: int
    tolerance: float | None = 1e-5


LAYOUTS = {
    "single": Layout(overrides=("strategy=single",), ranks=1),
    "ddp": Layout(overrides=("strategy=ddp",), ranks=2),
    "ddp with a spare": Layout(overrides=("strategy=ddp", "recovery.spares=1"), ranks=2),
    "ddp, 1 to 3 workers": Layout(overrides=("strategy=ddp", "strategy.num_workers=[1,3]"), ranks=3, tolerance=1e-4),
    "pipeline": Layout(overrides=("strategy=pipeline",), ranks=2),
    "pipeline with copies": Layout(overrides=("strategy=pipeline", "recovery.peer_copy_every=4"), ranks=2),
    "ddp_pipeline": Layout(
        overrides=("strategy=ddp_pipeline", "strategy.num_workers=4", "strategy.pipeline_parallel_size=2"), ranks=4
    ),
    "hogwild": Layout(overrides=("strategy=hogwild",), ranks=2, tolerance=None),
    "parameter_server": Layout(overrides=("strategy=parameter_server", "strategy.consistency=sync"), ranks=3),
    "parameter_server, stale": Layout(
        overrides=("strategy=parameter_server", "strategy.consistency=stale"), ranks=3, tolerance=None
    ),
}
KINDS = ("raise", "exit", "kill", "segv", "stop", "sleep")
PHASES = ("train", "train", "train", "join", "build", "eval", "checkpoint", "end")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run ended with: its final weights by name, and its training loss by step."""

    weights: dict[str, torch.Tensor]
    losses: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run with faults, or with stalls, and its verdict; ``problems`` is empty if it passed."""

    layout: str
    disturbances: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float
    restarts: int
    recovery_s: tuple[float, ...]
    steps_lost: int

    @property
    def passed(self) -> bool:
        return not self.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="runs with faults (default: %(default)s)")
    parser.add_argument("--slow", type=int, default=50, help="healthy runs with stalls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: %(default)s)")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="layouts to run, separated by semicolons")
    parser.add_argument("--keep", action="store_true", help="write the table to results/")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rng = random.Random(arguments.seed)
    trials: list[Trial] = []
    names = arguments.layouts.split(";")
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.chdir(folder)
        references = {name: reference(LAYOUTS[name]) for name in names if arguments.trials}
        for number in range(arguments.trials):
            name = names[number % len(names)]
            faults = draw_faults(rng, LAYOUTS[name])
            chaos = (*FAULTY, f"recovery.chaos=[{','.join(faults)}]")
            trials.append(run_trial(name, faults, chaos, references[name]))
            report_trial(number + 1, trials[-1])
        slow_trials: list[Trial] = []
        for number in range(arguments.slow):
            stalls = draw_stalls(rng)
            slow_trials.append(run_trial(names[number % len(names)], stalls, (*SLOW, *stalls), None))
            report_trial(number + 1, slow_trials[-1])
    ray.shutdown()
    passed = sum(t.passed for t in slow_trials)
    text = "\n\n".join(
        [summary(trials)] * bool(trials)
        + [f"{len(slow_trials)} healthy runs with stalls: no worker killed in {passed}"] * bool(slow_trials)
    )
    trials += slow_trials
    print(text)
    if arguments.keep:
        (RESULTS / "campaign.md").write_text(f"# campaign\n\n{date.today()}, seed {arguments.seed}\n\n{text}\n")
    sys.exit(0 if all(t.passed for t in trials) else 1)


def draw_faults(rng: random.Random, layout: Layout) -> tuple[str, ...]:
    """Draw one to three faults at different steps, but never so many before the first step that any run would end."""
    faults = []
    for step in sorted(rng.sample(range(2, STEPS), rng.choice((1, 1, 1, 2, 2, 3)))):
        phase, kind, rank = rng.choice(PHASES), rng.choice(KINDS), rng.randrange(layout.ranks)
        at = {"join": 0, "build": 0, "eval": 10, "checkpoint": 20, "end": STEPS}.get(phase, step)
        if phase in ("join", "build", "end") and kind == "sleep":
            kind = "kill"  # the timeouts of these phases are minutes long
        if phase in ("join", "build") and kind == "raise":
            kind = "exit"  # an exception before the first step ends the run by design
        faults.append(f"{kind}@{at}:{rank}" + ("" if phase == "train" else f":{phase}"))
    before_the_first = [fault for fault in faults if "@0:" in fault]
    return tuple(faults if len(before_the_first) < GENERATIONS_WITHOUT_PROGRESS else faults[:-1])


def draw_stalls(rng: random.Random) -> tuple[str, ...]:
    """Draw one to three kinds of stalls, as overrides, and in half of the runs a loader process."""
    stalls = [f"{key}={rng.uniform(*STALLS[key]):.2f}" for key in rng.sample(list(STALLS), rng.choice((1, 2, 3)))]
    return tuple(stalls + ["data.num_workers=1"] * rng.randrange(2))


def report_trial(number: int, trial: Trial) -> None:
    verdict = "passed" if trial.passed else f"FAILED: {'; '.join(trial.problems)}"
    words = " ".join(trial.disturbances)
    print(f"{number:4} {trial.layout:23} {words:40} {trial.seconds:5.1f} s  {verdict}", flush=True)


def reference(layout: Layout) -> Outcome:
    """Run a layout without faults."""
    result = orchestrator.run([*layout.overrides, *OVERRIDES, *FAULTY])
    assert result is not None
    assert result.exit_code == 0, result.reason
    return outcome(result.run_dir)


def run_trial(name: str, disturbances: tuple[str, ...], overrides: tuple[str, ...], expected: Outcome | None) -> Trial:
    """Run a layout and compare the outcome with ``expected``, unless that is None.

    Args:
        name: the layout.
        disturbances: the faults or stalls, for the report.
        overrides: what causes them.
        expected: the outcome of an undisturbed run.

    Raises:
        KeyboardInterrupt: The run was interrupted.
    """
    layout, problems = LAYOUTS[name], list[str]()
    shared_before = shared_memory()
    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        result = orchestrator.run([*layout.overrides, *OVERRIDES, *overrides])
    seconds = time.monotonic() - start
    assert result is not None
    if result.status == "KILLED":
        raise KeyboardInterrupt
    summary = result.summary
    if result.exit_code != 0:
        problems.append(f"exit {result.exit_code}: {result.reason}")
    elif expected is not None:
        problems += differences(outcome(result.run_dir), expected, layout.tolerance)
    if seconds > TRIAL_TIMEOUT_S:
        problems.append(f"it took {seconds:.0f} s")
    problems += leaks()
    problems += [f"{file} left in shared memory" for file in sorted(shared_memory() - shared_before)]
    return Trial(
        layout=name,
        disturbances=disturbances,
        problems=tuple(problems),
        seconds=seconds,
        restarts=summary.get("restarts", 0),
        recovery_s=tuple(summary.get("recovery_s", ())),
        steps_lost=summary.get("steps_lost", 0),
    )


def differences(found: Outcome, expected: Outcome, tolerance: float | None) -> list[str]:
    """Describe the first three weights and losses that differ; none if ``tolerance`` is None."""
    if tolerance is None:
        return []
    close = functools.partial(torch.allclose, rtol=tolerance, atol=tolerance / 100)
    differing = [
        f"{name} differs" for name, tensor in found.weights.items() if not close(tensor, expected.weights[name])
    ]
    differing += [
        f"loss of step {step}: {loss}, not {expected.losses[step]}"
        for step, loss in found.losses.items()
        if abs(loss - expected.losses[step]) > tolerance * abs(expected.losses[step])
    ]
    return differing[:3]


def shared_memory() -> set[str]:
    """Return the names of all shared-memory files."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def leaks() -> list[str]:
    """Describe the placement groups and worker processes that a finished run left behind."""
    from ray.util.placement_group import placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    workers = [p for p in psutil.Process().children(recursive=True) if is_worker(p)]
    _, alive = psutil.wait_procs(workers, timeout=10)
    return [f"{len(groups)} placement groups left"] * bool(groups) + [f"{len(alive)} processes left"] * bool(alive)


def is_worker(process: psutil.Process) -> bool:
    """Return whether a process runs one of our worker actors."""
    with contextlib.suppress(psutil.Error):
        return any("ray::Worker" in word or "/worker-" in word for word in process.cmdline())
    return False


def outcome(run_dir: Path) -> Outcome:
    """Read the outcome of a finished run."""
    return Outcome(
        weights=load_file(run_dir / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"),
        losses={step: m["train/loss"] for step, _, m in read_metrics(RunDir(run_dir)) if "train/loss" in m},
    )


def summary(trials: list[Trial]) -> str:
    """Return a table with a row for each layout, and the number of faults of each kind."""
    rows = []
    for name in dict.fromkeys(t.layout for t in trials):
        group = [t for t in trials if t.layout == name]
        recoveries = sorted(s for t in group for s in t.recovery_s)
        rows.append(
            [
                name,
                str(len(group)),
                str(sum(t.passed for t in group)),
                str(sum(t.restarts for t in group)),
                f"{recoveries[len(recoveries) // 2]:.2f} s" if recoveries else "",
                f"{recoveries[-1]:.2f} s" if recoveries else "",
                str(sum(t.steps_lost for t in group)),
            ]
        )
    kinds = Counter(fault.partition("@")[0] for t in trials for fault in t.disturbances)
    head = ["strategy", "trials", "passed", "recoveries", "median", "longest", "steps repeated"]
    return f"{table(head, rows)}\n\nfaults: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}"


if __name__ == "__main__":
    main()
