"""The search for the largest batch that fits: real runs, each with twice the batch of the one before."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.display.plain_text import first_line, rate, writable
from orchestrator.driver.checked_runs import check_all
from orchestrator.driver.process.origin import this_origin
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.session import brief_runs
from orchestrator.features.batch_size.sizes import Trial, fastest, next_size
from orchestrator.planning.plan import Plan
from orchestrator.strategies import registry

KEY = "train.global_batch_size"
OUT_OF_MEMORY = "out of memory"
"""What the reason of a run has that has failed for want of memory."""
_HEADING = f"{'global batch':>12}  {'per worker':>10}  {'samples/s':>9}  memory of a worker"
FOLDER = "batch-size"
"""The directory below ``output_dir`` in which the runs are until they end."""


def search(words: Sequence[str], redactor: Redactor, *, steps: int, largest: int | None) -> int:
    """Find the largest batch that fits, and print what each run shows; returns the exit code.

    Args:
        words: the overrides of the run.
        redactor: masks secrets.
        steps: of each run.
        largest: the largest global batch to try; None for no limit.

    Raises:
        ConfigError: the first run cannot start.
    """
    (checked_run,) = check_all([words], redactor)
    config = checked_run.config
    if config.strategy.is_choice or registry.load(config.strategy.name).runs_script:
        raise ConfigError([f"strategy={config.strategy.name}: it has no batch of its own; choose another strategy"])
    trials: list[Trial] = []
    why, others = "", [word for word in words if not word.startswith(f"{KEY}=")]
    size: int | None = config.train.global_batch_size
    with contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, Path(config.output_dir) / FOLDER, ignore_errors=True)
        stop = at_end.enter_context(StopSignals(owns_process=True))
        run = at_end.enter_context(brief_runs(checked_run, stop, folder=FOLDER))
        while size is not None:
            try:
                (checked_run,) = check_all([[*others, f"{KEY}={size}"]], redactor)
            except ConfigError as e:
                if not trials:
                    raise
                why = first_line(e.errors[0])
                break
            plan, result = run(checked_run, steps)
            if result.status == "KILLED":
                return result.exit_code
            if not trials:
                _say(f"{plan.world_size} x {plan.device}\n\n{_HEADING}")
            trials.append(_trial(size, plan, result))
            _say(_row(trials[-1]))
            if trials[-1].refused and OUT_OF_MEMORY not in trials[-1].refused:
                _say(f"\nfailed for another reason; `orchestrator launch` with {KEY}={size} shows more")
                return 1
            size, why = next_size(
                trials,
                first=size,
                least=plan.mesh.data_parallel_size * config.train.grad_accumulation,
                largest=largest,
                on_cpu=plan.device == "cpu",
                free_mb=psutil.virtual_memory().available / 2**20 / plan.world_size,
            )
    fitting = [trial for trial in trials if not trial.refused]
    if not fitting:
        return 1
    found, best = max(fitting, key=lambda trial: trial.size), fastest(fitting)
    _say(f"\nlargest that was tried and fits: {found.size} ({found.per_worker} per worker); {why}")
    if best.size != found.size:
        _say(f"{best.size} ({best.per_worker} per worker) is about as fast")
    command = this_origin().relaunch([*others, f"{KEY}={found.size}"])
    _say(f"next: {shlex.join(command)}")
    return 0


def _trial(size: int, plan: Plan, result: RunResult) -> Trial:
    return Trial(
        size=size,
        per_worker=-(-size // plan.mesh.data_parallel_size),
        samples_per_s=float(result.summary.get("samples_per_s") or 0.0),
        memory_mb=result.summary.get("peak_memory_mb"),
        refused="" if result.status == "FINISHED" else first_line(result.reason),
    )


def _row(trial: Trial) -> str:
    if trial.refused:
        return f"{trial.size:>12,}  {trial.per_worker:>10,}  {trial.refused}"
    memory = "" if trial.memory_mb is None else f"{trial.memory_mb:,.0f} MB"
    return f"{trial.size:>12,}  {trial.per_worker:>10,}  {rate(trial.samples_per_s):>9}  {memory}"


def _say(text: str) -> None:
    print(writable(text, sys.stdout), flush=True)
