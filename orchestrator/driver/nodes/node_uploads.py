"""Uploads of what workers write on other nodes than the driver's, by a process on each node that outlives them."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.config.redact import Redactor
from orchestrator.config.schema import StorageConfig
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.mirror import LOGS, Mirror
from orchestrator.storage.staging import make_private

ANSWER_TIMEOUT_S = 5.0
"""The time in which a node answers, besides its uploads."""


@ray.remote(num_cpus=0, max_restarts=-1)
class NodeUpload:
    """Uploads the logs and outputs of the workers of its node.

    Args:
        run_dir: where they write on this node, and where that goes.
        uid: the id of the run. If its record is here, the driver uploads from this directory.
        config: the intervals and limits.
        secrets: texts to mask in logs.
    """

    def __init__(self, run_dir: RunDir, uid: str, config: StorageConfig, secrets: Sequence[str]):
        self._run_dir = run_dir
        self._mirror: Mirror | None = None
        assert run_dir.remote is not None
        with contextlib.suppress(ValueError):
            if run_dir.read_record().get("uid") == uid:
                return
        make_private(run_dir.path.parents[1])
        run_dir.path.mkdir(parents=True, exist_ok=True)
        redactor = Redactor.of_process()
        redactor.learn({"secrets": secrets})
        self._mirror = Mirror(
            run_dir.path,
            run_dir.remote,
            every_s=config.upload_every_s,
            masked=redactor.copy_file,
            place=functools.partial(place_of, folder=f"{socket.gethostname()}-{_staging_id(run_dir.path)}"),
        )

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those of the files ``names`` of the run directory that are here."""
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                found[name] = (self._run_dir.path / name).read_bytes()
        return found

    def finish(self, timeout_s: float) -> list[str]:
        """Upload the rest, for at most ``timeout_s``. Return the names of the files that differ on the store."""
        return [] if self._mirror is None else self._mirror.finish(timeout_s)


class NodeUploads:
    """The uploads of a run from other nodes than the driver's; does nothing if ``output_dir`` is a directory."""

    def __init__(self, run_dir: RunDir, uid: str, config: StorageConfig, secrets: Sequence[str]):
        self._run_dir = run_dir
        self._uid = uid
        self._config = config
        self._secrets = tuple(secrets)
        self._actors: dict[str, Any] = {}  # by node id

    def cover(self, node_ids: Iterable[str]) -> None:
        """Upload from these nodes until :meth:`finish`."""
        if self._run_dir.remote is None:
            return
        for node_id in set(node_ids) - {ray.get_runtime_context().get_node_id()} - self._actors.keys():
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = NodeUpload.options(scheduling_strategy=on_node)  # type: ignore[attr-defined]
            self._actors[node_id] = options.remote(self._run_dir, self._uid, self._config, self._secrets)

    def bring(self, node_id: str, paths: Collection[Path]) -> None:
        """Copy files of the run directory from a node to the driver, if both have them in different directories."""
        actor = self._actors.get(node_id)
        if actor is None:
            return
        names = [str(path.relative_to(self._run_dir.path)) for path in paths if not path.exists()]
        with contextlib.suppress(ray.exceptions.RayError, OSError):
            for name, data in ray.get(actor.read.remote(names), timeout=ANSWER_TIMEOUT_S).items():
                path = self._run_dir.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def finish(self) -> str | None:
        """Upload the rest from all nodes, for at most ``storage.flush_timeout_s``, and end.

        Returns:
            What is not uploaded; None if everything is.
        """
        timeout_s = self._config.flush_timeout_s
        deadline = time.monotonic() + timeout_s + ANSWER_TIMEOUT_S
        answers = [(node_id, actor, actor.finish.remote(timeout_s)) for node_id, actor in self._actors.items()]
        left = []
        for node_id, actor, answer in answers:
            try:
                missing = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayError as e:
                missing = [type(e).__name__]
            if missing:
                left.append(f"node {node_id[:8]}: {', '.join(missing[:5])}")
            ray.kill(actor)
        return f"not uploaded from other nodes: {'; '.join(left)} (in {self._run_dir.path} there)" if left else None


def place_of(name: str, *, folder: str) -> str:
    """Return where a file of another node than the driver's goes: each node has a folder of its own for logs."""
    head, _, rest = name.partition("/")
    return f"{LOGS}/{folder}/{rest}" if head == LOGS else name


def _staging_id(path: Path) -> str:
    """Return an id of the directory ``path``: logs in a new one must not replace those that an earlier one has left."""
    file = path / ".staging-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8])
    return file.read_text()
