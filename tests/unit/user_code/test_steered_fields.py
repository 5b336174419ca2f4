"""The fields of a job that evaluations change: one owner, and what is built as it was configured."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from orchestrator import Evaluation, Job, Steering
from orchestrator.user_code.steering import (
    AS_CONFIGURED,
    EVALUATIONS,
    asked,
    changes_of,
    steer,
    steer_as_trained,
    view_of,
)


@dataclass(frozen=True, kw_only=True)
class Scaled(Job):
    scale: float = 1.0
    steerable: ClassVar[tuple[str, ...]] = ("scale",)

    def model(self) -> nn.Module:
        return nn.Linear(int(self.scale), 1)

    def dataset(self, split: str) -> Any:
        return [self.scale]

    def loss(self, output: Any, target: Any) -> Tensor:
        raise NotImplementedError

    def optimizer(self, parameters: Any) -> Any:
        raise NotImplementedError

    def weight(self, target: Any) -> Any:
        return self.scale

    def on_evaluation(self, evaluations: Any) -> Steering:
        return Steering(fields={"scale": self.scale + len(evaluations)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Slotted(Scaled):
    own: float = 1.0
    steerable: ClassVar[tuple[str, ...]] = ("own",)


EVALUATED = [Evaluation(step=step, metrics={}) for step in (2, 4)]


def test_what_is_built_later_is_built_as_configured() -> None:
    job = Scaled(scale=3.0)
    steer(job, {"scale": 5.0})
    model: Any = job.model()
    assert (job.scale, job.weight(None), model.in_features, job.dataset("train")) == (5.0, 5.0, 3, [3.0])
    steer(job, {})
    assert (job.scale, job.weight(None)) == (3.0, 3.0)
    assert {name for name in AS_CONFIGURED if not hasattr(Job, name)} == set(), "all are methods of a job"


def test_what_a_job_says_of_evaluations_does_not_depend_on_when_it_is_asked() -> None:
    """As after a resume, which asks once."""
    often, once = Scaled(), Scaled()
    for count in range(len(EVALUATED)):
        steer(often, asked(often, EVALUATED[: count + 1]).fields)
    steer(once, asked(once, EVALUATED).fields)
    assert often.scale == once.scale == 3.0


@pytest.mark.parametrize(("job", "field"), [(Scaled(), "scale"), (Slotted(), "own")])
def test_a_view_has_the_fields_of_its_job(job: Any, field: str) -> None:
    view = view_of(job, {"metrics": lambda self, output, target: (getattr(self, field), output)})
    steer(job, {field: 7.0})
    assert (getattr(view, field), view.metrics(1, 2)) == (7.0, (7.0, 1))
    assert isinstance(view, Scaled)
    assert (view.weight(None), view.draws_samples) == (job.weight(None), False)
    model: Any = view.model()
    assert (model.in_features, getattr(view, field)) == (1, 7.0)


def test_a_change_is_counted_once_and_goes_along_to_another_process() -> None:
    job = Scaled()
    assert changes_of(job) == 0
    for _ in range(2):
        steer(job, {"scale": 2.0})
    assert changes_of(job) == 1
    other = pickle.loads(pickle.dumps(job))
    assert (other.scale, other.dataset("train")) == (2.0, [1.0])


def test_a_job_is_as_in_the_last_step_of_a_checkpoint() -> None:
    """Whose evaluation has changed what comes after it."""
    meta = {EVALUATIONS: [vars(evaluation) for evaluation in EVALUATED]}
    for step, scale in ((1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 3.0)):
        job = Scaled()
        steer_as_trained(job, {"step": step, "meta": meta})
        assert job.scale == scale
