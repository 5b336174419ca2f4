"""A directory on an object store, given by its URL: ``s3://``, or ``file://`` for a file system that all nodes mount.

Other schemes of pyarrow and fsspec are refused. Through pyarrow, ``gs://`` lists no directories that only have files,
and the ``sftp://`` of fsspec cannot rename a file; the others are untested.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

_CHUNK_BYTES = 8 << 20
_ATTEMPTS = 2
"""How often the S3 client sends a request. The callers repeat what failed, at longer intervals."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REMEDIES = (
    (r"NO_SUCH_BUCKET|bucket does not exist", "create the bucket"),
    (
        r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|[Cc]redential|Forbidden|403",
        "give every node credentials for it, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in its environment",
    ),
    (r"NETWORK_CONNECTION|[Cc]onnect|no progress|resolve", "check the endpoint and the network"),
)

T = TypeVar("T")


class StorageError(OSError):
    """A store cannot be used. The text names the URL, the problem and what to do."""


class Entry(NamedTuple):
    """A file or directory on a store; ``changed_at`` in seconds of the store's clock, None if it does not tell."""

    name: str
    is_file: bool
    changed_at: float | None


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL and not a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


@dataclass(frozen=True)
class Remote:
    """The directory ``path`` below the one at the URL ``root``. Names are relative to it, with slashes.

    An operation that makes no progress for ``timeout_s`` fails. All methods raise :class:`StorageError` if the store
    cannot be used, and :class:`FileNotFoundError` if a file to read does not exist.
    """

    root: str
    timeout_s: float
    path: str = ""

    @property
    def url(self) -> str:
        """The URL of this directory."""
        if not self.path:
            return self.root
        parts = urlsplit(self.root)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(self.path)}"))

    def __str__(self) -> str:
        return self.url

    def child(self, name: str) -> Remote:
        """Return the directory ``name`` in this one."""
        return replace(self, path=posixpath.join(self.path, name))

    def split(self, depth: int) -> tuple[Remote, str]:
        """Return the directory ``depth`` levels above this one, and the name of this one in it."""
        parts = urlsplit(self.url)
        names = parts.path.rstrip("/").split("/")
        above = urlunsplit(parts._replace(path="/".join(names[:-depth])))
        return Remote(above, self.timeout_s), unquote("/".join(names[-depth:]))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a small file."""
        self._store(name, lambda out, _: out.write(data))

    def put(self, source: Path, name: str, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """Copy the local file ``source`` to ``name``, which readers see when it is complete.

        ``on_progress`` is called whenever some of its bytes have been sent.

        Raises:
            FileNotFoundError: there is no ``source``.
        """
        source.stat()

        def copy(out: Any, progressed: Callable[[], None]) -> None:
            # Open here: a stream that is closed early leaves a part of the file, and a call that was given up goes on.
            with source.open("rb") as file:
                _copy(file, out, progressed)

        self._store(name, copy, on_progress)

    def read(self, name: str, *, last_bytes: int | None = None) -> bytes:
        """Return the contents of a small file, or the ``last_bytes`` of a large one."""

        def read(files: Any, path: str, _: Callable[[], None]) -> bytes:
            if last_bytes is None:
                with files.open_input_stream(path) as file:
                    data: bytes = file.read()
            else:
                with files.open_input_file(path) as file:
                    file.seek(max(0, file.size() - last_bytes))
                    data = file.read()
            return data

        return self._call("read", name, read)

    def fetch(self, name: str, target: Path, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """Copy the file ``name`` to the local file ``target``, which appears when it is complete."""
        target.parent.mkdir(parents=True, exist_ok=True)
        incomplete = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

        def copy(files: Any, path: str, progressed: Callable[[], None]) -> None:
            with files.open_input_stream(path) as file, incomplete.open("wb") as out:
                _copy(file, out, progressed)

        try:
            self._call("read", name, copy, on_progress)
            incomplete.replace(target)
        finally:
            incomplete.unlink(missing_ok=True)

    def list(self, name: str = "", *, recursive: bool = False) -> list[Entry]:
        """Return what is in the directory ``name``, which may not exist, with names relative to it."""
        from pyarrow.fs import FileSelector, FileType

        def find(files: Any, path: str, _: Callable[[], None]) -> list[Entry]:
            infos = files.get_file_info(FileSelector(path, recursive=recursive, allow_not_found=True))
            named = ((posixpath.relpath(info.path, path), info) for info in infos)
            return [
                Entry(
                    name=name,
                    is_file=info.type == FileType.File,
                    changed_at=None if info.mtime is None else info.mtime.timestamp(),
                )
                for name, info in named
                if name.partition("/")[0] not in (".", "..")  # S3 lets anyone who may write there choose such a key
            ]

        return self._call("list", name, find)

    def check_writable(self) -> None:
        """Write and delete a probe."""
        probe = f".probe-{uuid.uuid4().hex}"
        self.write(probe, b"probe")
        self.delete(probe)

    def age_s(self, *names: str) -> float:
        """Return the seconds since the last change of any of the files ``names``, by the clock of the store.

        The age is 0 if the store does not tell when its files change.

        Raises:
            FileNotFoundError: none of them exists.
        """
        probe = f".probe-{uuid.uuid4().hex}"
        self.write(probe, b"probe")
        try:
            found = {entry.name: entry.changed_at for entry in self.list()}
        finally:
            self.delete(probe)
        now, times = found.get(probe), [found[name] for name in names if name in found]
        if not times:
            raise FileNotFoundError(f"{self} has none of the files {', '.join(names)}")
        return min(0.0 if now is None or changed_at is None else now - changed_at for changed_at in times)

    def delete(self, name: str) -> None:
        """Delete the file ``name``, which may not exist."""

        def delete(files: Any, path: str, _: Callable[[], None]) -> None:
            with contextlib.suppress(FileNotFoundError):
                files.delete_file(path)

        self._call("delete", name, delete)

    def delete_directory(self, name: str) -> None:
        """Delete the directory ``name`` with everything in it; it may not exist."""

        def delete(files: Any, path: str, _: Callable[[], None]) -> None:
            with contextlib.suppress(FileNotFoundError):
                files.delete_dir(path)

        self._call("delete", name, delete)

    def _store(
        self,
        name: str,
        write: Callable[[Any, Callable[[], None]], object],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        def store(files: Any, path: str, progressed: Callable[[], None]) -> None:
            if files.type_name == "s3":  # there, a file appears only when it is complete
                with files.open_output_stream(path) as out:
                    write(out, progressed)
                return
            folder, _, file = path.rpartition("/")
            files.create_dir(folder, recursive=True)
            incomplete = f"{folder}/.{file}.{uuid.uuid4().hex}"
            with files.open_output_stream(incomplete) as out:
                write(out, progressed)
            files.move(incomplete, path)

        try:
            self._call("write", name, store, on_progress)
        except FileNotFoundError as e:  # of a directory above
            raise StorageError(self._explain("write", name, e)) from e

    def _call(
        self,
        verb: str,
        name: str,
        operation: Callable[[Any, str, Callable[[], None]], T],
        on_progress: Callable[[], None] = lambda: None,
    ) -> T:
        """Return ``operation(file system, path of name, progressed)``."""

        def run(progressed: Callable[[], None]) -> T:
            files, root = _open(self.root, self.timeout_s)
            return operation(files, posixpath.join(root, self.path, name).rstrip("/"), progressed)

        try:
            return _within(self.timeout_s, run, on_progress)
        except (FileNotFoundError, StorageError):
            raise
        except Exception as e:
            raise StorageError(self._explain(verb, name, e)) from e

    def _explain(self, verb: str, name: str, error: Exception) -> str:
        text = " ".join(str(error).split())
        # Of AWS's errors, the names of the error and of the problem, without request ids.
        short = re.sub(r"^.*?AWS Error ", "", re.sub(r" ?\(Request ID:.*?\)", "", text)).rstrip(".")
        remedy = next((f"; {then}" for pattern, then in _REMEDIES if re.search(pattern, text)), "")
        what = posixpath.join(self.path, name) or "it"
        return f"output_dir={self.root}: cannot {verb} {what} ({short or type(error).__name__}){remedy}"


def _within(
    timeout_s: float, operation: Callable[[Callable[[], None]], T], on_progress: Callable[[], None] = lambda: None
) -> T:
    """Return what ``operation(progressed)`` returns, in a thread of its own that may never end.

    Raises:
        TimeoutError: it has called ``progressed`` for the last time ``timeout_s`` ago.
    """
    news: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()

    def fail(error: BaseException) -> T:
        raise error

    def work() -> None:
        try:
            result = operation(lambda: news.put(None))
        except BaseException as e:
            news.put(functools.partial(fail, e))
        else:
            news.put(lambda: result)

    threading.Thread(target=work, name="storage", daemon=True).start()
    while True:
        try:
            end = news.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no progress for {timeout_s:g} s") from None
        if end is not None:
            return end()
        on_progress()


def _open(url: str, timeout_s: float) -> tuple[Any, str]:
    """Return the file system of ``url`` and the path in it."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        endpoint = next((e for name in _ENDPOINTS if (e := os.environ.get(name))), None)
        return _s3(parts.netloc, parts.query, endpoint, timeout_s), f"{parts.hostname}{unquote(parts.path)}"
    if parts.scheme == "file":
        from pyarrow.fs import FileSystem

        files, path = FileSystem.from_uri(url)
        return files, path
    raise StorageError(
        f"output_dir={url}: {parts.scheme}:// is not supported; use s3:// if the store has that protocol "
        "(endpoint_override names another server than AWS), or mount it on every node and give the path"
    )


@functools.cache
def _s3(netloc: str, query: str, endpoint: str | None, timeout_s: float) -> Any:
    """Return the file system of an S3 URL; pyarrow takes no timeouts from a URL."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    parts = urlsplit(f"//{netloc}")
    options: dict[str, Any] = {} if endpoint is None else {"endpoint_override": endpoint}
    options |= parse_qsl(query)
    if parts.username and parts.password:
        options |= {"access_key": unquote(parts.username), "secret_key": unquote(parts.password)}
    try:
        return S3FileSystem(
            **options,
            connect_timeout=timeout_s / _ATTEMPTS,
            request_timeout=timeout_s / _ATTEMPTS,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        )
    except TypeError as e:
        raise ValueError(f"{e}; parameters are arguments of pyarrow.fs.S3FileSystem, such as endpoint_override") from e


def _copy(source: IO[bytes] | Any, target: IO[bytes] | Any, progressed: Callable[[], None]) -> None:
    for chunk in _chunks(source):
        target.write(chunk)
        progressed()


def _chunks(source: IO[bytes] | Any) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK_BYTES):
        yield chunk


CLAIM_TIMEOUT_S = 30.0
"""Wait this long for the claims of others. Each is held for the time of a few small files."""
ABANDONED_S = 60.0
"""A claim counts as left behind by a dead process after this time, by the clock of the store."""
_POLL_S = 0.2
_CLAIMS = ".claims"


@contextlib.contextmanager
def store_locked(remote: Remote, *, timeout_s: float = CLAIM_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of the directory ``remote`` during the block, although a store has no locks.

    A process writes its claim and then lists all claims. It has the lock if there is no other one: of two processes,
    the one that writes later sees the claim of the other, as lists of a store are consistent. If both see each other,
    the first in the order of names waits, and the others withdraw and try again.

    Raises:
        TimeoutError: others have held the lock for ``timeout_s`` seconds.
        StorageError: the store cannot be used.
    """
    mine = uuid.uuid4().hex
    claims = remote.child(_CLAIMS)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            claims.write(mine, b"claim")
            while (others := _others(claims, mine)) and mine < min(others):
                _pause(remote, deadline)
            if not others:
                break
            claims.delete(mine)
            _pause(remote, deadline)
        yield
    finally:
        claims.delete(mine)


def _others(claims: Remote, mine: str) -> list[str]:
    """Return the claims of others that live, after the abandoned ones have been deleted."""
    found = {entry.name: entry.changed_at for entry in claims.list() if not entry.name.startswith(".")}
    now = found.pop(mine, None)
    living = []
    for name, changed_at in found.items():
        if now is not None and changed_at is not None and now - changed_at > ABANDONED_S:
            claims.delete(name)
        else:
            living.append(name)
    return living


def _pause(remote: Remote, deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(f"output_dir={remote}: another process has kept it claimed")
    time.sleep(_POLL_S)
