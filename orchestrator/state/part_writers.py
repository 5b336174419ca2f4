"""Several ranks write one checkpoint, each its own part, from a thread of its own. No collective operation takes part.

The ranks exchange short messages through the store of their generation: every writer but the first reports the digests
of its files, and the first one commits when it has them all. In a directory that they share, the first writer names the
place before (:meth:`JointSave.save`). For an object store, each stages its files in a directory of its own
(:meth:`JointSave.stage`), and uploads them later (:meth:`JointSave.upload`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store

from orchestrator.state.checkpoint import commit, make_staging, path_of, remove_staging, staging, write_part
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.fence import Fence
from orchestrator.state.manifest import Digests, manifest_text
from orchestrator.state.merge import META_OF_PARTS, merge_meta
from orchestrator.state.train_state import TrainState

_POLL_S = 0.02
_PROGRESS_S = 0.5


class PartError(RuntimeError):
    """Another writer has not written its part; the text says which one and why."""


@dataclass(frozen=True, kw_only=True)
class Writers:
    """The ranks that write the checkpoints of a generation together, as one of them sees them.

    Attributes:
        store: which all of them can reach.
        ranks: their global ranks; the first one commits.
        rank: of this process.
        names: the names of all parameters and buffers, in the order of the whole model.
        stall_timeout_s: how long a part may make no progress.
        lost_timeout_s: the same after the end of the generation, because its rank may be lost.
        ended: set when the generation has ended.
    """

    store: Store
    ranks: Sequence[int]
    rank: int
    names: Sequence[str]
    stall_timeout_s: float
    lost_timeout_s: float
    ended: threading.Event

    def joint_save(self, key: str) -> JointSave:
        """Return one checkpoint that they write. All of them give it the same ``key``, used once."""
        return JointSave(self, key)


@dataclass(frozen=True, kw_only=True)
class StagedPart:
    """One writer's part of a checkpoint for an object store.

    Attributes:
        jointly: the checkpoint.
        directory: has the files; to be removed with :func:`remove_staging`.
        files: their digests by name.
        meta: of the state, of which the others have other parts.
        run_uid: the identity of the run.
    """

    jointly: JointSave
    directory: Path
    files: Mapping[str, Digests]
    meta: Mapping[str, Any]
    run_uid: str


class JointSave:
    """One checkpoint of several writers. Only one thread at a time calls its methods."""

    def __init__(self, writers: Writers, key: str):
        self._writers = writers
        self._key = key
        self._part = list(writers.ranks).index(writers.rank)
        self._answers: dict[int, Any] = {}
        self._progress = 0
        self._reported_at = 0.0

    @property
    def commits(self) -> bool:
        """Whether this rank commits the checkpoint, and reports how it ended."""
        return self._part == 0

    def decline(self, reason: str) -> None:
        """Let the others know that this rank does not write its part, unless the store is gone."""
        with contextlib.suppress(PartError):
            self._put(self._own_topic, {"failed": reason})

    def save(
        self,
        root: Path,
        state: TrainState,
        *,
        run_uid: str,
        fence: Fence | None,
        explain: Callable[[OSError], str],
        on_progress: Callable[[], None],
    ) -> tuple[Path, int] | None:
        """Write this rank's part to a directory that all writers share; on the first one, commit the checkpoint.

        Args:
            root: the directory that holds the checkpoints.
            state: this rank's part of the state.
            run_uid: the identity of the run.
            fence: consulted before the checkpoint becomes visible. None if this process may always save.
            explain: describes an error of this rank to the first writer, which reports it.
            on_progress: called whenever this or another writer has written some of its bytes.

        Returns:
            The directory and the size of the checkpoint in bytes; None if another rank commits it.

        Raises:
            OSError: this rank cannot write its part; the first writer knows it.
            PartError: another writer has not written its part.
            FencedError: this process may no longer save.
        """
        with self._declining(explain):
            if self.commits:
                return self._commit_all(root, state, run_uid=run_uid, fence=fence, on_progress=on_progress)
            self._report(self._write(root / self._await(0, on_progress)["directory"], state, on_progress), state.meta)
        return None

    def stage(
        self,
        root: Path,
        state: TrainState,
        *,
        run_uid: str,
        explain: Callable[[OSError], str],
        on_progress: Callable[[], None],
    ) -> StagedPart:
        """Write this rank's part to a hidden directory in ``root``. It takes the arguments of :meth:`save`.

        Raises:
            OSError: it cannot be written; the first writer knows it.
        """
        with self._declining(explain):
            directory = make_staging(root, state.step)
            try:
                files = self._write(directory, state, on_progress)
            except BaseException:
                remove_staging(directory)
                raise
            return StagedPart(jointly=self, directory=directory, files=files, meta=dict(state.meta), run_uid=run_uid)

    def upload(
        self,
        part: StagedPart,
        store: CheckpointStore,
        *,
        fence: Fence | None,
        on_progress: Callable[[], None],
    ) -> int | None:
        """Upload this rank's part; on the first writer, commit the checkpoint when all parts are on the store.

        May be called again after an error.

        Returns:
            The size of the checkpoint in bytes; None if another rank commits it.

        Raises:
            OSError: a file cannot be read, or the store cannot be used.
            PartError: another writer has not uploaded its part.
            FencedError: this process may no longer save.
        """
        name = path_of(part.directory.parent, int(part.meta["step"])).name
        store.upload_files(name, part.directory, part.files, on_progress=self._reporting(on_progress))
        if not self.commits:
            self._report(part.files, part.meta)
            return None
        meta, files = self._collect(part.files, part.meta, on_progress)
        store.commit(name, manifest_text(meta, run_uid=part.run_uid, files=files, parts=self._parts), fence=fence)
        return _size_of(files)

    @contextlib.contextmanager
    def _declining(self, explain: Callable[[OSError], str]) -> Iterator[None]:
        """Let the others know of an error."""
        try:
            yield
        except Exception as e:
            self.decline(explain(e) if isinstance(e, OSError) else f"{type(e).__name__}: {e}")
            raise

    def _commit_all(
        self, root: Path, state: TrainState, *, run_uid: str, fence: Fence | None, on_progress: Callable[[], None]
    ) -> tuple[Path, int]:
        with staging(root, state.step) as directory:
            self._put(self._own_topic, {"directory": directory.name})
            own = self._write(directory, state, on_progress)
            meta, files = self._collect(own, state.meta, on_progress)
            path = commit(directory, meta, files, run_uid=run_uid, parts=self._parts, fence=fence)
        return path, _size_of(files)

    def _write(self, directory: Path, state: TrainState, on_progress: Callable[[], None]) -> dict[str, Digests]:
        progress = self._reporting(on_progress)
        return write_part(directory, state, part=self._part, parts=self._parts, on_progress=progress)

    def _report(self, files: Mapping[str, Digests], meta: Mapping[str, Any]) -> None:
        """Let the first writer know that this part is written."""
        own = {key: meta[key] for key in META_OF_PARTS if key in meta}
        self._put(self._own_topic, {"files": {name: asdict(d) for name, d in files.items()}, "meta": own})

    def _collect(
        self, files: Mapping[str, Digests], meta: Mapping[str, Any], on_progress: Callable[[], None]
    ) -> tuple[dict[str, Any], dict[str, Digests]]:
        """Wait until all parts are written; return the meta and the files of the checkpoint."""
        metas, every = [meta], dict(files)
        for part in range(1, self._parts):
            answer = self._await(part, on_progress)
            every |= {
                name: Digests(size=entry["size"], chunk_bytes=entry["chunk_bytes"], hashes=tuple(entry["hashes"]))
                for name, entry in answer["files"].items()
            }
            metas.append(answer["meta"])
        return merge_meta(metas, order=self._writers.names), every

    def _reporting(self, on_progress: Callable[[], None]) -> Callable[[], None]:
        """Return what counts progress and lets the first writer know of it."""

        def progress() -> None:
            on_progress()
            self._progress += 1
            if not self.commits and time.monotonic() - self._reported_at > _PROGRESS_S:
                self._reported_at = time.monotonic()
                with contextlib.suppress(PartError):  # raised again at the end of the part
                    self._put(f"{self._own_topic}/progress", self._progress)

        return progress

    @property
    def _parts(self) -> int:
        return len(self._writers.ranks)

    @property
    def _own_topic(self) -> str:
        return self._topic(self._part)

    def _topic(self, part: int) -> str:
        return f"{self._key}/{part}"

    def _put(self, topic: str, value: Any) -> None:
        try:
            self._writers.store.set(topic, json.dumps(value))
        except RuntimeError as e:
            raise PartError(f"rank {self._writers.ranks[0]} cannot be reached: {e}") from e

    def _await(self, part: int, on_progress: Callable[[], None]) -> Any:
        """Wait for the message of a writer, as long as it makes progress.

        Raises:
            PartError: it has failed, cannot be reached, or makes no progress.
        """
        if part in self._answers:
            return self._answers[part]
        writers, topic = self._writers, self._topic(part)
        seen, seen_at, looked_at = b"", time.monotonic(), 0.0
        try:
            while not writers.store.check([topic]):
                now = time.monotonic()
                if now - looked_at > _PROGRESS_S:
                    looked_at = now
                    sign = f"{topic}/progress"
                    found = writers.store.get(sign) if writers.store.check([sign]) else b""
                    if found != seen:
                        seen, seen_at = found, now
                        on_progress()
                limit_s = writers.lost_timeout_s if writers.ended.is_set() else writers.stall_timeout_s
                if now - seen_at > limit_s:
                    raise PartError(f"rank {writers.ranks[part]} has written nothing of its part for {limit_s:g} s")
                time.sleep(_POLL_S)
            answer = json.loads(writers.store.get(topic))
        except PartError:
            raise
        except RuntimeError as e:
            raise PartError(f"rank {writers.ranks[0]} cannot be reached: {e}") from e
        if "failed" in answer:
            raise PartError(f"rank {writers.ranks[part]}: {answer['failed']}")
        self._answers[part] = answer
        return answer


def _size_of(files: Mapping[str, Digests]) -> int:
    return sum(digests.size for digests in files.values())
