"""The memory of tensors: copies of them on the host, and which of them may take other values in place.

Copies from a GPU go into pinned memory. To pin memory takes the host milliseconds for each call, and torch rounds each
allocation up to a power of two. So a snapshot has a few large blocks, whose tensors later snapshots overwrite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from orchestrator.compat.torch import storage_key

BLOCK_BYTES = 2**29
"""The largest block for several tensors. A power of two, so that at most the unused end of it is lost."""
ALIGNMENT = 64
"""A tensor begins at a multiple of this in its block, in bytes."""


def host_copies(sources: Sequence[Tensor], *, into: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy tensors to host memory, and wait once for each GPU: for the copies, not for what is enqueued behind them.

    Args:
        sources: the tensors, in any memory.
        into: for each of them, an earlier copy that is no longer needed. Its memory is reused if shape and dtype fit.
    """
    buffers = [buffer if _fits(buffer, source) else None for source, buffer in zip(sources, into, strict=True)]
    new = [source for source, buffer in zip(sources, buffers, strict=True) if buffer is None]
    pinned = in_blocks([source for source in new if source.is_cuda], _pinned)
    streams = {s.device: _side_stream(s.device) for s in sources if s.is_cuda}
    copies = []
    for source, buffer in zip(sources, buffers, strict=True):
        if buffer is None:
            buffer = next(pinned) if source.is_cuda else torch.empty(source.shape, dtype=source.dtype)
        with torch.cuda.stream(streams[source.device]) if source.is_cuda else contextlib.nullcontext():
            copies.append(buffer.copy_(source, non_blocking=True))
    for stream in streams.values():
        stream.synchronize()
    return copies


def in_blocks(outlines: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """Yield a tensor of the shape and dtype of each of ``outlines``, as parts of blocks.

    ``allocate`` returns a block of so many bytes, as uint8.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in outlines]
    for run in runs_of(sizes, most=BLOCK_BYTES):
        block = allocate(sum(sizes[run]))
        for tensor, part in zip(outlines[run], block.split(sizes[run]), strict=True):
            yield part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def runs_of(sizes: Sequence[int], *, most: int) -> Iterator[slice]:
    """Group consecutive items of these sizes into runs of up to ``most``, or of one larger item."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if total and total + size > most:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _fits(buffer: Tensor | None, source: Tensor) -> bool:
    return buffer is not None and buffer.shape == source.shape and buffer.dtype == source.dtype


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that goes on where the current one is now."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def with_own_memory(tensors: Mapping[str, Tensor], others: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the ``tensors`` whose elements share memory with no other one, and with none of the ``others``.

    They may be views of one storage, as those of a flat buffer are.
    """
    every = [*tensors.values(), *others]
    shared = {number for number, tensor in enumerate(every) if tensor.layout != torch.strided or _repeats(tensor)}
    places = sorted((*_place(every[number]), number) for number in {*range(len(every))} - shared)
    before, reached, last = -1, 0, -1
    for storage, begin, end, number in places:
        if storage == before and begin < reached:
            shared |= {number, last}
        if storage != before or end > reached:
            before, reached, last = storage, end, number
    return {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number not in shared}


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of a tensor, and where in it the tensor begins and ends, in bytes."""
    begin = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first, last = begin * tensor.itemsize, (begin + reach + 1) * tensor.itemsize
    return storage_key(tensor.untyped_storage()), first, last


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements share their memory, as those of an expanded tensor do."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
