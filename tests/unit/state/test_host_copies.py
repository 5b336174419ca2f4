"""Copies of tensors in host memory, and the blocks of pinned memory that they share."""

import torch

from orchestrator.state.tensor_memory import ALIGNMENT, BLOCK_BYTES, host_copies, in_blocks


def test_tensors_of_any_type_share_one_block_of_memory() -> None:
    outlines = [
        torch.ones(3, dtype=torch.bool),
        torch.randn(5, 7),
        torch.empty(0, 4),
        torch.randn((), dtype=torch.float64),
        torch.randn(9, dtype=torch.bfloat16),
    ]
    blocks: list[int] = []

    def allocate(size_bytes: int) -> torch.Tensor:
        blocks.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    buffers = list(in_blocks(outlines, allocate))
    for buffer, tensor in zip(buffers, outlines, strict=True):
        buffer.copy_(tensor)
    assert blocks == [sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in outlines)]
    for buffer, tensor in zip(buffers, outlines, strict=True):
        assert buffer.dtype == tensor.dtype
        assert torch.equal(buffer, tensor)


def test_a_block_is_at_most_so_large_unless_a_tensor_is() -> None:
    outlines = [torch.empty(size, dtype=torch.uint8, device="meta") for size in (BLOCK_BYTES // 2, BLOCK_BYTES // 2, 1)]
    outlines.append(torch.empty(BLOCK_BYTES + 1, dtype=torch.uint8, device="meta"))
    blocks: list[int] = []

    def allocate(size_bytes: int) -> torch.Tensor:
        blocks.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device="meta")

    assert [buffer.shape for buffer in in_blocks(outlines, allocate)] == [tensor.shape for tensor in outlines]
    assert blocks == [BLOCK_BYTES, ALIGNMENT, BLOCK_BYTES + ALIGNMENT]


def test_only_memory_that_fits_is_used_again() -> None:
    sources = [torch.full((3,), 1.0), torch.full((4,), 2.0), torch.full((5,), 3.0)]
    fitting, other_type = torch.zeros(3), torch.zeros(4, dtype=torch.float64)
    copies = host_copies(sources, into=[fitting, other_type, None])
    assert copies[0] is fitting
    assert copies[1] is not other_type
    assert all(torch.equal(copy, source) for copy, source in zip(copies, sources, strict=True))
    assert not {copy.data_ptr() for copy in copies} & {source.data_ptr() for source in sources}
