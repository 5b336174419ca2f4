"""No order of communication that can deadlock where sends are not buffered, as with NCCL; gloo would hide it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import LAYOUTS, MODEL_PARALLEL, Layout, ddp_pipeline, layout, pipeline
from helpers.conformance.training import Steps, losses, make, steps, train
from helpers.jobs.quick_jobs import FewToEvaluate, digits
from helpers.jobs.step_toys import Contrastive
from helpers.jobs.toys import Normed, Tokens, Toy, Wide
from helpers.ranks.batches import validated
from helpers.ranks.deadlock import Launch, find_deadlock
from helpers.ranks.gang import SOON_S, Gang
from helpers.ranks.launches import CountingGate, recorded
from helpers.records.runs import in_campaign
from orchestrator.compat.pipelining import sends_one_way
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.strategies.parts.stages import Stages

IN_CI = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
GRIDS: dict[str, Callable[[str], Layout]] = {
    "2": lambda schedule: layout(pipeline(schedule, 4), 2),
    "4": lambda schedule: layout(replace(pipeline(schedule, 8), num_workers=4), 4),
    "2x2": lambda schedule: layout(ddp_pipeline(schedule, 4), 4),
}


def everything(rank: int, case: Case) -> list[Launch]:
    """Set up, train, evaluate if there is a validation set, save, load, and recover from the first replica."""
    with recorded() as launches:
        strategy = make(case, rank)
        for _ in steps(strategy):
            pass
        if (val_set := case.job.dataset("val")) is not None:
            validated(strategy, rank, val_set)
        mesh, done, samples = strategy.context.mesh, case.train.steps, case.train.steps * case.train.global_batch_size
        state = strategy.capture(step=done, samples_consumed=samples, into=None)
        strategy.restore(state, source=0)
        first_replica = [mesh.group("replicate", r)[0] for r in range(mesh.world_size)]
        strategy.recover_state(first_replica, source_step=done, step=done, samples_consumed=samples)
    return launches


def assert_no_deadlock(launches: Sequence[Sequence[Launch]]) -> None:
    assert all(launches), "a rank has communicated nothing"
    assert find_deadlock(launches) is None


@pytest.mark.in_turn
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("schedule", [*IN_CI, *in_campaign(*(s for s in SCHEDULES if s not in IN_CI))])
def test_every_schedule(gang: Gang, schedule: str, grid: str) -> None:
    """The last batch of the evaluation leaves micro-batches without samples, and a replica without any."""
    of_schedule = GRIDS[grid](schedule)
    train = having(steps=2, global_batch_size=32, grad_accumulation=2, clip_norm=0.1)
    case = Case(job=digits(depth=8, hidden=8, val_size=33), train=train)
    assert_no_deadlock(gang.run(everything, of_schedule.of(case), world_size=of_schedule.world_size))


@pytest.mark.parametrize("changes", [{"tensor": 2}, *in_campaign({"context": 2})], ids=str)
def test_stages_that_several_ranks_compute_together(gang: Gang, changes: dict[str, int]) -> None:
    """What is computed again has sums too, in both halves of a backward pass."""
    train = having(steps=1, global_batch_size=8, clip_norm=0.1, activation_checkpointing="blocks")
    case = Case(job=FewToEvaluate(layers=2, variant="llama", kv_heads=2, tied=True), train=train)
    together = layout(replace(pipeline("ZBVZeroBubble", 4), **changes), 4)
    assert_no_deadlock(gang.run(everything, together.of(case), world_size=4))


def in_two_groups(rank: int, case: Case) -> tuple[list[Launch], Steps]:
    """Train with a group for each direction, as NCCL has them."""
    with recorded() as launches, patch.object(Stages, "_has_backward_group", return_value=True):
        return launches, train(rank, case)


@pytest.mark.parametrize(
    "schedule",
    ["Interleaved1F1B", *in_campaign(*(s for s in SCHEDULES if sends_one_way(s) and s != "Interleaved1F1B"))],
)
def test_activations_and_their_gradients_may_have_groups_of_their_own(gang: Gang, schedule: str) -> None:
    of_schedule = layout(pipeline(schedule, 4), 2)
    case = of_schedule.of(Case(job=digits(depth=8, hidden=8), train=having(steps=2, global_batch_size=32)))
    seen = gang.run(in_two_groups, case, world_size=2)
    launches = [own for own, _ in seen]
    assert_no_deadlock(launches)
    transfers = {o for own in launches for launch in own for o in launch if o.name == "transfer"}
    assert len({transfer.group for transfer in transfers}) == 2
    assert torch.equal(losses([steps for _, steps in seen]), losses(gang.run(train, case, world_size=2)))


@pytest.mark.parametrize(
    ("job", "staged"),
    [
        (digits(), layout(MODEL_PARALLEL, 2)),
        (Toy(build=of.tied_thrice), LAYOUTS["1F1B-4"]),
        (Toy(build=of.normed), LAYOUTS["ZBVZeroBubble-2x2"]),
        *in_campaign(
            (Tokens(build=of.tied_ends), LAYOUTS["InterleavedZeroBubble-2x2"]),
            (Tokens(build=of.sparse_and_tied, momentum=0), LAYOUTS["1F1B-2x2-replicas-close"]),
            (Toy(build=of.pairs), LAYOUTS["Interleaved1F1B-2"]),
        ),
    ],
    ids=["one-micro-batch", "tied-thrice", "buffers", "tied", "sparse-and-tied", "several-tensors"],
)
def test_special_stages(gang: Gang, job: Toy, staged: Layout) -> None:
    case = Case(job=job, train=having(steps=2, global_batch_size=16, on_nonfinite="skip"))
    assert_no_deadlock(gang.run(everything, staged.of(case), world_size=staged.world_size))


@pytest.mark.parametrize(
    "case",
    [
        Case(job=Normed(), options=replace(DDP, sync_batchnorm=True)),
        Case(job=Wide(), options=replace(DDP, comm_hook="powersgd")),
        Case(job=Contrastive()),
        *in_campaign(
            Case(job=Tokens(build=of.sparse_ends, momentum=0)),
            Case(job=Tokens(), options=replace(DDP, comm_hook="bf16", find_unused_parameters=True)),
        ),
    ],
    ids=["buffers", "powersgd", "training-step", "sparse", "half-precision"],
)
def test_replicas(gang: Gang, case: Case) -> None:
    train = having(steps=12, global_batch_size=14, clip_norm=0.1)
    assert_no_deadlock(gang.run(everything, replace(case, train=train), world_size=3))


def recover_from_copies(rank: int, case: Case) -> list[Launch]:
    """Each rank takes its state after the first step from the copy of its neighbour."""
    with recorded() as launches:
        strategy = make(case, rank, peer_copy_every=1)
        for done, _ in enumerate(steps(strategy), 1):
            strategy.after_step(step=done, samples_consumed=done * case.train.global_batch_size)
        neighbours = [(r + 1) % dist.get_world_size() for r in range(dist.get_world_size())]
        strategy.recover_state(neighbours, source_step=1, step=2, samples_consumed=2 * case.train.global_batch_size)
    return launches


@pytest.mark.parametrize(
    "name", ["hsdp-2x2", "fsdp-1F1B-2x2", *in_campaign("fsdp-3", "fsdp-ZBVZeroBubble-2x2", "sharded-ddp-3")]
)
def test_parts(gang: Gang, name: str) -> None:
    train = having(steps=2, global_batch_size=32, grad_accumulation=2, clip_norm=0.1)
    case = LAYOUTS[name].of(Case(job=digits(depth=4, hidden=8, val_size=33), train=train))
    launches = gang.run(everything, case, world_size=LAYOUTS[name].world_size)
    assert_no_deadlock(launches)
    names = {operation.name for own in launches for launch in own for operation in launch}
    assert any("allgather" in name for name in names), "parts are gathered"


@pytest.mark.parametrize("name", ["1F1B-4", "fsdp-2", *in_campaign("LoopedBFS-2", "sharded-ddp-2")])
def test_recovery_from_copies_in_a_ring(gang: Gang, name: str) -> None:
    case = LAYOUTS[name].of(Case(job=digits(depth=3), train=having(steps=2, global_batch_size=16)))
    assert_no_deadlock(gang.run(recover_from_copies, case, world_size=LAYOUTS[name].world_size))


def until_refused(rank: int, case: Case) -> None:
    """Rank 0 may enqueue one more operation after its first step, as if its groups were aborted then."""
    gate = CountingGate()
    with recorded(gate):
        remaining = steps(make(case, rank))
        next(remaining)
        if rank == 0:
            gate.closes_after = gate.passed + 1
        list(remaining)


@pytest.mark.parametrize(
    "name",
    [
        "ddp-2",
        "hsdp-2x2",
        "1F1B-2",
        *in_campaign("sharded-ddp-2", "fsdp-2", "fsdp-1F1B-2x2", "model_parallel-2", "ZBVZeroBubble-2x2"),
    ],
)
def test_a_step_ends_if_its_groups_are_aborted(gang: Gang, name: str) -> None:
    case = LAYOUTS[name].of(Case(job=digits(depth=8, hidden=8), train=having(steps=3, global_batch_size=32)))
    answers = gang.ask(until_refused, case, world_size=LAYOUTS[name].world_size, timeout_s=SOON_S)
    assert (answers[0].error or "").startswith("ConnectionAbortedError"), answers[0].trace
    assert all(answer.error is not None for answer in answers)


# What gloo does without complaint, and NCCL never ends --------------------------------------------


def both_send_first(rank: int) -> list[Launch]:
    with recorded() as launches:
        work = dist.isend(torch.zeros(3), 1 - rank)
        dist.recv(torch.zeros(3), 1 - rank)
        assert work is not None
        work.wait()
    return launches


def two_groups_in_either_order(rank: int) -> list[Launch]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with recorded() as launches:
        works = [dist.all_reduce(torch.zeros(3), group=g, async_op=True) for g in (groups if rank else groups[::-1])]
        for work in works:
            assert work is not None
            work.wait()
    return launches


def stage_after_stage(rank: int) -> list[Launch]:
    """Two stages on each rank: all micro-batches pass the first one before the second one starts."""
    activations, sends = torch.zeros(3), []
    with recorded() as launches:
        for stage in (rank, rank + 2):
            for _ in range(4):
                if stage > 0:
                    dist.recv(activations, 1 - rank)
                if stage < 3:
                    sends.append(dist.isend(activations, 1 - rank))
        for work in sends:
            assert work is not None
            work.wait()
    return launches


@pytest.mark.parametrize("planted", [both_send_first, two_groups_in_either_order, stage_after_stage])
def test_a_planted_deadlock_is_found(gang: Gang, planted: Callable[[int], list[Launch]]) -> None:
    found = find_deadlock(gang.run(planted, world_size=2))
    assert found is not None
    assert "rank 0 waits for rank 1" in found
    assert "rank 1 waits for rank 0" in found


# What is recorded ---------------------------------------------------------------------------------


def test_the_reductions_that_ddp_starts_are_recorded(gang: Gang) -> None:
    """Nothing else of this job is reduced."""
    (launches, _) = gang.run(everything, Case(job=Toy(), train=having(steps=1)), world_size=2)
    assert "allreduce" in {operation.name for launch in launches for operation in launch}


def exchange(rank: int, closes_after: float) -> list[Launch]:
    gate = CountingGate()
    gate.closes_after = closes_after
    transfers = [
        dist.P2POp(dist.isend, torch.zeros(3), 1 - rank),
        dist.P2POp(dist.irecv, torch.zeros(3), 1 - rank),
    ]
    with recorded(gate) as launches:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
    return launches


@pytest.mark.parametrize("closes_after", [math.inf, 1])
def test_a_batch_is_one_launch_which_is_finished_once_it_has_begun(gang: Gang, closes_after: float) -> None:
    launches = gang.run(exchange, closes_after, world_size=2)
    assert [len(own) for own in launches] == [1, 1]
    assert_no_deadlock(launches)
