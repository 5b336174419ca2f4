"""Optimizers with state of their own: a resume in other layouts and a recovery continue with all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import Steps, assert_same_state, losses, make, piece, steps, watched
from helpers.jobs.optimizers import KINDS, OptimizedDigits
from helpers.ranks.gang import Gang
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.trainer import Trainer

TRAIN = having(steps=6, global_batch_size=32)


def case_of(kind: str) -> Case:
    return Case(job=OptimizedDigits(kind=kind), train=TRAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_in_other_layouts_continues_it(gang: Gang, kind: str) -> None:
    case = case_of(kind)
    ((alone, whole),) = gang.run(piece, case, None, 6, world_size=1)
    state, curve = None, []
    for name, stop in (("ddp-2", 2), ("1F1B-2", 4), ("single", 6)):
        layout = LAYOUTS[name]
        results = gang.run(piece, layout.of(case), state, stop, world_size=layout.world_size)
        state = results[0][1]
        curve.append(losses([seen for seen, _ in results]))
    torch.testing.assert_close(torch.cat(curve), losses([alone]), rtol=1e-4, atol=0)
    assert state is not None
    torch.testing.assert_close(state.model, whole.model, rtol=1e-2, atol=1e-3)
    assert [*state.optimizer] == [*whole.optimizer]
    assert state.meta.keys() == whole.meta.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_exact(gang: Gang, kind: str) -> None:
    case = case_of(kind)
    ((_, whole),) = gang.run(piece, case, None, 6, world_size=1)
    ((_, state),) = gang.run(piece, case, None, 3, world_size=1)
    ((_, resumed),) = gang.run(piece, case, state, 6, world_size=1)
    assert_same_state(resumed, whole)


def recovered(rank: int, case: Case) -> tuple[Steps, TrainState | None]:
    """Rank 1 is new after the third step, and receives the state of rank 0; what is seen from there on, and the end."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    list(steps(strategy, last=3))
    if rank == 1:
        strategy.setup(case.job.dataset("train"))
    strategy.close()
    strategy.attach()
    strategy.recover_state((0, 0), source_step=3, step=3 if rank == 0 else 0, samples_consumed=3 * 32)
    seen = watched(strategy, steps(strategy, first=4))
    return seen, strategy.trained.snapshot(step=6, samples_consumed=6 * 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_worker_receives_it_from_a_survivor(gang: Gang, kind: str) -> None:
    case = case_of(kind)
    (seen, end), (_, received) = gang.run(recovered, case, world_size=2)
    undisturbed, *_ = gang.run(piece, case, None, 6, world_size=2)
    assert_same_state(received, end)
    assert seen.loss_sums == undisturbed[0].loss_sums[3:]
    weights: dict[str, Tensor] = seen.model
    assert all(torch.equal(weights[name], t) for name, t in undisturbed[0].model.items())
