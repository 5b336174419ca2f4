"""One model in shared memory: what is shared, what a lock changes, what becomes of a checkpoint."""

import contextlib
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import HOGWILD, LOCKED
from helpers.conformance.training import (
    assert_same,
    assert_same_state,
    losses,
    made,
    make,
    piece,
    snapshot,
    steps,
    train,
)
from helpers.jobs.quick_jobs import AdamDigits, digits
from helpers.jobs.toys import Toy
from helpers.ranks.gang import Gang
from orchestrator.config import schema
from orchestrator.protocol.messages import ANY_RANK
from orchestrator.strategies import registry

LOCKED_UPDATE = replace(LOCKED, lock="update")


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [HOGWILD, LOCKED, LOCKED_UPDATE], ids=["hogwild", "locked_sgd", "locked_update"])
@pytest.mark.parametrize("job", [digits(lr=0.02), AdamDigits(hidden=24, lr=2e-3)], ids=["sgd", "adamw"])
def test_all_have_one_model_and_it_learns(gang: Gang, options: schema.StrategyConfig, job: Any) -> None:
    case = Case(job=job, train=having(global_batch_size=32, steps=60), options=options)
    ranks = gang.run(train_to_the_end, case, world_size=3)
    for rank in ranks[1:]:
        torch.testing.assert_close(rank["model"], ranks[0]["model"], rtol=0, atol=0)
        torch.testing.assert_close(rank["optimizer"], ranks[0]["optimizer"], rtol=0, atol=0)
    assert ranks[0]["updates"] == 3 * 60
    curve = losses([r["steps"] for r in ranks])
    assert curve[-10:].mean() < 0.9 * curve[:3].mean()


def train_to_the_end(rank: int, case: Case) -> dict[str, Any]:
    from helpers.conformance.training import watched

    strategy = make(case, rank)
    seen = watched(strategy, steps(strategy))
    with strategy.quiesced():
        state = {f"{k}": t.clone() for k, t in optimizer_state(strategy).items()}
        return {
            "steps": seen,
            "model": snapshot(strategy.passes.model),
            "optimizer": state,
            "updates": int(strategy._updates.sum()),
            "figures": {name: f.value for name, f in strategy.metrics().items()},
        }


def optimizer_state(strategy: Any) -> dict[str, torch.Tensor]:
    from orchestrator.features.asynchronous.hogwild import optimizer_tensors

    return optimizer_tensors(strategy.trained.optimizer)


@pytest.mark.parametrize("options", [LOCKED, LOCKED_UPDATE], ids=["step", "update"])
def test_a_lock_loses_no_update(gang: Gang, options: schema.StrategyConfig) -> None:
    case = Case(job=Toy(), train=having(global_batch_size=20, steps=60), options=options)
    ranks = gang.run(train_to_the_end, case, world_size=4)
    assert ranks[0]["figures"]["hogwild/lost_updates_pct"] == 0
    if options is LOCKED:
        assert all(r["figures"]["async/staleness_max"] == 0 for r in ranks)


def test_without_a_lock_others_update_meanwhile(gang: Gang) -> None:
    case = Case(job=Toy(loss_of=in_step), train=having(global_batch_size=20, steps=10), options=HOGWILD)
    ranks = gang.run(train_to_the_end, case, world_size=3)
    assert max(r["figures"]["async/staleness_max"] for r in ranks) >= 2, "of the last one to update"


def in_step(output: Any, target: Any) -> torch.Tensor:
    """All workers have computed their outputs before one of them updates."""
    dist.barrier()
    return F.cross_entropy(output, target)


def test_a_skipped_update_is_not_stale(gang: Gang) -> None:
    case = Case(
        job=Toy(loss_of=diverging), train=having(global_batch_size=20, steps=3, on_nonfinite="skip"), options=LOCKED
    )
    for rank in gang.run(train_to_the_end, case, world_size=2):
        assert rank["steps"].skipped == [True] * 3
        assert "async/staleness_max" not in rank["figures"]


def diverging(output: Any, target: Any) -> torch.Tensor:
    return F.cross_entropy(output, target) * torch.inf


def test_one_worker_is_single(gang: Gang) -> None:
    case = Case(job=digits(), train=having(global_batch_size=32))
    alone, hogwild = (
        gang.run(train, replace(case, options=options), world_size=size)[0]
        for options, size in ((None, 1), (HOGWILD, 1))
    )
    torch.testing.assert_close(losses([hogwild]), losses([alone]), rtol=0, atol=0)


@pytest.mark.parametrize("job", [digits(), AdamDigits(hidden=24)], ids=["sgd", "adamw"])
def test_goes_on_from_a_checkpoint_and_ddp_from_its(gang: Gang, job: Any) -> None:
    case = Case(job=job, train=having(global_batch_size=32), options=HOGWILD)
    _, saved = gang.run(piece, case, None, 6, world_size=2)[0]
    assert saved is not None
    for ranks in (
        gang.run(piece, case, saved, 6, world_size=2),
        gang.run(piece, replace(case, options=DDP), saved, 6, world_size=2),
    ):
        assert_same_state(ranks[0][1], saved)


def test_the_memory_has_no_name(gang: Gang) -> None:
    before = set(Path("/dev/shm").iterdir())
    case = Case(job=Toy(), train=having(global_batch_size=20), options=HOGWILD)
    for during in gang.run(names_in_training, case, world_size=2):
        assert during <= before


def test_a_new_worker_maps_the_memory_that_is_there(gang: Gang) -> None:
    case = Case(job=AdamDigits(hidden=24), train=having(global_batch_size=32, steps=20), options=HOGWILD)
    for lost in (0, 1):
        ranks = gang.run(with_a_new_worker, case, lost, 8, world_size=2)
        for rank in ranks:
            assert rank["handed over"] == {"step": 8, "samples_consumed": 8 * 32}
            assert_same(rank["before"], ranks[1 - lost]["before"])
            assert_same(rank["model"], ranks[0]["model"])
            assert rank["held"] == {ANY_RANK: (20,)}
            assert rank["lost_pct"] < 50
            assert rank["descriptors"] == 0


def with_a_new_worker(rank: int, case: Case, lost: int, at: int) -> dict[str, Any]:
    """Train on after step ``at``, when the worker ``lost`` is another one than before."""
    opened = memory_descriptors()
    strategy: Any = make(case, rank)
    list(steps(strategy, last=at))
    dist.barrier()
    strategy.close()
    step = at
    if rank == lost:
        made.remove(strategy)
        strategy, step = registry.load("hogwild").create(strategy.context, case.job), 0
        made.append(strategy)
        strategy.setup(case.job.dataset("train"))
        assert strategy.recoverable_steps(0) == {}
    strategy.attach()
    handed_over = strategy.recover_state((1 - lost,) * 2, source_step=at, step=step, samples_consumed=step * 32)
    before = snapshot(strategy.passes.model)
    dist.barrier()
    list(steps(strategy, first=at + 1))
    with strategy.quiesced():
        result = {
            "handed over": handed_over,
            "before": before,
            "model": snapshot(strategy.passes.model),
            "held": strategy.recoverable_steps(20),
            "lost_pct": strategy.metrics()["hogwild/lost_updates_pct"].value,
        }
    made.remove(strategy)
    del strategy
    gc.collect()
    return {**result, "descriptors": memory_descriptors() - opened}


def memory_descriptors() -> int:
    """How many shared memories this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing itself
            found += "memfd:orchestrator" in str(descriptor.readlink())
    return found


def names_in_training(rank: int, case: Case) -> set[Path]:
    strategy = make(case, rank)
    list(steps(strategy, last=2))
    return set(Path("/dev/shm").iterdir())


def test_an_optimizer_that_cannot_be_shared_is_refused(gang: Gang) -> None:
    answers = gang.ask(
        train,
        Case(job=Toy(optimizer_of=torch.optim.RMSprop), train=having(global_batch_size=20), options=HOGWILD),
        world_size=2,
    )
    assert all("RMSprop: its state cannot be shared" in str(a.error) for a in answers)
