"""Compressed gradients: close to plain averaging, and really smaller."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.training import (
    assert_same,
    assert_same_state,
    losses,
    make,
    piece,
    steps,
    train,
)
from helpers.jobs.quick_jobs import digits
from helpers.jobs.toys import Constant, ConstantHeads, Poisoned, Steep, Toy, Wide
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.replicated.comm_hooks import POWERSGD_WARM_UP_STEPS as WARM_UP
from orchestrator.worker.data.batches import SampleOrder


def hooked(comm_hook: str, **options: Any) -> Any:
    return replace(DDP, comm_hook=comm_hook, **options)


@contextlib.contextmanager
def all_reduced() -> Iterator[list[Tensor]]:
    """Collects the tensors that Python code hands to ``dist.all_reduce``."""
    seen: list[Tensor] = []
    original = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(tensor)
        return original(tensor, *args, **options)

    dist.all_reduce = noting
    try:
        yield seen
    finally:
        dist.all_reduce = original


def sent_by_step(rank: int, case: Case) -> list[tuple[set[torch.dtype], int]]:
    """The dtypes and bytes of each step's gradients."""
    strategy, sent = make(case, rank), []
    results = steps(strategy)
    for _ in range(case.train.steps):
        with all_reduced() as tensors:
            next(results)
        sent.append(({t.dtype for t in tensors}, sum(t.nbytes for t in tensors)))
    return sent


@pytest.mark.parametrize(("comm_hook", "rtol"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_half_precision_is_close(gang, comm_hook, rtol):
    case = Case(job=digits(), train=having(global_batch_size=65, grad_accumulation=2))
    plain = losses(gang.run(train, case, world_size=3))
    ranks = gang.run(train, replace(case, options=hooked(comm_hook)), world_size=3)
    assert not torch.equal(losses(ranks), plain)
    torch.testing.assert_close(losses(ranks), plain, rtol=rtol, atol=0)
    for rank in ranks:
        assert_same(rank.model, ranks[0].model)


@pytest.mark.parametrize(("comm_hook", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_sends_half_the_bytes(gang, comm_hook, dtype):
    case = Case(job=digits(), train=having(steps=3), options=hooked(comm_hook))
    size = 2 * sum(p.numel() for p in case.job.model().parameters())
    for sent in gang.run(sent_by_step, case, world_size=2):
        assert sent == [({dtype}, size)] * 3


@pytest.mark.parametrize("comm_hook", ["bf16", "fp16"])
def test_large_gradients_of_many_ranks_do_not_overflow(gang, comm_hook):
    case = Case(job=Steep(), train=having(steps=3), options=hooked(comm_hook))
    for rank in gang.run(train, case, True, world_size=4):
        assert rank.norms == pytest.approx([5e4] * 3, rel=1e-2)


@pytest.mark.parametrize("bucket_mb", [0.001, 25])
def test_powersgd_is_plain_first_and_then_close_to_it(gang, bucket_mb):
    case = Case(job=Wide(), train=having(steps=40))
    plain = losses(gang.run(train, case, world_size=2))
    options = hooked("powersgd", powersgd_rank=2, bucket_mb=bucket_mb)
    ranks = gang.run(train, replace(case, options=options), world_size=2)
    compressed = losses(ranks)
    torch.testing.assert_close(compressed[:WARM_UP], plain[:WARM_UP], rtol=1e-5, atol=0)
    assert not torch.allclose(compressed[WARM_UP + 1 :], plain[WARM_UP + 1 :], rtol=1e-4)
    torch.testing.assert_close(compressed, plain, rtol=0, atol=0.1)
    assert compressed[-5:].mean() < 0.2 * compressed[:5].mean()
    assert_same(ranks[0].model, ranks[1].model)


def test_powersgd_without_compression_is_plain(gang):
    case = Case(job=Toy(), train=having(steps=WARM_UP + 5))  # factors of its matrices would be larger than they are
    plain = losses(gang.run(train, case, world_size=2))
    ranks = gang.run(train, replace(case, options=hooked("powersgd", powersgd_rank=4)), world_size=2)
    torch.testing.assert_close(losses(ranks), plain, rtol=1e-5, atol=0)


def test_powersgd_sends_factors_after_the_first_steps(gang):
    case = Case(job=Wide(), train=having(steps=WARM_UP + 3), options=hooked("powersgd", powersgd_rank=2))
    sizes = {name: p.shape for name, p in case.job.model().named_parameters()}
    factors = 2 * sum(sum(sizes[name]) for name in ("0.weight", "2.weight"))
    marks = 2
    in_full = sum(shape.numel() for name, shape in sizes.items() if name not in ("0.weight", "2.weight"))
    for sent in gang.run(sent_by_step, case, world_size=2):
        counts = [count // 4 for _, count in sent]
        assert counts[:WARM_UP] == [sum(shape.numel() for shape in sizes.values())] * WARM_UP
        assert counts[WARM_UP:] == [factors + marks + in_full] * 3


@pytest.mark.parametrize("stops", [(14, 30), (14, 14, 30)], ids=["once", "twice"])
def test_what_powersgd_still_owes_survives_a_resume_with_other_workers(gang, stops):
    case = Case(
        job=Constant(), train=having(steps=30, global_batch_size=12), options=hooked("powersgd", powersgd_rank=1)
    )
    ((exact, _),) = gang.run(piece, case, None, 30, world_size=1)
    state: TrainState | None = None
    for world_size, stop in zip((2, 3, 2), stops, strict=False):
        results = gang.run(piece, case, state, stop, world_size=world_size)
        state = results[0][1]
        assert state is not None
        owed = state.optimizer["powersgd.error/weight"]
        assert owed.abs().max() > 0.1
    # All that was not applied is still owed: no gradient was lost on the way.
    torch.testing.assert_close(
        results[0][0].model["weight"], exact.model["weight"] + case.job.lr * owed, rtol=1e-3, atol=1e-3
    )


def on_odd_calls(rank: int, call: int) -> bool:
    return call % 2 == 1


def on_one_rank_or_none(rank: int, call: int) -> bool:
    return call % 3 == rank


@pytest.mark.parametrize("uses", [on_odd_calls, on_one_rank_or_none])
def test_what_powersgd_owes_to_a_parameter_waits_for_its_next_use(gang, uses):
    case = Case(
        job=ConstantHeads(uses=uses),
        train=having(steps=30, global_batch_size=12, check="never"),  # the model asks for its rank
        options=hooked("powersgd", powersgd_rank=1, find_unused_parameters=True),
    )
    plain = replace(case, options=replace(case.options, comm_hook="none"))
    (exact, _), _ = gang.run(piece, plain, None, 30, world_size=2)
    compressed = gang.run(piece, case, None, 30, world_size=2)
    assert_same(compressed[0][0].model, compressed[1][0].model)
    state = compressed[0][1]
    assert state is not None
    for name in ("head.weight", "spare.weight"):
        owed = state.optimizer[f"powersgd.error/{name}"]
        assert owed.abs().max() > 0.1
        torch.testing.assert_close(
            compressed[0][0].model[name], exact.model[name] + case.job.lr * owed, rtol=1e-3, atol=1e-3
        )


def test_a_strategy_without_powersgd_goes_on_from_its_checkpoint(gang):
    case = Case(job=Wide(), train=having(steps=16), options=hooked("powersgd"))
    _, state = gang.run(piece, case, None, 14, world_size=2)[0]
    assert any(name.startswith("powersgd") for name in state.optimizer)
    ((_, after),) = gang.run(piece, case, state, 16, world_size=1)
    assert not any("powersgd" in name for name in after.optimizer)


def resume_and_step(rank: int, case: Case, state: TrainState) -> tuple[TrainState | None, int]:
    """The state right after it was restored, and the bytes of the step that follows."""
    strategy = make(case, rank)
    done = strategy.restore(state if rank == 0 else None, source=0)["step"]
    kept = strategy.capture(step=done, samples_consumed=state.samples_consumed, into=None)
    with all_reduced() as tensors:
        next(steps(strategy, first=done + 1))
    return kept, sum(t.nbytes for t in tensors)


def test_powersgd_resumes_with_its_factors_and_without_a_new_warm_up(gang):
    case = Case(job=Wide(), train=having(steps=16), options=hooked("powersgd", powersgd_rank=2))
    _, state = gang.run(piece, case, None, 14, world_size=2)[0]
    (kept, sent), _ = gang.run(resume_and_step, case, state, world_size=2)
    assert sorted(n for n in state.optimizer if n.startswith("powersgd")) == [
        "powersgd.error/0.weight",
        "powersgd.error/2.weight",
        "powersgd.factor/0.weight",
        "powersgd.factor/2.weight",
    ]
    assert_same_state(kept, state)
    assert sent < 4 * sum(p.numel() for p in case.job.model().parameters()) / 3


def test_powersgd_goes_on_after_a_skipped_step(gang):
    bad = SampleOrder(n=200, seed=3).indices(13 * 8, 1)
    case = Case(
        job=Poisoned(bad=tuple(bad), samples=200),
        train=having(global_batch_size=8, on_nonfinite="skip"),
        options=hooked("powersgd", powersgd_rank=1),
    )
    ranks = gang.run(train, case, world_size=2)
    for rank in ranks:
        assert [i for i, skipped in enumerate(rank.skipped) if skipped] == [13]
        assert_same(rank.model, ranks[0].model)
        assert all(bool(t.isfinite().all()) for t in rank.model.values())
