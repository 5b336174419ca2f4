"""What defines a run, for its driver, and what all parts of the driver have at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.driver.process.event_stream import EventStream
from orchestrator.driver.process.signals import StopSignals
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.queue import QueueEntry
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What defines a run.

    Attributes:
        checkpoint: the checkpoint to resume from; None for a new run.
        resumed_from_step: the step of this checkpoint.
        started_at: seconds since the epoch.
        source: the other run that has made the checkpoint; None if this one has.
        secrets: texts to mask in what other nodes upload.
        pickled_job: see :class:`~orchestrator.protocol.messages.WorkerEnvironment`.
        queue_entry: the run in the queue of the cluster; None if it does not queue.
        checked_nodes: the ids of the nodes of a cluster that have been found able to run its workers.
        known_namesakes: the uids of other runs of its name that the user has been warned of.
    """

    config: Config
    sizes: Sizes
    run_dir: RunDir
    run_uid: str
    checkpoint: Path | None
    resumed_from_step: int | None
    started_at: float
    tokens_per_sample: int | None
    source: RunDir | None = None
    secrets: tuple[str, ...] = ()
    pickled_job: bytes | None = None
    queue_entry: QueueEntry | None = None
    checked_nodes: frozenset[str] = frozenset()
    known_namesakes: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every part of the driver of a run has at hand: the run, where its events go, its signals and its lease."""

    spec: RunSpec
    events: EventStream
    stop: StopSignals
    lease: Lease
