"""What a process group, a strategy and a model take on a GPU is given back when the generation ends."""

from __future__ import annotations

import gc

import pytest
import torch

from helpers.cases import Case, having
from helpers.gang import Gang
from helpers.layouts import LAYOUTS
from helpers.quick_jobs import TinyGPT
from helpers.training import make, steps

MB = 2**20


def train_briefly(rank: int, case: Case) -> None:
    list(steps(make(case, rank), last=3))


def allocated(rank: int) -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["ddp-2", "1F1B-2", "GPipe-2x2"])
def test_memory_stays_flat_over_three_new_groups(gang: Gang, name: str) -> None:
    layout = LAYOUTS[name]
    case = layout.of(Case(job=TinyGPT(layers=4, width=256, heads=4), train=having(global_batch_size=32)))
    after = []
    for _ in range(4):  # the first also allocates what CUDA's libraries keep
        gang.run(train_briefly, case, world_size=layout.world_size)
        after.append([a.value for a in gang.ask(allocated, world_size=layout.world_size, grouped=False)])
    for rank, first in enumerate(after[0]):
        assert max(later[rank] for later in after[1:]) <= first + MB, after
