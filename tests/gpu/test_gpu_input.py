"""Batches that reach a GPU one step ahead."""

import pytest
import torch

from helpers.ranks.batches import train
from helpers.ranks.gang import Gang, own_device
from orchestrator.strategies.data.prefetch import SideStream, prefetched

ROWS, COLUMNS, STEPS = 64, 65_536, 12


class Constants(torch.utils.data.Dataset[torch.Tensor]):
    """Item ``i`` is a long row of ``i``."""

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((COLUMNS,), float(index))


def sums_behind_long_work(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sums of the rows of each step, computed on the host, and computed ahead on a busy device."""
    device = own_device()
    words = {"steps": STEPS, "global_batch_size": ROWS, "num_workers": 2, "pin_memory": True}
    expected = [batch[:, 0] * COLUMNS for (batch,) in train(Constants(), **words)]
    matrix, found = torch.randn(4096, 4096, device=device), []
    for (batch,) in prefetched(train(Constants(), **words), SideStream(device)):
        for _ in range(10):
            matrix = torch.tanh(matrix @ matrix)  # so that the host is ahead of the device
        assert batch.device == device
        found.append(batch.sum(1))
        del batch
    return expected, found


@pytest.mark.usefixtures("gpu")
def test_batches_that_are_copied_ahead_arrive_unchanged(gang: Gang) -> None:
    """If it fails, the copy on a side stream overwrites or reads a batch too early."""
    ((expected, found),) = gang.run(sums_behind_long_work, world_size=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
