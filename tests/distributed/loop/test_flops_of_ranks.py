"""The ranks of every strategy together count the FLOPs of the whole model, where the rank sees them."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import DP, LAYOUTS, TENSOR
from helpers.jobs.quick_jobs import TinyGPT, digits
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, run_loop
from helpers.records.runs import in_campaign
from orchestrator.protocol.messages import TrainPoint

TRAIN = having(steps=2, global_batch_size=32)


def flops(ranks: list[Ran]) -> list[float | None]:
    """The count of each rank, which makes it in the second step."""
    points = [[p.flops for p in rank.points if isinstance(p, TrainPoint)] for rank in ranks]
    assert all(len(of_rank) == TRAIN.steps and of_rank[0] is None for of_rank in points)
    return [of_rank[-1] for of_rank in points]


@pytest.mark.parametrize(
    "name", ["parameter_server-2+2", "ZBVZeroBubble-2", *in_campaign("1F1B-2x2", "single", "ddp-4", "model_parallel-2")]
)
def test_the_ranks_count_what_the_whole_model_takes(gang: Gang, tmp_path: Path, name: str) -> None:
    job, layout = digits(depth=3), LAYOUTS[name]
    inputs, target = torch.ones(32, 64), torch.zeros(32, dtype=torch.long)
    with FlopCounterMode(display=False) as expected:
        F.cross_entropy(job.model()(inputs), target).backward()
    case = layout.of(Case(job=job, train=TRAIN))
    counts = flops(gang.run(run_loop, case, tmp_path, world_size=layout.world_size))
    assert None not in counts
    assert sum(c for c in counts if c is not None) == expected.get_total_flops()


@pytest.mark.campaign
def test_what_several_ranks_compute_alike_counts_once(gang: Gang, tmp_path: Path) -> None:
    """With 257 words and one head of keys, only the layers of the MLP are divided."""
    job = TinyGPT(layers=2, variant="llama", kv_heads=1, vocabulary=257)
    case = Case(job=job, train=having(TRAIN, activation_checkpointing="blocks", global_batch_size=8))
    counts = [
        sum(c for c in flops(gang.run(run_loop, of, tmp_path / str(n), world_size=n)) if c is not None)
        for of, n in ((case, 1), (TENSOR["mesh-tensor-2"].of(case), 2))
    ]
    assert counts[0] == pytest.approx(counts[1])


def test_the_flops_of_replicas_in_threads_are_unknown(gang: Gang, tmp_path: Path) -> None:
    dp = DP
    case = Case(job=digits(), train=TRAIN, alone=dp)
    assert flops(gang.run(run_loop, case, tmp_path, world_size=1)) == [None]
