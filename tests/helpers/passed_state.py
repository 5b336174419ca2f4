"""Training state that passes from rank to rank."""

from __future__ import annotations

import torch

from helpers.gang import Gang, own_device
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import MESSAGE_BYTES, broadcast_tensors, receive_state, send_state


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
        send_state(state(), to=1, device=own_device())
        return None, False
    into = state() if reuse else None
    if into is not None:
        for tensor in (*into.model.values(), *into.optimizer.values()):
            tensor.zero_()
    received = receive_state(0, device=own_device(), into=into)
    kept = into is not None and all(received.model[n].data_ptr() == t.data_ptr() for n, t in into.model.items())
    return received, kept


def broadcast_from_1(rank: int) -> list[torch.Tensor]:
    """Tensors of several types and layouts, after the broadcast; those of rank 1 are nonzero."""
    torch.manual_seed(0)
    tensors = [torch.tensor([True]), torch.randn(3).bfloat16(), torch.randn(()), torch.randn(4, 6).t(), torch.empty(0)]
    for tensor in tensors if rank == 0 else ():
        tensor.zero_()
    broadcast_tensors(tensors, source=1, device=own_device())
    return tensors


def assert_arrives_as_sent(gang: Gang, *, reuse: bool) -> None:
    """Send a state to rank 1, which gives memory for its tensors if ``reuse``."""
    received, kept = gang.run(pass_on, reuse, world_size=2)[1]
    sent = state()
    assert kept == reuse
    assert received.meta == sent.meta
    for part in ("model", "optimizer"):
        ours, theirs = getattr(received, part), getattr(sent, part)
        assert list(ours) == list(theirs)
        assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == []
