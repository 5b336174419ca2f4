"""Uploads of what workers write on other nodes than the driver's, by a process on each node that outlives them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.config.operation import StorageConfig
from orchestrator.config.redact import Redactor
from orchestrator.records.lock import this_process
from orchestrator.records.output_dir import folder_of_node, prepare_staging
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.mirror import LOGS, Mirror

ANSWER_TIMEOUT_S = 5.0
"""The time in which a node answers, besides its uploads."""
_OF_WORKERS = ("samples", "profile")
"""The folders in which workers write, besides the folder of the logs."""


@ray.remote(num_cpus=0, max_restarts=-1)
class NodeUpload:
    """Uploads the logs and outputs of the workers of its node.

    Args:
        run_dir: where they write on this node, and where that goes.
        driver: the process that drives the run. If it writes to this directory too, it uploads from there.
        config: the intervals and limits.
        secrets: texts to mask in logs.
    """

    def __init__(self, run_dir: RunDir, driver: Mapping[str, Any], config: StorageConfig, secrets: Sequence[str]):
        self._run_dir = run_dir
        redactor = Redactor.of_process()
        redactor.learn({"secrets": secrets})
        self._mirror = mirror_of(run_dir, driver, every_s=config.upload_every_s, masked=redactor.copy_file)

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of the files ``names`` of the run directory, as far as they are here."""
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

    def __init__(self, run_dir: RunDir, config: StorageConfig, secrets: Sequence[str]):
        self._run_dir = run_dir
        self._driver = this_process()
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
            self._actors[node_id] = options.remote(self._run_dir, self._driver, self._config, self._secrets)

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


def mirror_of(
    run_dir: RunDir, driver: Mapping[str, Any], *, every_s: float, masked: Callable[[Path, Path], bool]
) -> Mirror | None:
    """Start to copy to the store what workers write to the directory here; None if ``driver`` does so itself."""
    assert run_dir.remote is not None
    if run_dir.is_original(driver):
        return None
    prepare_staging(run_dir)
    place = functools.partial(_place_of, folder=folder_of_node(run_dir))
    return Mirror(run_dir.path, run_dir.remote, every_s=every_s, masked=masked, place=place)


def _place_of(name: str, *, folder: str) -> str | None:
    """Return where a file of another node than the driver's goes: each node has a folder of its own for logs.

    None for the records, which only the driver writes: the ones here are from an earlier driver.
    """
    head, _, rest = name.partition("/")
    if head == LOGS:
        return f"{LOGS}/{folder}/{rest}"
    return name if head in _OF_WORKERS else None
