"""The memory of a GPU: generations and discarded loops give back what they take, and a resume or a recovery needs no
more than training."""

import gc
from pathlib import Path

import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import make, piece, steps
from helpers.jobs.gpu_jobs import COMMUNICATOR_MB, outside_of_torch
from helpers.jobs.quick_jobs import AdamDigits, TinyGPT
from helpers.ranks.discarded import built_three_times
from helpers.ranks.gang import Gang
from orchestrator.state.checkpoint import load, save

MB = 2**20


def train_briefly(rank: int, case: Case) -> None:
    list(steps(make(case, rank), last=3))


def release(rank: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()


def allocated(rank: int) -> tuple[int, int]:
    """What the tensors of a rank take, and what is in use on the GPU beside the allocator of this process."""
    return torch.cuda.memory_allocated(), outside_of_torch()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["ddp-2", "1F1B-2", "GPipe-2x2"])
def test_memory_stays_flat_over_three_new_groups(gang: Gang, name: str) -> None:
    """If it fails, a generation leaves tensors, or communicators, which torch's allocator does not count."""
    layout = LAYOUTS[name]
    case = layout.of(Case(job=TinyGPT(layers=4, width=256, heads=4), train=having(global_batch_size=32)))
    after = []
    for _ in range(4):  # the first also allocates what CUDA's libraries keep
        gang.run(train_briefly, case, world_size=layout.world_size)
        gang.ask(release, world_size=layout.world_size, grouped=False)
        after.append([a.value for a in gang.ask(allocated, world_size=layout.world_size, grouped=False)])
    for rank, (first, outside) in enumerate(after[0]):
        assert max(later[rank][0] for later in after[1:]) <= first + MB, after
        assert max(later[rank][1] for later in after[1:]) <= outside + COMMUNICATOR_MB * MB, after


@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2"])
def test_nothing_is_left_of_a_discarded_loop(gang: Gang, tmp_path: Path, name: str) -> None:
    """If it fails, two models are in memory after a restart from a checkpoint."""
    layout = LAYOUTS[name]
    case = layout.of(Case(job=AdamDigits(hidden=24, depth=4), train=having(steps=4, global_batch_size=24)))
    for left in gang.run(built_three_times, case, layout.world_size, str(tmp_path), world_size=layout.world_size):
        assert left == []


def peak_of_two_steps(rank: int, case: Case, checkpoint: str | None) -> int:
    """The most bytes that a rank has taken for two steps, or to resume after the first and make the second."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    strategy = make(case, rank)
    if checkpoint is not None:
        strategy.restore(load(Path(checkpoint)) if rank == 0 else None, source=0)
    list(steps(strategy, first=1 if checkpoint is None else 2, last=2))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2"])
def test_a_resume_takes_no_more_memory_than_training(gang: Gang, tmp_path: Path, name: str) -> None:
    """If it fails, a run that fits cannot be resumed."""
    layout = LAYOUTS[name]
    case = layout.of(Case(job=AdamDigits(hidden=2048, depth=9), train=having(steps=2, global_batch_size=32)))
    (_, state), *_ = gang.run(piece, case, None, 1, world_size=layout.world_size)
    path = str(save(tmp_path, state, run_uid="r"))
    trained, resumed = (gang.run(peak_of_two_steps, case, of, world_size=layout.world_size) for of in (None, path))
    for rank, peak in enumerate(resumed):
        assert peak < 1.1 * trained[rank], f"rank {rank}"


def peaks_of_steps_and_recovery(rank: int, case: Case) -> tuple[int, int]:
    """The most bytes that a rank has taken for two steps, and then as rank 1, a step behind, recovers from rank 0."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    strategy = make(case, rank)
    list(steps(strategy, last=2))
    trained = torch.cuda.max_memory_allocated() - before
    strategy.close()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    strategy.attach()
    done = 2 - rank
    strategy.recover_state((0, 0), source_step=2, step=done, samples_consumed=done * case.train.global_batch_size)
    return trained, torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("gpu")
def test_a_recovery_takes_no_more_memory_than_training(gang: Gang) -> None:
    """If it fails, a run that fits cannot recover. On CPUs, ``tests/unit/state/test_load_memory.py``."""
    layout = LAYOUTS["ddp-2"]
    case = layout.of(Case(job=AdamDigits(hidden=2048, depth=9), train=having(steps=2, global_batch_size=32)))
    found = gang.run(peaks_of_steps_and_recovery, case, world_size=layout.world_size)
    for rank, (trained, recovered) in enumerate(found):
        assert recovered <= trained, f"rank {rank}"
