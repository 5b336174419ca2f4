"""Checksums of frozen parameters: those of the parts of a tensor give that of the whole."""

from __future__ import annotations

import pytest
import torch

from orchestrator.planning.boxes import Box
from orchestrator.state.model_state import check_built, checksum, total


@pytest.mark.parametrize("shape", [(7, 3, 2), (5,), ()])
def test_the_parts_of_a_tensor_give_the_checksum_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = checksum(whole, Box.whole(shape))
    assert expected == checksum(whole.double(), Box.whole(shape)), "whatever the dtype"
    if shape:
        boxes = [Box.shard(shape, index, 3) for index in range(3)]
        parts = [{"a": checksum(whole[box.slices_in(Box.whole(shape))], box)} for box in boxes]
        assert total(parts) == {"a": expected}
        assert checksum(whole.flip(0), Box.whole(shape)) != expected
    other = whole.clone()
    other.view(-1)[-1] += 1e-3
    with pytest.raises(ValueError, match="parameters than the checkpoint was trained with: a, the first of 1;"):
        check_built({"a": expected}, {"a": checksum(other, Box.whole(shape))})


def test_columns_give_the_checksum_of_the_whole() -> None:
    whole = torch.arange(12).view(3, 4)
    boxes = [Box(full=(3, 4), offset=(0, start), shape=(3, 2)) for start in (0, 2)]
    parts = [{"a": checksum(whole[box.slices_in(Box.whole((3, 4)))], box)} for box in boxes]
    assert total(parts)["a"] == checksum(whole, Box.whole((3, 4)))
