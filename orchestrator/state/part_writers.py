"""Several ranks write one checkpoint, each its own part, from a thread of its own. No collective operation takes part.

The ranks exchange short messages through the store of their generation: the first writer names the directory, every
other one reports the digests of its files, and the first one commits when it has them all.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.state.checkpoint import commit, staging, write_part
from orchestrator.state.digests import Digests
from orchestrator.state.fence import Fence
from orchestrator.state.merge import META_OF_PARTS, merge_meta
from orchestrator.state.train_state import TrainState

_POLL_S = 0.02
_PROGRESS_S = 0.5
AFTER_END_S = 10.0
"""How long a part may make no progress after the end of the generation in which it was begun."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


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
        ended: set when the generation has ended.
    """

    store: Store
    ranks: Sequence[int]
    rank: int
    names: Sequence[str]
    stall_timeout_s: float
    ended: threading.Event

    def joint_save(self, key: str) -> JointSave:
        """Return one checkpoint that they write. All of them give it the same ``key``, used once."""
        return JointSave(self, key)


class JointSave:
    """One checkpoint of several writers. Methods run on the thread that writes."""

    def __init__(self, writers: Writers, key: str):
        self._writers = writers
        self._key = key
        self._part = list(writers.ranks).index(writers.rank)
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
        """Write this rank's part, and on the first writer, commit the checkpoint when all parts are written.

        Args:
            root: the directory that holds the checkpoints, which all writers share.
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
        try:
            if self.commits:
                return self._commit_all(root, state, run_uid=run_uid, fence=fence, on_progress=on_progress)
            self._write_own(root / self._await(0, on_progress)["directory"], state, on_progress)
        except Exception as e:
            self.decline(explain(e) if isinstance(e, OSError) else f"{type(e).__name__}: {e}")
            raise
        return None

    def _commit_all(
        self, root: Path, state: TrainState, *, run_uid: str, fence: Fence | None, on_progress: Callable[[], None]
    ) -> tuple[Path, int]:
        parts = len(self._writers.ranks)
        with staging(root, state.step) as directory:
            self._put(self._own_topic, {"directory": directory.name})
            files = write_part(directory, state, part=0, parts=parts, on_progress=on_progress)
            metas: list[Mapping[str, Any]] = [state.meta]
            for part in range(1, parts):
                answer = self._await(part, on_progress)
                files |= {name: _digests(entry) for name, entry in answer["files"].items()}
                metas.append(answer["meta"])
            meta = merge_meta(metas, order=self._writers.names)
            path = commit(directory, meta, files, run_uid=run_uid, parts=parts, fence=fence)
        return path, sum(digests.size for digests in files.values())

    def _write_own(self, directory: Path, state: TrainState, on_progress: Callable[[], None]) -> None:
        def progress() -> None:
            on_progress()
            self._progress += 1
            if time.monotonic() - self._reported_at > _PROGRESS_S:
                self._reported_at = time.monotonic()
                self._writers.store.set(f"{self._own_topic}/progress", str(self._progress))

        parts = len(self._writers.ranks)
        files = write_part(directory, state, part=self._part, parts=parts, on_progress=progress)
        meta = {key: state.meta[key] for key in META_OF_PARTS if key in state.meta}
        self._put(self._own_topic, {"files": {name: asdict(d) for name, d in files.items()}, "meta": meta})

    @property
    def _own_topic(self) -> str:
        return self._topic(self._part)

    def _topic(self, part: int) -> str:
        return f"{self._key}/{part}"

    def _put(self, topic: str, value: Mapping[str, Any]) -> None:
        try:
            self._writers.store.set(topic, json.dumps(value))
        except RuntimeError as e:
            raise PartError(f"rank {self._writers.ranks[0]} cannot be reached: {e}") from e

    def _await(self, part: int, on_progress: Callable[[], None]) -> Any:
        """Wait for the message of a writer, as long as it makes progress.

        Raises:
            PartError: it has failed, cannot be reached, or makes no progress.
        """
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
                limit_s = min(writers.stall_timeout_s, AFTER_END_S if writers.ended.is_set() else math.inf)
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
        return answer


def _digests(entry: Mapping[str, Any]) -> Digests:
    return Digests(size=entry["size"], chunk_bytes=entry["chunk_bytes"], hashes=tuple(entry["hashes"]))
