"""A sweep: which of its runs are still to do, its progress on the console, and the comparison at its end."""

from __future__ import annotations

import shlex
import statistics
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.overrides import choosing, masked, values
from orchestrator.config.redact import Redactor
from orchestrator.config.text import path_override, plain, settings_of
from orchestrator.display.comparison import ComparedRun, CompareError, read_run
from orchestrator.display.plain_text import count, duration, writable
from orchestrator.display.report import errors_text
from orchestrator.driver.loops import Execute, PlannedRun
from orchestrator.driver.preflight.run_config import absolute_paths, output_dir
from orchestrator.driver.process.origin import this_origin
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.features.sweep.comparison_analysis import Comparison, verdict
from orchestrator.features.sweep.comparison_report import draw, markdown, table
from orchestrator.features.sweep.side_by_side import num_at_once, run_side_by_side
from orchestrator.planning.plan import Node
from orchestrator.records.output_dir import OutputDir, fetch
from orchestrator.records.run_dir import RunDir
from orchestrator.records.sweep_dir import SweepDir, all_sweeps, runs_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.storage.remote import StorageError
from orchestrator.strategies import registry
from orchestrator.user_code.errors import exits_refused

NOT_STARTED = 2
"""The exit code of a run whose configuration or directory is wrong."""

FAILED = 1
"""The exit code of a run that an error in the orchestrator has ended."""


@dataclass(kw_only=True)
class Sweep:
    """The runs of one command with ``-m``, in their order.

    Attributes:
        words: the overrides as typed, for the command that continues the sweep.
        runs: the overrides of each run, without ``resume``, with secrets masked; they identify the run.
        redactor: masks secrets in what is printed and written.
        label: the name of the sweep; None to name the overrides in which the runs differ.
        sweep_id: identifies the sweep in the records and in MLflow.
        finished: directories of the runs that an earlier command has finished, by the number of the run.
        errors: the errors of the runs that are left out.
        exit_code: the largest exit code of its runs.
        at_once: how many runs are in progress at once.
    """

    words: Sequence[str]
    runs: Sequence[tuple[str, ...]]
    output: OutputDir
    redactor: Redactor
    label: str | None = None
    sweep_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    finished: dict[int, RunDir] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    exit_code: int = 0
    at_once: int = 1
    _numbers: list[int] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _unfinished: list[int] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """The overrides in which the runs differ, such as ``strategy=single,ddp``, or the label."""
        if self.label is not None:
            return self.label
        given: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        for override in (override for run in self.runs for override in run):
            key, _, value = override.partition("=")
            given.setdefault(key, {})[value] = None
        return " ".join(f"{key}={','.join(found)}" for key, found in given.items() if len(found) > 1) or "sweep"

    @property
    def directory(self) -> SweepDir:
        """Where the record and the report of the sweep are."""
        return SweepDir.of(self.output, self.sweep_id)

    def leaves_out(self, overrides: Sequence[str], errors: Sequence[str]) -> bool:
        """Leave out the run if ``sweep.unfit=skip``; returns whether it is left out."""
        if values(overrides).get("sweep.unfit") != "skip":
            return False
        self.errors += errors
        name = self._run_name(self._number(overrides))
        line = f"left out: {name}: {errors[0].removeprefix(f'{name}: ')}"
        self._left_out.append(line)
        self.say(line)
        return True

    def begin(self, planned: Sequence[Sequence[str]]) -> None:
        """Record the sweep before its first run. ``planned``: the overrides of the runs to execute, in order."""
        self._numbers = [self._number(overrides) for overrides in planned]
        self._unfinished = list(self._numbers)
        numbers = range(1, len(self.runs) + 1)
        left_out = [n for n in numbers if n not in self._numbers and n not in self.finished]
        record = {
            "id": self.sweep_id,
            "name": self.name,
            "runs": [list(run) for run in self.runs],
            "left_out": left_out,
        }
        try:
            self.directory.write_record(record)
        except OSError as e:
            raise ConfigError([f"{self.directory.path}: cannot be written ({e.strerror or e})"]) from e

    def title_of(self, overrides: Sequence[str]) -> str:
        """Return the number of a run in the sweep and what distinguishes it: ``run 2: strategy=ddp``."""
        number = self._number(overrides)
        return f"run {number}: {self._run_name(number)}"

    def execute(self, runs: Sequence[PlannedRun], nodes: Sequence[Node], stop: StopSignals) -> list[RunResult]:
        """Execute the runs one after another, or as many at once as ``sweep.parallel`` says."""
        first = runs[0].checked
        parallel = first.config.sweep.parallel
        if parallel == "auto":
            parallel = 1 if first.embeds_ray else num_at_once([run.sizes.initial for run in runs], nodes)
        self.at_once = parallel
        self.begin([run.checked.overrides for run in runs])
        if self.at_once > 1:
            return run_side_by_side([run.checked.overrides for run in runs], self, stop)
        return self.run_in_turn([(run.checked.overrides, run.execute) for run in runs], stop)

    def run_in_turn(self, runs: Iterable[tuple[Sequence[str], Execute]], stop: StopSignals) -> list[RunResult]:
        """Execute runs, given by their overrides, one after another. After a signal no other starts.

        Returns:
            The results of the runs that no error has ended.
        """
        results: list[RunResult] = []
        for overrides, execute in runs:
            if stop.received is not None:
                break
            if (result := self.run(overrides, execute)) is not None:
                results.append(result)
        self.note_stop(stop)
        return results

    def note_stop(self, stop: StopSignals) -> None:
        """Let the exit code say so if a signal has kept runs from finishing, even if none was in progress."""
        if stop.received is not None and self._unfinished:
            self._raise_exit_code(128 + stop.received)

    def run(self, overrides: Sequence[str], execute: Execute) -> RunResult | None:
        """Execute a run and report the progress; an error ends this run only. Returns None after an error."""
        number = self._number(overrides)
        self.say(self._progress(number))
        began = time.monotonic()
        try:
            with exits_refused():
                result = execute(sweep=self.membership(number, self._own_overrides(number)))
        except ConfigError as e:
            print(errors_text(e.errors), file=sys.stderr)
            self._raise_exit_code(NOT_STARTED)
            return None
        except Exception:
            traceback.print_exc()
            self._raise_exit_code(FAILED)
            return None
        self._seconds.append(time.monotonic() - began)
        self._raise_exit_code(result.exit_code)
        if result.status == "FINISHED":
            self._unfinished.remove(number)
        return result

    def _raise_exit_code(self, code: int) -> None:
        with self._lock:
            self.exit_code = max(self.exit_code, code)

    def end(self) -> None:
        """Show and write the comparison of all runs, and say how to continue what is not finished."""
        try:
            self._report()
        except (OSError, CompareError) as e:
            self.say(f"warning: no report of the sweep was written: {e}")
        if self._unfinished:
            self.say(
                f"not finished: {count(len(self._unfinished), 'run')}; continue the sweep with: {self.continue_command}"
            )

    @property
    def continue_command(self) -> str:
        """The command line that continues the sweep after a stop."""
        again = [masked(word, self.redactor) for word in self.words if not word.startswith("resume=")]
        return shlex.join(this_origin().relaunch(["-m", *again, "resume=auto"]))

    def _report(self) -> None:
        runs = self._runs()
        if not runs:
            return
        comparison, directory = Comparison(runs, best_first=True), self.directory
        title = f"Sweep {self.name}"
        self.say("\n".join(["", title, table(comparison), *verdict(comparison)]))
        left_out = "".join(f"- {plain(self.redactor.text(line))}\n" for line in self._left_out)
        directory.report.write_text(markdown(comparison.grouped, title=title) + left_out, errors="replace")
        draw(comparison, directory.picture)
        directory.upload(directory.report, directory.picture)
        self.say(f"report: {directory.location_of(directory.report)}")

    def _runs(self) -> list[ComparedRun]:
        """The runs of the sweep that have a directory, in the order of the sweep."""
        found = {**runs_of(self.output, self.sweep_id), **self.finished}
        for run_dir in found.values():
            fetch(run_dir, [run_dir.metrics_file.name])
        return [read_run(found[number].path) for number in sorted(found)]

    def _progress(self, number: int) -> str:
        before, total = self._numbers.index(number), len(self._numbers)
        done = len(self.finished) + before
        text = f"\nrun {done + 1} of {len(self.finished) + total}: {self._run_name(number)}"
        if self._seconds:
            remaining = total - before
            seconds = statistics.fmean(self._seconds) * remaining / self.at_once
            text += f"; about {duration(seconds, whole=True)} left"
        return text

    def _run_name(self, number: int) -> str:
        """The overrides that distinguish the run from the others."""
        return " ".join(self._own_overrides(number)) or "all defaults"

    def _own_overrides(self, number: int) -> list[str]:
        others = [set(run) for run in self.runs]
        shared = set.intersection(*others) if len(others) > 1 else set()
        return [o for o in self.runs[number - 1] if o not in shared]

    def membership(self, number: int, own: Sequence[str]) -> dict[str, str]:
        """Return what a run records of the sweep; ``own``: the overrides that distinguish it from the others."""
        is_named = any(word.startswith("name=") for word in self.words)
        settings = settings_of(own, told_by_name=("name",) if is_named else ("job", "strategy"))
        return {"id": self.sweep_id, "name": self.name, "run": str(number), "settings": self.redactor.text(settings)}

    def _number(self, overrides: Sequence[str]) -> int:
        """The number of a run in the sweep, from 1."""
        return self.runs.index(_identity(overrides, self.redactor)) + 1

    def say(self, text: str) -> None:
        """Print ``text``, with secrets masked."""
        print(writable(self.redactor.text(text), sys.stdout), flush=True)


def open_sweep(
    words: Sequence[str], runs: Sequence[Sequence[str]], redactor: Redactor
) -> tuple[Sweep, list[list[str]]]:
    """Return the sweep with these ``runs``, and the overrides of those that are still to do.

    With ``resume=auto``, it is the newest sweep of the same runs that is not complete. Its finished runs are not
    repeated, and the others continue from their last checkpoint.

    Args:
        words: the overrides as typed.
        runs: the overrides of each run.
        redactor: learns the secrets of the overrides.

    Raises:
        ConfigError: two runs are equal; or the store with the sweep to resume cannot be used.
    """
    for run in runs:
        redactor.learn(values(run))
    identities = [_identity(run, redactor) for run in runs]
    if len(set(identities)) < len(identities):
        raise ConfigError(["two runs of the sweep are equal; leave out values that are given twice"])
    sweep = Sweep(words=words, runs=identities, output=output_of(runs[0]), redactor=redactor)
    if not all("resume=auto" in run for run in runs):
        return sweep, [list(run) for run in runs]
    try:
        return _resumed(sweep, runs)
    except StorageError as e:
        raise ConfigError([str(e)]) from e


def _resumed(sweep: Sweep, runs: Sequence[Sequence[str]]) -> tuple[Sweep, list[list[str]]]:
    new = [[o for o in run if not o.startswith("resume=")] for run in runs]
    for directory in all_sweeps(sweep.output):
        try:
            record = directory.read_record()
        except (OSError, ValueError) as e:
            sweep.say(f"sweep skipped: {e}")
            continue
        if sorted(tuple(run) for run in record.get("runs", [])) != sorted(sweep.runs):
            continue
        sweep.runs = [tuple(run) for run in record["runs"]]
        found = runs_of(sweep.output, record["id"], sweep.say)
        finished = {n: run_dir for n, run_dir in found.items() if run_dir.read_record().get("state") == "finished"}
        if len(finished) + len(record["left_out"]) == len(sweep.runs):
            break
        sweep.sweep_id, sweep.finished = record["id"], finished
        sweep.say(f"sweep {sweep.sweep_id[:8]}: {len(finished)} of {count(len(sweep.runs), 'run')} finished before")
        return sweep, [run + resume_override(found.get(n)) for run in new if (n := sweep._number(run)) not in finished]
    sweep.say("resume=auto: no sweep of these runs is unfinished; this is a new one")
    return sweep, new


def resume_override(run_dir: RunDir | None) -> list[str]:
    """Return the override that continues a run; none if it has no checkpoint, and starts again."""
    if run_dir is None or not CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).list():
        return []
    return [path_override("resume", run_dir.location)]


def _identity(overrides: Sequence[str], redactor: Redactor) -> tuple[str, ...]:
    return tuple(masked(o, redactor) for o in overrides if not o.startswith("resume="))


def output_of(overrides: Sequence[str]) -> OutputDir:
    """Return the directory of the runs, as far as the overrides are valid; the check of the runs reports the errors."""
    config, _ = compose(choosing(overrides, "output_dir", "storage."), [], registry.config_class)
    return OutputDir(Path()) if config is None else output_dir(absolute_paths(config))
