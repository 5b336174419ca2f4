"""Sums of an evaluation stay on the device until its end."""

from typing import Any

import torch

from helpers.conformance.training import CPU
from helpers.jobs.toys import Toy
from orchestrator.config.redact import Redactor
from orchestrator.strategies.base import Hooks, Traits
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.reports.evaluation import evaluate


class OnDevice(torch.Tensor):
    """A scalar of a GPU; to read it waits for all that has been enqueued there."""

    def cpu(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("read before the end of the evaluation")

    item = cpu


class Evaluating:
    traits, hooks = Traits(), Hooks()
    job = Toy()

    def evaluate(self, batch: float, valid: int) -> EvalSums:
        sums = (torch.tensor(value).as_subclass(OnDevice) for value in (batch * valid, float(valid), batch))
        loss_sum, weight, accuracy = sums
        return EvalSums(loss_sum=loss_sum, weight=weight, metrics={"accuracy": accuracy})


def test_no_batch_waits_for_the_device() -> None:
    strategy: Any = Evaluating()
    point = evaluate(strategy, [(2.0, 3), (9.0, 0), (4.0, 1)], step=7, device=CPU, outbox=Outbox(Redactor()))
    assert (point.loss_sum, point.weight, point.sums) == (10.0, 4.0, {"accuracy": 6.0})
