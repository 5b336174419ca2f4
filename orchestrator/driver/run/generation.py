"""One generation: forms the process group, and watches it until every rank ends, one fails, or all pause."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import ray.exceptions

from orchestrator.display.terminal import native_warnings_dropped
from orchestrator.driver.gang.members import Member
from orchestrator.driver.process.calls import GATHER_S, NoAnswerError, cause_of_death, check_ray, completed, results
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.run.health import Health, failed_call_of
from orchestrator.driver.run.run_workers import Pause, RecoverableByRank, RunWorkers, abandon
from orchestrator.driver.run.telemetry import HEARTBEAT_WAIT_S, Telemetry
from orchestrator.planning.faults import Fault
from orchestrator.policy.failure import Outcomes, cannot_leave_nccl, death, no_store
from orchestrator.policy.hang import WatchedTime
from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.policy.run_state import GenerationEnd
from orchestrator.protocol.events import Event, GenerationStarted
from orchestrator.protocol.messages import Assignment, Heartbeat, Outcome, Place
from orchestrator.records.rank_log import crash_report
from orchestrator.storage.remote import Remote
from orchestrator.worker.base_actor import BaseWorker
from orchestrator.worker.control import rendezvous
from orchestrator.worker.process.network import LOOPBACK
from orchestrator.worker.process.node_facts import kernel_oom_kills

MIN_SETTLE_S, SETTLE_STEPS = 3.0, 2.0
"""After a failure, wait this long for another rank to report its own: seconds, or usual steps if these are longer."""
LONGEST_ROUND_FACTOR = 4.0
"""A round of heartbeats that takes more than this many times its interval says nothing about the workers."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a generation begins.

    Attributes:
        recovery_plan: where the state comes from; None in the first generation.
        recoverable: the state that the workers hold from earlier generations, by rank.
        checkpoint: what ranks load that get their state from no survivor; None to start from the beginning.
        checkpoint_remote: the directory on a store that it has to be fetched from; None if it is on disk.
        faults: those still to be injected.
        only_saves: the ranks are to save what they hold and to stop, because the run cannot continue.
        failures: how many failures have ended earlier generations.
        tracked_as: the id of the run on the tracking server; None if it is unknown.
    """

    recovery_plan: RecoveryPlan | None
    recoverable: RecoverableByRank
    checkpoint: Path | None
    checkpoint_remote: Remote | None
    faults: tuple[Fault, ...] = ()
    only_saves: bool = False
    failures: int = 0
    tracked_as: str | None = None


class Generation:
    """The ranks of a plan, from forming their group to the end of all their parts in it.

    Attributes:
        outcomes: how each rank's part ended, as far as it is known.
        health: what was found about the ranks.
    """

    def __init__(
        self,
        number: int,
        context: RunContext,
        workers: RunWorkers,
        start: Start,
        *,
        telemetry: Telemetry,
        earlier_hangs: Sequence[int],
    ):
        self.number = number
        self.outcomes = Outcomes(workers.plan.world_size)
        self.health = Health(
            number, context, workers, telemetry=telemetry, outcomes=self.outcomes, earlier_hangs=earlier_hangs
        )
        self._pause = Pause(number, context, workers, check=self._check_driver)
        self._start = start
        self._gang = workers.gang
        self._nodes = workers.nodes
        self._environment = workers.environment
        self._config = workers.environment.config
        self._plan = workers.plan
        self._run_dir = context.spec.run_dir
        self._run_uid = context.spec.run_uid
        self._telemetry = telemetry
        self._stop = context.stop
        self._lease = context.lease
        self._events = context.events
        self._store: Any = None  # of a script: has to live as long as the generation
        self._pending: dict[Any, Member] = {}  # by the reference to its outcome
        self._next_round = 0.0  # when the next heartbeats are due
        self._oom_kills = kernel_oom_kills()
        self._backend: Literal["gloo", "nccl"] = "nccl" if all(m.info.gpu_uuid for m in self._gang.members) else "gloo"

    def begin(self) -> None:
        """Let every rank join the group and train.

        Raises:
            GangError: Ray is dead.
            SupersededError: another driver has taken over the run.
        """
        members = self._gang.members
        if (store := self._open_store()) is None:
            return
        if self._backend == "gloo" and self._plan.device == "cuda" and self.number == 1:
            why = members[0].info.gpu_error
            self._events.warn(f"no worker can use the GPU that Ray has given it ({why}); they train on CPUs with gloo")
        self._events.emit(
            GenerationStarted(
                generation=self.number,
                backend=self._backend,
                device="cuda" if self._backend == "nccl" else "cpu",
                precision=self._config.train.precision,
                workers=tuple(_describe(m) for m in members),
            )
        )
        recovery_plan, checkpoint = self._start.recovery_plan, self._start.checkpoint
        fence = f"{uuid.uuid4().hex} generation {self.number}"
        self._lease.admit(fence)
        assignment = Assignment(
            generation=self.number,
            global_rank=0,
            store_host=store[0],
            store_port=store[1],
            backend=self._backend,
            run_dir=str(self._run_dir.path),
            remote=self._run_dir.remote,
            run_uid=self._run_uid,
            environment=self._environment,
            plan=self._plan,
            fence=fence,
            sources=None if recovery_plan is None else recovery_plan.sources,
            source_step=0 if recovery_plan is None else recovery_plan.step,
            checkpoint=None if checkpoint is None else str(checkpoint),
            checkpoint_remote=self._start.checkpoint_remote,
            faults=self._start.faults,
            places=_places(members),
            failures=self._start.failures,
            tracked_as=self._start.tracked_as,
        )
        packed = assignment.packed()  # once, not for every worker
        self._next_round = time.monotonic() + self._config.cluster.heartbeat_s  # the calls below take part of it
        for member in members:
            rank = member.global_rank
            train = member.actor.train.options(name=f"rank-{rank} {self._plan.run_name}")  # as the dashboard shows it
            self._pending[train.remote(packed, rank)] = member

    def watch(self) -> Iterator[Event]:
        """Yield the events that workers report, which have been emitted, until the generation is over.

        It is over when every rank has ended, when one has failed and the others have had time to notice, or when the
        grace period after a stop has passed.

        Raises:
            GangError: Ray is dead.
            SupersededError: another driver has taken over the run.
        """
        give_up_at: float | None = None
        abandoned, known_lost, settle_s = False, 0, MIN_SETTLE_S
        longest_round_s = LONGEST_ROUND_FACTOR * self._config.cluster.heartbeat_s + HEARTBEAT_WAIT_S
        watched = WatchedTime(time.monotonic(), longest_round_s=longest_round_s)
        while self._pending:
            if self.outcomes.any_failed and (not abandoned or len(self.health.lost_nodes) > known_lost):
                abandoned, known_lost = True, len(self.health.lost_nodes)
                settle_s = max(MIN_SETTLE_S, SETTLE_STEPS * self.health.usual_s)
                give_up_at = time.monotonic() + settle_s
                self._abandon()
            wait_until = self._next_round if give_up_at is None else min(self._next_round, give_up_at)
            timeout_s = max(0.0, wait_until - time.monotonic())
            ready = completed(self._pending, timeout_s, gather_s=GATHER_S if abandoned else 0.0)
            self._check_driver()
            self._record_outcomes(ready)
            if ready and abandoned and self._pause.reason != "stopped":  # a large gang takes longer
                give_up_at = time.monotonic() + settle_s
            if give_up_at is not None and time.monotonic() > give_up_at:
                break
            if not self._pending and self.outcomes.any_failed and not abandoned:
                self._abandon()
            if self._pending and time.monotonic() < self._next_round:
                continue
            ranks: Collection[int] | None = None  # the next in turn
            if not self._pending:
                ranks = self._gang.unanswered()
            elif self._pause.awaits_ranks:
                ranks = range(self._plan.world_size)
            collected = self._telemetry.collect(self._gang, ranks=ranks)
            yield from collected.events
            self._check_workers(collected.heartbeats, watched.advance(time.monotonic(), held=self.health.is_held))
            self._next_round = time.monotonic() + self._config.cluster.heartbeat_s
            stop_due = self._stop.received is not None or self._start.only_saves
            # A failed generation cannot stop in order; the next one can.
            if stop_due and self._pause.reason is None and not self.outcomes.any_failed:
                self._pause.stop()
                give_up_at = time.monotonic() + self._stop_limit_s()
        if (rank := self.outcomes.least_advanced(self._telemetry.last_step)) is not None:
            self.health.record_standstill(rank)

    def end(self) -> GenerationEnd:
        """Return what has happened in this generation, as far as it is known."""
        return GenerationEnd(
            outcomes=self.outcomes,
            last_step=max([self.outcomes.last_step, *self._telemetry.last_step.values()]),
            asked=self._pause.reason,
            asked_at=self._pause.began,
            draining=self._pause.draining,
            stopped_ago_s=None if self._stop.received is None else self._stop.seconds_ago,
            phases={rank: self.health.phase(rank) for rank in self.outcomes.unfinished},
        )

    def note_of_lost_with(self, rank: int) -> str | None:
        """Return a note on the ranks to replace that have not failed themselves; None if there are none."""
        if self._backend != "nccl":
            return None
        phases = {unfinished: self.health.phase(unfinished) for unfinished in self.outcomes.unfinished}
        return cannot_leave_nccl(phases, lost=rank)

    def _open_store(self) -> tuple[str, int] | None:
        """Open the store of the group on the node of rank 0: in this process for a script, whose workers have no torch.

        Returns:
            Its host and port; None if rank 0 has failed.
        """
        timeout_s = self._config.cluster.rendezvous_timeout_s
        members = self._gang.members
        on_one_node = len({m.info.node_id for m in members}) == 1
        if self._telemetry.runs_script and members[0].info.node_id == ray.get_runtime_context().get_node_id():
            host = LOOPBACK if on_one_node else ray.util.get_node_ip_address()
            with native_warnings_dropped():  # torch warns of an address without a name
                self._store = rendezvous.open_store(host, timeout_s=timeout_s)
            return host, self._store.port
        try:
            store: tuple[str, int] = self._gang.ask_one(
                0, BaseWorker.open_store, timeout_s, on_one_node, timeout_s=timeout_s, check=self._lease.check
            )
        except NoAnswerError:
            self._record_as_idle(besides=0)
            info = members[0].info
            self.health.terminate(0, no_store(timeout_s, pid=info.pid, hostname=info.hostname, time=time.time()))
            return None
        except ray.exceptions.RayError as e:
            self._record_as_idle(besides=0)
            self._record_errors([(members[0], e)])
            return None
        return store

    def _check_driver(self) -> None:
        """Check that this driver can go on.

        Raises:
            GangError: Ray is dead.
            SupersededError: another driver has taken over the run.
        """
        check_ray()
        self._lease.check()

    def _abandon(self) -> None:
        """Tell the ranks that this generation has ended, because one of them has failed."""
        abandon(
            self._gang,
            self.number,
            self.health.unreachable(),
            training={m.global_rank for m in self._pending.values()},
            failed={r for r in self.outcomes.returned if self.outcomes.by_rank[r].status == "failed"},
            aborts=self._backend == "nccl",
            check=self._check_driver,
        )

    def _record_outcomes(self, references: Sequence[Any]) -> None:
        """Record how the part of each rank ended whose call has completed."""
        errors: list[tuple[Member, ray.exceptions.RayError]] = []
        for reference, outcome in zip(references, results(references), strict=True):
            member = self._pending.pop(reference)
            rank = member.global_rank
            if isinstance(outcome, Outcome):
                self.outcomes.add(rank, outcome)
                if outcome.last_heartbeat is not None:
                    self._gang.add_last_heartbeat(rank, outcome.last_heartbeat)
            elif rank not in self.outcomes:  # otherwise the driver has killed it, for the reason recorded there
                errors.append((member, outcome))
        self._record_errors(errors)

    def _record_as_idle(self, *, besides: int) -> None:
        """Record that the ranks ``besides`` one that failed have not begun the generation, and keep their state."""
        for rank in range(self._plan.world_size):
            if rank != besides:
                step, states = self._telemetry.last_step.get(rank, 0), self._start.recoverable.get(rank, {})
                self.outcomes.add(rank, Outcome(status="stopped", step=step, recoverable_steps=states))

    def _record_errors(self, errors: Sequence[tuple[Member, ray.exceptions.RayError]]) -> None:
        """Record that calls to workers have failed, most likely because these died."""
        unexplained = {member.info.node_id for member, error in errors if cause_of_death(error) == "unknown"}
        self.health.lose_nodes(self._nodes.find_gone(unexplained - self.health.lost_nodes))
        for member, error in errors:
            self._record_error(member, error)

    def _record_error(self, member: Member, error: ray.exceptions.RayError) -> None:
        info = member.info
        if (cause := cause_of_death(error)) is None:
            self.health.record(member.global_rank, failed_call_of(info, error))
            return
        if cause == "unknown" and info.node_id in self.health.lost_nodes:
            cause = "node lost"
        if cause == "node lost":
            self.health.lose_nodes({info.node_id})
        oom_kills = kernel_oom_kills() if info.hostname == socket.gethostname() else None
        failure = death(
            cause,
            pid=info.pid,
            hostname=info.hostname,
            time=time.time(),
            crash_report=crash_report(self._run_dir.log_file(member.global_rank), info.pid),
            kernel_oom_kill=None not in (oom_kills, self._oom_kills) and oom_kills != self._oom_kills,
        )
        self.health.record(member.global_rank, failure)

    def _check_workers(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Judge the ranks after a round of heartbeats, and pause if it is due."""
        self.health.check(heartbeats, now)
        if self.outcomes.any_failed:
            return
        self._pause.observe(heartbeats)
        all_train = self._telemetry.has_trained(self.number) and not self.outcomes.by_rank
        if all_train and self._stop.received is None:
            self._pause.begin_if_due()

    def _stop_limit_s(self) -> float:
        """Return how long the ranks may take to stop: without a signal, also to form their group."""
        cluster = self._config.cluster
        return cluster.stop_grace_s + (cluster.rendezvous_timeout_s if self._stop.received is None else 0.0)


def _places(members: Sequence[Member]) -> tuple[Place, ...]:
    """Return the place of each rank."""
    nodes = list(dict.fromkeys(member.info.node_id for member in members))
    return tuple(Place(nodes.index(member.info.node_id), member.info.gpu_index) for member in members)


def _describe(member: Member) -> str:
    info = member.info
    gpu = "" if info.gpu_index is None else f" gpu {info.gpu_index}"
    return f"{info.place}{gpu} pid {info.pid}"
