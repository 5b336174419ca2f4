"""A stop cuts an evaluation off in every layout, and the resumed run makes it: nothing is lost or counted twice."""

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, nn

from helpers.conformance.cases import CHECKPOINT, Case, having
from helpers.conformance.layouts import EVERY, taking_turns
from helpers.jobs.quick_jobs import PredictedDigits, QuickDigits
from helpers.ranks.cut_offs import run_cut_off
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, losses_by_step, run_loop
from helpers.records.runs import in_campaign
from orchestrator import Callback, current_step
from orchestrator.job import Split
from orchestrator.protocol.messages import EvalPoint, Reached
from orchestrator.state.best import BEST
from orchestrator.state.checkpoint import list_checkpoints
from orchestrator.state.manifest import read_manifest
from orchestrator.user_code.callbacks import Evaluation, RunBegin
from orchestrator.worker.evaluating import CUT_OFF

EVALUATING, COMPLETE, SAMPLING = Reached(2, 1, 2), Reached(2, 2), Reached(2, 3)
"""In the second batch of the evaluation after step 2, where it counts, and where samples are drawn."""


@dataclass(frozen=True, kw_only=True)
class Sampled(QuickDigits):
    """Draws samples for ever, unless they were cut off before."""

    hidden: int = 24
    val_size: int | None = 80
    folder: str = ""

    def sample(self, model: nn.Module, generator: Generator) -> str:
        if (begun := Path(self.folder, "begun")).exists():
            return "drawn"
        begun.touch()
        while True:
            time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Predicting(PredictedDigits):
    """Predicts for ever on the first rank, unless that was cut off before."""

    hidden: int = 24
    val_size: int | None = 80
    folder: str = ""

    def predictions(self, model: nn.Module, split: Split, part: int, parts: int) -> Iterable[tuple[Any, Any]]:
        begun = Path(self.folder, "begun")
        # Not in the trial after the first step.
        if part == 0 and current_step() == 2 and not begun.exists():
            begun.touch()
            while True:
                time.sleep(0.01)
        yield from super().predictions(model, split, part, parts)


class Told(Callback):
    """Writes each evaluation that it is told of to a file of the run."""

    def on_run_begin(self, info: RunBegin) -> None:
        self.file = info.run_dir / "told"

    def on_evaluation_end(self, info: Evaluation) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([info.step, info.metrics["val/loss"]]) + "\n")


def case_of(job: Any = None) -> Case:
    return Case(
        job=job or QuickDigits(hidden=24, depth=7, val_size=80),
        train=having(steps=5, global_batch_size=32, eval_every=2, stop_after=3),
        checkpoint=replace(CHECKPOINT, best="val/loss"),
        callbacks=(Told(),),
    )


def evaluations(ranks: Sequence[Ran]) -> dict[int, list[tuple[float, float]]]:
    """What each rank has reported of the evaluation after each step."""
    found: dict[int, list[tuple[float, float]]] = {}
    for ran in ranks:
        for point in ran.points:
            if isinstance(point, EvalPoint):
                found.setdefault(point.step, []).append((point.loss_sum, point.weight))
    return found


def saved(folder: Path) -> dict[str, Any]:
    """The metadata of the newest checkpoint."""
    return dict(read_manifest(list_checkpoints(folder / "checkpoints")[-1])["meta"])


@pytest.mark.parametrize("name", taking_turns(EVERY))
def test_the_resumed_run_makes_the_evaluation(gang: Gang, tmp_path: Path, name: str) -> None:
    of = EVERY[name]
    case, n = of.of(case_of()), of.world_size
    whole = gang.run(run_loop, case, tmp_path / "whole", world_size=n)
    folder = tmp_path / "cut"
    cut = gang.run(run_cut_off, case, n, str(folder), EVALUATING, world_size=n)
    assert {(ran.outcome.status, ran.outcome.step) for ran in cut} == {("stopped", 2)}
    assert evaluations(cut) == {}
    assert saved(folder)[CUT_OFF] == {"step": 2, "task": "evaluation"}
    newest = str(list_checkpoints(folder / "checkpoints")[-1])
    resumed = gang.run(run_loop, case, folder, newest, world_size=n)
    if name.startswith(("hogwild", "locked")):  # whose steps differ from run to run
        assert evaluations(resumed).keys() == {2, 4, 5}
        return
    made, expected = evaluations(resumed), evaluations(whole)
    assert made.keys() == expected.keys()
    for step, parts in made.items():
        torch.testing.assert_close(torch.tensor(parts), torch.tensor(expected[step]), rtol=1e-6, atol=0)
    assert losses_by_step(cut) | losses_by_step(resumed) == pytest.approx(losses_by_step(whole), rel=1e-6)
    told, as_whole = ((path / "told").read_text().splitlines() for path in (folder, tmp_path / "whole"))
    assert [json.loads(line)[0] for line in told] == [json.loads(line)[0] for line in as_whole] == [2, 4, 5]
    counted = {key: value for key, value in saved(folder)[BEST].items() if not isinstance(value, float)}
    assert counted.items() <= saved(tmp_path / "whole")[BEST].items()
    assert saved(folder)[CUT_OFF] is None


@pytest.mark.parametrize("name", ["single", "ddp-2", *in_campaign("fsdp-2")])
def test_samples_that_were_cut_off_are_drawn_after_the_resume(gang: Gang, tmp_path: Path, name: str) -> None:
    of = EVERY[name]
    case, n = of.of(case_of(Sampled(folder=str(tmp_path)))), of.world_size
    cut = gang.run(run_cut_off, case, n, str(tmp_path), SAMPLING, world_size=n)
    assert {(ran.outcome.status, ran.outcome.step) for ran in cut} == {("stopped", 2)}
    assert evaluations(cut).keys() == {2}
    assert saved(tmp_path)[CUT_OFF] == {"step": 2, "task": "samples"}
    newest = str(list_checkpoints(tmp_path / "checkpoints")[-1])
    resumed = gang.run(run_loop, case, tmp_path, newest, world_size=n)
    assert evaluations(resumed).keys() == {4, 5}, "the one after step 2 counts once"
    drawn = [event.step for event in resumed[0].events if event.kind == "sample_saved"]
    assert drawn == [2, 4, 5]
    assert resumed[0].outcome.texts == {"sample": "drawn"}


@pytest.mark.parametrize(
    "name", ["ddp-2", *[pytest.param(n, marks=pytest.mark.campaign) for n in ("single", "fsdp-2")]]
)
def test_predictions_that_were_cut_off_are_made_after_the_resume(gang: Gang, tmp_path: Path, name: str) -> None:
    of = EVERY[name]
    n = of.world_size
    case = of.of(case_of(Predicting(folder=str(tmp_path))))
    cut = gang.run(run_cut_off, case, n, str(tmp_path), Reached(2, 1, 3), world_size=n)
    assert {(ran.outcome.status, ran.outcome.step) for ran in cut} == {("stopped", 2)}
    assert evaluations(cut) == {}
    newest = str(list_checkpoints(tmp_path / "checkpoints")[-1])
    resumed = gang.run(run_loop, case, tmp_path, newest, world_size=n)
    assert evaluations(resumed).keys() == {2, 4, 5}


def test_an_evaluation_that_counts_on_one_rank_counts_on_all(gang: Gang, tmp_path: Path) -> None:
    of = EVERY["ddp-2"]
    ranks = gang.run(run_cut_off, of.of(case_of()), 2, str(tmp_path), COMPLETE, world_size=2)
    assert [len(points) for points in evaluations(ranks).values()] == [2]
    assert CUT_OFF not in saved(tmp_path)
    assert saved(tmp_path)["best"]["step"] == 2


@pytest.mark.parametrize("place", [EVALUATING, Reached(5, 1, 1), Reached(1, 1, 1)])
def test_a_stop_in_the_trial_or_in_the_last_evaluation_saves_the_step(
    gang: Gang, tmp_path: Path, place: Reached
) -> None:
    of = EVERY["ddp-2"]
    whole = gang.run(run_loop, of.of(case_of()), tmp_path / "whole", world_size=2)
    folder = tmp_path / "cut"
    cut = gang.run(run_cut_off, of.of(case_of()), 2, str(folder), place, world_size=2)
    assert {(ran.outcome.status, ran.outcome.step) for ran in cut} == {("stopped", place.step)}
    newest = list_checkpoints(folder / "checkpoints")[-1]
    assert read_manifest(newest)["step"] == place.step
    resumed = gang.run(run_loop, of.of(case_of()), folder, newest, world_size=2)
    made = [evaluations(ranks) for ranks in (cut, resumed)]
    assert not made[0].keys() & made[1].keys()
    assert made[0] | made[1] == evaluations(whole)
    assert list(itertools.chain(*made)) == [2, 4, 5]
