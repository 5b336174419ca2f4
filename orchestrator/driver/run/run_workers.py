"""The workers of a run: the wait for a turn and for room, the end of a generation on all of them, and the next gang."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import ray

from orchestrator.display.plain_text import count
from orchestrator.driver.code.worker_code import WorkerCode, worker_variables
from orchestrator.driver.gang.gang import Gang
from orchestrator.driver.gang.members import Members
from orchestrator.driver.gang.spares import Admission
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.process.waiting import TurnLostError, WaitMonitor
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import RankAssignment, find_rank_assignment, find_rescue, reassigned
from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.policy.worker_gpus import placement_note, with_common_precision
from orchestrator.protocol.events import EndReason, PauseReason, StopRequested
from orchestrator.protocol.messages import Heartbeat, RecoverableSteps, WorkerEnvironment
from orchestrator.protocol.run_label import run_label
from orchestrator.strategies import registry
from orchestrator.worker.base_actor import BaseWorker

RecoverableByRank = Mapping[int, RecoverableSteps]
"""By rank, the state that its worker holds."""


class AnyWorkers(Protocol):
    """What the records of a run need of its workers."""

    plan: Plan

    @property
    def gang(self) -> Members:
        """The workers that have a rank."""

    @property
    def waits_s(self) -> Mapping[str, float]:
        """How long the run has waited until now, in seconds: ``queue_s`` for its turns, ``waited_s`` for resources."""

    def name_of(self, rank: int) -> str:
        """Return how a rank is called."""

    def refill(self) -> None:
        """Start missing spares in the background."""


class RunWorkers:
    """The workers of a run. Use as a context manager, which releases all of them on exit.

    Attributes:
        plan: what the present generation follows, or the next one.
        environment: what all workers are given.
    """

    gang: Gang
    _admission: Admission

    def __init__(self, context: RunContext, code: WorkerCode):
        spec, config = context.spec, context.spec.config
        self.plan = spec.sizes.initial
        self.environment = WorkerEnvironment(
            working_dir=None if code.working_dir is not None else str(Path.cwd()),
            import_paths=tuple(str(Path(p).resolve()) for p in sys.path),
            config=config,
            pickled_job=spec.pickled_job,
        )
        self.nodes = NodeWatch(config.cluster.node_timeout_s)
        self.turns = spec.turns(
            context.events,
            context.stop,
            timeout_s=config.cluster.queue_timeout_s,
            unfit_timeout_s=config.cluster.unfit_timeout_s,
            known_namesakes=spec.known_namesakes,
            reserved=lambda: self.gang.reserved_by_node,
            avoids=lambda: self._admission.trouble(),
        )
        self._monitor = WaitMonitor(
            context.events,
            context.lease,
            context.stop,
            check_turn=self.turns.check_turn,
            offer_turn=self.turns.offer_turn,
        )
        self._admission = Admission(spec, code, self.nodes, self._monitor)
        self.gang = Gang(
            self.plan,
            self.environment,
            code,
            self.nodes,
            self._admission,
            self._monitor,
            variables=worker_variables(config.cluster.env, os.environ),
            label=run_label(self.plan.run_name, spec.run_uid),
        )
        self._config = config
        self._stop = context.stop
        self._events = context.events
        self._sizes = spec.sizes
        self._entered = contextlib.ExitStack()
        self._placement_note: str | None = None

    def __enter__(self) -> RunWorkers:
        with contextlib.ExitStack() as entered:
            for part in (self.nodes, self.turns, self.gang):
                entered.enter_context(part)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    @property
    def waits_s(self) -> Mapping[str, float]:
        """See :attr:`AnyWorkers.waits_s`."""
        return {"queue_s": self.turns.waited_s, "waited_s": self.gang.waited_s}

    @property
    def waited_s(self) -> float:
        """How long the run has waited until now, in seconds."""
        return sum(self.waits_s.values())

    def acquire(self) -> None:
        """Wait for the turn of the run, and acquire its workers, by the plan of a size for which there is room.

        Raises as :meth:`Gang.acquire`, but for TurnLostError.
        """
        while True:
            self.turns.wait_for_turn(self._monitor.check)
            try:
                plan = self.gang.acquire(self._sizes)
            except TurnLostError:
                self.gang.release()
                continue
            if plan is not self.plan:
                self._events.note(
                    f"the run starts with {plan.mesh.num_workers} of {self.plan.mesh.num_workers} workers, for which "
                    "there is room; it grows when there is more"
                )
            self.plan = plan
            self._choose_precision()
            return

    def _choose_precision(self) -> None:
        """Choose what all ranks compute in until the run ends."""
        refused = registry.load(self._config.strategy.name).refused_precisions
        train = with_common_precision(self._config.train, self.gang.workers, refused=refused)
        self.environment = replace(self.environment, config=replace(self._config, train=train))

    def name_of(self, rank: int) -> str:
        """Return how a rank is called. The name has the node, unless the driver and all workers are on one."""
        members = self.gang.members
        nodes = {ray.get_runtime_context().get_node_id(), *(member.info.node_id for member in members)}
        return self.plan.display_name(rank) + (f" on {members[rank].info.place}" if len(nodes) > 1 else "")

    def note_placement(self) -> None:
        """Say which parts of the mesh cross nodes, unless it has been said."""
        note = placement_note(self.plan.mesh, [member.info for member in self.gang.members])
        if note is not None and note != self._placement_note:
            self._events.note(note)
        self._placement_note = note

    def refill(self) -> None:
        """Start missing spares in the background, and workers for sizes that the cluster has no room for yet.

        If other runs wait, only the workers of the present plan are started, and what is beyond it is given back. So
        are workers that leave no CPU to the tasks of the data.
        """
        plan, most = self.plan, self._sizes.max_processes
        if self.turns.others_wait:
            most = plan.world_size + plan.spares
        elif self._sizes.cpus_of_data:
            most = min(most, self.gang.room_beside(self._sizes.cpus_of_data))
        self.gang.refill(most)

    def find_larger(self) -> RankAssignment | None:
        """Return an assignment larger than the plan for which all workers are ready; None if there is none.

        None if other runs wait.
        """
        plan, ready = self.plan, self.gang.ready()
        if self.turns.others_wait or not ready or plan is self._sizes.largest:
            return None
        assignment = find_rank_assignment(plan, self._sizes, range(plan.world_size), ready=ready, saved=True)
        is_larger = assignment is not None and assignment.plan.world_size > plan.world_size
        return assignment if is_larger else None

    def change(
        self, decision: RecoveryPlan, recoverable: RecoverableByRank, *, saved: bool
    ) -> tuple[RecoveryPlan, RecoverableByRank]:
        """Replace the lost workers, or continue with fewer or more of them.

        Args:
            recoverable: the state that the workers hold.
            saved: a checkpoint holds all of the state.

        Returns:
            How the next generation starts, and the state that its workers hold.

        Raises:
            NoWorkersError: not in time, or each new worker dies at once.
            Interrupted: a stop was requested.
        """
        alive = self._alive(decision)
        # A stop is obeyed in the next generation, which can save what survivors hold. Here it ends only the pause, and
        # the wait for a worker without which nothing could be saved, after a while.
        can_wait = decision.sources is not None and find_rescue(self.plan, self._sizes, alive) is None
        with self._monitor.grace(self._config.cluster.stop_grace_s if can_wait else 0.0):
            deadline = time.monotonic() + decision.pause_s
            while time.monotonic() < deadline and self._stop.received is None:
                time.sleep(0.1)
            self.gang.lose(decision.lost)
            if (assignment := self._change_size(alive, saved=saved)) is None:
                self.gang.replace(decision.lost)
                return decision, {rank: states for rank, states in recoverable.items() if rank in alive}
        self.plan = assignment.plan
        return reassigned(decision, assignment, recoverable), {}

    def rescue(self, decision: RecoveryPlan, recoverable: RecoverableByRank, *, newer_than: int) -> RecoveryPlan | None:
        """Let the survivors alone form a generation in which they save what they hold.

        Returns:
            How it starts; None if they hold nothing complete, or nothing that is ``newer_than`` that step.
        """
        assignment = find_rescue(self.plan, self._sizes, self._alive(decision))
        if assignment is None:
            return None
        plan = reassigned(decision, assignment, recoverable)
        if plan.sources is None or plan.step <= newer_than:
            return None
        self.gang.reassign_ranks(assignment.plan, assignment.before)
        self.plan = assignment.plan
        return plan

    def _change_size(self, alive: Collection[int], *, saved: bool) -> RankAssignment | None:
        """Give the present workers the ranks of a plan of another size; None if the run keeps its size.

        Waits until there are enough workers for the smallest size.
        """
        while self._sizes.is_elastic:
            self.gang.advance_spares()
            assignment = find_rank_assignment(self.plan, self._sizes, alive, ready=self.gang.ready(), saved=saved)
            if assignment is None:
                least = self._sizes.smallest.world_size
                missing = least - len(alive)
                wanted = f"{count(missing, 'worker')} more (has {len(alive)}, least {least})"
                self.gang.wait_for_spares(missing, wanted)
            elif assignment.plan is self.plan:
                return None
            elif self.gang.reassign_ranks(assignment.plan, assignment.before):
                return assignment
        return None

    def _alive(self, decision: RecoveryPlan) -> list[int]:
        return [rank for rank in range(self.plan.world_size) if rank not in decision.lost]


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
        elif self._workers.turns.yield_to is not None:
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
        self._finish_step(save=True, cuts=True)

    def _finish_step(self, *, save: bool, cuts: bool) -> bool:
        """Let all ranks stop after the most advanced step that any of them has begun.

        ``cuts``: whether an evaluation after this step ends at its next batch.

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
        last = max(begun.values())
        self._gang.tell(BaseWorker.finish_step, self._generation, last if cuts else last.step, save, ranks=everyone)
        return True

    def _begin(self, reason: PauseReason, *, save: bool) -> None:
        """End the generation after a step.

        If some ranks do not answer, the others train on. The next attempt is made when these have answered again.
        """
        began = time.time()
        if self._finish_step(save=save, cuts=reason != "growing"):
            self.reason, self.began = reason, began
        else:
            self._gang.tell(BaseWorker.open_gate, self._generation, ranks=range(self._plan.world_size))

    def _names(self, ranks: set[int]) -> str:
        return " and ".join(self._plan.display_name(rank) for rank in sorted(ranks))
