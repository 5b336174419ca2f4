"""The rule of exact evaluation: every layout evaluates a model as one worker does."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import Case
from helpers.conformance.layouts import CONTEXT, LAYOUTS, SGD, TENSOR, Layout
from helpers.conformance.training import Steps, make, steps, watched
from helpers.ranks.batches import HERE, validated
from helpers.ranks.gang import Gang
from orchestrator.job import Job
from orchestrator.protocol.core_metrics import evaluation_metrics
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.worker.data.batches import EvalBatches


def evaluated_in_slices(rank: int, case: Case) -> tuple[int, EvalPoint]:
    """How many samples this rank evaluates at once, and the sums over its samples."""
    strategy, val_set = make(case, rank), case.job.dataset("val")
    assert val_set is not None
    return strategy.eval_batch_size, validated(strategy, rank, val_set)


def trained_and_evaluated(
    rank: int, case: Case, state: TrainState | None
) -> tuple[Steps, TrainState | None, list[EvalSums]]:
    """Train ``case``, or take the ``state`` that another layout has come to, and evaluate it twice."""
    strategy = make(case, rank)
    if state is not None:
        strategy.restore(state if rank == 0 else None, source=0)
    seen = watched(strategy, steps(strategy) if state is None else [])
    found = [_evaluated(strategy) for _ in range(2)]
    return seen, strategy.capture(step=0, samples_consumed=0, into=None), found


def _evaluated(strategy: Strategy) -> EvalSums:
    context = strategy.context
    loss_sum, weight, metrics = torch.zeros(()), torch.zeros(()), dict[str, Tensor]()
    for batch, valid in EvalBatches(
        strategy.job.dataset("val"),
        replace(HERE, collate=strategy.job.collate),
        batch_size=strategy.eval_batch_size,
        data_parallel_size=context.mesh.data_parallel_size,
        dp_rank=context.dp_rank,
        read=strategy.traits.reads_data,
    ):
        if valid:
            sums = strategy.evaluate(batch, valid)
            loss_sum, weight = loss_sum + sums.loss_sum, weight + sums.weight
            metrics = {name: metrics.get(name, 0) + value for name, value in sums.metrics.items()}
    return EvalSums(loss_sum=loss_sum, weight=weight, metrics=metrics)


def assert_evaluated_exactly(gang: Gang, case: Case, name: str, *, rtol: float = SGD) -> tuple[list[Steps], TrainState]:
    """As one worker evaluates the model that the layout has come to."""
    layout = {**LAYOUTS, **TENSOR, **CONTEXT}[name]
    results = gang.run(trained_and_evaluated, layout.of(case), None, world_size=layout.world_size)
    state = results[0][1]
    assert state is not None
    ((_, _, (expected, _)),) = gang.run(trained_and_evaluated, case, state, world_size=1)
    for turn in range(2):
        found = [sums[turn] for _, _, sums in results]
        loss_sum = sum(f.loss_sum for f in found)
        torch.testing.assert_close(loss_sum, expected.loss_sum, rtol=rtol, atol=0)
        assert sum(f.weight for f in found) == expected.weight
        assert {n for f in found for n in f.metrics} == set(expected.metrics)
        for metric, value in expected.metrics.items():
            assert sum(f.metrics.get(metric, 0) for f in found) == value
    return [seen for seen, _, _ in results], state


def _scored(rank: int, case: Case) -> EvalPoint:
    strategy = make(case, rank)
    point = validated(strategy, rank, strategy.job.dataset("val"))
    assert strategy.own_model is None or strategy.own_model.training
    return point


@cache
def _scored_alone(gang: Gang, job: Job) -> dict[str, float]:
    return evaluation_metrics(gang.run(_scored, Case(job=job), world_size=1))


def assert_scored_exactly(gang: Gang, job: Job, layout: Layout, *, rtol: float = SGD) -> dict[str, float]:
    """The metrics of the whole set are those of one worker, and equal if they are counts; what they are."""
    expected = _scored_alone(gang, job)
    assert 0 < expected["val/f1"] < 1
    found = evaluation_metrics(gang.run(_scored, layout.of(Case(job=job)), world_size=layout.world_size))
    assert found == pytest.approx(expected, rel=rtol)
    assert all(found[name] == expected[name] for name in ("val/f1", "val/counted"))
    return expected
