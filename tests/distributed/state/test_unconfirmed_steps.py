"""What is not confirmed, as on a GPU when a rank is lost: a step leaves no trace, and a number is not reported."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.conformance.cases import Case, assignment, having
from helpers.conformance.layouts import CONTEXT, LAYOUTS, STAGED, TENSOR
from helpers.conformance.training import CPU, Steps, make, steps, train, watched
from helpers.jobs.matrix_optimizers import OfTall, Preconditioned
from helpers.jobs.quick_jobs import TinyGPT, digits
from helpers.jobs.step_toys import NormedGAN
from helpers.jobs.toys import Normed, Poisoned, Toy
from helpers.ranks.gang import SOON_S, Gang
from helpers.ranks.loops import loop_of
from helpers.records.runs import in_campaign
from orchestrator.config.redact import Redactor
from orchestrator.job import Job
from orchestrator.policy.recovery import newest_state
from orchestrator.protocol.events import CheckpointSaved
from orchestrator.protocol.messages import ANY_RANK, PENDING
from orchestrator.strategies import owner as owners
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update import whole_tensors
from orchestrator.strategies.update.confirmation import no_confirmation
from orchestrator.worker.control.control import AbandonedError, Outbox
from orchestrator.worker.control.rendezvous import context_of
from orchestrator.worker.data.batches import SampleOrder

SHORT = having(steps=6, global_batch_size=16)


def model_of(strategy: Strategy) -> nn.Module:
    assert isinstance(strategy, Trainer)
    return strategy.trained.module()


def with_garbage(strategy: Strategy, *, call: int) -> Callable[[], None]:
    """The confirmation that fails at a call, from 1: the gradients and the buffers are garbage by then."""
    calls = iter(range(1, 100))

    def confirm() -> None:
        if next(calls) < call:
            return
        for parameter in model_of(strategy).parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
        for buffer in model_of(strategy).buffers():
            buffer.fill_(1)
        raise AbandonedError("another rank was lost")

    return confirm


def interrupted(rank: int, case: Case, call: int) -> tuple[Mapping[int, tuple[int, ...]], Steps | None]:
    """Leave the third step at that confirmation, continue from the memory of the ranks, and train to the end."""
    strategy = make(case, rank)
    results = steps(strategy)
    seen = [next(results), next(results)]
    strategy.hooks.confirm = with_garbage(strategy, call=call)
    with pytest.raises(AbandonedError):
        next(results)
    offered = strategy.recoverable_steps(2)
    strategy.close()
    if not offered:
        return offered, None
    strategy.hooks.confirm = no_confirmation
    strategy.attach()
    sources = range(strategy.context.mesh.world_size)
    consumed = 2 * case.train.global_batch_size
    meta = strategy.recover_state(list(sources), source_step=2, step=2, samples_consumed=consumed)
    assert meta["step"] == 2
    return offered, watched(strategy, [*seen, *steps(strategy, first=3)])


def last_confirmation(case: Case) -> int:
    """The number of the confirmation that comes before the update of a step."""
    return 2 if isinstance(case.job, OfTall) else 1


def torn(rank: int, case: Case, lost: int, unconfirmed: tuple[int, ...]) -> tuple[int, Steps]:
    """In the third step a rank is lost between its peers' updates. The step that the others continue from, and the end.

    The ranks that are ``unconfirmed`` have given their part of the norm, and not seen it.
    """
    strategy = make(case, rank)
    results = steps(strategy)
    seen = [next(results), next(results)]
    if rank in (lost, *unconfirmed):
        strategy.hooks.confirm = Ended(at=last_confirmation(case))
        with pytest.raises(AbandonedError):
            next(results)
    else:
        seen.append(next(results))
    step = len(seen)
    offers: list[Mapping[int, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(offers, strategy.recoverable_steps(step))
    found, sources = newest_state({r: offered for r, offered in enumerate(offers) if r != lost}, range(len(offers)))
    assert sources is not None, "a checkpoint would be the source"
    strategy.close()
    if rank == lost:
        step, strategy = 0, type(strategy)(strategy.context, strategy.job)
        strategy.setup(case.job.dataset("train"))
    strategy.hooks.confirm = no_confirmation
    strategy.attach()
    batch = case.train.global_batch_size
    meta = strategy.recover_state(sources, source_step=found, step=step, samples_consumed=step * batch)
    assert meta == {"step": found, "samples_consumed": found * batch}
    return found, watched(strategy, steps(strategy, first=found + 1))


class Mean(nn.Module):
    """Keeps a moving average of what it sees, in another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def centred() -> nn.Module:
    return nn.Sequential(Mean(), nn.Linear(10, 4))


class Follower(nn.Module):
    """A teacher that moves towards its student in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(10, 4), nn.Linear(10, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data.lerp_(new.data, 0.3 * self.training)
        return self.student(x) + 0.5 * self.teacher(x)


OTHER_BUCKETS = 1e-5
"""``DistributedDataParallel`` orders its buckets anew after its first step, and with them the sums of four numbers."""
CASES = {
    "ddp": LAYOUTS["ddp-2"].of(Case(job=Normed(), train=replace(SHORT, clip_norm=1.0))),
    "ddp in fp16": LAYOUTS["ddp-2"].of(Case(job=Toy(), train=replace(SHORT, precision="fp16"))),
    "teacher": LAYOUTS["ddp-2"].of(Case(job=Toy(build=Follower), train=SHORT)),
    "teacher in parts": LAYOUTS["sharded-ddp-2"].of(Case(job=Toy(build=Follower), train=SHORT)),
    "replicas of stages": LAYOUTS["GPipe-2x2"].of(Case(job=Toy(), train=SHORT), split=("2",)),
    "replicas of parts": LAYOUTS["hsdp-2x2"].of(Case(job=Normed(), train=SHORT)),
    "parts": LAYOUTS["fsdp-2"].of(Case(job=Normed(), train=SHORT)),
    "parts, other buffers": LAYOUTS["fsdp-2"].of(Case(job=Toy(build=centred), train=SHORT)),
    "parts that are updated": LAYOUTS["sharded-ddp-2"].of(Case(job=Normed(), train=SHORT)),
    "replicas of parts that are updated": LAYOUTS["mesh-replicated-zero1-2x2"].of(Case(job=Normed(), train=SHORT)),
    "parts, whole tensors": LAYOUTS["fsdp-2"].of(Case(job=OfTall(kind=Preconditioned), train=SHORT)),
    "replicas of parts, whole tensors": LAYOUTS["hsdp-2x2"].of(
        Case(job=OfTall(kind=Preconditioned), train=replace(SHORT, clip_norm=0.05, ema_decay=0.8))
    ),
    "own updates": Case(job=NormedGAN(), train=SHORT),
}


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "teacher in parts",
        "replicas of stages",
        "parts",
        "own updates",
        *in_campaign(
            "ddp in fp16",
            "teacher",
            "replicas of parts",
            "parts, other buffers",
            "parts that are updated",
            "replicas of parts that are updated",
            "parts, whole tensors",
            "replicas of parts, whole tensors",
        ),
    ],
)
def test_a_step_that_is_not_confirmed_is_repeated_bit_for_bit(gang: Gang, name: str) -> None:
    world_size = 4 if name.startswith("replicas") else 2
    expected = gang.run(train, CASES[name], world_size=world_size)
    found = gang.run(interrupted, CASES[name], last_confirmation(CASES[name]), world_size=world_size)
    rtol = OTHER_BUCKETS if name == "replicas of parts that are updated" else 0.0
    for (offered, seen), undisturbed in zip(found, expected, strict=True):
        assert offered
        assert all(2 in of_rank for key, of_rank in offered.items() if key != PENDING)
        assert seen.loss_sums == pytest.approx(undisturbed.loss_sums, rel=rtol, abs=0)
        torch.testing.assert_close(seen.model, undisturbed.model, rtol=rtol, atol=rtol / 100)


def lost_without_replica(rank: int, case: Case, moment: str) -> tuple[int, Steps]:
    """Rank 1 is lost in the sixth step, of which a neighbour has a copy after every second one; ``moment``: where the
    others are then. The step that all continue from, and the end."""

    def fail(*args: object, **more: object) -> None:
        raise AbandonedError("another rank was lost")

    strategy = make(case, rank, peer_copy_every=2)
    assert isinstance(strategy, Trainer)
    batch = case.train.global_batch_size
    for step, _ in enumerate(steps(strategy, last=5), 1):
        strategy.after_step(step=step, samples_consumed=step * batch)
    with pytest.MonkeyPatch.context() as patch:
        if moment == "whole tensors":
            patch.setattr(whole_tensors, "pieces_of_all", fail)
        elif moment == "exchange":
            patch.setattr(owners, "pieces_of_all", fail)
        else:
            owner, name = {
                "forward": (strategy.passes, "backward"),
                "sums": (strategy.reduction, "finish"),
                "update": (strategy.hooks, "confirm"),
            }[moment]
            patch.setattr(owner, name, fail)
        with pytest.raises(AbandonedError):
            next(steps(strategy, first=6))
    offers: list[Mapping[int, tuple[int, ...]]] = [{}] * dist.get_world_size()
    deadline = time.monotonic() + SOON_S
    offered = strategy.recoverable_steps(5)
    while not all(4 in of_rank for of_rank in offered.values()):
        assert time.monotonic() < deadline, f"no copy has arrived: {offered}"
        time.sleep(0.01)
        offered = strategy.recoverable_steps(5)
    dist.all_gather_object(offers, offered)
    found, sources = newest_state({r: of_rank for r, of_rank in enumerate(offers) if r != 1}, range(len(offers)))
    assert sources is not None, "a checkpoint would be the source"
    strategy.close()
    step = 5
    if rank == 1:
        step, strategy = 0, type(strategy)(strategy.context, strategy.job)
        strategy.setup(case.job.dataset("train"))
    strategy.attach()
    meta = strategy.recover_state(sources, source_step=found, step=step, samples_consumed=step * batch)
    assert meta == {"step": found, "samples_consumed": found * batch}
    seen = watched(strategy, steps(strategy, first=found + 1))
    strategy.close()
    return found, seen


@pytest.mark.parametrize(
    ("layout", "moment"),
    [
        ("fsdp-2", "sums"),
        ("fsdp-3", "update"),
        ("sharded-ddp-2", "exchange"),
        ("fsdp-2", "whole tensors"),
        *in_campaign(
            ("fsdp-3", "forward"),
            ("fsdp-1F1B-2x2", "update"),
            ("sharded-ddp-2", "sums"),
            ("sharded-ddp-2", "whole tensors"),
            ("mesh-zero1-in-stages-2x2", "sums"),
            ("mesh-zero1-in-stages-2x2", "exchange"),
            ("context-in-stages-2x2", "update"),
            ("mesh-zero1-tensor-2x2", "exchange"),
        ),
    ],
)
def test_a_part_without_replicas_comes_from_the_memory_of_a_neighbour(gang: Gang, layout: str, moment: str) -> None:
    of = {**LAYOUTS, **TENSOR, **CONTEXT}[layout]
    world_size = of.world_size
    # Ranks that measure may cut elsewhere in another run.
    cut = {"split": ("2",), "schedule": "1F1B"} if layout in STAGED else {}
    job: Job = OfTall(kind=Preconditioned) if moment == "whole tensors" else Normed()
    if layout not in LAYOUTS:
        job, cut = TinyGPT(layers=2, variant="llama", tied=True), {"split": ("block1",)} if "stages" in layout else {}
    case = of.of(Case(job=job, train=having(SHORT, steps=8)), **cut)
    expected = gang.run(train, case, world_size=world_size)
    for (step, seen), undisturbed in zip(
        gang.run(lost_without_replica, case, moment, world_size=world_size), expected, strict=True
    ):
        assert step == 4
        assert seen.loss_sums == undisturbed.loss_sums[4:]
        assert all(torch.equal(seen.model[n], tensor) for n, tensor in undisturbed.model.items())


def recovered_twice(rank: int, case: Case) -> tuple[set[int], Steps]:
    """Continue from the copies of the fourth step after five, which fails in the exchange of the parts. The steps that
    are then offered, and the end."""

    def fail(*args: object) -> None:
        raise AbandonedError("another rank was lost")

    strategy = make(case, rank, peer_copy_every=2)
    batch = case.train.global_batch_size
    for step, _ in enumerate(steps(strategy, last=5), 1):
        strategy.after_step(step=step, samples_consumed=step * batch)
    recover = functools.partial(strategy.recover_state, (0, 1), source_step=4, step=5, samples_consumed=5 * batch)
    strategy.close()
    strategy.attach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "pieces_of_all", fail)
        with pytest.raises(AbandonedError):
            recover()
    offered = {step for of_rank in strategy.recoverable_steps(5).values() for step in of_rank}
    strategy.close()
    strategy.attach()
    assert recover() == {"step": 4, "samples_consumed": 4 * batch}
    return offered, watched(strategy, steps(strategy, first=5))


def test_a_recovery_that_fails_after_parts_are_loaded_offers_what_they_are(gang: Gang) -> None:
    case = LAYOUTS["sharded-ddp-2"].of(Case(job=Normed(), train=SHORT))
    expected = gang.run(train, case, world_size=2)
    for (offered, seen), undisturbed in zip(gang.run(recovered_twice, case, world_size=2), expected, strict=True):
        assert 4 in offered
        assert 5 not in offered
        assert seen.loss_sums == undisturbed.loss_sums[4:]


STAGES = CASES["replicas of stages"]
TORN = {
    "parts, clipped, in slices": replace(
        CASES["replicas of parts"], train=replace(SHORT, grad_accumulation=2, clip_norm=0.05)
    ),
    "parts that are updated": replace(
        CASES["replicas of parts that are updated"], train=replace(SHORT, clip_norm=0.05)
    ),
    "whole tensors": CASES["replicas of parts, whole tensors"],
    "divided layers": TENSOR["mesh-replicated-tensor-2x2"].of(
        Case(job=TinyGPT(layers=2), train=replace(SHORT, clip_norm=0.05))
    ),
    "unclipped, in slices": replace(STAGES, train=replace(SHORT, grad_accumulation=2)),
    "clipped, in fp16": replace(STAGES, train=replace(SHORT, precision="fp16", clip_norm=0.05)),
    "skipped": replace(
        STAGES,
        job=Poisoned(bad=tuple(SampleOrder(n=200, seed=3).indices(2 * 16, 1))),
        train=replace(SHORT, on_nonfinite="skip"),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "parts that are updated",
        "clipped, in fp16",
        *in_campaign("parts, clipped, in slices", "whole tensors", "divided layers", "unclipped, in slices", "skipped"),
    ],
)
def test_a_step_that_some_ranks_have_made_is_made_by_the_others(gang: Gang, name: str) -> None:
    """Ranks 1 and 3 have one stage or part; after the loss of one of them, the other one has not made its update."""
    case = TORN[name]
    expected = gang.run(train, case, world_size=4)
    assert [steps.skipped[2] for steps in expected] == [name == "skipped"] * 4
    moments, rtol = ((3, (1,)), (0, (2, 3)), (1, (0, 2, 3))), 0.0
    if name == "parts that are updated":  # nobody ends a step without the peers of its exchange
        moments, rtol = ((3, (2,)), (1, (0, 2, 3))), OTHER_BUCKETS
    for lost, unconfirmed in moments:
        ranks = gang.run(torn, case, lost, unconfirmed, world_size=4)
        made = len(unconfirmed) < 3
        for (step, seen), undisturbed in zip(ranks, expected, strict=True):
            assert step == (3 if made else 2)
            np.testing.assert_allclose(seen.loss_sums, undisturbed.loss_sums[step:], rtol=rtol)  # a NaN equals itself
            torch.testing.assert_close(seen.model, undisturbed.model, rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize(("call", "offered"), [(1, {ANY_RANK: (2,)}), (2, {}), (3, {})])
def test_a_step_with_several_updates_offers_nothing_once_it_has_made_one(
    gang: Gang, call: int, offered: Mapping[int, tuple[int, ...]]
) -> None:
    found = gang.run(interrupted, CASES["own updates"], call, world_size=2)
    assert [o for o, _ in found] == [offered] * 2


class Ended:
    """A confirmation that finds the generation ended at its ``at``-th call."""

    def __init__(self, at: int):
        self.at = at
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls >= self.at:
            raise AbandonedError("another rank was lost")


def run_until_ended(tmp_path: Path, at: int) -> tuple[int, int]:
    """Run one rank, whose generation ends at a confirmation. How often it confirmed, and how much it has reported."""
    (tmp_path / "checkpoints").mkdir(parents=True)
    case = Case(job=digits(val_size=8), train=having(steps=2, global_batch_size=8, eval_every=2))
    orders = assignment(
        rank=0, world_size=1, generation=1, store_port=0, run_dir=str(tmp_path), case=case, checkpoint_every=2
    )
    outbox, confirm = Outbox(Redactor()), Ended(at)
    strategy = Trainer(context_of(orders, CPU), case.job)
    loop = loop_of(orders, case, strategy, outbox=outbox)
    strategy.hooks.confirm = confirm
    with contextlib.suppress(AbandonedError):
        loop.run({})
    loop.finish(timeout_s=SOON_S)
    heartbeat = outbox.collect({})
    saved = [event for event in heartbeat.events if isinstance(event, CheckpointSaved)]
    return confirm.calls, len(heartbeat.points) + len(saved)


def test_each_report_and_checkpoint_has_its_own_confirmation(tmp_path: Path) -> None:
    calls, everything = run_until_ended(tmp_path / "whole", at=1000)
    reported = [run_until_ended(tmp_path / str(at), at=at)[1] for at in range(1, calls + 1)]
    assert everything == 2 + 1 + 1, "points, evaluations and checkpoints"
    assert calls == 2 + everything + 4, "the updates, the reports, the initial state, the trial, the order and the end"
    assert {after - before for before, after in itertools.pairwise([0, *reported, everything])} == {0, 1}
