"""Random faults, in every phase, under six of the strategies: each run has to end as if nothing had happened.

python benchmarks/campaign.py --trials 200

A trial is one run with one to three faults, drawn from a seed. It passes if the run finishes, nothing is left behind
(process, placement group, shared memory), and losses and weights are those of an undisturbed run, where the strategy
is deterministic.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
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
from typing import Any

import psutil
import ray
import torch
from rounds import HERE, table
from safetensors.torch import load_file

import orchestrator
from orchestrator.policy.recovery import GENERATIONS_WITHOUT_PROGRESS

STEPS = 30
WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.eval_every=10",
    "checkpoint.every=10",
    "job.hidden=16",
    "job.depth=3",
    "tracking=none",
    "recovery.backoff_s=0.1",
    "recovery.hang_min_s=2",
    "recovery.hang_max_s=20",
)
TRIAL_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``tolerance``: relative, of losses and weights; None: they differ from run to run anyway."""

    words: tuple[str, ...]
    ranks: int
    tolerance: float | None = 1e-5


LAYOUTS = {
    "single": Layout(words=("strategy=single",), ranks=1),
    "ddp": Layout(words=("strategy=ddp",), ranks=2),
    "ddp with a spare": Layout(words=("strategy=ddp", "recovery.spares=1"), ranks=2),
    "ddp, 1 to 3 workers": Layout(words=("strategy=ddp", "strategy.num_workers=[1,3]"), ranks=3, tolerance=1e-4),
    "pipeline": Layout(words=("strategy=pipeline",), ranks=2),
    "pipeline with copies": Layout(words=("strategy=pipeline", "recovery.peer_copy_every=4"), ranks=2),
    "ddp_pipeline": Layout(
        words=("strategy=ddp_pipeline", "strategy.num_workers=4", "strategy.pipeline_parallel_size=2"), ranks=4
    ),
    "hogwild": Layout(words=("strategy=hogwild",), ranks=2, tolerance=None),
    "parameter_server": Layout(words=("strategy=parameter_server", "strategy.consistency=sync"), ranks=3),
    "parameter_server, stale": Layout(
        words=("strategy=parameter_server", "strategy.consistency=stale"), ranks=3, tolerance=None
    ),
}
KINDS = ("raise", "exit", "kill", "segv", "stop", "sleep")
PHASES = ("train", "train", "train", "join", "build", "eval", "checkpoint", "end")


@dataclass(frozen=True, kw_only=True)
class Trial:
    layout: str
    faults: tuple[str, ...]
    passed: bool
    why: str
    seconds: float
    restarts: int
    recovery_s: tuple[float, ...]
    steps_lost: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="some of them, with semicolons between")
    parser.add_argument("--keep", action="store_true", help="write the table to results/")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    chance = random.Random(arguments.seed)
    trials: list[Trial] = []
    names = arguments.layouts.split(";")
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.chdir(folder)
        references = {name: reference(LAYOUTS[name]) for name in names}
        for number in range(arguments.trials):
            name = names[number % len(names)]
            trial = run_trial(name, draw(chance, LAYOUTS[name]), references[name])
            trials.append(trial)
            verdict = "passed" if trial.passed else f"FAILED: {trial.why}"
            print(f"{number + 1:4} {name:23} {' '.join(trial.faults):40} {trial.seconds:5.1f} s  {verdict}", flush=True)
    ray.shutdown()
    text = summary(trials)
    print(text)
    if arguments.keep:
        (HERE / "results" / "campaign.md").write_text(
            f"# campaign\n\n{date.today()}, seed {arguments.seed}\n\n{text}\n"
        )
    sys.exit(0 if all(t.passed for t in trials) else 1)


def draw(chance: random.Random, layout: Layout) -> tuple[str, ...]:
    """One to three faults at different steps; not three before the first one, which would end any run."""
    faults = []
    for step in sorted(chance.sample(range(2, STEPS), chance.choice((1, 1, 1, 2, 2, 3)))):
        phase, kind, rank = chance.choice(PHASES), chance.choice(KINDS), chance.randrange(layout.ranks)
        at = {"join": 0, "build": 0, "eval": 10, "checkpoint": 20, "end": STEPS}.get(phase, step)
        if phase in ("join", "build", "end") and kind in ("stop", "sleep"):
            kind = "kill"  # what these phases take nobody knows: the timeouts that end them are minutes
        if phase in ("join", "build") and kind == "raise":
            kind = "exit"  # an error before the first step ends a run
        faults.append(f"{kind}@{at}:{rank}" + ("" if phase == "train" else f":{phase}"))
    before_the_first = [fault for fault in faults if "@0:" in fault]
    return tuple(faults if len(before_the_first) < GENERATIONS_WITHOUT_PROGRESS else faults[:-1])


def reference(layout: Layout) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    result = orchestrator.run([*layout.words, *WORDS])
    assert result is not None
    assert result.exit_code == 0, result.reason
    return weights(result.run_dir), losses(result.run_dir)


def run_trial(name: str, faults: tuple[str, ...], expected: tuple[dict[str, torch.Tensor], dict[int, float]]) -> Trial:
    layout, began, shared_before, why = LAYOUTS[name], time.monotonic(), shared_memory(), []
    with contextlib.redirect_stdout(io.StringIO()):
        result = orchestrator.run([*layout.words, *WORDS, f"recovery.chaos=[{','.join(faults)}]"])
    seconds = time.monotonic() - began
    assert result is not None
    if result.status == "KILLED":
        raise KeyboardInterrupt
    summary = result.summary
    if result.exit_code != 0:
        why.append(f"exit {result.exit_code}: {result.reason}")
    else:
        why += differences(result.run_dir, expected, layout.tolerance)
    if seconds > TRIAL_TIMEOUT_S:
        why.append(f"it took {seconds:.0f} s")
    why += left_behind()
    why += [f"{name} left in shared memory" for name in sorted(shared_memory() - shared_before)]
    return Trial(
        layout=name,
        faults=faults,
        passed=not why,
        why="; ".join(why),
        seconds=seconds,
        restarts=summary.get("restarts", 0),
        recovery_s=tuple(summary.get("recovery_s", ())),
        steps_lost=summary.get("steps_lost", 0),
    )


def differences(
    run_dir: Path, expected: tuple[dict[str, torch.Tensor], dict[int, float]], tolerance: float | None
) -> list[str]:
    if tolerance is None:
        return []
    final, curve = weights(run_dir), losses(run_dir)
    close = functools.partial(torch.allclose, rtol=tolerance, atol=tolerance / 100)
    found = [f"{name} differs" for name, tensor in final.items() if not close(tensor, expected[0][name])]
    found += [
        f"loss of step {step}: {loss}, not {expected[1][step]}"
        for step, loss in curve.items()
        if abs(loss - expected[1][step]) > tolerance * abs(expected[1][step])
    ]
    return found[:3]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_behind() -> list[str]:
    from ray.util.placement_group import placement_group_table

    held = [g for g in placement_group_table().values() if g["state"] not in ("REMOVED",)]
    workers = [p for p in psutil.Process().children(recursive=True) if is_worker(p)]
    _, alive = psutil.wait_procs(workers, timeout=10)
    return [f"{len(held)} placement groups left"] * bool(held) + [f"{len(alive)} processes left"] * bool(alive)


def is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("ray::Worker" in word or "/worker-" in word for word in process.cmdline())
    return False


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")


def losses(run_dir: Path) -> dict[int, float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def summary(trials: list[Trial]) -> str:
    rows = []
    for name in dict.fromkeys(t.layout for t in trials):
        of = [t for t in trials if t.layout == name]
        recoveries = sorted(s for t in of for s in t.recovery_s)
        rows.append(
            [
                name,
                str(len(of)),
                str(sum(t.passed for t in of)),
                str(sum(t.restarts for t in of)),
                f"{recoveries[len(recoveries) // 2]:.2f} s" if recoveries else "",
                f"{recoveries[-1]:.2f} s" if recoveries else "",
                str(sum(t.steps_lost for t in of)),
            ]
        )
    kinds = Counter(fault.partition("@")[0] for t in trials for fault in t.faults)
    head = ["strategy", "trials", "passed", "recoveries", "median", "longest", "steps lost"]
    return f"{table(head, rows)}\n\nfaults: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}"


if __name__ == "__main__":
    main()
