"""The end of a generation on all of its ranks: after a failure, or after a step, because the driver asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from orchestrator.driver.gang.gang import Gang
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.run.run_workers import RunWorkers
from orchestrator.protocol.events import EndReason, PauseReason, StopRequested
from orchestrator.protocol.messages import Heartbeat
from orchestrator.worker.base_actor import BaseWorker

MARK_TIMEOUT_S = 3.0


def abandon(
    gang: Gang,
    generation: int,
    unreachable: Sequence[str],
    *,
    training: Collection[int],
    failed: Collection[int],
    aborts: bool,
    check: Callable[[], None],
) -> None:
    """End ``generation``, which has failed, on its ranks.

    With NCCL, a rank that aborts may send garbage to one that still waits. So no rank aborts before every rank that
    trains knows that the generation has ended, and will make no update (``strategies/update/confirmation.py``). A rank
    that does not answer is killed: it could make one.

    Args:
        gang: the workers.
        generation: its number.
        unreachable: the IP addresses of lost nodes.
        training: the ranks that have not ended.
        failed: the ranks that have failed and may live.
        aborts: whether the ranks have to abort what they wait for, as with NCCL.
        check: runs while ranks are waited for, and may raise.
    """
    if not aborts:
        gang.tell(BaseWorker.abandon, generation, unreachable, ranks=training)
        return
    marked = gang.poll(
        BaseWorker.abandon, generation, unreachable, ranks=training, timeout_s=MARK_TIMEOUT_S, check=check
    )
    for rank in set(training) - marked.keys():
        gang.kill(rank)
    gang.tell(BaseWorker.abort, generation, ranks={*marked, *failed})


class Pause:
    """Ends a generation after a step: for the next one to continue with other workers, or for the run to stop.

    Attributes:
        reason: why the ranks were asked to end it; None if they were not.
        began: when they were asked, in seconds since the epoch.
        draining: the ranks to replace then.
    """

    def __init__(self, generation: int, context: RunContext, workers: RunWorkers, *, check: Callable[[], None]):
        self.reason: EndReason | None = None
        self.began = 0.0
        self.draining: tuple[int, ...] = ()
        self._generation = generation
        self._workers = workers
        self._gang = workers.gang
        self._plan = workers.plan
        self._stop = context.stop
        self._events = context.events
        self._answer_timeout_s = context.spec.config.cluster.stop_grace_s
        self._check = check
        self._leaving: set[int] = set()  # the ranks that have received SIGTERM
        self._awaited: set[int] = set()  # the ranks to hear from before the next attempt

    @property
    def awaits_ranks(self) -> bool:
        """Whether the next attempt waits until some ranks have answered."""
        return bool(self._awaited)

    def observe(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Note which ranks have received SIGTERM. Others may have too, so that every rank is asked before the pause."""
        self._awaited -= heartbeats.keys()
        leaving = {rank for rank, heartbeat in heartbeats.items() if heartbeat.leaving}
        if leaving - self._leaving:
            self._leaving |= leaving
            self._awaited = set(range(self._plan.world_size))

    def begin_if_due(self) -> None:
        """Pause if workers must leave, if all must make room, or if more could join."""
        if self.reason is not None or self._awaited:
            return
        nodes = self._workers.nodes.draining
        draining = self._leaving | {m.global_rank for m in self._gang.members if m.info.node_id in nodes}
        if draining:
            self.draining = tuple(sorted(draining))
            self._events.warn(
                f"{self._names(draining)} must leave (its node is draining, or its process got SIGTERM); "
                "the run saves a checkpoint and replaces it"
            )
            self._begin("preempted", save=True)
        elif self._workers.queue.yield_to is not None:
            self._begin("yielded", save=True)
        else:
            self._workers.refill()
            if (larger := self._workers.find_larger()) is not None:
                self._begin("growing", save=larger.state_sources is None)

    def stop(self) -> None:
        """Let all ranks save what they hold and stop, for the run to end."""
        self.reason, self.began = "stopped", time.time()
        if self._stop.received is not None and not self._stop.is_pruned:
            self._events.emit(StopRequested(signal=self._stop.cause))
        self._finish_step(save=True)

    def _finish_step(self, *, save: bool) -> bool:
        """Let all ranks stop after the most advanced step that any of them has begun.

        Returns:
            False if some ranks do not answer; those that do are held.
        """
        everyone = range(self._plan.world_size)
        timeout_s = self._answer_timeout_s
        begun = self._gang.poll(
            BaseWorker.hold, self._generation, ranks=everyone, timeout_s=timeout_s, check=self._check
        )
        self._awaited = set(everyone) - begun.keys()
        if self._awaited:
            names = self._names(self._awaited)
            self._events.warn(f"{names} did not answer the request to stop (cluster.stop_grace_s={timeout_s:g})")
            return False
        self._gang.tell(BaseWorker.finish_step, self._generation, max(begun.values()), save, ranks=everyone)
        return True

    def _begin(self, reason: PauseReason, *, save: bool) -> None:
        """End the generation after a step.

        If some ranks do not answer, the others train on. The next attempt is made when these have answered again.
        """
        began = time.time()
        if self._finish_step(save=save):
            self.reason, self.began = reason, began
        else:
            self._gang.tell(BaseWorker.open_gate, self._generation, ranks=range(self._plan.world_size))

    def _names(self, ranks: set[int]) -> str:
        return " and ".join(self._plan.display_name(rank) for rank in sorted(ranks))
