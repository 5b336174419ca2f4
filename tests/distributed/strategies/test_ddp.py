"""What DDP communicates and when, and what happens to buffers, unused parameters and bad gradients."""

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.training import assert_same, assert_same_state, losses, make, model_of, steps, train
from helpers.jobs.quick_jobs import digits
from helpers.jobs.toys import Dropped, Normed, Poisoned, Tokens, Toy, TwoHeads
from helpers.ranks.gang import SOON_S
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.trainer import Trainer
from orchestrator.worker.data.batches import SampleOrder


def collectives(rank: int, case: Case) -> Counter[str]:
    """Collective operations in the third step, by name."""
    results = steps(make(case, rank))
    next(results)
    next(results)  # DDP arranges its buckets anew after the first
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(results)
    return Counter(e.name for e in profile.events() if e.name.startswith("gloo:"))


class Noisy(nn.Module):
    """Has values of its own on each rank, some of which are not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.linear = nn.Linear(10, 4)
        self.noise: Tensor
        self.register_buffer("noise", torch.randn(10), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.noise)


def initial_values(rank: int, case: Case) -> list[Tensor]:
    model = model_of(make(case, rank))
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def test_all_ranks_begin_with_the_values_of_rank_0_also_with_those_that_are_not_saved(gang):
    first, second = gang.run(initial_values, Case(job=Toy(build=Noisy)), world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grad_accumulation", [1, 3])
def test_gradients_are_averaged_once_a_step(gang, grad_accumulation):
    case = Case(job=digits(), train=having(grad_accumulation=grad_accumulation), options=replace(DDP, bucket_mb=25))
    for found in gang.run(collectives, case, world_size=2):
        assert found == {"gloo:all_reduce": 1}


def test_a_static_graph_changes_no_loss(gang):
    case = Case(job=digits(), train=having(steps=6))
    expected, found = (
        gang.run(train, replace(case, options=replace(DDP, static_graph=static)), world_size=2)
        for static in (False, True)
    )
    assert torch.equal(losses(found), losses(expected))


def test_a_smaller_bucket_makes_more_of_them(gang):
    (found, _) = gang.run(collectives, Case(job=digits()), world_size=2)
    assert found["gloo:all_reduce"] > 1


def test_weights_cost_one_more_and_only_where_the_job_has_them(gang):
    case = Case(job=Tokens(), options=replace(DDP, bucket_mb=25))
    (found, _) = gang.run(collectives, case, world_size=2)
    assert found == {"gloo:all_reduce": 2}


def waited_ms(rank: int, case: Case) -> dict[int, float | None]:
    """After a resume at step 3: how long each step waited. Rank 1 begins those that are logged long after rank 0."""
    store = dist.distributed_c10d._get_default_store()
    strategy = make(case, rank)
    for _ in steps(strategy, last=3):
        pass
    state = strategy.capture(step=3, samples_consumed=3 * case.train.global_batch_size, into=None)
    strategy = make(case, rank)
    strategy.restore(state, source=0)
    results, waited = steps(strategy, first=4, log_every=case.train.log_every), {}
    for step in range(4, case.train.steps + 1):
        if rank == 0:
            store.set(f"begins {step}", "")
        elif step % case.train.log_every == 0:
            store.wait([f"begins {step}"])
            time.sleep(0.5)
        next(results)
        waited[step] = strategy.comm_ms()
    return waited


def test_waiting_is_that_of_the_very_step_which_is_logged(gang):
    case = Case(job=Toy(), train=having(steps=12, log_every=4))
    (waited, _) = gang.run(waited_ms, case, world_size=2)
    assert {step for step, ms in waited.items() if ms is not None} == {4, 8, 12}
    assert max(ms for ms in waited.values() if ms is not None) > 100


def buffers_and_evaluation(rank: int, case: Case) -> tuple[dict[str, torch.Tensor], float]:
    strategy = make(case, rank)
    for _ in steps(strategy):
        pass
    batch = torch.utils.data.default_collate(strategy.job.dataset("val").items[:16])
    result = strategy.evaluate(batch, 16)
    return dict(model_of(strategy).named_buffers()), float(result.loss_sum)


@pytest.mark.in_turn
@pytest.mark.parametrize("grad_accumulation", [1, 2])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_every_rank_evaluates_with_the_running_statistics_of_rank_0(gang, grad_accumulation, find_unused_parameters):
    case = Case(
        job=Normed(),
        train=having(steps=5, global_batch_size=32, grad_accumulation=grad_accumulation),
        options=replace(DDP, find_unused_parameters=find_unused_parameters),
    )
    results = gang.run(buffers_and_evaluation, case, world_size=3)
    fresh = dict(case.job.model().named_buffers())
    for buffers, loss in results:
        assert buffers["1.num_batches_tracked"] == 5 * grad_accumulation
        assert not torch.equal(buffers["1.running_mean"], fresh["1.running_mean"])
        assert_same(buffers, results[0][0])
        assert loss == results[0][1]


def test_dropout_repeats_itself_and_differs_between_ranks_and_steps(gang):
    case = Case(job=Dropped(), train=having(steps=6))
    first = gang.run(train, case, world_size=2)
    again = gang.run(train, case, world_size=2)
    assert [r.loss_sums for r in first] == [r.loss_sums for r in again]
    other = gang.run(train, replace(case, seed=4), world_size=2)
    assert first[0].loss_sums != other[0].loss_sums


# Unused parameters: when the head named "spare" takes part in a forward pass


def never(rank: int, call: int) -> bool:
    return False


def until_third_call(rank: int, call: int) -> bool:
    return call < 3


def not_on_rank_1_at_third_call(rank: int, call: int) -> bool:
    return not (rank == 1 and call == 3)


def on_odd_calls(rank: int, call: int) -> bool:
    return call % 2 == 1


@pytest.mark.parametrize(
    ("uses", "steps_asked", "grad_accumulation"),
    [(never, 1, 1), (never, 5, 1), (never, 5, 3), (until_third_call, 3, 1), (until_third_call, 5, 1)],
)
def test_an_unused_parameter_is_named_on_every_rank(gang, uses, steps_asked, grad_accumulation):
    case = Case(job=TwoHeads(uses=uses), train=having(steps=steps_asked, grad_accumulation=grad_accumulation))
    for answer in gang.ask(train, case, world_size=3, timeout_s=SOON_S):
        assert answer.error is not None
        assert answer.error.startswith("ValueError: parameters that take no part in the loss: spare.weight, spare.bias")
        assert "strategy.find_unused_parameters=true" in answer.error


def test_unused_on_one_rank_alone_ends_the_others_soon(gang):
    case = Case(job=TwoHeads(uses=not_on_rank_1_at_third_call), train=having(steps=5))
    answers = gang.ask(train, case, world_size=3, timeout_s=SOON_S)
    assert "take no part in the loss: spare.weight, spare.bias" in answers[1].error
    assert all(a.error is not None for a in answers)


IN_STEP = "ValueError: set strategy.find_unused_parameters=true"


@pytest.mark.parametrize(
    ("check", "says"),
    [
        # Who finds it first depends on how often the model has been called before.
        ("always", ("JobError: strategy=ddp: the workers would train another model", IN_STEP)),
        ("never", IN_STEP),
    ],
)
def test_unused_in_the_last_micro_batch_alone_is_named(gang, check, says):
    case = Case(job=TwoHeads(uses=on_odd_calls), train=having(grad_accumulation=2, check=check))
    for answer in gang.ask(train, case, world_size=2, timeout_s=SOON_S):
        assert answer.error is not None
        assert answer.error.startswith(says)
        assert "strategy.find_unused_parameters=true" in answer.error
        assert "spare." in answer.error


@pytest.mark.parametrize("uses", [never, until_third_call])
def test_unused_parameters_can_be_allowed(gang, uses):
    case = Case(
        job=TwoHeads(uses=uses),
        train=having(steps=6),
        options=replace(DDP, find_unused_parameters=True),
    )
    alone = gang.run(train, case, world_size=1)
    ranks = gang.run(train, case, world_size=2)
    torch.testing.assert_close(losses(ranks), losses(alone), rtol=1e-5, atol=0)
    torch.testing.assert_close(ranks[0].model, alone[0].model, rtol=1e-4, atol=1e-6)
    assert_same(ranks[0].model, ranks[1].model)


# Gradients that are not finite

BATCH, BAD_STEP = 16, 3


def poisoned(*, rank: int, world_size: int) -> Poisoned:
    """One sample that is NaN, in step ``BAD_STEP`` on ``rank`` alone."""
    position = (BAD_STEP - 1) * BATCH + rank * (BATCH // world_size)
    return Poisoned(bad=tuple(SampleOrder(n=200, seed=3).indices(position, 1)))


def around_steps(rank: int, case: Case) -> list[tuple[bool, bool, bool]]:
    """For each step: was it skipped, was the rank's own loss finite, and did nothing change."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)

    def state() -> TrainState:
        return strategy.trained.snapshot(step=0, samples_consumed=0)

    found, before = [], state()
    for result in steps(strategy):
        after = state()
        try:
            assert_same_state(before, after)
            unchanged = True
        except AssertionError:
            unchanged = False
        found.append((result.skipped, bool(result.loss_sum.isfinite()), unchanged))
        before = after
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("grad_accumulation", [1, 2])
@pytest.mark.parametrize(("world_size", "bad_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_a_skipped_step_changes_nothing_on_any_rank(gang, world_size, bad_rank, grad_accumulation):
    case = Case(
        job=poisoned(rank=bad_rank, world_size=world_size),
        train=having(
            steps=6,
            global_batch_size=BATCH,
            grad_accumulation=grad_accumulation,
            on_nonfinite="skip",
            clip_norm=1.0,
        ),
    )
    for rank, found in enumerate(gang.run(around_steps, case, world_size=world_size)):
        for step, (skipped, finite, unchanged) in enumerate(found, 1):
            assert skipped == (step == BAD_STEP)
            assert finite == (step != BAD_STEP or rank != bad_rank)
            assert unchanged == skipped


def test_without_skip_the_bad_gradient_is_applied_and_seen(gang):
    case = Case(job=poisoned(rank=1, world_size=2), train=having(steps=BAD_STEP, global_batch_size=BATCH))
    for rank in gang.run(train, case, True, world_size=2):
        assert rank.norms[:-1] == pytest.approx(rank.norms[:-1], nan_ok=False)
        assert rank.norms[-1] != rank.norms[-1], "the norm is NaN, on every rank"
        assert not any(rank.skipped)
