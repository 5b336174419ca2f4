"""State from one process to others: what is broadcast, and that training goes on where it stood."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.conformance.cases import Case, having
from helpers.conformance.training import CPU, Steps, assert_same, assert_same_state, piece
from helpers.jobs.quick_jobs import AdamDigits, ScheduledDigits, TinyGPT, digits
from helpers.jobs.toys import Dropped, Normed, Tokens, Toy
from helpers.ranks.gang import SOON_S
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state


@dataclass(frozen=True, kw_only=True)
class HalfToy(Toy):
    """Its parameters are bf16."""

    lr: float = 0.02

    def model(self) -> nn.Module:
        return super().model().to(torch.bfloat16)

    def item(self, index: int, inputs: torch.Tensor, target: int) -> tuple[torch.Tensor, int]:
        return inputs.to(torch.bfloat16), target


def in_pieces(gang: Any, case: Case, pieces: list[tuple[int, int]]) -> tuple[list[list[Steps]], TrainState]:
    """Train on so many workers to step so and so, each time in new models; the last state."""
    state: TrainState | None = None
    seen = []
    for world_size, stop in pieces:
        results = gang.run(piece, case, state, stop, world_size=world_size)
        assert [kept is not None for _, kept in results] == [rank == 0 for rank in range(world_size)]
        state = results[0][1]
        seen.append([steps for steps, _ in results])
    assert state is not None
    return seen, state


JOBS = {
    "momentum": digits(),
    "schedule": ScheduledDigits(hidden=24),
    "adamw": AdamDigits(hidden=24),
    "gpt": TinyGPT(),
    "tokens": Tokens(),
    "buffers": Normed(),
    "dropout": Dropped(),
    "empty-optimizer-state": Toy(momentum=0.0),
    "bf16-parameters": HalfToy(),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_two_workers_continue_bit_for_bit(gang, job):
    case = Case(job=job, train=having(steps=8, global_batch_size=25))
    whole, end = in_pieces(gang, case, [(2, 8)])
    parts, end_of_parts = in_pieces(gang, case, [(2, 3), (2, 8)])
    for rank in range(2):
        assert whole[0][rank].loss_sums == parts[0][rank].loss_sums + parts[1][rank].loss_sums
        assert_same(whole[0][rank].model, parts[1][rank].model)
    assert_same_state(end, end_of_parts)


def test_a_state_of_another_model_is_refused_by_every_rank(gang):
    case = Case(job=digits(), train=having(steps=2))
    _, state = in_pieces(gang, case, [(1, 2)])
    other = replace(case, job=digits(hidden=12))
    for answer in gang.ask(piece, other, state, 2, world_size=2, timeout_s=SOON_S):
        assert answer.error is not None
        assert "hidden0.weight" in answer.error


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def sample_state() -> TrainState:
    random = torch.Generator().manual_seed(5)
    tensors = {str(d): (torch.randn(3, 5, generator=random) * 10).to(d) for d in DTYPES}
    tensors |= {f"scalar {d}": torch.ones((), dtype=d) for d in DTYPES}
    return TrainState(
        model={**tensors, "no elements": torch.empty(0, 4), "not a number": torch.tensor([float("nan")])},
        optimizer={"p/step": torch.tensor(7.0), "p/exp_avg": torch.randn(100, 100, generator=random)},
        meta={"step": 7, "text": "é", "nested": [{"a": None, "b": [1, 2.5, True]}], "betas": [0.1 + 0.2, 1e-300]},
    )


def broadcast(rank: int, source: int, *, state: TrainState | None = None) -> TrainState:
    return broadcast_state(sample_state() if rank == source else None, source=source, rank=rank, device=CPU)


@pytest.mark.parametrize("source", [0, 2])
def test_every_kind_of_tensor_arrives(gang, source):
    expected = sample_state()
    for received in gang.run(broadcast, source, world_size=3):
        assert received.meta == expected.meta
        for here, there in ((received.model, expected.model), (received.optimizer, expected.optimizer)):
            assert list(here) == list(there)
            for name, tensor in there.items():
                assert here[name].dtype == tensor.dtype
                torch.testing.assert_close(here[name], tensor, rtol=0, atol=0, equal_nan=True)


def broadcast_nothing(rank: int) -> TrainState:
    state = TrainState(model={}, optimizer={}, meta={})
    return broadcast_state(state if rank == 0 else None, source=0, rank=rank, device=CPU)


def test_an_empty_state_arrives(gang):
    assert gang.run(broadcast_nothing, world_size=2) == [TrainState(model={}, optimizer={}, meta={})] * 2
