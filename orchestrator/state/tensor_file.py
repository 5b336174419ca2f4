"""Safetensors files that are hashed while they are written or read.

The format is the header's length (8 bytes, little endian), a JSON header, and the data. Unlike the safetensors
library's own writer, this one releases the GIL while it writes large tensors, and copies none of them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    head, data = [len(text).to_bytes(8, "little"), text], [t for _, t in ordered]
    size = 0
    with path.open("wb", buffering=1 << 20) as f, ThreadPoolExecutor(1, "hashing") as beside:
        digest = beside.submit(_hash, _chunks(head, data))  # both loops release the GIL
        for chunk in _chunks(head, data):
            before, size = size, size + f.write(chunk)
            on_progress()
            if before // _SYNC_BYTES < size // _SYNC_BYTES:
                f.flush()
                os.fdatasync(f.fileno())
                on_progress()
        f.flush()
        os.fsync(f.fileno())
    on_progress()
    return digest.result(), size


@dataclass(frozen=True)
class _Place:
    """Where a tensor of a file is: its shape and dtype, and the position of its first byte."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class TensorFile(MutableMapping[str, Tensor]):
    """The tensors of a safetensors file. One is read whenever it is asked for; a change is not written to the file."""

    def __init__(self, path: Path):
        """Read the header.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a safetensors file; the text is a predicate whose subject is the file's name.
        """
        self._file = path.open("rb", buffering=0)
        self._entries: dict[str, _Place | Tensor] = {}
        size = os.fstat(self._file.fileno()).st_size
        try:
            data_start = 8 + int.from_bytes(self._file.read(8), "little")
            if data_start > size:
                raise ValueError("its header ends after the file")
            header = json.loads(self._file.read(data_start - 8))
            header.pop("__metadata__", None)
            self._entries |= {name: _place(name, entry, data_start, size) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"is not a safetensors file: {e}") from e

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        data, position = _bytes_of(tensor), 0
        while position < len(data):
            count = os.preadv(self._file.fileno(), [data[position : position + _CHUNK_BYTES]], entry.start + position)
            if not count:
                raise OSError(errno.EIO, "shorter than when it was verified", self._file.name)
            position += count
        return tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._entries[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def outline(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes and dtypes on the meta device, without reading any."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in self._entries.items()
        }


def read(path: Path, digest: str, size: int) -> TensorFile:
    """Verify a file and return its tensors.

    Args:
        path: the file.
        digest: its expected SHA-256 in hex.
        size: its expected size in bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged; the text is a predicate whose subject is the file's name.
    """
    verify(path, digest, size)
    return TensorFile(path)


def verify(path: Path, digest: str, size: int) -> None:
    """Read a file once and check its size and hash.

    Takes the arguments of :func:`read` and raises the same errors.
    """
    scratch = memoryview(bytearray(min(size, _CHUNK_BYTES)))
    hasher, position = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as f:
        found = os.fstat(f.fileno()).st_size
        while found == size and position < size:
            count = f.readinto(scratch)
            if not count:
                found = position
                break
            hasher.update(scratch[:count])
            position += count
    if found != size:
        what = "is truncated" if found < size else "has grown"
        raise ValueError(f"{what}: has {found} of {size} bytes")
    if hasher.hexdigest() != digest:
        raise ValueError("changed since it was written: its sha256 differs from the manifest's")


def _place(name: str, entry: Mapping[str, Any], data_start: int, size: int) -> _Place:
    """Return where the tensor ``name`` is in a file of ``size`` bytes.

    Raises:
        ValueError, KeyError, TypeError: it cannot be there.
    """
    shape, (start, stop), dtype = tuple(entry["shape"]), entry["data_offsets"], _DTYPES[entry["dtype"]]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name} has shape {shape} and offsets {start} and {stop}")
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{name} has {stop - start} bytes")
    if data_start + stop > size:
        raise ValueError(f"{name} ends after the file")
    return _Place(shape, dtype, data_start + start)


def _hash(chunks: Iterable[memoryview]) -> str:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


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
