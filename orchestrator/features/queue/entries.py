"""What the drivers of a cluster's runs and the queue of these runs tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.protocol.run_label import ID_LENGTH, run_label

QueueState = Literal["waiting", "unfit", "reserving", "running", "yielding"]
"""``waiting``: without workers; ``unfit``: without workers, and the cluster is too small for them; ``reserving``: may
acquire its workers, as the only run at a time; ``running``: has workers; ``yielding``: saves a checkpoint, and then
releases its workers and waits again. Only the queue says ``unfit``; the driver of such a run reports another state."""


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """A run in the queue, as its driver reports it.

    Attributes:
        location: its run directory or URL.
        submitted_at: seconds since the epoch; of two runs of equal priority, the earlier one goes first.
        priority: the higher one goes first.
        workers: the processes that it needs at least, spares included.
        most_workers: the processes that it takes at most, where there is room; 0 for as many as it needs.
        one_node: all workers must be on one node.
        autoscaling: its request may make the cluster add nodes.
        since: when it entered its state, in seconds since the epoch.
        user_share: see ``cluster.user_share``; None for no limit.
        sweep: the id of its sweep, whose runs may share a name; None if it belongs to none.
        workers_by_node: the workers for which it has reserved resources, by the id of their node.
        avoids: why none of its workers may start on some nodes, by node id.
        overtook: the uids of the runs before which it got its turn out of order. It makes room for each of them.
        over_share: the runs of its user have their share of the cluster already. Only the queue says so, of a run
            without workers.
    """

    uid: str
    name: str
    location: str
    user: str
    host: str
    submitted_at: float
    priority: int
    workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    one_node: bool
    autoscaling: bool
    since: float
    user_share: float | None = None
    state: QueueState = "waiting"
    workers_by_node: Mapping[str, int] = field(default_factory=dict)
    avoids: Mapping[str, str] = field(default_factory=dict)
    overtook: tuple[str, ...] = ()
    over_share: bool = False
    sweep: str | None = None
    most_workers: int = 0

    @property
    def id(self) -> str:
        """What tells the run apart from others of its name, short enough to type."""
        return self.uid[:ID_LENGTH]

    @property
    def label(self) -> str:
        """The name and the id of the run, as messages about held resources show it."""
        return run_label(self.name, self.uid)

    @property
    def has_workers(self) -> bool:
        """Whether the run holds resources."""
        return self.state in ("running", "yielding")


@dataclass(frozen=True, kw_only=True)
class QueueAnswer:
    """What the queue tells a run.

    Attributes:
        may_reserve: the run may acquire its workers.
        ahead: the names of the runs that go before it, in order.
        overtakes: the uids of these runs if it may acquire its workers all the same.
        running: the names of the runs that have workers.
        others_wait: whether other runs wait for resources.
        yield_to: the name of the run that needs the resources of this one; None to keep them.
        priority: the run's priority, which ``orchestrator queue priority`` may have changed.
        cancelled_by: who has cancelled the run; None if nobody has.
        unfit: the cluster is too small for the run, which has no place in the line.
        namesakes: the uids of other runs of its name that are not in its sweep.
    """

    may_reserve: bool
    ahead: tuple[str, ...]
    running: tuple[str, ...]
    others_wait: bool
    yield_to: str | None
    priority: int
    cancelled_by: str | None
    unfit: bool = False
    overtakes: tuple[str, ...] = ()
    namesakes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """The resources of a node: all of them, and those that Ray reports as free."""

    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
