"""One generation: forms the process group, and watches it until every rank ends, one fails, or all pause."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ray.exceptions

from orchestrator.driver.gang.gang import Gang, Member
from orchestrator.driver.nodes.node_watch import NodeWatch, kernel_oom_kills
from orchestrator.driver.process.calls import NoAnswerError, cause_of_death, check_ray, completed, results
from orchestrator.driver.process.event_stream import EventStream
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.queue.queue_place import QueuePlace
from orchestrator.driver.run.abandonment import abandon
from orchestrator.driver.run.health import Health, failed_call_of
from orchestrator.driver.run.pause import Pause
from orchestrator.driver.run.resizing import Resizing
from orchestrator.driver.run.telemetry import HEARTBEAT_WAIT_S, Telemetry
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import Plan
from orchestrator.policy.failure import cannot_leave_nccl, death, no_store
from orchestrator.policy.hang import WatchedTime
from orchestrator.policy.outcomes import Outcomes
from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.protocol.events import Event, GenerationStarted, StopRequested
from orchestrator.protocol.messages import Assignment, Heartbeat, Outcome, RecoverableSteps, WorkerEnvironment
from orchestrator.records.lease import Lease
from orchestrator.records.rank_log import crash_report
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.actor import Worker

MIN_SETTLE_S, SETTLE_STEPS = 3.0, 2.0
"""After a failure, wait this long for another rank to report its own: seconds, or usual steps if these are longer."""
GATHER_S = 0.05
"""While a generation is ending, wait this long for more outcomes after one, because each wait examines all pending."""
LONGEST_ROUND_FACTOR = 4.0
"""A round of heartbeats that takes more than this many times its interval says nothing about the workers."""


class Generation:
    """The ranks of ``plan``, from forming their group to the end of all their parts in it.

    ``outcomes``: how each rank's part ended, as far as it is known. ``health``: what was found about the ranks.
    ``pause``: whether and why all ranks were asked to end this generation, so that the next one can continue.
    ``stop_sent``: the ranks were asked to stop because of a signal.
    ``only_saves``: the ranks are asked to save what they hold and to stop, because the run cannot continue.
    """

    def __init__(
        self,
        number: int,
        gang: Gang,
        environment: WorkerEnvironment,
        plan: Plan,
        run_dir: RunDir,
        *,
        telemetry: Telemetry,
        stop: StopSignals,
        nodes: NodeWatch,
        lease: Lease,
        events: EventStream,
        resizing: Resizing,
        queue: QueuePlace,
        earlier_hangs: Sequence[int],
    ):
        config = environment.config
        self.number = number
        self.outcomes = Outcomes(plan.world_size)
        self.health = Health(
            number,
            gang,
            plan,
            config,
            run_dir,
            telemetry=telemetry,
            nodes=nodes,
            outcomes=self.outcomes,
            earlier_hangs=earlier_hangs,
        )
        self.pause = Pause(
            number,
            gang,
            plan,
            nodes=nodes,
            queue=queue,
            resizing=resizing,
            events=events,
            answer_timeout_s=config.cluster.stop_grace_s,
            check=self._check_driver,
        )
        self.stop_sent = False
        self.only_saves = False
        self._gang = gang
        self._nodes = nodes
        self._environment = environment
        self._config = config
        self._plan = plan
        self._run_dir = run_dir
        self._telemetry = telemetry
        self._stop = stop
        self._lease = lease
        self._events = events
        self._pending: dict[Any, Member] = {}  # by the reference to its outcome
        self._next_round = 0.0  # when the next heartbeats are due
        self._oom_kills = kernel_oom_kills()
        self._backend: Literal["gloo", "nccl"] = "nccl" if all(m.info.gpu_uuid for m in gang.members) else "gloo"

    def begin(
        self,
        run_uid: str,
        recovery_plan: RecoveryPlan | None,
        *,
        recoverable_steps: Mapping[int, RecoverableSteps],
        checkpoint: Path | None,
        faults: tuple[Fault, ...],
    ) -> None:
        """Let every rank join the group and train.

        Args:
            run_uid: the id that checkpoints of this run carry.
            recovery_plan: where the state comes from; None in the first generation.
            recoverable_steps: the state that the workers hold from earlier generations, by rank.
            checkpoint: what ranks load that get their state from no survivor; None to start from the beginning.
            faults: those still to be injected.

        Raises:
            GangError: Ray is dead.
            SupersededError: another driver has taken over the run.
        """
        members = self._gang.members
        if (store := self._open_store(recoverable_steps)) is None:
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
            run_uid=run_uid,
            environment=self._environment,
            plan=self._plan,
            fence=fence,
            sources=None if recovery_plan is None else recovery_plan.sources,
            source_step=0 if recovery_plan is None else recovery_plan.step,
            checkpoint=None if checkpoint is None else str(checkpoint),
            faults=faults,
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
            if ready and abandoned and not self.stop_sent:  # a large gang takes longer
                give_up_at = time.monotonic() + settle_s
            if give_up_at is not None and time.monotonic() > give_up_at:
                return
            if not self._pending and self.outcomes.any_failed and not abandoned:
                self._abandon()
            if self._pending and time.monotonic() < self._next_round:
                continue
            ranks: Collection[int] | None = None  # the next in turn
            if not self._pending:
                ranks = self._gang.unanswered()
            elif self.pause.awaits_ranks:
                ranks = range(self._plan.world_size)
            collected = self._telemetry.collect(self._gang, ranks=ranks)
            yield from collected.events
            self._check_workers(collected.heartbeats, watched.advance(time.monotonic()))
            self._next_round = time.monotonic() + self._config.cluster.heartbeat_s
            is_asked = self._stop.received is not None or self.only_saves
            stop_due = is_asked and not self.stop_sent and self.pause.reason is None
            if stop_due and not self.outcomes.any_failed:  # a failed generation cannot stop in order; the next one can
                self._coordinate_stop()
                give_up_at = time.monotonic() + self._stop_limit_s()

    def find_failed_rank(self) -> int | None:
        """Return the rank that failed first; None if none did.

        If all reported failures are broken connections, the cause is the least advanced rank that has not ended. It is
        recorded as failed.
        """
        rank, unfinished = self.outcomes.first_failed, self.outcomes.unfinished
        if rank is None or not self.outcomes.failure(rank).collateral or not unfinished:
            return rank
        rank = min(unfinished, key=lambda r: (self._telemetry.last_step.get(r, 0), r))
        self.health.record_standstill(rank)
        return rank

    def last_step(self) -> int:
        """Return the last step that any rank has completed."""
        return max([self.outcomes.last_step, *self._telemetry.last_step.values()])

    def note_of_lost_with(self, rank: int) -> str | None:
        """Return a note on the ranks to replace that have not failed themselves; None if there are none."""
        if self._backend != "nccl":
            return None
        phases = {unfinished: self.health.phase(unfinished) for unfinished in self.outcomes.unfinished}
        return cannot_leave_nccl(phases, lost=rank)

    def _open_store(self, recoverable_steps: Mapping[int, RecoverableSteps]) -> tuple[str, int] | None:
        """Let rank 0 open the store of the group; returns its host and port, or None if rank 0 has failed."""
        timeout_s = self._config.cluster.rendezvous_timeout_s
        members = self._gang.members
        on_one_node = len({m.info.node_id for m in members}) == 1
        try:
            store: tuple[str, int] = self._gang.ask_one(
                0, Worker.open_store, timeout_s, on_one_node, timeout_s=timeout_s, check=self._lease.check
            )
        except NoAnswerError:
            self._record_as_idle(recoverable_steps, besides=0)
            info = members[0].info
            self.health.terminate(0, no_store(timeout_s, pid=info.pid, hostname=info.hostname, time=time.time()))
            return None
        except ray.exceptions.RayError as e:
            self._record_as_idle(recoverable_steps, besides=0)
            self._record_error(members[0], e)
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
        for reference, outcome in zip(references, results(references), strict=True):
            member = self._pending.pop(reference)
            rank = member.global_rank
            if isinstance(outcome, Outcome):
                self.outcomes.add(rank, outcome)
                if outcome.last_heartbeat is not None:
                    self._gang.add_last_heartbeat(rank, outcome.last_heartbeat)
            elif rank not in self.outcomes:  # otherwise the driver has killed it, for the reason recorded there
                self._record_error(member, outcome)

    def _record_as_idle(self, recoverable_steps: Mapping[int, RecoverableSteps], *, besides: int) -> None:
        """Record that the ranks ``besides`` one that failed have not begun the generation, and keep their state."""
        for rank in range(self._plan.world_size):
            if rank != besides:
                step, states = self._telemetry.last_step.get(rank, 0), recoverable_steps.get(rank, {})
                self.outcomes.add(rank, Outcome(status="stopped", step=step, recoverable_steps=states))

    def _record_error(self, member: Member, error: ray.exceptions.RayError) -> None:
        """Record that a call to a worker has failed, most likely because it died."""
        info = member.info
        if (cause := cause_of_death(error)) is None:
            self.health.record(member.global_rank, failed_call_of(info, error))
            return
        if cause == "unknown" and (info.node_id in self.health.lost_nodes or self._nodes.is_gone(info.node_id)):
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
        self.pause.observe(heartbeats)
        all_train = self._telemetry.has_trained(self.number) and not self.outcomes.by_rank
        if all_train and self._stop.received is None:
            self.pause.begin_if_due()

    def _coordinate_stop(self) -> None:
        self.stop_sent = True
        if self._stop.received is not None:
            self._events.emit(StopRequested(signal=self._stop.cause))
        self.pause.finish_step(save=True)

    def _stop_limit_s(self) -> float:
        """Return how long the ranks may take to stop: without a signal, also to form their group."""
        cluster = self._config.cluster
        return cluster.stop_grace_s + (cluster.rendezvous_timeout_s if self._stop.received is None else 0.0)


def _describe(member: Member) -> str:
    info = member.info
    gpu = "" if info.gpu_index is None else f" gpu {info.gpu_index}"
    return f"{info.place}{gpu} pid {info.pid}"
