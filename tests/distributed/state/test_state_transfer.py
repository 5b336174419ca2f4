"""Training state from rank to rank: whatever its tensors are, they arrive as they were sent."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from helpers.conformance.cases import RECOVERY, Case, config_of, having, plan_of
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import make, steps
from helpers.jobs.quick_jobs import AdamDigits
from helpers.ranks.gang import Gang
from helpers.ranks.passed_state import assert_arrives_as_sent, assert_live_tensors_are_sent, broadcast_from_1, state
from helpers.records.runs import in_campaign
from orchestrator.planning.memory import Division, NodeShare
from orchestrator.state.transport import MESSAGE_BYTES, messages_of
from orchestrator.strategies.checks.memory_plan import host_memory, parameter_sizes
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.peer_copies import PeerCopies


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([], []),
        ([3], [[3]]),
        ([3, 4, 1], [[3, 4, 1]]),
        ([3, 4, 2, 8, 9, 1], [[3, 4], [2], [8], [9], [1]]),
        ([0, 12, 0], [[0, 12], [0]]),
    ],
)
def test_small_tensors_are_sent_together(sizes: list[int], messages: list[list[int]]) -> None:
    """Sizes in eighths of a message."""
    assert [sizes[message] for message in messages_of([MESSAGE_BYTES // 8 * size for size in sizes])] == messages


@pytest.mark.parametrize("reuse", [False, True])
def test_a_state_arrives_as_it_was_sent(gang: Gang, reuse: bool) -> None:
    assert_arrives_as_sent(gang, reuse=reuse)


@pytest.mark.parametrize(
    ("name", "sources"), [("ddp-4", (0, 1, 2, 0)), ("GPipe-2x2", (0, 1, 0, 1)), ("hsdp-2x2", (2, 1, 2, 1))]
)
@pytest.mark.parametrize("own_step", [0, 1], ids=["new workers", "survivors that are behind"])
def test_a_recovery_sends_live_tensors_to_the_ranks_that_need_them(
    gang: Gang, name: str, sources: tuple[int, ...], own_step: int
) -> None:
    assert_live_tensors_are_sent(gang, name, sources, own_step=own_step)


def test_tensors_of_any_type_take_the_values_of_one_rank(gang: Gang) -> None:
    received, sent = gang.run(broadcast_from_1, world_size=2)
    assert all(torch.equal(got, value) for got, value in zip(received, sent, strict=True))
    assert all(tensor.any() for tensor in sent if tensor.numel())


def submitted_after_a_failure(rank: int) -> str:
    """The error of the second snapshot, after an exchange with the rank itself, which torch refuses."""
    copies = PeerCopies()
    assert dist.group.WORLD is not None
    copies.attach(dist.group.WORLD, [rank], rank=rank)
    copies.submit(lambda into: state())
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is that of torch
        copies.submit(lambda into: state())
    copies.detach()
    return str(error.value)


def test_copies_that_cannot_be_exchanged_are_reported(gang: Gang) -> None:
    assert all("destination rank" in text for text in gang.run(submitted_after_a_failure, world_size=2))


def copied_bytes(rank: int, case: Case) -> int:
    """What the copies of a rank take, of its own state and of its neighbour's."""
    strategy = make(case, rank, peer_copy_every=1)
    assert isinstance(strategy, MeshTrainer)
    for step, _ in enumerate(steps(strategy, last=4), 1):
        strategy.after_step(step=step, samples_consumed=step * case.train.global_batch_size)
    copies = strategy.recovery.copies
    assert copies is not None
    copies._exchange.work.join()
    return sum(state.size_bytes for states in (copies._own, copies._neighbours) for state in states.values())


@pytest.mark.parametrize("name", ["fsdp-2", *in_campaign("sharded-ddp-2", "1F1B-2")])
def test_copies_take_what_the_plan_says(gang: Gang, name: str) -> None:
    layout = LAYOUTS[name]
    case = layout.of(Case(job=AdamDigits(hidden=64, depth=3), train=having(steps=4, global_batch_size=32)))
    config = config_of(case, layout.world_size, recovery=replace(RECOVERY, peer_copy_every=1))
    model = Outline(case.job, case.train).model
    assert model is not None
    plan = replace(plan_of(config), node=NodeShare(workers=layout.world_size))
    planned = host_memory(config, plan, parameter_sizes(config, case.job, model), Division.of(plan.mesh))
    taken = gang.run(copied_bytes, case, world_size=layout.world_size)
    assert sum(taken) == pytest.approx(planned.peer_copies, rel=0.01)
