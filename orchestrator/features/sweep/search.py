"""A search: the runs of a sweep whose values Optuna chooses by the results of the runs before.

Optuna's own storage is not used: the record of the sweep has the values of each run, and the run directories have the
results. From these, a search that was stopped goes on.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.operation import SweepConfig
from orchestrator.config.overrides import Choices, Interval, Space, choosing, masked, search_space, values
from orchestrator.config.redact import Redactor
from orchestrator.config.text import first_few
from orchestrator.display.plain_text import count
from orchestrator.display.report import errors_text
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.features.sweep.sweep import Sweep, output_of, resume_override
from orchestrator.protocol.events import Event, MetricsLogged, RunStarted, Sink
from orchestrator.protocol.metrics import summary_value
from orchestrator.records.journal import read_metrics
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_dir import RunDir
from orchestrator.records.sweep_dir import all_sweeps, runs_of
from orchestrator.strategies import registry

NONE_FINISHED = 1
"""The exit code of a search of which no run has a result."""
_RUN = "run"
"""The attribute of a trial that holds the number of its run."""


class ExecuteTrial(Protocol):
    """Executes one run, which is recorded as a part of ``sweep``.

    Raises:
        ConfigError: the configuration of the run is wrong.
    """

    def __call__(self, overrides: Sequence[str], *, sweep: Mapping[str, str], watcher: Sink) -> RunResult: ...


class Trial(Sink):
    """A trial of Optuna while its run trains: an event sink that reports ``metric``, and may prune the run.

    Args:
        metric: the result of a run by which Optuna searches.
    """

    def __init__(self, trial: Any, metric: str, *, prune: Callable[[], None] = lambda: None):
        self._trial = trial
        self._metric = metric
        self._prune = prune
        self._steps: float = math.inf
        self._reported = 0  # the last step; a run may repeat steps after a failure

    def emit(self, event: Event) -> None:
        """Report an evaluation, and prune the run if its value is poor, except after the last step."""
        if isinstance(event, RunStarted):
            self._steps = event.steps or math.inf
        elif isinstance(event, MetricsLogged) and self.report(event.step, event.metrics) and event.step < self._steps:
            self._prune()

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Report the value of an evaluation that ``metrics`` may have; returns whether it is poor."""
        value = next((v for name, v in metrics.items() if name.replace("/", "_") == self._metric), None)
        if value is None or step <= self._reported:
            return False
        self._reported = step
        self._trial.report(value, step)
        return bool(self._trial.should_prune())


@dataclass(kw_only=True)
class Search:
    """A search in progress.

    Attributes:
        fixed: the overrides of all runs.
        space: the values that may be tried.
        options: how to search, and for how many runs.
        seed: the seed of the choice of values.
        sweep: the sweep that the runs belong to.
        tried: the values of each run, in order.
        started: the directories of the runs that an earlier command has started, by number.
    """

    fixed: Sequence[str]
    space: Space
    options: SweepConfig
    eval_every: int
    seed: int
    sweep: Sweep
    tried: list[dict[str, Any]] = field(default_factory=list)
    started: Mapping[int, RunDir] = field(default_factory=dict)

    def run(self, execute: ExecuteTrial, stop: StopSignals) -> int:
        """Execute the runs one after another, and say which was the best. After a signal no other starts.

        Returns:
            The exit code: 0 if a run has a result, 128 plus the number of the signal if one came.

        Raises:
            ConfigError: the configuration of the first run is wrong, or the runs have no result ``sweep.metric``.
        """
        study = self._study()
        try:
            is_complete = self._execute_all(study, execute, stop)
        finally:
            self.sweep.end()
        if not is_complete:
            assert stop.received is not None
            self.sweep.say(f"continue the search with: {self.sweep.continue_command}")
            return 128 + stop.received
        return self._say_best(study)

    def _execute_all(self, study: Any, execute: ExecuteTrial, stop: StopSignals) -> bool:
        """Execute what is left to do; returns whether all was done before a signal came. Raises like :meth:`run`."""
        import optuna

        assert self.options.trials is not None
        unfinished = self._replay(study)
        for number in [*unfinished, *range(len(self.tried) + 1, self.options.trials + 1)]:
            if stop.received is not None:
                return False
            if number in unfinished:
                study.enqueue_trial(self.tried[number - 1])
            trial = study.ask(self._distributions())
            trial.set_user_attr(_RUN, number)
            if number > len(self.tried):
                self.tried.append(trial.params)
            self._record(study)
            watcher = Trial(trial, self.options.metric, prune=stop.prune)
            self._report_journal(watcher, number)
            self.sweep.say(f"\nrun {number} of {self.options.trials}: {' '.join(_words(trial.params))}")
            try:
                membership = self.sweep.membership(number, _words(self.tried[number - 1]))
                result = execute(self._overrides(number), sweep=membership, watcher=watcher)
            except ConfigError as e:
                if number == 1:
                    raise
                print(errors_text(e.errors), file=sys.stderr)
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            if result.status == "KILLED":
                return False
            self._tell(study, trial, result.status, result.summary)
        return True

    def _study(self) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # With another seed than before, a search that goes on does not try the same values again.
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(self.tried))
        pruner: Any = optuna.pruners.NopPruner()
        if self.options.pruner is not None:
            pruner = optuna.pruners.SuccessiveHalvingPruner(
                min_resource=self.options.min_steps or self.eval_every, reduction_factor=self.options.reduction_factor
            )
        return optuna.create_study(sampler=sampler, pruner=pruner, direction=self.options.direction)

    def _tell(self, study: Any, trial: Any, status: str, summary: Mapping[str, Any]) -> None:
        """Tell Optuna how a run ended."""
        from optuna.trial import TrialState

        value = self._value(summary) if status == "FINISHED" else None
        without = TrialState.PRUNED if status == "PRUNED" else TrialState.FAIL
        study.tell(trial, value, state=without if value is None else None)

    def _report_journal(self, trial: Trial, number: int) -> None:
        """Report the evaluations that a run has logged under an earlier command."""
        if (run_dir := self.started.get(number)) is not None:
            fetch(run_dir, [run_dir.metrics_file.name])
            for step, _, metrics in read_metrics(run_dir):
                trial.report(step, metrics)

    def _replay(self, study: Any) -> list[int]:
        """Add the results of an earlier command; returns the numbers of its runs that have not ended."""
        unfinished = []
        for number, params in enumerate(self.tried, start=1):
            record = self.started[number].read_record() if number in self.started else {}
            if record.get("state") not in ("finished", "pruned", "failed"):
                unfinished.append(number)
                continue
            study.enqueue_trial(params, user_attrs={_RUN: number})
            trial = study.ask(self._distributions())
            self._report_journal(Trial(trial, self.options.metric), number)
            self._tell(study, trial, record["state"].upper(), record.get("summary") or {})
        return unfinished

    def _distributions(self) -> dict[str, Any]:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        found: dict[str, Any] = {}
        for key, tried in self.space.items():
            match tried:
                case Choices(listed):
                    found[key] = CategoricalDistribution(listed)
                case Interval(low, high, log, step) if tried.is_whole:
                    found[key] = IntDistribution(int(low), int(high), log=log, step=step)
                case Interval(low, high, log):
                    found[key] = FloatDistribution(low, high, log=log)
        return found

    def _overrides(self, number: int) -> list[str]:
        resumed = resume_override(self.started.get(number))
        return [*self.fixed, *_words(self.tried[number - 1]), *resumed]

    def _value(self, summary: Mapping[str, Any]) -> float | None:
        """Return the result of a run; None if it is not a finite number."""
        metric = self.options.metric
        value = summary_value(summary, metric)
        if value is None and metric not in summary:
            known = [key for key, known in summary.items() if isinstance(known, (int, float))]
            raise ConfigError(
                [f"sweep.metric={metric}: the runs have no such result; they have {first_few(known, 20)}"]
            )
        return value

    def _record(self, study: Any) -> None:
        numbers = range(1, len(self.tried) + 1)
        runs = [[masked(word, self.sweep.redactor) for word in self._overrides(number)] for number in numbers]
        record = {"id": self.sweep.sweep_id, "name": self.sweep.name, "runs": runs, "left_out": []}
        search = {
            "identity": identity(self.fixed, self.space, self.sweep.redactor),
            "tried": self.tried,
            "pruned": [trial.user_attrs[_RUN] for trial in _pruned(study)],
        }
        try:
            self.sweep.directory.write_record({**record, "search": search})
        except OSError as e:
            raise ConfigError([f"{self.sweep.directory.path}: cannot be written ({e.strerror or e})"]) from e

    def _say_best(self, study: Any) -> int:
        self._record(study)
        done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
        if not done:
            self.sweep.say("no run of the search has a result")
            return NONE_FINISHED
        best, pruned = study.best_trial, _pruned(study)
        self.sweep.say(
            f"best of {count(len(done), 'run')}: run {best.user_attrs[_RUN]}, {self.options.metric} {best.value:.6g}, "
            f"with {' '.join(_words(best.params))}{f'; {len(pruned)} pruned' if pruned else ''}"
        )
        return 0


def open_search(words: Sequence[str], preset: Mapping[str, str], redactor: Redactor) -> Search:
    """Return the search with these overrides; with ``resume=auto``, the newest one of the same runs that has not ended.

    Args:
        words: the overrides as typed, with ``sweep.trials``.
        preset: the values of further keys, unless ``words`` have them.
        redactor: learns the secrets of the overrides.

    Raises:
        ConfigError: an override is wrong, nothing is to be searched, or Optuna is not installed.
    """
    fixed, space = search_space(words, preset)
    redactor.learn(values(fixed))
    errors: list[str] = []
    config, _ = compose(choosing(fixed, "sweep.", "seed", "train.eval_"), errors, registry.config_class)
    if config is not None and config.sweep.parallel != 1:
        errors.append("sweep.parallel: the runs of a search follow one another; leave it out")
    if importlib.util.find_spec("optuna") is None:
        errors.append("sweep.trials: a search needs Optuna; install it with: pip install optuna")
    if errors or config is None:
        raise ConfigError(errors)
    search = Search(
        fixed=[word for word in fixed if not word.startswith("resume=")],
        space=space,
        options=config.sweep,
        eval_every=config.train.eval_every,
        seed=config.seed,
        sweep=Sweep(
            words=words, runs=(), label=f"search of {', '.join(space)}", output=output_of(fixed), redactor=redactor
        ),
    )
    if "resume=auto" in fixed:
        _resume(search)
    return search


def _resume(search: Search) -> None:
    """Let ``search`` go on where the newest one of the same runs was stopped."""
    assert search.options.trials is not None
    sweep, own = search.sweep, identity(search.fixed, search.space, search.sweep.redactor)
    for directory in all_sweeps(sweep.output):
        try:
            record = directory.read_record()
        except (OSError, ValueError) as e:
            sweep.say(f"sweep skipped: {e}")
            continue
        earlier = record.get("search") or {}
        if earlier.get("identity") != own:
            continue
        sweep.sweep_id, search.tried = record["id"], earlier["tried"]
        search.started = runs_of(sweep.output, record["id"], sweep.say)
        sweep.say(f"sweep {sweep.sweep_id[:8]}: {count(len(search.tried), 'run')} of the search were started before")
        return
    sweep.say("resume=auto: there is no search of these runs; this is a new one")


def identity(fixed: Sequence[str], space: Space, redactor: Redactor) -> list[str]:
    """Return what distinguishes a search from others; its number of runs does not, so that it can be raised."""
    kept = [masked(word, redactor) for word in fixed if not word.startswith("sweep.trials=")]
    return sorted([*kept, *(f"{key}: {tried}" for key, tried in space.items())])


def _pruned(study: Any) -> list[Any]:
    """Return the trials whose runs were pruned."""
    return [trial for trial in study.trials if trial.state.name == "PRUNED"]


def _words(params: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a run for the keys of the search, numbers with six digits."""
    return [f"{key}={f'{value:.6g}' if isinstance(value, float) else value}" for key, value in params.items()]
