"""Training state from rank to rank: whatever its tensors are, they arrive as they were sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.gang import Gang
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import MESSAGE_BYTES, broadcast_tensors, messages_of, receive_state, send_state
from orchestrator.strategies.peer_copies import PeerCopies

CPU = torch.device("cpu")


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


def state() -> TrainState:
    torch.manual_seed(0)
    return TrainState(
        model={
            "weight": torch.randn(300, 400),
            "table": torch.randn(MESSAGE_BYTES // 4 + 5),
            "bias": torch.randn(400, dtype=torch.bfloat16),
            "mask": torch.tensor([True, False]),
        },
        optimizer={"bias/step": torch.tensor(7.0), "nothing/exp_avg": torch.empty(0), "weight/exp_avg": torch.ones(3)},
        meta={"step": 7, "samples_consumed": 70},
    )


def pass_on(rank: int, reuse: bool) -> tuple[TrainState | None, bool]:
    """What rank 1 receives, and whether it took the memory that it was given."""
    if rank == 0:
        send_state(state(), to=1, device=CPU)
        return None, False
    into = state() if reuse else None
    if into is not None:
        for tensor in (*into.model.values(), *into.optimizer.values()):
            tensor.zero_()
    received = receive_state(0, device=CPU, into=into)
    kept = into is not None and all(received.model[n].data_ptr() == t.data_ptr() for n, t in into.model.items())
    return received, kept


@pytest.mark.parametrize("reuse", [False, True])
def test_a_state_arrives_as_it_was_sent(gang: Gang, reuse: bool) -> None:
    received, kept = gang.run(pass_on, reuse, world_size=2)[1]
    sent = state()
    assert kept == reuse
    assert received.meta == sent.meta
    for part in ("model", "optimizer"):
        ours, theirs = getattr(received, part), getattr(sent, part)
        assert list(ours) == list(theirs)
        assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == []


def broadcast_from_1(rank: int) -> list[torch.Tensor]:
    """Tensors of several types and layouts, after the broadcast; those of rank 1 are nonzero."""
    torch.manual_seed(0)
    tensors = [torch.tensor([True]), torch.randn(3).bfloat16(), torch.randn(()), torch.randn(4, 6).t(), torch.empty(0)]
    for tensor in tensors if rank == 0 else ():
        tensor.zero_()
    broadcast_tensors(tensors, source=1, device=CPU)
    return tensors


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
