"""What a rank sees of the feeder: splits of the data that it can read from any position."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.compat.ray import datasets as ray_data
from orchestrator.features.feeding.feed import Request, Share
from orchestrator.features.feeding.feeder import About, Feeder, FeederActor, feeder_for, with_paths
from orchestrator.features.feeding.rows import ROW, SEEN, digest, tells_position
from orchestrator.job import Job
from orchestrator.protocol.core_metrics import ROWS_PER_S, STORE_MB
from orchestrator.protocol.messages import Assignment
from orchestrator.protocol.metrics import Metric, measured
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.user_code.errors import JobError
from orchestrator.worker.data.data_loader import LoaderError, ReadFailure
from orchestrator.worker.data.fed import Fed
from orchestrator.worker.data.stream import Mark

AHEAD = 2
"""How many shares a rank fetches before it needs them."""
CACHED = 8
"""How many blocks a rank keeps as arrays."""
HEAD = 64
"""How many of the first samples are read at once."""
_GONE = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError)
_POLL_S = 0.2
_Fetched = tuple[Share, Sequence[Any], Sequence[Any]]
"""A share, its samples as others may see them, and a copy that may be changed."""


class Feeding:
    """The feeder of a run, or of a node of it, for one rank.

    Any rank makes it if there is none, also after it has died: a new one reads on where the ranks ask for.
    """

    def __init__(self, assignment: Assignment, job: Job, warn: Callable[[str], None]):
        self._job = job
        self.warn = warn
        self.deaths = 0
        self._local: Feeder | None = None
        self._actor: Any = None
        self.reassign(assignment)

    def reassign(self, assignment: Assignment) -> None:
        self.assignment = assignment

    @property
    def waits_for_cpus(self) -> bool:
        """Whether tasks can wait for CPUs that no new node will have."""
        return ray.is_initialized() and not self.assignment.config.cluster.autoscaling

    def open(self, split: str) -> FedSplit | None:
        about: About = self.call("about", split)
        return FedSplit(self, split, about.length) if about.is_fed else None

    def call(self, name: str, *arguments: Any, retries: bool = True) -> Any:
        """Call a method of the feeder, however often it dies within the time that a batch may take.

        Without ``retries``, returns None if it has died.

        Raises:
            DataError, JobError: the data cannot be read.
            LoaderError: there is no answer in time.
        """
        timeout_s = self.assignment.config.recovery.loader_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._call(name, arguments, deadline)
                break
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as e:
                self._actor, self.deaths = None, self.deaths + 1
                if time.monotonic() > deadline:
                    raise LoaderError(f"the process that reads the data has died again and again: {e}") from e
                time.sleep(_POLL_S)
                if not retries:
                    return None
            except ray.exceptions.GetTimeoutError as e:
                raise LoaderError(f"the process that reads the data gives no answer within {timeout_s:g} s") from e
        if isinstance(answer, ReadFailure):
            raise answer.error()
        return answer

    def _call(self, name: str, arguments: Sequence[Any], deadline: float) -> Any:
        if not ray.is_initialized():  # debug=true
            self._local = self._local or feeder_for(self._job, self.assignment.config)
            return getattr(self._local, name)(*arguments)
        self._actor = self._actor or self._make()
        return ray.get(self._actor.call.remote(name, *arguments), timeout=max(0.0, deadline - time.monotonic()))

    def _make(self) -> Any:
        """Return the feeder, which is made unless another rank has done so. It dies with the rank that made it."""
        environment, config = self.assignment.environment, self.assignment.config
        node_id = ray.get_runtime_context().get_node_id()
        place = f"-{node_id}" if config.data.read == "node" else ""
        return (
            ray.remote(FeederActor)
            .options(
                name=f"{self.assignment.plan.run_name}-{self.assignment.run_uid}/feeder{place}",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=0,
                max_concurrency=4 * self.assignment.plan.world_size + 16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=not place),
                runtime_env=with_paths(environment.import_paths),
            )
            .remote(pickle.dumps(environment))
        )


class FedSplit(Fed):
    """See :class:`Fed`."""

    def __init__(self, feeding: Feeding, split: str, length: int | None):
        self.name = split
        self._feeding = feeding
        self._length = length
        self._blocks: OrderedDict[Any, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._types: dict[str, str] = {}
        # The shares that came with the last answer, after what asks for the first one. They are one value, because
        # an evaluation may read the data of training while these are read ahead.
        self._further: tuple[Request | None, tuple[Share, ...]] = (None, ())
        self.last_mark: Callable[[], Mark | None] = lambda: None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the number of samples is not known")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        found: Sequence[Any] = ()
        wanted = HEAD
        while True:
            before, found = len(found), self._feeding.call("head", self.name, wanted)
            yield from found.own()[before:] if isinstance(found, Columns) else found[before:]
            if len(found) < wanted:
                return
            wanted *= 4

    def reader(self) -> FedReader:
        return FedReader(self, self._feeding)

    def part(self, position: int, count: int, *, first: int, end: int) -> tuple[int, Sequence[Any]]:
        request = self.request(position, count, first, end, keep=position)
        share, samples = self.fetch(replace(request, once=True))
        return share.count, samples

    def close(self) -> None:
        self._blocks.clear()
        self._further = (None, ())

    def request(self, position: int, count: int, first: int, end: int, *, keep: int) -> Request:
        """Return the request for a share, which has to be asked for in this generation."""
        assignment = self._feeding.assignment
        return Request(
            asker=assignment.global_rank,
            generation=assignment.generation,
            position=position,
            count=count,
            first=first,
            end=end,
            keep=max(0, keep),
            ahead=assignment.config.data.batches_ahead * count,
        )

    def fetch(self, request: Request) -> tuple[Share, Sequence[Any]]:
        """Return a share, and its samples.

        Raises:
            DataError, JobError: the data cannot be read.
        """
        timeout_s = self._feeding.assignment.config.recovery.loader_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            deaths = self._feeding.deaths
            share = self._take(request)
            if self._feeding.deaths > deaths:
                request = self._from_last_mark(request)
                continue
            if share is None:
                raise LoaderError("the feeder serves a later generation of this run")
            for note in share.notes:
                self._feeding.warn(note)
            if share.parts is not None:
                try:
                    return share, joined([p.load(self._columns) for p in share.parts]) if share.parts else ()
                except _GONE:
                    request = replace(self._from_last_mark(request), lost=share.reading)
                except ValueError as e:
                    raise JobError(f"job.dataset({self.name!r}): {e}") from e
            elif self._feeding.waits_for_cpus and (why := ray_data.no_cpus()) is not None:  # since a run has grown
                self._feeding.warn(f"{self.name} data: {why}")
            if time.monotonic() > deadline:
                raise LoaderError(
                    f"{self.name} data: no batch within {timeout_s:g} s: the tasks that make it are too slow, fail "
                    "again and again, or wait for CPUs"
                )

    def _take(self, request: Request) -> Share | None:
        """Return a share that came with an earlier one, or ask the feeder. It is None if the feeder has died, too."""
        asked = replace(request, keep=0, mark=None, lost=None)
        expected, shares = self._further
        if not shares or asked != expected or request.lost is not None:
            answer: Share | None = self._feeding.call("take", self.name, request, retries=False)
            if answer is None:
                return None
            shares = (answer, *answer.further)
        self._further = replace(asked, position=asked.position + asked.count), shares[1:]
        return shares[0]

    def _from_last_mark(self, request: Request) -> Request:
        """Return the request by which a new feeder compares what it reads with what was read."""
        return request if request.once else replace(request, mark=self.last_mark() or request.mark)

    def _columns(self, ref: Any) -> Mapping[str, Any]:
        columns = self._blocks.get(ref)
        if columns is None:
            columns = ray_data.columns(ref)
            types = {name: _type_of(column) for name, column in columns.items()}
            self._types = self._types or types
            if types != self._types:
                raise ValueError(f"rows with several kinds of columns ({self._types}; {types}); give all rows the same")
            with self._lock:
                self._blocks[ref] = columns
                while len(self._blocks) > CACHED:
                    self._blocks.popitem(last=False)
        return columns


class FedReader:
    """The share of a rank, from one position on. See :class:`StreamReader`, whose methods it has.

    Attributes:
        position: the samples before the next one.
    """

    def __init__(self, split: FedSplit, feeding: Feeding):
        self.position = 0
        self._split = split
        self._split.last_mark = lambda: self.bookmark(self.position)
        self._feeding = feeding
        self._mark: Mark | None = None
        self._last: Share | None = None
        self._recent: deque[tuple[Request, Mark, Sequence[Any]]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feeding")
        self._fetched: deque[tuple[Request, Future[_Fetched]]] = deque()

    def read(self, count: int, *, first: int, end: int) -> Sequence[Any]:
        """Return the samples from number ``first`` up to, but not including, ``end`` of the next ``count``.

        Raises:
            DataError, JobError: they cannot be read.
        """
        behind = 2 * self._feeding.assignment.plan.loader_processes + 3  # batches that may not have been trained with

        def wanted(position: int) -> Request:
            return self._split.request(position, count, first, end, keep=self.position - behind * count)

        fits = self._fetched and replace(wanted(self.position), keep=0) == replace(
            self._fetched[0][0], keep=0, mark=None
        )
        if not fits:
            self._drop_fetched()
        while len(self._fetched) <= AHEAD:
            request = replace(wanted(self.position + len(self._fetched) * count), mark=self._mark)
            self._fetched.append((request, self._pool.submit(self._fetch, request)))
        request, future = self._fetched.popleft()
        share, samples, own = _result(future, self._feeding.assignment.config.recovery.loader_timeout_s)
        self._last = share
        self.position += count
        if share.mark is not None:
            self._recent.append((request, share.mark, samples if isinstance(samples, Columns) else ()))
        while len(self._recent) > behind:
            self._recent.popleft()
        return own

    def _fetch(self, request: Request) -> _Fetched:
        share, samples = self._split.fetch(request)
        return share, samples, samples.own() if isinstance(samples, Columns) else samples

    def first_read(self) -> tuple[int, str] | None:
        """Return where the first samples of a stream are read if several nodes read it. See :class:`StreamReader`."""
        if self._feeding.assignment.config.data.read != "node":
            return None
        found: tuple[int, str] | None = self._feeding.call("first_read", self._split.name)
        return found

    def metrics(self) -> Mapping[str, Metric]:
        share = self._last
        if share is None:
            return {}
        return measured({ROWS_PER_S: share.rows_per_s, STORE_MB: share.kept_mb if share.kept_mb < math.inf else None})

    def reaches(self, position: int) -> bool:
        return True

    def add_bookmark(self, mark: Mark) -> None:
        self._mark = mark

    def go_to_mark(self, position: int) -> int:
        """Go to ``position``. Return 0: the feeder reads past what is before it."""
        if position != self.position:
            self._drop_fetched()
        self.position = position
        return 0

    def bookmark(self, position: int) -> Mark | None:
        """Return the mark of the last batch that ended at ``position`` or before, with a digest of its rows."""
        known = [entry for entry in list(self._recent) if entry[1].position <= position]
        if known:
            request, mark, samples = max(known, key=lambda entry: (entry[1].position, entry[0].position))
            end = request.position + request.count
            whole = mark.position == end and isinstance(samples, Columns) and mark.state[ROW] >= request.count
            if whole and tells_position(samples):
                number = mark.state[ROW] - request.count + request.first
                mark = replace(mark, state={**mark.state, SEEN: [number, len(samples), digest(samples)]})
            self._mark = mark
        return self._mark if self._mark is not None and self._mark.position <= position else None

    def _drop_fetched(self) -> None:
        for _, future in self._fetched:
            future.cancel()
        self._fetched.clear()


def _result(future: Future[_Fetched], timeout_s: float) -> _Fetched:
    """Return what has been fetched; a result may come late, because the feeder has begun anew."""
    try:
        return future.result(timeout=2 * timeout_s)
    except NotYetError as e:
        raise LoaderError(f"no batch within {2 * timeout_s:g} s") from e


def _type_of(column: Any) -> str:
    """Return the type of a column of numbers; lists have arrays of several kinds, by their lengths."""
    return str(column.dtype) if column.ndim == 1 and column.dtype.kind != "O" else "object"
