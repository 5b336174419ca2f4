"""A search without Ray: the values that it tries, what it does with results and errors, and how it goes on."""

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from helpers.files.golden import Golden
from orchestrator import launch
from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import Choices, Interval, example, is_search, search_space, values
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.features.sweep.search import NONE_FINISHED, Search, Trial, open_search
from orchestrator.protocol.events import MetricsLogged, RunStarted, Sink
from orchestrator.records.journal import Journal
from orchestrator.records.run_dir import RunDir

pytestmark = pytest.mark.slow  # whole searches

STEPS = 40
SPACE = ("job.lr=tag(log,interval(1e-4,1.0))", "job.depth=range(1,4)", "strategy=single,ddp")


def test_the_space_is_what_has_several_values() -> None:
    fixed, space = search_space(["train.steps=5", *SPACE, "job.width=range(8,65,8)", "job.hidden=int(interval(16,64))"])
    assert fixed == ["train.steps=5"]
    assert space == {
        "job.lr": Interval(1e-4, 1.0, log=True),
        "job.depth": Interval(1, 3),
        "strategy": Choices(("single", "ddp")),
        "job.width": Interval(8, 64, step=8),
        "job.hidden": Interval(16, 64),
    }
    assert (space["job.hidden"].is_whole, space["job.lr"].is_whole) == (True, False)  # type: ignore[union-attr]
    assert example(["seed=1", *SPACE]) == ["seed=1", "job.lr=0.0001", "job.depth=1", "strategy=single"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["seed=1"], "sweep.trials: nothing to search"),
        (["job.lr=interval(0,1)", "job.hidden=glob(*)"], "job.hidden=glob(*): cannot be swept"),
    ],
)
def test_a_space_without_values_is_refused(words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("(", r"\(").replace(")", r"\)").replace("*", r"\*")):
        search_space(words)


def test_a_search_needs_the_option_of_several_runs(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert launch.main(["sweep.trials=2", "job.lr=0.1"]) == 2
    golden.says(capsys.readouterr().err)
    assert is_search(["job.lr=0.1"], {"sweep.trials": "5"})
    assert not is_search(["sweep.trials=null"], {"sweep.trials": "5"})


class Runs:
    """Executes runs whose loss is smallest at ``job.lr=0.01``, after evaluations of it in which a run may be pruned.

    ``end`` may change how one ends.
    """

    def __init__(self, root: Path, end: Callable[[int], str] = lambda number: "FINISHED", **summary: Any):
        self.overrides: list[Sequence[str]] = []
        self.steps: list[int] = []  # the last step of each run
        self._root = root
        self.stop = StopSignals()
        self._end = end
        self._summary = summary

    def __call__(self, overrides: Sequence[str], *, sweep: Mapping[str, str], watcher: Sink) -> RunResult:
        self.overrides.append(overrides)
        status = self._end(int(sweep["run"]))
        if status == "refused":
            raise ConfigError(["job.depth: too deep"])
        run_dir = RunDir(self._root / "2026-05-01" / f"run-{sweep['run']:>03}-{sweep['id'][:4]}")
        (run_dir.checkpoints / "step-00000010").mkdir(parents=True, exist_ok=True)
        loss = abs(math.log10(float(values(overrides)["job.lr"])) + 2)
        status = self._evaluate(run_dir, loss, watcher) if status == "FINISHED" else status
        summary = {"val_loss": loss, **self._summary} if status == "FINISHED" else {}
        run_dir.update_record(state=status.lower(), job="digits", strategy="single", sweep=dict(sweep), summary=summary)
        code = {"FINISHED": 0, "PRUNED": 0, "FAILED": 1, "KILLED": 130}[status]
        return RunResult(status=status, exit_code=code, run_dir=run_dir.path, summary=summary)  # type: ignore[arg-type]

    def _evaluate(self, run_dir: RunDir, loss: float, watcher: Sink) -> str:
        """Log the evaluations of a run of 40 steps, until it is pruned; returns how it ends."""
        journal = Journal(run_dir)
        started = RunStarted(name="", run_dir="", strategy="single", job="digits", world_size=1, steps=STEPS)
        for event in (started, *(MetricsLogged(step=n, metrics={"val/loss": loss}) for n in range(10, STEPS + 1, 10))):
            journal.emit(event)
            watcher.emit(event)
            if self.stop.is_pruned:
                break
        journal.close()
        self.steps.append(event.step if isinstance(event, MetricsLogged) else 0)
        status = "PRUNED" if self.stop.is_pruned else "FINISHED"
        self.stop.end_run()
        return status

    @property
    def rates(self) -> list[float]:
        """The learning rates that were tried."""
        return [float(values(overrides)["job.lr"]) for overrides in self.overrides]


def search(output_dir: Path, *words: str, trials: int = 25) -> Search:
    given = [f"output_dir={output_dir}", f"sweep.trials={trials}", *SPACE, *words]
    return open_search(given, {}, Redactor.of_process())


def test_a_search_finds_the_best_values_and_says_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, searched = Runs(tmp_path), search(tmp_path)
    assert searched.run(runs, StopSignals()) == 0
    assert len(runs.overrides) == 25
    best = min(runs.rates, key=lambda lr: abs(math.log10(lr) + 2))
    assert 0.005 < best < 0.02
    printed = capsys.readouterr().out
    assert "run 25 of 25: job.lr=" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("best of 25 runs: run ")]
    assert f"with job.lr={best:g} " in line
    assert len(searched.sweep.directory.read_record()["runs"]) == 25


def test_the_same_seed_tries_the_same_values(tmp_path: Path) -> None:
    tried = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        runs = Runs(tmp_path / name)
        search(tmp_path / name, f"seed={seed}", trials=3).run(runs, StopSignals())
        tried.append(runs.rates)
    assert tried[0] == tried[1] != tried[2]


def test_runs_that_fail_or_are_refused_do_not_end_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = {2: "FAILED", 3: "refused"}
    runs = Runs(tmp_path, lambda number: ends.get(number, "FINISHED"))
    assert search(tmp_path, trials=4).run(runs, StopSignals()) == 0
    printed = capsys.readouterr()
    assert "best of 2 runs" in printed.out
    assert "job.depth: too deep" in printed.err
    runs = Runs(tmp_path, lambda number: "FAILED")
    assert search(tmp_path, trials=1).run(runs, StopSignals()) == NONE_FINISHED


def test_wrong_input_ends_a_search_at_its_first_run(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(ConfigError, match="too deep"):
        search(tmp_path).run(Runs(tmp_path, lambda number: "refused"), StopSignals())
    with golden.raises(ConfigError):
        search(tmp_path, "sweep.metric=val_accuracy").run(Runs(tmp_path, steps=5), StopSignals())
    with pytest.raises(ConfigError, match=r"sweep.parallel"):
        search(tmp_path, "sweep.parallel=2")


def test_a_stop_after_the_last_step_of_a_run_starts_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopSignals()

    def end(number: int) -> str:
        if number == 2:
            stop.request(signal.SIGTERM, "SIGTERM")
        return "FINISHED"

    runs = Runs(tmp_path, end)
    assert search(tmp_path, trials=3).run(runs, stop) == 143
    assert len(runs.overrides) == 2
    assert "continue the search with: " in capsys.readouterr().out


def test_a_search_that_was_stopped_goes_on_with_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = StopSignals()

    def end(number: int) -> str:
        if number == 4:
            stop.request(signal.SIGINT, "SIGINT")
        return {2: "FAILED", 4: "KILLED"}.get(number, "FINISHED")

    first, stopped = Runs(tmp_path, end), search(tmp_path, trials=6)
    assert stopped.run(first, stop) == 130
    assert "continue the search with: python -m orchestrator.launch -m " in capsys.readouterr().out
    second = Runs(tmp_path)
    again = search(tmp_path, "resume=auto", trials=6)
    assert again.sweep.sweep_id == stopped.sweep.sweep_id
    assert again.run(second, StopSignals()) == 0
    assert len(second.overrides) == 3, "runs 4 to 6"
    assert second.rates[0] == first.rates[3]
    assert second.overrides[0][-1].startswith("resume=")
    assert not set(second.rates[1:]) & set(first.rates)
    assert "best of 5 runs" in capsys.readouterr().out
    longer = Runs(tmp_path)
    assert search(tmp_path, "resume=auto", trials=8).run(longer, StopSignals()) == 0
    assert len(longer.overrides) == 2, "a higher sweep.trials continues a search that has ended"


ASHA = ("sweep.pruner=asha", "train.eval_every=10", f"train.steps={STEPS}", "sweep.reduction_factor=2")


def test_poor_runs_are_pruned_where_the_rungs_are_and_count_neither_as_failed_nor_as_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, searched = Runs(tmp_path), search(tmp_path, *ASHA, trials=8)
    assert searched.run(runs, runs.stop) == 0
    best = 0
    for number in range(1, 9):  # a run goes on while no other was better at 10, 20 and 40 steps
        losses = sorted(abs(math.log10(lr) + 2) for lr in runs.rates[:number])
        at_10 = losses[: max(1, number // 2)]
        own = abs(math.log10(runs.rates[number - 1]) + 2)
        assert (runs.steps[number - 1] == 10) == (own not in at_10)
        best += own == losses[0]
    assert 10 in runs.steps
    assert runs.steps.count(STEPS) >= best, "nothing is pruned at the last step"
    pruned = [number for number, steps in enumerate(runs.steps, start=1) if steps < STEPS]
    assert searched.sweep.directory.read_record()["search"]["pruned"] == pruned
    assert f"best of {8 - len(pruned)} runs: run " in (printed := capsys.readouterr().out)
    assert f"; {len(pruned)} pruned\n" in printed


def test_a_search_that_goes_on_prunes_by_what_the_runs_before_have_reported(tmp_path: Path) -> None:
    first, second = Runs(tmp_path), Runs(tmp_path)
    search(tmp_path, *ASHA, trials=4).run(first, first.stop)
    again = search(tmp_path, *ASHA, "resume=auto", trials=8)
    again.run(second, second.stop)
    assert len(second.overrides) == 4
    lowest = min(abs(math.log10(lr) + 2) for lr in first.rates)
    poor = [number for number, lr in enumerate(second.rates) if abs(math.log10(lr) + 2) > 2 * lowest]
    assert poor
    assert [second.steps[number] for number in poor] == [10] * len(poor)
    pruned = [n for n, steps in enumerate([*first.steps, *second.steps], start=1) if steps < STEPS]
    assert again.sweep.directory.read_record()["search"]["pruned"] == pruned


def test_a_signal_during_a_pruned_run_is_the_first_one_and_the_next_run_knows_nothing_of_the_pruning() -> None:
    stop = StopSignals()
    stop.prune()
    assert (stop.received, stop.is_pruned) == (signal.SIGTERM, True)
    stop.end_run()
    assert (stop.received, stop.is_pruned) == (None, False)
    stop.exit_at_once = False
    with stop:
        stop.prune()
        signal.raise_signal(signal.SIGINT)
        stop.end_run()
        assert (stop.received, stop.is_pruned) == (signal.SIGINT, False)


@pytest.mark.parametrize(("steps", "pruned"), [(10, 0), (11, 1), (0, 1)], ids=["last step", "before it", "unknown"])
def test_a_run_that_has_done_its_last_step_is_not_pruned(steps: int, pruned: int) -> None:
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=10, reduction_factor=2))
    calls: list[None] = []
    for loss in (0.1, 0.2):
        trial = Trial(study.ask(), "val_loss", prune=lambda: calls.append(None))
        trial.emit(RunStarted(name="", run_dir="", strategy="single", job="digits", world_size=1, steps=steps))
        for _ in range(2):  # a failure may repeat the evaluation
            trial.emit(MetricsLogged(step=10, metrics={"train/loss": 9.0, "val/loss": loss}))
    assert len(calls) == pruned
