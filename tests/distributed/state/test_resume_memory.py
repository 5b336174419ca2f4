"""A resume needs no more memory than training."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import assert_same_state, close_strategies, make, model_of, piece
from helpers.jobs.quick_jobs import AdamDigits
from helpers.ranks.gang import Gang
from orchestrator.state.checkpoint import load, save
from orchestrator.state.train_state import TrainState
from orchestrator.worker.measure.step_metrics import peak_memory_mb

SMALL = AdamDigits(hidden=8, depth=9)
LARGE = AdamDigits(hidden=1300, depth=9)
TRAINING = 4
"""Parameters, gradients and the two moments of AdamW, in units of the parameters."""
MARGIN = 0.5
"""For a tensor on its way and for what else a process allocates, in units of the parameters of the whole model."""


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def resumed(rank: int, case: Case, checkpoint: str) -> tuple[float, TrainState | None]:
    """By how much the peak of a rank that continues exceeds what training needs, in MB, and the state it then has."""
    piece(rank, replace(case, job=SMALL), None, 1)  # maps the code that runs into this process
    close_strategies()
    gc.collect()
    before_mb = resident_mb()
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    strategy = make(case, rank)
    strategy.restore(load(Path(checkpoint)) if rank == 0 else None, source=0)
    peak_mb = peak_memory_mb(strategy.context.device)
    assert peak_mb is not None
    parameters_mb = sum(p.nbytes for p in model_of(strategy).parameters()) / 1e6
    return peak_mb - before_mb - TRAINING * parameters_mb, strategy.capture(step=1, samples_consumed=32, into=None)


@pytest.mark.campaign  # ``test_parts.py`` measures a rank that loads its part
@pytest.mark.parametrize("name", ["single", "1F1B-2", "ddp-2"])
def test_the_peak_of_a_resume_is_that_of_training(gang: Gang, tmp_path: Path, name: str) -> None:
    case = LAYOUTS[name].of(Case(job=LARGE, train=having(steps=2, global_batch_size=32)))
    world_size = LAYOUTS[name].world_size
    (_, state), *_ = gang.run(piece, case, None, 1, world_size=world_size)
    path = str(save(tmp_path, state, run_uid="r"))
    gang.close()  # the next processes have an allocator that holds no freed memory yet
    ranks = gang.run(resumed, case, path, world_size=world_size)
    model_mb = sum(t.nbytes for t in state.model.values()) / 1e6
    assert max(excess_mb for excess_mb, _ in ranks) < MARGIN * model_mb, [excess_mb for excess_mb, _ in ranks]
    assert_same_state(ranks[0][1], state)
