"""Parameters on servers: the losses of one worker where steps are synchronous, bounds where they are not."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.conformance.cases import DDP as DDP_OPTIONS
from helpers.conformance.cases import Case, having, options_of
from helpers.conformance.layouts import ADAMW, SGD, Layout, assert_as_alone, layout
from helpers.conformance.training import (
    Steps,
    assert_same,
    assert_same_state,
    losses,
    made,
    make,
    model_of,
    piece,
    snapshot,
    steps,
    train,
    watched,
)
from helpers.jobs.quick_jobs import AdamDigits, ScheduledDigits, digits
from helpers.jobs.toys import Normed, Poisoned, Tokens, Toy, TwoHeads
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from jobs.sparse import MatrixCompletion, SparseLogistic
from orchestrator.features.asynchronous.strategies import ParameterServerConfig
from orchestrator.strategies import registry


def server(num_servers: int = 2, **changes: Any) -> ParameterServerConfig:
    return options_of("parameter_server", **{"num_workers": 2, "num_shards": num_servers, **changes})


def run(gang: Gang, case: Case, workers: int, servers: int, function: Any = train, **changes: Any) -> list[Any]:
    """What ``function`` returns on each rank, those of the servers last."""
    return gang.run(function, replace(case, options=server(servers, **changes)), world_size=workers + servers)


def served(*grids: tuple[int, int]) -> list[Layout]:
    """The layouts of so many workers and servers."""
    return [layout(server(servers), workers + servers) for workers, servers in grids]


# Synchronous: the rule of equal loss --------------------------------------------------------------


def test_any_number_of_workers_and_shards(gang: Gang) -> None:
    case = Case(job=digits(), train=having(global_batch_size=24))
    assert_as_alone(gang, case, *served((1, 1), (1, 3), (2, 1), (2, 2), (3, 1)))


def test_a_step_that_is_not_finite_is_left_out_by_all(gang: Gang) -> None:
    case = Case(job=Poisoned(bad=(5, 60)), train=having(on_nonfinite="skip", global_batch_size=20))
    ranks = run(gang, case, 2, 2)
    assert 0 < sum(ranks[0].skipped) < len(ranks[0].skipped)
    for rank in ranks:
        assert rank.skipped == ranks[0].skipped
    assert all(t.isfinite().all() for t in ranks[0].model.values())


def on_even_calls(rank: int, call: int) -> bool:
    return call % 2 == 0


def on_odd_calls(rank: int, call: int) -> bool:
    return call % 2 == 1


def on_rank_1_alone(rank: int, call: int) -> bool:
    return rank == 1


@pytest.mark.parametrize(("uses", "grad_accumulation"), [(on_even_calls, 1), (on_even_calls, 2), (on_odd_calls, 2)])
def test_parameters_that_take_no_part_in_a_backward_pass(gang: Gang, uses: Any, grad_accumulation: int) -> None:
    job = TwoHeads(uses=uses)
    case = Case(job=job, train=having(global_batch_size=20, grad_accumulation=grad_accumulation))
    assert_as_alone(gang, case, *served((1, 2)))


def test_one_worker_may_use_parameters_that_others_do_not(gang: Gang) -> None:
    ranks = run(gang, Case(job=TwoHeads(uses=on_rank_1_alone), train=having(global_batch_size=20)), 2, 2)
    assert_same(ranks[0].model, ranks[1].model)
    untouched = job_model(TwoHeads(uses=on_rank_1_alone))
    assert (ranks[0].model["spare.weight"] - untouched["spare.weight"]).abs().max() > 1e-3


def job_model(job: Any, seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return snapshot(job.model())


def test_buffers_are_those_of_the_first_worker(gang: Gang) -> None:
    case = Case(job=Normed(), train=having(global_batch_size=20))
    ranks = run(gang, case, 2, 1)
    of_ddp = gang.run(train, replace(case, options=DDP_OPTIONS), world_size=2)
    assert_same(ranks[0].model, ranks[1].model)
    torch.testing.assert_close(losses(ranks), losses(of_ddp), rtol=SGD, atol=0)
    torch.testing.assert_close(ranks[0].model, of_ddp[0].model, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class ManyOptimizers(Toy):
    kind: str = "SGD"
    fields: tuple[tuple[str, Any], ...] = ()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        weights, others = [], []
        for p in parameters:
            (weights if p.ndim > 1 else others).append(p)
        groups = [{"params": weights, "weight_decay": 0.01}, {"params": others, "lr": 2 * self.lr}]
        return getattr(torch.optim, self.kind)(groups, lr=self.lr, **dict(self.fields))


@pytest.mark.parametrize(
    ("kind", "lr", "fields"),
    [
        ("SGD", 0.1, (("momentum", 0.9), ("nesterov", True))),
        ("SGD", 0.1, (("momentum", 0.9), ("dampening", 0.5))),
        ("Adagrad", 0.05, (("initial_accumulator_value", 0.1), ("lr_decay", 0.01))),
        ("Adam", 0.01, (("amsgrad", True),)),
        ("NAdam", 0.01, ()),
        ("RMSprop", 0.01, (("centered", True),)),
    ],
)
def test_every_group_and_option_of_an_optimizer(gang: Gang, kind: str, lr: float, fields: Any) -> None:
    case = Case(job=ManyOptimizers(kind=kind, lr=lr, fields=fields), train=having(global_batch_size=20))
    assert_as_alone(gang, case, *served((2, 2)), rtol=ADAMW)


# Sparse gradients ---------------------------------------------------------------------------------

SPARSE = SparseLogistic(features=200, samples=600, words=20, lr=0.1)


@pytest.mark.parametrize(
    ("job", "clip_norm"),
    [
        (SPARSE, 0.5),
        (MatrixCompletion(size=60, rank=3, observed=600), 0.5),
        *in_campaign((replace(SPARSE, algorithm="sgd"), None), (replace(SPARSE, features=140_000), None)),
    ],
    ids=["adagrad", "two tables", "sgd", "long table"],
)
def test_sparse_gradients(gang: Gang, job: Any, clip_norm: float | None) -> None:
    case = Case(job=job, train=having(global_batch_size=24, clip_norm=clip_norm, steps=30))
    assert_as_alone(gang, case, *served((2, 2), (3, 1)), rtol=1e-4)


def test_of_a_sparse_table_only_touched_rows_are_sent(gang: Gang) -> None:
    job = replace(SPARSE, features=5_000)
    case = Case(job=job, train=having(global_batch_size=16, steps=10))
    dense = replace(case, job=replace(job, sparse=False))
    sparse_figures, dense_figures = (run(gang, c, 2, 2, figures_after)[0] for c in (case, dense))
    assert dense_figures["parameter_server/pulled_pct"] == 100
    assert 0 < sparse_figures["parameter_server/pulled_pct"] < 20
    for way in ("sent", "received"):
        name = f"parameter_server/bytes_{way}_per_step"
        assert 0 < sparse_figures[name] < 0.5 * dense_figures[name]


def figures_after(rank: int, case: Case) -> dict[str, float]:
    strategy = make(case, rank)
    list(steps(strategy))
    with strategy.quiesced():
        return {name: figure.value for name, figure in strategy.metrics().items()}


def test_bytes_are_those_of_the_parameters(gang: Gang) -> None:
    case = Case(job=Toy(), train=having(global_batch_size=20, steps=5))
    size_bytes = sum(t.nbytes for t in job_model(Toy()).values())
    metrics = run(gang, case, 2, 2, figures_after)[0]
    overhead = 8 * 16 * 2  # headers and alignment
    for way in ("sent", "received"):
        assert size_bytes <= metrics[f"parameter_server/bytes_{way}_per_step"] <= size_bytes + overhead
    assert 0 <= metrics["parameter_server/wait_pct"] <= 100


# Asynchronous -------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [digits(), AdamDigits(hidden=24)], ids=["sgd", "adamw"])
def test_one_worker_is_alone_however_it_is_served(gang: Gang, job: Any) -> None:
    case = Case(job=job, train=having(global_batch_size=24, clip_norm=0.5))
    (alone,) = gang.run(train, replace(case, options=DDP_OPTIONS), world_size=1)
    ranks = run(gang, case, 1, 2, consistency="async")
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=ADAMW, atol=0)


@pytest.mark.parametrize("job", [digits(lr=0.02), AdamDigits(hidden=24), SPARSE], ids=["sgd", "adamw", "sparse"])
def test_all_end_with_one_model_and_it_learns(gang: Gang, job: Any) -> None:
    case = Case(job=job, train=having(global_batch_size=32, steps=40))
    ranks = run(gang, case, 3, 1, to_the_end, consistency="async")
    for seen, _ in ranks[:3]:
        assert_same(seen.model, ranks[0][0].model)
    curve = losses([seen for seen, _ in ranks])
    assert curve[-10:].mean() < 0.97 * curve[:3].mean()
    assert ranks[3][1]["updates"] == 3 * 40


def to_the_end(rank: int, case: Case, lead: int | None = None) -> tuple[Steps, dict[str, float]]:
    """The first worker begins a step when the second one has begun that which is ``lead`` steps later, or its last."""
    strategy: Any = make(case, rank)
    made = steps(strategy)
    results = [after(lead, made, rank, step, case.train.steps) for step in range(1, case.train.steps + 1)]
    with strategy.quiesced():
        metrics = {name: figure.value for name, figure in strategy.metrics().items()}
        if not strategy.traits.reads_data:
            metrics["updates"] = strategy._updates
        return watched(strategy, results), metrics


def after(lead: int | None, results: Any, rank: int, step: int, last: int) -> Any:
    store = dist.distributed_c10d._get_default_store()
    if lead is not None and rank == 0:
        while store.add("begun", 0) < min(step + lead, last):
            time.sleep(0.002)
        time.sleep(0.01)  # in which the second one could begin another
    if rank == 1:
        store.add("begun", 1)
    return next(results)


def test_a_worker_leads_and_the_updates_of_others_are_counted(gang: Gang) -> None:
    options = server(1, consistency="async")
    case = Case(job=Toy(), train=having(global_batch_size=20, steps=15), options=options)
    _, metrics = gang.run(to_the_end, case, 5, world_size=3)[2]
    assert metrics["async/steps_ahead_max"] > 4
    assert metrics["async/staleness_max"] > 4, "of the first worker, while the other goes on"


def test_asynchronous_steps_that_are_not_finite_are_left_out(gang: Gang) -> None:
    case = Case(job=Poisoned(bad=(5, 60)), train=having(on_nonfinite="skip", global_batch_size=20))
    ranks = run(gang, case, 2, 1, to_the_end, consistency="async")
    assert any(any(seen.skipped) for seen, _ in ranks[:2])
    assert all(t.isfinite().all() for t in ranks[0][0].model.values())


class Masked(Tokens):
    """As jobs write it by hand: 0 where nothing counts."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        valid = target != -100
        each = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten().clamp(min=0), reduction="none")
        return (each * valid.flatten()).sum() / valid.sum().clamp(min=1)


def test_a_batch_without_anything_that_counts_changes_nothing(gang: Gang) -> None:
    case = Case(job=Masked(empty=6, lr=0.5), train=having(global_batch_size=6))
    ranks = run(gang, case, 3, 1, to_the_end, consistency="async")
    assert any(weight == 0 for seen, _ in ranks[:3] for weight in seen.weights)
    assert all(t.isfinite().all() for t in ranks[0][0].model.values())


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [ScheduledDigits(hidden=24), AdamDigits(hidden=24)], ids=["scheduled", "adamw"])
def test_to_ddp_and_back_on_the_same_curve(gang: Gang, job: Any) -> None:
    case = Case(job=job, train=having(global_batch_size=24, steps=9))
    (alone,) = gang.run(train, replace(case, options=DDP_OPTIONS), world_size=1)
    curve, state = [], None
    for stop, options, world_size in ((3, server(2), 4), (6, DDP_OPTIONS, 3), (9, server(1), 3)):
        results = gang.run(piece, replace(case, options=options), state, stop, world_size=world_size)
        state = results[0][1]
        curve.append(losses([seen for seen, _ in results]))
    torch.testing.assert_close(torch.cat(curve), losses([alone]), rtol=ADAMW, atol=0)


@pytest.mark.in_turn
@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("job", [AdamDigits(hidden=24), SPARSE], ids=["adamw", "sparse"])
def test_what_is_saved_is_what_is_loaded(gang: Gang, job: Any, consistency: str) -> None:
    case = Case(job=job, train=having(global_batch_size=24))
    options = server(2, consistency=consistency)
    saved = [kept for _, kept in gang.run(piece, replace(case, options=options), None, 6, world_size=4)]
    assert [kept is not None for kept in saved] == [True, False, False, False]
    for options in (server(1, consistency=consistency), DDP_OPTIONS):
        _, again = gang.run(piece, replace(case, options=options), saved[0], 6, world_size=3)[0]
        assert_same_state(again, saved[0])


# A lost worker ------------------------------------------------------------------------------------


@pytest.mark.in_turn
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    "job",
    [ScheduledDigits(hidden=24), AdamDigits(hidden=24), Normed(), SPARSE],
    ids=["sgd", "adamw", "buffers", "sparse"],
)
def test_a_new_worker_has_everything_from_the_servers_and_the_other_one(gang: Gang, job: Any, lost: int) -> None:
    case = Case(job=job, train=having(global_batch_size=24, steps=12))
    undisturbed = run(gang, case, 2, 2)
    seen = gang.run(with_a_new_worker, replace(case, options=server()), lost, 7, world_size=4)
    for rank, (after, lr) in enumerate(seen[:2]):
        assert after.loss_sums == undisturbed[rank].loss_sums[7:]
        assert_same(after.model, undisturbed[rank].model)
        assert lr == seen[2][1]


def with_a_new_worker(rank: int, case: Case, lost: int, at: int) -> tuple[Steps, float]:
    """The steps after ``at``, when the worker ``lost`` is another one than before, and the learning rate at the end."""
    strategy = make(case, rank)
    list(steps(strategy, last=at))
    model_of(strategy)  # a worker pulls the answers of its last step
    dist.barrier()
    strategy.close()
    step = at
    if rank == lost:
        strategy, step = registry.load("parameter_server").create(strategy.context, case.job), 0
        made.append(strategy)
        strategy.setup(case.job.dataset("train"))
    strategy.attach()
    batch_size = case.train.global_batch_size
    meta = strategy.recover_state((2, 2, 2, 3), source_step=at, step=step, samples_consumed=step * batch_size)
    assert meta == {"step": at, "samples_consumed": at * batch_size}
    return watched(strategy, steps(strategy, first=at + 1)), strategy.group_lrs[0]


def test_a_server_that_has_no_state_yet_offers_none(gang: Gang) -> None:
    case = Case(job=digits(), train=having(global_batch_size=24))
    for before, after in run(gang, case, 1, 1, held_before_and_after):
        assert before == {}
        assert after in ({}, {0: (4,), 1: (4,)})


def held_before_and_after(rank: int, case: Case) -> tuple[Any, Any]:
    context = make(case, rank).context
    strategy = registry.load("parameter_server").create(context, case.job)
    made.append(strategy)
    strategy.setup(case.job.dataset("train"))
    before = strategy.recoverable_steps(0)
    strategy.attach()
    strategy.sync_initial_state()
    list(steps(strategy, last=4))
    model_of(strategy)
    return before, strategy.recoverable_steps(4)


# What is refused ----------------------------------------------------------------------------------


def test_an_optimizer_that_cannot_be_sharded_is_refused(gang: Gang) -> None:
    case = Case(job=Toy(optimizer_of=torch.optim.Adafactor), train=having(global_batch_size=20), options=server(1))
    answers = gang.ask(train, case, world_size=3)
    assert all("Adafactor: servers update their shards" in str(a.error) for a in answers)


class Reentrant(nn.Module):
    """The gradient of the first layer comes in two parts, each from a backward pass within the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.head = nn.Linear(10, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = checkpoint(self.layer, checkpoint(self.layer, inputs, use_reentrant=True), use_reentrant=True)
        return self.head(hidden)


def test_a_gradient_that_grows_after_it_was_pushed_is_an_error(gang: Gang) -> None:
    case = Case(job=Toy(build=Reentrant), train=having(global_batch_size=20), options=server(1))
    answers = gang.ask(train, case, world_size=2)
    assert "use_reentrant=False" in str(answers[0].error)
