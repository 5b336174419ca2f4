"""The process that reads for many ranks: one for each run, or one on each node."""

from __future__ import annotations

import functools
import math
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from orchestrator.compat.ray import counted_sources
from orchestrator.compat.ray import datasets as ray_data
from orchestrator.config.eval_splits import TRAIN
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.features.feeding.feed import Feed, Request, Share, Source, failure_of
from orchestrator.features.feeding.needs import Need, shortage
from orchestrator.features.feeding.rows import Reading, Rows
from orchestrator.features.feeding.streams import Stream
from orchestrator.job import Job
from orchestrator.protocol.messages import WorkerEnvironment
from orchestrator.strategies.data.columns import joined
from orchestrator.strategies.data.datasets import (
    DatasetError,
    check_dataset,
    is_of_ray,
    is_stream,
    known_length,
    needs_feeder,
    opened_dataset,
)
from orchestrator.worker.base_actor import job_of
from orchestrator.worker.data.data_loader import ReadFailure

SAMPLE_S = 300.0
"""How long the first samples may take that the checks before a run want to see."""
KEPT_BYTES = 2**28
"""The size up to which the rows of a split that is evaluated stay in the object store."""


@dataclass(frozen=True)
class About:
    """What a split of the data is.

    Attributes:
        is_fed: whether a feeder reads it; each rank reads a map-style dataset by itself.
        length: the number of samples of an epoch, if that is known without reading them.
    """

    is_fed: bool
    length: int | None = None


class Feeder:
    """Answers the ranks of a run. Its methods are called by several threads, and return an error as a text.

    Args:
        job: the job, whose data it opens.
        seed: of the run.
        window: ``data.shuffle_window``.
        count: the samples of a global batch of training.
        grows: whether the cluster adds nodes for tasks that wait.
        limit: the samples of an epoch of training at most; None for all.
        has_rows: whether it is known that some data is a dataset of Ray Data.
    """

    def __init__(
        self,
        job: Job,
        *,
        seed: int,
        window: int,
        count: int,
        limit: int | None = None,
        has_rows: bool = False,
        grows: bool = False,
    ):
        self._job = job
        self._seed = seed
        self._window = window
        self._count = count
        self._limit = limit
        self._has_rows = has_rows
        self._grows = grows
        self._lock = threading.Lock()
        self._feeds: dict[tuple[str, int], Feed] = {}
        self._opened: dict[str, Any] = {}
        self._unread: dict[str, Any] = {}
        self._heads: dict[str, Sequence[Any]] = {}

    def take(self, split: str, request: Request) -> Share | ReadFailure | None:
        """See :meth:`Feed.take`."""
        repeats = not request.once
        with self._lock:
            key = (split, 0 if repeats else request.count)
            if key not in self._feeds:
                self._feeds[key] = Feed(
                    functools.partial(self._source, split, count=request.count, repeats=repeats),
                    keep_bytes=0.0 if repeats else KEPT_BYTES,
                    store_bytes=ray_data.store_bytes(),
                )
        return self._feeds[key].take(request)

    def first_read(self, split: str) -> tuple[int, str] | None:
        """Return the position and the digest of the first samples of a stream, as far as it has been read."""
        with self._lock:
            feed = self._feeds.get((split, 0))
        return None if feed is None else feed.first_read

    def head(self, split: str, count: int) -> Sequence[Any] | ReadFailure:
        """Return the first samples of a split in its own order, ``count`` of them if there are so many."""
        try:
            with self._lock:
                found = self._heads.get(split, ())
                if len(found) < count:
                    found = self._heads[split] = self._read_head(split, count)
            return found[:count]
        except Exception as e:
            return failure_of(e)

    def length(self, split: str, up_to: int | None, limit_s: float) -> int | ReadFailure:
        """Return the number of rows of the first epoch, which are counted if no file tells how many there are.

        Args:
            split: the part of the data.
            up_to: the largest number of interest.
            limit_s: how long they are counted.
        """
        try:
            source = self._source(split, count=self._count, repeats=False)
            assert isinstance(source, Rows)
            return source.length(up_to=math.inf if up_to is None else up_to, limit_s=limit_s)
        except Exception as e:
            return failure_of(e)

    def about(self, split: str) -> About | ReadFailure:
        """Return what kind of data a split is."""
        try:
            with self._lock:
                dataset = self._open(split)
                if needs_feeder(dataset):
                    length = counted_sources.known_count(dataset) if is_of_ray(dataset) else None
                    return About(is_fed=True, length=length)
                is_missing = dataset is None and split != "train"
                if not is_missing:
                    check_dataset(dataset, split=split)
                is_fed = not is_missing and is_stream(dataset)
                return About(is_fed=is_fed, length=known_length(dataset) if is_fed else None)
        except Exception as e:
            return failure_of(e)

    def close(self, split: str) -> None:
        """End reading a split that is evaluated, until it is asked for again."""
        with self._lock:
            feeds = [feed for (of, _), feed in self._feeds.items() if of == split]
        for feed in feeds:
            feed.close()

    def _read_head(self, split: str, count: int) -> Sequence[Any]:
        source = self._source(split, count=count, repeats=False)
        parts, rows = [], 0
        chunks = source.read(None, 0)
        for _, chunk in chunks:
            taken = min(len(chunk), count - rows)
            parts.append(chunk.part(0, taken).load(ray_data.columns))
            rows += taken
            if rows >= count:
                break
        chunks.close()
        if not parts:
            raise DatasetError(f"job.dataset({split!r}): the stream has no samples; give it at least one")
        return joined(parts)  # type: ignore[no-any-return]

    def _source(self, split: str, *, count: int, repeats: bool) -> Source:
        opens = functools.partial(self._open, split, again=True)
        as_trained = repeats or (split == TRAIN and self._limit is not None)
        window, limit = (self._window, self._limit) if as_trained else (0, None)
        if needs_feeder(self._open(split)):
            cpus = self._cpus()
            reading = Reading(
                split=split,
                seed=self._seed,
                window=window,
                repeats=repeats,
                cpus=cpus,
                limit=limit,
                store_bytes=ray_data.store_bytes(),
            )
            return Rows(opens, reading, check=lambda dataset: self._check_room(dataset, split))
        return Stream(opens, split=split, seed=self._seed, count=count, repeats=repeats, limit=limit)

    def _open(self, split: str, *, again: bool = False) -> Any:
        """Return the data of a split; with ``again``, those that nobody has begun to read."""
        unread = self._unread.pop(split, None) if again else None
        if unread is not None:
            return unread
        if split not in self._opened or again:
            if self._has_rows and ray.is_initialized():
                self._cpus()  # without any, the tasks by which datasets look at files would wait for ever
            with ray_data.in_order():
                dataset = opened_dataset(self._job, split, self._seed)
            self._opened[split] = dataset
            if not again:
                self._unread[split] = dataset
        return self._opened[split]

    def _cpus(self) -> float | None:
        """Return the most CPUs that tasks may use: those of this machine if Ray counts more than it has.

        Raises:
            DatasetError: the workers have reserved all of them.
        """
        total = ray.cluster_resources().get("CPU", 0.0)
        cores = len(os.sched_getaffinity(0))
        if total > 4 * max(cores, os.cpu_count() or 1) * max(1, len(ray.nodes())):
            return float(max(1, cores))
        if not self._grows and (why := ray_data.no_cpus()) is not None:
            raise DatasetError(f"job.dataset: {why}")
        return None

    def _check_room(self, dataset: Any, split: str) -> None:
        """Check that all tasks and actors that make a dataset of Ray Data find room at a time.

        Raises:
            DatasetError: some would wait for ever.
        """
        if self._grows:
            return
        needs = [Need(*need) for need in ray_data.needs_of(dataset)]
        if (found := shortage(needs, ray_data.unreserved())) is not None:
            raise DatasetError(
                f"job.dataset({split!r}): {found}, for which the nodes have no room: {ray_data.reserved()}; lower "
                "strategy.num_workers or what the data asks for, or add nodes"
            )


class FeederActor:
    """The feeder as a Ray actor."""

    def __init__(self, packed: bytes):
        environment: WorkerEnvironment = pickle.loads(packed)
        self._make = functools.partial(_feeder_of, environment)
        self._lock = threading.Lock()
        self._feeder: Feeder | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the feeder, which is made at the first call. An error of the job is returned as a text."""
        try:
            with self._lock:
                self._feeder = self._feeder or self._make()
        except Exception as e:
            return failure_of(e)
        return getattr(self._feeder, name)(*arguments)


def asked_in_task(
    job: Job, name: str, split: str, *arguments: Any, seed: int, count: int = 1, timeout_s: float | None = SAMPLE_S
) -> Any:
    """Return what a method of a feeder returns, from a task on the cluster; a text that says why if it fails.

    The nodes have to have the code of the job.
    """

    def ask(data: bytes) -> Any:
        feeder = Feeder(ray.cloudpickle.loads(data), seed=seed, window=0, count=count)
        return getattr(feeder, name)(split, *arguments)

    options = {"num_cpus": 0, "max_retries": 0, "runtime_env": with_paths(sys.path)}
    task = ray.remote(ask).options(**options).remote(ray.cloudpickle.dumps(job))
    try:
        found = ray.get(task, timeout=timeout_s)
    except ray.exceptions.RayError as e:
        ray.cancel(task, force=True)
        return str(e).strip().splitlines()[-1]
    return found.message if isinstance(found, ReadFailure) else found


def with_paths(paths: Sequence[str]) -> dict[str, Any]:
    """Return the runtime environment in which the tasks of the data find the modules of the job, too."""
    own = dict(ray.get_runtime_context().runtime_env)
    variables = {**own.get("env_vars", {})}
    before = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    installed = (sys.prefix, sys.base_prefix, "site-packages", "dist-packages")  # as each node has them
    further = [str(Path(path).resolve()) for path in paths if not any(part in path for part in installed)]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*before, *further])))
    return {**own, "env_vars": variables}


def _feeder_of(environment: WorkerEnvironment) -> Feeder:
    redactor = Redactor.of_process()
    redactor.learn(environment.config)
    return feeder_for(job_of(environment, redactor), environment.config)


def feeder_for(job: Job, config: Config) -> Feeder:
    """Return the feeder of a run."""
    train = config.train
    return Feeder(
        job,
        seed=config.seed,
        window=config.data.shuffle_window,
        count=train.global_batch_size,
        limit=train.limit_samples,
        has_rows=config.data.read == "rank",
        grows=config.cluster.autoscaling,
    )
