"""Optimizers with state of their own: a resume in other layouts and a recovery continue with all of it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import (
    Steps,
    assert_same,
    assert_same_state,
    losses,
    make,
    model_of,
    piece,
    snapshot,
    steps,
    watched,
)
from helpers.jobs.optimizers import KINDS, OptimizedDigits, ScheduleFree
from helpers.ranks.gang import Gang
from helpers.ranks.loops import evaluation, losses_by_step, run_loop
from orchestrator.state.checkpoint import load
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update.job_optimizer import TRAINED

TRAIN = having(steps=6, global_batch_size=32)


def case_of(kind: str) -> Case:
    return Case(job=OptimizedDigits(kind=KINDS[kind]), train=TRAIN)


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


@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2"])
def test_modes_are_those_of_evaluation_in_evaluations_and_checkpoints(gang: Gang, tmp_path: Path, name: str) -> None:
    """Neither changes the training; what a checkpoint has is what was evaluated."""
    layout, job = LAYOUTS[name], OptimizedDigits(kind=ScheduleFree, val_size=32)
    often, seldom = (
        gang.run(run_loop, case, tmp_path / str(every), None, every, world_size=layout.world_size)
        for every in (2, 0)
        for case in [layout.of(Case(job=job, train=having(TRAIN, eval_every=every, ema_decay=0.5)))]
    )
    assert losses_by_step(often) == losses_by_step(seldom)
    state, other = (load(tmp_path / str(every) / "checkpoints" / "step-00000006") for every in (2, 0))
    assert_same_state(state, other)
    model = job.model()
    model.load_state_dict(dict(state.model))
    inputs, targets = (torch.stack([torch.as_tensor(item[i]) for item in job.dataset("val").items]) for i in (0, 1))
    with torch.no_grad():
        expected = float(job.loss(model(inputs), targets))
    assert evaluation(often)["loss"] / 32 == pytest.approx(expected, rel=1e-5)
    trained = {name: state.optimizer[f"{name}/{TRAINED}"] for name in state.model}
    assert not any(torch.equal(trained[name], tensor) for name, tensor in state.model.items())


def with_a_failed_evaluation(rank: int, case: Case) -> bool:
    """Whether the weights of an evaluation are others, and what they were before an error in it, afterwards."""
    strategy = make(case, rank)
    list(steps(strategy))
    before, changed = snapshot(model_of(strategy)), False
    try:
        with strategy.weights_to_evaluate():
            changed = not torch.equal(model_of(strategy).state_dict()["head.weight"], before["head.weight"])
            raise RuntimeError("the planted fault")
    except RuntimeError:
        assert_same(snapshot(model_of(strategy)), before)
    return changed


def test_an_error_in_an_evaluation_leaves_the_weights() -> None:
    assert with_a_failed_evaluation(0, case_of("schedule-free"))


def recovered_from_copies(rank: int, case: Case) -> list[bool]:
    """Rank 1 of a pipeline is new; the ring's copies of the second step are what all continue from."""
    strategy = make(case, rank, peer_copy_every=2)
    assert isinstance(strategy, Trainer)
    for step, _ in enumerate(steps(strategy, last=3), 1):
        strategy.after_step(step=step, samples_consumed=step * 32)
    list(steps(strategy, first=4))
    end = strategy.trained.snapshot(step=6, samples_consumed=192)
    strategy.close()
    strategy.attach()
    offered = strategy.recoverable_steps(6)
    assert 2 in offered[rank]
    strategy.recover_state((0, 1), source_step=2, step=6, samples_consumed=192)
    list(steps(strategy, first=3))
    again = strategy.trained.snapshot(step=6, samples_consumed=192)
    return [again.meta == end.meta, *(torch.equal(t, end.model[n]) for n, t in again.model.items())]


@pytest.mark.parametrize("kind", ["attribute", "lists", "lookahead", "schedule-free"])
def test_stages_continue_from_copies_in_host_memory(gang: Gang, kind: str) -> None:
    layout = LAYOUTS["1F1B-2"]
    for found in gang.run(recovered_from_copies, layout.of(case_of(kind)), world_size=2):
        assert all(found)
