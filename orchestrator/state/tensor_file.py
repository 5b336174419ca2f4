"""Safetensors files that are written, read and hashed in a single pass.

The format is the header's length (8 bytes, little endian), a JSON header, and the data. Unlike the safetensors
library's own writer, this one releases the GIL while it writes large tensors, and copies none of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 8 << 20  # large, so that a writing thread seldom needs the GIL
_SYNC_BYTES = 64 << 20
"""Wait for the disk after this many bytes: a single wait at the end would hide whether a slow disk still writes."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(
    path: Path, tensors: Mapping[str, Tensor], *, on_progress: Callable[[], None] = lambda: None
) -> tuple[str, int]:
    """Write contiguous host tensors through to the disk.

    Args:
        path: the file.
        tensors: what to write, by name.
        on_progress: called whenever some of the bytes have been written.

    Returns:
        The file's SHA-256 in hex and its size in bytes.

    Raises:
        OSError: the file cannot be written; the disk may be full.
    """
    # Wide types first, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hasher, size = hashlib.sha256(), 0
    with path.open("wb", buffering=1 << 20) as f:
        for chunk in _chunks([len(text).to_bytes(8, "little"), text], [t for _, t in ordered]):
            hasher.update(chunk)
            before, size = size, size + f.write(chunk)
            on_progress()
            if before // _SYNC_BYTES < size // _SYNC_BYTES:
                f.flush()
                os.fdatasync(f.fileno())
                on_progress()
        f.flush()
        os.fsync(f.fileno())
    on_progress()
    return hasher.hexdigest(), size


def read(path: Path, digest: str, size: int) -> dict[str, Tensor]:
    """Read and verify the tensors of a file; they are views of one buffer.

    Args:
        path: the file.
        digest: its expected SHA-256 in hex.
        size: its expected size in bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged; the text is a predicate whose subject is the file's name.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    view = _bytes_of(buffer)
    _read_verified(path, digest, size, lambda start, stop: view[start:stop])
    try:
        data_start = 8 + int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8:data_start]))
        header.pop("__metadata__", None)
        data = buffer[data_start:]
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensors[name] = data[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise ValueError(f"is not a safetensors file: {e}") from e
    return tensors


def verify(path: Path, digest: str, size: int) -> None:
    """Read a file and check its size and hash without keeping its data.

    Takes the arguments of :func:`read` and raises the same errors.
    """
    scratch = memoryview(bytearray(min(size, _CHUNK_BYTES)))
    _read_verified(path, digest, size, lambda start, stop: scratch[: stop - start])


def _read_verified(path: Path, digest: str, size: int, buffer_for: Callable[[int, int], memoryview]) -> None:
    """Read the file once, bytes ``start`` to ``stop`` into ``buffer_for(start, stop)``."""
    hasher, position = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as f:
        found = os.fstat(f.fileno()).st_size
        while found == size and position < size:
            chunk = buffer_for(position, min(position + _CHUNK_BYTES, size))
            count = f.readinto(chunk)
            if not count:
                found = position
                break
            hasher.update(chunk[:count])
            position += count
    if found != size:
        what = "is truncated" if found < size else "has grown"
        raise ValueError(f"{what}: has {found} of {size} bytes")
    if hasher.hexdigest() != digest:
        raise ValueError("changed since it was written: its sha256 differs from the manifest's")


def _chunks(head: Sequence[bytes], tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    yield from (memoryview(part) for part in head)
    for tensor in tensors:
        data = _bytes_of(tensor)
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's memory, without a copy."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data
