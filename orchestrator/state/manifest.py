"""The manifest of a checkpoint: a JSON file that lists the others with their digests, and says what they belong to.

Format 2 has a file of the model and one of the optimizer from each rank that writes, and digests of chunks. Format 1,
which is read only, has one of each, and a digest of the whole file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT = 2
READABLE = (1, 2)
MANIFEST = "manifest.json"
Kind = Literal["model", "optimizer"]
KINDS: tuple[Kind, ...] = ("model", "optimizer")


class CheckpointError(ValueError):
    """The checkpoint at ``path``, a local one or a URL, cannot be used. ``reason`` names the file and the problem."""

    def __init__(self, path: Path | str, reason: str):
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.reason}"


def file_name(kind: Kind, part: int, parts: int) -> str:
    """Return the name of the file of a kind that the writer ``part``, counted from 0, of ``parts`` writes."""
    return f"{kind}.safetensors" if parts == 1 else f"{kind}-{part + 1:05d}-of-{parts:05d}.safetensors"


def files_of(manifest: Mapping[str, Any], *kinds: Kind) -> dict[str, Digests]:
    """Return the digests of the files of these kinds, or of all, by name, in the order of their writers."""
    parts = _num_parts(manifest)
    names = [file_name(kind, part, parts) for kind in kinds or KINDS for part in range(parts)]
    return {name: _digests(manifest, manifest["files"][name]) for name in names}


def manifest_text(meta: Mapping[str, Any], *, run_uid: str, files: Mapping[str, Digests], parts: int) -> str:
    """Return the text of a manifest.

    Args:
        meta: of the state, with ``step`` and ``samples_consumed``.
        run_uid: the identity of the run.
        files: the digests of all files by name.
    """
    (chunk_bytes,) = {digests.chunk_bytes for digests in files.values()}
    position = {key: meta[key] for key in ("step", "samples_consumed")}
    manifest = {
        "format": FORMAT,
        **position,
        "run_uid": run_uid,
        "meta": {k: v for k, v in meta.items() if k not in position},
        "parts": parts,
        "chunk_bytes": chunk_bytes,
        "files": {name: {"bytes": digests.size, HASH: list(digests.hashes)} for name, digests in files.items()},
    }
    return json.dumps({**manifest, HASH: _digest(manifest)}, indent=1)


def amended(manifest: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Return the text of a manifest like this one, with other values of these entries of the metadata."""
    position = {key: manifest[key] for key in ("step", "samples_consumed")}
    own = {**manifest["meta"], **meta, **position}
    return manifest_text(own, run_uid=manifest["run_uid"], files=files_of(manifest), parts=_num_parts(manifest))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify the manifest of the checkpoint in directory ``path``.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of a format that this version cannot read.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        what = f"missing file {MANIFEST}" if path.is_dir() else "no such directory"
        raise CheckpointError(path, what) from None
    except OSError as e:
        raise CheckpointError(path, f"{MANIFEST} is unreadable: {e}") from e
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path | str) -> dict[str, Any]:
    """Verify the text of the manifest of the checkpoint at ``path``, a directory or a URL, and return its contents.

    Raises:
        CheckpointError: the manifest is damaged, or of a format that this version cannot read.
    """
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(path, f"{MANIFEST} is unreadable: {e}") from e
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(path, f"{MANIFEST} is unreadable: it is not a manifest")
    if manifest["format"] not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise CheckpointError(path, f"its format is {manifest['format']!r}, this version reads {known}")
    if manifest.pop(HASH, None) != _digest(manifest):
        raise CheckpointError(path, f"{MANIFEST} changed: its own {HASH} differs")
    if not _is_complete(manifest):
        raise CheckpointError(path, f"{MANIFEST} is unreadable: it lacks the position, the meta data or the files")
    for kind in KINDS:
        for part in range(_num_parts(manifest)):
            if (name := file_name(kind, part, _num_parts(manifest))) not in manifest["files"]:
                raise CheckpointError(path, f"{MANIFEST} does not list {name}")
    return manifest


def _num_parts(manifest: Mapping[str, Any]) -> int:
    parts: int = manifest.get("parts", 1)
    return parts


def _is_complete(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest has all keys, with values of their types."""
    files, counts = manifest.get("files"), [manifest.get("parts", 1), manifest.get("chunk_bytes", 1)]
    return (
        all(isinstance(manifest.get(key), int) for key in ("step", "samples_consumed"))
        and isinstance(manifest.get("meta"), dict)
        and isinstance(files, dict)
        and all(isinstance(count, int) and count > 0 for count in counts)
        and all(_is_file_entry(manifest, entry) for entry in files.values())
    )


def _is_file_entry(manifest: Mapping[str, Any], entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    size, hashes = entry.get("bytes"), hashes_of(entry.get(HASH))
    if not isinstance(size, int) or size < 0 or hashes is None:
        return False
    return len(hashes) == max(1, -(-size // _chunk_bytes(manifest, size)))


def _digests(manifest: Mapping[str, Any], entry: Mapping[str, Any]) -> Digests:
    size = entry["bytes"]
    hashes = hashes_of(entry[HASH])
    assert hashes is not None
    return Digests(size=size, chunk_bytes=_chunk_bytes(manifest, size), hashes=tuple(hashes))


def _chunk_bytes(manifest: Mapping[str, Any], size: int) -> int:
    """Return the size of the chunks of a file; in format 1, a file is one chunk."""
    chunk_bytes: int = manifest.get("chunk_bytes", max(1, size))
    return chunk_bytes


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


HASH = "sha256"  # twice as fast as blake2b on CPUs with SHA instructions
CHUNK_BYTES = 8 << 20
"""Large, so that a writing thread seldom needs the GIL, and the digests of a checkpoint are few."""


@dataclass(frozen=True, kw_only=True)
class Digests:
    """The size of a file in bytes, and the SHA-256 in hex of each of its chunks; the last chunk may be shorter."""

    size: int
    chunk_bytes: int
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for the contents of the file."""
        joined = "".join(self.hashes)
        return (joined if len(self.hashes) == 1 else hashlib.sha256(joined.encode()).hexdigest())[:16]


class ChunkHasher:
    """Computes the digests of a file from its contents, which come in pieces of any size."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES):
        self._chunk_bytes = chunk_bytes
        self._size = 0
        self._hashes: list[str] = []
        self._hasher = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """Add the next piece."""
        while len(data):
            room = self._chunk_bytes - self._size % self._chunk_bytes
            part, data = data[:room], data[room:]
            self._hasher.update(part)
            self._size += len(part)
            if len(part) == room:
                self._end_chunk()

    def finish(self) -> Digests:
        """Return the digests of all pieces. A file has one chunk at least."""
        if self._size % self._chunk_bytes or not self._hashes:
            self._end_chunk()
        return Digests(size=self._size, chunk_bytes=self._chunk_bytes, hashes=tuple(self._hashes))

    def _end_chunk(self) -> None:
        self._hashes.append(self._hasher.hexdigest())
        self._hasher = hashlib.sha256()


@dataclass
class VerifiedFile:
    """A file of which nothing is used before its chunk has been compared with its digest.

    Messages of its errors are predicates whose subject is the file's name.
    """

    path: Path
    digests: Digests
    _verified: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Open the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has another size.
        """
        self._file = self.path.open("rb", buffering=0)
        self._check_size(os.fstat(self._file.fileno()).st_size)

    def readinto(self, target: memoryview, start: int) -> None:
        """Fill ``target`` with the bytes from ``start`` on.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged.
        """
        chunk_bytes, position = self.digests.chunk_bytes, start
        while position < start + len(target):
            chunk = position // chunk_bytes
            end = min((chunk + 1) * chunk_bytes, start + len(target))
            part = target[position - start : end - start]
            if chunk in self._verified:
                self._read(part, position)
            elif len(part) == self._chunk_end(chunk) - chunk * chunk_bytes:
                self._read(part, position)
                self._compare(chunk, hashlib.sha256(part))
            else:
                self.verify_chunk(chunk)
                self._read(part, position)
            position = end

    def verify_chunk(self, chunk: int) -> None:
        """Read a chunk and compare it, without keeping it. It may be larger than the memory.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged.
        """
        position, end = chunk * self.digests.chunk_bytes, self._chunk_end(chunk)
        scratch = memoryview(bytearray(min(CHUNK_BYTES, end - position)))
        hasher = hashlib.sha256()
        while position < end:
            part = scratch[: end - position]
            self._read(part, position)
            hasher.update(part)
            position += len(part)
        self._compare(chunk, hasher)

    def verify(self) -> None:
        """Verify the whole file, as :meth:`verify_chunk` does."""
        for chunk in range(len(self.digests.hashes)):
            self.verify_chunk(chunk)

    def _chunk_end(self, chunk: int) -> int:
        return min((chunk + 1) * self.digests.chunk_bytes, self.digests.size)

    def _read(self, target: memoryview, start: int) -> None:
        position = 0
        while position < len(target):
            count = os.preadv(self._file.fileno(), [target[position : position + CHUNK_BYTES]], start + position)
            if not count:
                self._check_size(os.fstat(self._file.fileno()).st_size)
                raise OSError(errno.EIO, "ends before its size", str(self.path))
            position += count

    def _check_size(self, found: int) -> None:
        expected = self.digests.size
        if found != expected:
            what = "is truncated" if found < expected else "has grown"
            raise ValueError(f"{what}: has {found} of {expected} bytes")

    def _compare(self, chunk: int, hasher: Any) -> None:
        if hasher.hexdigest() != self.digests.hashes[chunk]:
            raise ValueError(f"changed since it was written: its {HASH} differs from the manifest's")
        self._verified.add(chunk)


def hashes_of(value: Any) -> Sequence[str] | None:
    """Return the hashes in an entry of a manifest, one string or a list of them; None if it is neither."""
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None
