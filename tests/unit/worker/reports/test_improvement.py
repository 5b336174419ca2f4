"""The best evaluation of a run on one rank: after a failure, after a resume, and with a name that nothing reports."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.conformance.cases import CHECKPOINT, Case, assignment, config_of, having
from helpers.conformance.training import close_strategies, make
from helpers.files.checkpoints import best_at, make_state
from helpers.files.golden import Golden
from helpers.jobs.quick_jobs import digits
from orchestrator.config.redact import Redactor
from orchestrator.protocol.events import BestFound
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state import checkpoint
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.worker.control.control import Outbox, Warner
from orchestrator.worker.reports.after_evaluation import Improvement
from orchestrator.worker.reports.checkpoints import Checkpoints
from orchestrator.worker.reports.evaluation import MetricError

Saved = Callable[[BestSoFar], BestSoFar]


def followed(outbox: Outbox | None = None, saved: Saved = lambda best: best, **checkpoint: Any) -> Improvement:
    train = having(eval_every=10, stop_after=None if checkpoint.get("best", "val/loss") is None else 2)
    case = Case(job=digits(), train=train, checkpoint=replace(CHECKPOINT, **{"best": "val/loss", **checkpoint}))
    return Improvement(config_of(case, 1), device=torch.device("cpu"), outbox=outbox or Outbox(Redactor()), saved=saved)


def evaluate(improvement: Improvement, **losses: float) -> None:
    """Evaluations after steps such as ``at_10``."""
    for name, loss in losses.items():
        sums = {"accuracy": 1.0 - loss}
        other = EvalPoint(step=0, time=0.0, loss_sum=9.0, weight=1.0, sums=sums, split="test")
        step = int(name.removeprefix("at_"))
        point = EvalPoint(step=step, time=0.0, loss_sum=loss, weight=1.0, sums=sums, others=(other,))
        improvement.add(point, rank=0, world_size=1, confirm=lambda: None)


def test_evaluations_after_the_step_from_which_a_run_continues_are_forgotten() -> None:
    improvement = followed()
    evaluate(improvement, at_10=0.5, at_20=0.9, at_30=0.1)
    improvement.share([0], source_step=20, rank=0)
    assert improvement.is_best(10)
    assert improvement.why_stop is None
    evaluate(improvement, at_20=0.9)  # the failure may have come before its end
    assert improvement.why_stop is None
    evaluate(improvement, at_30=0.6)
    assert improvement.why_stop is not None


def test_a_resumed_run_counts_on() -> None:
    first, outbox = followed(), Outbox(Redactor())
    evaluate(first, at_10=0.5, at_20=0.9)
    resumed = followed(outbox)
    resumed.restore(first.metadata(), rank=0)
    evaluate(resumed, at_30=0.6)
    assert resumed.why_stop is not None
    (found,) = outbox.collect({}).events
    assert isinstance(found, BestFound)
    assert (found.step, found.metric, found.value) == (10, "val/loss", 0.5)


@pytest.mark.parametrize("change", [{"best": "val/ema_loss"}, {"best_direction": "maximize"}])
def test_another_metric_or_direction_begins_anew(change: dict[str, Any]) -> None:
    first = followed()
    evaluate(first, at_10=0.5)
    resumed = followed(**change)
    resumed.restore(first.metadata())
    assert not resumed.is_best(10)


def test_a_name_that_no_evaluation_reports_is_refused_with_those_that_exist(golden: Golden) -> None:
    with golden.raises(MetricError):
        evaluate(followed(best="val/acc", best_direction="maximize"), at_10=0.5)
    with golden.raises(MetricError):
        evaluate(followed(best="val/f1", best_direction="maximize"), at_10=0.5)


def test_the_best_is_the_best_of_those_that_are_saved(tmp_path: Path) -> None:
    """The checkpoint of step 20 could not be written, or its writer has died, and so with step 40."""
    case, outbox = Case(job=digits()), Outbox(Redactor())
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir=str(tmp_path), case=case)
    checkpoints = Checkpoints(orders, strategy=make(case, 0), outbox=outbox, warner=Warner(outbox))
    improvement, root = followed(outbox, checkpoints.saved), tmp_path / "checkpoints"

    def save(step: int) -> None:
        state = make_state(step)
        state.meta.update(improvement.metadata())
        checkpoint.save(root, state, run_uid="test")

    evaluate(improvement, at_10=0.5)
    save(10)
    evaluate(improvement, at_20=0.1)
    evaluate(improvement, at_30=0.4)
    assert improvement.is_best(30), "better than the best of those that are saved"
    save(30)
    evaluate(improvement, at_40=0.3)
    improvement.confine(rank=0)
    assert improvement.is_best(30)
    steps = [event.step for event in outbox.collect({}).events if isinstance(event, BestFound)]
    assert steps == [10, 20, 10, 30, 40, 30]
    resumed = followed(saved=checkpoints.saved)
    resumed.restore({BEST: replace(best_at(20), direction="minimize", value=0.1).to_json()}, rank=0)
    assert resumed.is_best(30)
    anew = followed(saved=checkpoints.saved)
    anew.restore({}, rank=0)  # the newest checkpoint is of a part without checkpoint.best
    assert anew.is_best(30)
    evaluate(anew, at_50=0.45)
    assert anew.is_best(30)
    checkpoints.finish(timeout_s=10)
    close_strategies()


def test_without_a_metric_nothing_is_kept() -> None:
    improvement = followed(best=None)
    evaluate(improvement, at_10=0.5, at_20=0.9, at_30=0.9)
    assert improvement.metadata() == {}
    assert improvement.why_stop is None
