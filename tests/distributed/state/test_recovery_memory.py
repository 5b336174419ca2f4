"""A recovery needs no more memory of a device than a step, counted on CPUs, where what is received is counted too."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import made, make, steps
from helpers.jobs.quick_jobs import AdamDigits
from helpers.ranks.allocations import Allocations
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update.confirmation import no_confirmation
from orchestrator.worker.control.control import AbandonedError

JOB = AdamDigits(hidden=700, depth=9)
TENSOR = 4 * 700 * 700


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of a rank: the peaks of a step and of a recovery, the size of its state, and which tensors of the optimizer are
    other ones afterwards."""

    step: int
    recovery: int
    state: int
    replaced: tuple[str, ...]


def interrupt() -> None:
    raise AbandonedError("another rank was lost")


def peak_of(memory: Allocations, work: Callable[[], object]) -> int:
    gc.collect()
    memory.peak_bytes = 0
    work()
    return memory.peak_bytes


def places(strategy: Trainer) -> dict[str, int]:
    """Where the tensors of the optimizer are."""
    state = strategy.trained.snapshot(step=0, samples_consumed=0, live=True)
    return {path: tensor.data_ptr() for path, tensor in state.optimizer.items()}


def observed(rank: int, case: Case, sources: Sequence[int], new: Sequence[int]) -> Memory:
    """Recover after two steps and a part of the third; ranks with another source are ``new``, or a step behind."""
    batch = case.train.global_batch_size
    with Allocations() as memory:
        strategy = make(case, rank)
        list(steps(strategy, last=1))
        step_bytes = peak_of(memory, lambda: list(steps(strategy, first=2, last=2)))
        strategy.hooks.confirm = interrupt
        with pytest.raises(AbandonedError):
            next(steps(strategy, first=3))
        done = 2 if sources[rank] == rank else 1
        strategy.close()
        made.clear()
        if rank in new:
            done, strategy = 0, type(strategy)(strategy.context, strategy.job)
            gc.collect()  # as if the process were a new one
            strategy.setup(case.job.dataset("train"))
        assert isinstance(strategy, Trainer)
        strategy.hooks.confirm = no_confirmation
        before = {} if rank in new else places(strategy)

        def recover() -> None:
            strategy.attach()
            strategy.recover_state(sources, source_step=2, step=done, samples_consumed=done * batch)

        recovery_bytes = peak_of(memory, recover)
        after = places(strategy)
        state = strategy.trained.snapshot(step=2, samples_consumed=2 * batch, live=True)
        strategy.close()
    return Memory(
        step=step_bytes,
        recovery=recovery_bytes,
        state=state.size_bytes,
        replaced=tuple(name for name, place in before.items() if after[name] != place),
    )


@pytest.mark.parametrize(
    ("name", "sources", "new"),
    [
        ("hsdp-2x2", (0, 1, 0, 1), (2,)),
        *in_campaign(("sharded-ddp-2", (0, 1), ())),
        *in_campaign(("ddp-4", (0, 0, 2, 0), (1,)), ("GPipe-2x2", (0, 1, 0, 1), (2,))),
        *in_campaign(("fsdp-3", (0, 1, 2), ()), ("fsdp-1F1B-2x2", (0, 1, 2, 3), ()), ("1F1B-2", (0, 1), ())),
    ],
)
def test_the_peak_of_a_recovery_is_that_of_a_step(
    gang: Gang, name: str, sources: tuple[int, ...], new: tuple[int, ...]
) -> None:
    case = LAYOUTS[name].of(Case(job=JOB, train=having(steps=3, global_batch_size=16)))
    for rank, found in enumerate(gang.run(observed, case, sources, new, world_size=len(sources))):
        is_behind = sources[rank] != rank and rank not in new
        received = found.state if is_behind else 0  # on GPUs, in host memory
        assert found.recovery <= found.step + received + TENSOR, f"rank {rank}"
        assert found.replaced == (), f"rank {rank}"
