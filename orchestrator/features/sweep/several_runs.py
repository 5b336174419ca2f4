"""One launch of several runs: a sweep, or a search, with the comparison at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from orchestrator.config.redact import Redactor
from orchestrator.driver.checked_runs import CheckedRun, check_all
from orchestrator.driver.process.origin import this_origin
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.process.uploads import tracking, tracking_keys
from orchestrator.driver.session import run_all
from orchestrator.features.sweep.search import open_search
from orchestrator.features.sweep.sweep import Sweep, open_sweep
from orchestrator.protocol.events import Sink
from orchestrator.records.lock import process_started_at
from orchestrator.records.run_dir import RunDir


def run_sweep(words: Sequence[str], runs: Sequence[Sequence[str]], redactor: Redactor) -> int:
    """Execute the runs of a sweep, compare them at the end, and upload the comparison.

    Args:
        words: the overrides as typed.
        runs: the overrides of each run.
        redactor: learns the secrets of all runs.

    Returns:
        The largest exit code of the runs.

    Raises:
        ConfigError, KeyboardInterrupt, SystemExit: see :func:`check_all` and :func:`run_all`.
    """
    sweep, remaining = open_sweep(words, runs, redactor)
    checked_runs = check_all(remaining, redactor, loop=sweep)
    results: list[RunResult] = []
    try:
        with StopSignals(owns_process=True) as stop:
            results = run_all(checked_runs, stop, loop=sweep, started_at=process_started_at())
    finally:
        sweep.end()
    if results:
        _publish(sweep, checked_runs[0], results[-1])
    return sweep.exit_code


def run_search(words: Sequence[str], preset: Mapping[str, str], redactor: Redactor) -> int:
    """Execute the runs of a search, compare them at the end, and upload the comparison.

    Args:
        words: the overrides as typed.
        preset: what the preset of the sweep sets.
        redactor: learns the secrets of all runs.

    Returns:
        The exit code.

    Raises:
        ConfigError, KeyboardInterrupt, SystemExit: see :meth:`Search.run` and :func:`run_all`.
    """
    search = open_search(words, preset, redactor)
    ran: list[tuple[CheckedRun, RunResult]] = []

    def execute(overrides: Sequence[str], *, sweep: Mapping[str, str], watcher: Sink) -> RunResult:
        started_at = time.time() if ran else process_started_at()
        (checked_run,) = check_all([overrides], search.sweep.redactor)
        (result,) = run_all([checked_run], stop, part_of=sweep, started_at=started_at, watcher=watcher)
        ran.append((checked_run, result))
        return result

    with StopSignals(owns_process=True) as stop:
        exit_code = search.run(execute, stop)
    if ran:
        _publish(search.sweep, *ran[-1])
    return exit_code


def _publish(sweep: Sweep, checked_run: CheckedRun, last: RunResult) -> None:
    """Upload the comparison of a sweep, and link to it; ``last`` is a result of ``checked_run`` or of a later run."""
    try:
        tracking().report_sweep(RunDir(last.run_dir), checked_run.config.tracking, tuple(checked_run.redactor.secrets))
    except ValueError as e:
        sweep.say(f"warning: the comparison is not uploaded: {e}")
    for command in tracking_keys().page_commands(checked_run.config.tracking, this_origin()):
        sweep.say(f"next: {command}")
    if page := last.summary.get("mlflow_page"):
        sweep.say(f"charts: {page}")
