"""One generation: forms the process group, and watches it until every rank ends, one fails, or all pause."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import ray
import ray.exceptions

from orchestrator.driver.abandonment import abandon
from orchestrator.driver.calls import (
    NoAnswerError,
    cause_of_death,
    check_ray,
    completed,
    describe_error,
    results,
)
from orchestrator.driver.event_stream import EventStream
from orchestrator.driver.gang import Gang, Member
from orchestrator.driver.growth import Growth
from orchestrator.driver.hang_report import write_stacks
from orchestrator.driver.node_watch import NodeWatch, kernel_oom_kills
from orchestrator.driver.queue_place import QueuePlace
from orchestrator.driver.signals import StopSignals
from orchestrator.driver.telemetry import HEARTBEAT_WAIT_S, Telemetry
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import Plan
from orchestrator.policy.failure import (
    death,
    failed_call,
    first_failure,
    hang,
    no_store,
    node_loss,
    silence,
    standstill,
    stopped,
    too_slow,
    unreachable_addresses,
)
from orchestrator.policy.hang import HangDetector, WatchedTime, culprit
from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.protocol.events import Event, GenerationStarted, PauseReason, StopRequested
from orchestrator.protocol.messages import (
    Assignment,
    Failure,
    Heartbeat,
    Outcome,
    RecoverableSteps,
    Stacks,
    WorkerEnvironment,
    WorkerInfo,
)
from orchestrator.records.lease import Lease
from orchestrator.records.rank_log import crash_report
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.worker.actor import Worker

MIN_SETTLE_S, SETTLE_STEPS = 3.0, 2.0
"""After a failure, wait this long for another rank to report its own: seconds, or usual steps if these are longer."""
GATHER_S = 0.05
"""While a generation is ending, wait this long for more outcomes after one, because each wait examines all pending."""
STACKS_TIMEOUT_S = 2.0
LONGEST_ROUND_FACTOR = 4.0
"""A round of heartbeats that takes more than this many times its interval says nothing about the workers."""


class Generation:
    """The ranks of ``plan``, from forming their group to the end of all their parts in it.

    ``outcomes``: how each rank's part ended, as far as it is known. ``returned``: the ranks whose process lives.
    ``stop_sent``: the ranks were asked to stop because of a signal.
    ``paused``: why all ranks were asked to end this generation after a step, so that the next one can continue with
    other workers; None if they were not. ``paused_at``: when, in seconds since the epoch.
    ``draining``: the ranks to replace then.
    ``only_saves``: the ranks are asked to save what they hold and to stop, because the run cannot continue.
    ``hung_at``: the last step of the rank that was killed because it hung; None if none was.
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
        growth: Growth,
        queue: QueuePlace,
        earlier_hangs: Sequence[int],
    ):
        self.number = number
        self.outcomes: dict[int, Outcome] = {}
        self.returned: set[int] = set()
        self.stop_sent = False
        self.only_saves = False
        self.paused: PauseReason | None = None
        self.paused_at = 0.0
        self.draining: tuple[int, ...] = ()
        self.hung_at: int | None = None
        self._gang = gang
        self._environment = environment
        self._config = environment.config
        self._plan = plan
        self._run_dir = run_dir
        self._telemetry = telemetry
        self._stop = stop
        self._nodes = nodes
        self._lease = lease
        self._events = events
        self._growth = growth
        self._queue = queue
        self._pending: dict[Any, Member] = {}  # by the reference to its outcome
        self._next_round = 0.0  # when the next heartbeats are due
        self._heard_at: dict[int, float] = {}
        self._lost_nodes: set[str] = set()
        self._leaving: set[int] = set()  # the ranks that have received SIGTERM
        self._awaited: set[int] = set()  # the ranks to hear from before the next attempt to pause
        synchronous = registry.load(self._config.strategy.name).is_synchronous(self._config.strategy)
        self._hang_detector = HangDetector(self._config.recovery, synchronous=synchronous, earlier_hangs=earlier_hangs)
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
        timeout_s = self._config.cluster.rendezvous_timeout_s
        on_one_node = len({m.info.node_id for m in members}) == 1
        try:
            host, port = self._gang.ask_one(
                0, Worker.open_store, timeout_s, on_one_node, timeout_s=timeout_s, check=self._lease.check
            )
        except NoAnswerError:
            info = members[0].info
            self._record_as_idle(recoverable_steps, besides=0)
            self._terminate(0, no_store(timeout_s, pid=info.pid, hostname=info.hostname, time=time.time()))
            return
        except ray.exceptions.RayError as e:
            self._record_as_idle(recoverable_steps, besides=0)
            self._record_error(members[0], e)
            return
        backend = self._backend
        if backend == "gloo" and self._plan.device == "cuda" and self.number == 1:
            why = members[0].info.gpu_error
            self._events.warn(f"no worker can use the GPU that Ray has given it ({why}); they train on CPUs with gloo")
        self._events.emit(
            GenerationStarted(
                generation=self.number,
                backend=backend,
                device="cuda" if backend == "nccl" else "cpu",
                precision=self._config.train.precision,
                workers=tuple(_describe(m) for m in members),
            )
        )
        fence = f"{uuid.uuid4().hex} generation {self.number}"
        self._lease.admit(fence)
        assignment = Assignment(
            generation=self.number,
            global_rank=0,
            store_host=host,
            store_port=port,
            backend=backend,
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
            if self._failed() and (not abandoned or len(self._lost_nodes) > known_lost):
                abandoned, known_lost = True, len(self._lost_nodes)
                settle_s = max(MIN_SETTLE_S, SETTLE_STEPS * self._hang_detector.usual_s)
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
            if not self._pending and self._failed() and not abandoned:
                self._abandon()
            if self._pending and time.monotonic() < self._next_round:
                continue
            ranks: Collection[int] | None = None  # the next in turn
            if not self._pending:
                ranks = self._gang.unanswered()
            elif self._awaited:
                ranks = range(self._plan.world_size)
            collected = self._telemetry.collect(self._gang, ranks=ranks)
            yield from collected.events
            self._check_workers(collected.heartbeats, watched.advance(time.monotonic()))
            self._next_round = time.monotonic() + self._config.cluster.heartbeat_s
            is_asked = self._stop.received is not None or self.only_saves
            stop_due = is_asked and not self.stop_sent and self.paused is None
            if stop_due and not self._failed():  # a failed generation cannot stop in order; the next one can
                self._coordinate_stop()
                give_up_at = time.monotonic() + self._stop_limit_s()

    def find_failed_rank(self) -> int | None:
        """Return the rank that failed first; None if none did.

        If all reported failures are broken connections, the cause is the least advanced rank that has not ended. It is
        recorded as failed.
        """
        rank = first_failure(self.outcomes)
        failure = None if rank is None else self.outcomes[rank].failure
        unfinished = [rank for rank in range(self._plan.world_size) if rank not in self.outcomes]
        if failure is None or not failure.collateral or not unfinished:
            return rank
        rank = min(unfinished, key=lambda r: (self._telemetry.last_step.get(r, 0), r))
        phase = self._hang_detector.phase(rank)
        self._record_failure(rank, standstill(self._config.cluster, phase, time=time.time()))
        return rank

    def survivors(self) -> dict[int, RecoverableSteps]:
        """Return the state that each rank holds whose process can continue."""
        return {
            rank: outcome.recoverable_steps
            for rank, outcome in self.outcomes.items()
            if rank in self.returned and (outcome.failure is None or outcome.failure.collateral)
        }

    def all_ended(self, status: Literal["done", "stopped"]) -> bool:
        """Return whether every rank has ended with ``status``."""
        return len(self.outcomes) == self._plan.world_size and all(o.status == status for o in self.outcomes.values())

    def last_step(self) -> int:
        """Return the last step that any rank has completed."""
        ended = [o.step for o in self.outcomes.values()]
        return max([*ended, *self._telemetry.last_step.values()], default=0)

    def unreachable(self) -> tuple[str, ...]:
        """Return the IP addresses of the nodes that were lost in this generation."""
        return unreachable_addresses([m.info for m in self._gang.members], self._lost_nodes)

    def failure(self, rank: int) -> Failure:
        """Return the failure of a rank that has failed."""
        failure = self.outcomes[rank].failure
        assert failure is not None
        return failure

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
            self.unreachable(),
            training={m.global_rank for m in self._pending.values()},
            failed={rank for rank in self.returned if self.outcomes[rank].status == "failed"},
            aborts=self._backend == "nccl",
            check=self._check_driver,
        )

    def _failed(self) -> bool:
        return any(o.status == "failed" for o in self.outcomes.values())

    def _record_outcomes(self, references: Sequence[Any]) -> None:
        """Record how the part of each rank ended whose call has completed."""
        for reference, outcome in zip(references, results(references), strict=True):
            member = self._pending.pop(reference)
            rank = member.global_rank
            if isinstance(outcome, Outcome):
                self.returned.add(rank)
                self.outcomes.setdefault(rank, outcome)
                if outcome.last_heartbeat is not None:
                    self._gang.add_last_heartbeat(rank, outcome.last_heartbeat)
            elif rank not in self.outcomes:  # otherwise the driver has killed it, for the reason recorded there
                self._record_error(member, outcome)

    def _record_as_idle(self, recoverable_steps: Mapping[int, RecoverableSteps], *, besides: int) -> None:
        """Record that the ranks ``besides`` one that failed have not begun the generation, and keep their state."""
        for rank in range(self._plan.world_size):
            if rank != besides:
                step, states = self._telemetry.last_step.get(rank, 0), recoverable_steps.get(rank, {})
                self.returned.add(rank)
                self.outcomes[rank] = Outcome(status="stopped", step=step, recoverable_steps=states)

    def _record_error(self, member: Member, error: ray.exceptions.RayError) -> None:
        """Record that a call to a worker has failed, most likely because it died."""
        info = member.info
        if (cause := cause_of_death(error)) is None:
            self._record_failure(member.global_rank, _failed_call(info, error))
            return
        if cause == "node lost":
            self._lose_nodes({info.node_id})
        oom_kills = kernel_oom_kills() if info.hostname == socket.gethostname() else None
        failure = death(
            cause,
            pid=info.pid,
            hostname=info.hostname,
            time=time.time(),
            crash_report=crash_report(self._run_dir.log_file(member.global_rank), info.pid),
            kernel_oom_kill=None not in (oom_kills, self._oom_kills) and oom_kills != self._oom_kills,
        )
        self._record_failure(member.global_rank, failure)

    def _record_failure(self, rank: int, failure: Failure) -> None:
        self.outcomes[rank] = Outcome(status="failed", step=self._telemetry.last_step.get(rank, 0), failure=failure)

    def _check_workers(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Terminate ranks that do not answer, make no progress or slow the others down; pause if it is due."""
        unfinished = [m for m in self._pending.values() if m.global_rank not in self.outcomes]
        unanswered = self._gang.unanswered()
        for member in unfinished:
            rank = member.global_rank
            self._heard_at.setdefault(rank, now)
            if rank not in unanswered:
                self._heard_at[rank] = now
            if (heartbeat := heartbeats.get(rank)) is not None:
                self._hang_detector.observe(rank, heartbeat, now)
        silent_nodes = self._nodes.silent(self._answers_by_node(heartbeats), now)
        on_silent_node = [m for m in unfinished if m.info.node_id in silent_nodes]
        self._lose_nodes({m.info.node_id for m in on_silent_node})
        if self._failed():
            return
        node_timeout_s = self._config.cluster.node_timeout_s
        for member in on_silent_node:
            failure = node_loss(node_timeout_s, hostname=member.info.hostname, time=time.time())
            self._terminate(member.global_rank, failure)
        for rank, error in self._gang.failed_heartbeats.items():
            if rank not in self.outcomes:
                self._terminate(rank, _failed_call(self._gang.members[rank].info, error))
        slow = self._telemetry.straggler
        if slow is not None and self._config.recovery.replace_stragglers and self._is_training(slow.rank):
            self._terminate(slow.rank, too_slow(slow.slower_by, time=time.time()))
            return
        for member in unfinished:
            if member.global_rank not in self.outcomes:
                self._terminate_if_silent(member, now)
        if not self._failed() and (hanging := self._hang_detector.hanging([m.global_rank for m in unfinished], now)):
            self._terminate_culprit(hanging, now)
        self._awaited -= heartbeats.keys()
        self._find_leaving(heartbeats)
        all_train = self._telemetry.has_trained(self.number) and not self.outcomes
        may_pause = all_train and self.paused is None and self._stop.received is None
        if may_pause and not self._awaited:
            self._pause_if_due()

    def _lose_nodes(self, node_ids: Collection[str]) -> None:
        self._lost_nodes.update(node_ids)
        self._nodes.lost.update(node_ids)

    def _is_training(self, rank: int) -> bool:
        return rank not in self.outcomes and self._telemetry.last_step.get(rank, 0) < self._plan.steps

    def _answers_by_node(self, heartbeats: Mapping[int, Heartbeat]) -> dict[str, dict[int, bool]]:
        """For each node with ranks, whether each of their processes has answered."""
        answers: dict[str, dict[int, bool]] = {}
        for member in self._gang.members:
            answers.setdefault(member.info.node_id, {})[member.info.pid] = member.global_rank in heartbeats
        return answers

    def _find_leaving(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Note which ranks have received SIGTERM. Others may have too, so that every rank is asked before the pause."""
        leaving = {rank for rank, heartbeat in heartbeats.items() if heartbeat.leaving}
        if leaving - self._leaving:
            self._leaving |= leaving
            self._awaited = set(range(self._plan.world_size))

    def _pause_if_due(self) -> None:
        """End the generation after a step if workers must leave, if all must make room, or if more could join."""
        nodes = self._nodes.draining
        draining = self._leaving | {m.global_rank for m in self._gang.members if m.info.node_id in nodes}
        if draining:
            self.draining = tuple(sorted(draining))
            who = " and ".join(self._plan.display_name(rank) for rank in self.draining)
            self._events.warn(
                f"{who} must leave (its node is draining, or its process got SIGTERM); "
                "the run saves a checkpoint and replaces it"
            )
            self._pause("preempted", save=True)
        elif self._queue.yield_to is not None:
            self._pause("yielded", save=True)
        elif not self._queue.others_wait and (larger := self._growth.start_and_find()) is not None:
            self._pause("growing", save=larger.state_sources is None)

    def _pause(self, why: PauseReason, *, save: bool) -> None:
        """End the generation after a step.

        If some ranks do not answer, the others train on. The next attempt is made when these have answered again.
        """
        paused_at = time.time()
        if self._finish_step(save=save):
            self.paused, self.paused_at = why, paused_at
        else:
            self._gang.tell(Worker.open_gate, self.number, ranks=range(self._plan.world_size))

    def _coordinate_stop(self) -> None:
        self.stop_sent = True
        if self._stop.received is not None:
            self._events.emit(StopRequested(signal=self._stop.cause))
        self._finish_step(save=True)

    def _stop_limit_s(self) -> float:
        """Return how long the ranks may take to stop: without a signal, also to form their group."""
        cluster = self._config.cluster
        return cluster.stop_grace_s + (cluster.rendezvous_timeout_s if self._stop.received is None else 0.0)

    def _finish_step(self, *, save: bool) -> bool:
        """Let all ranks stop after the most advanced step that any of them has begun.

        Returns:
            False if some ranks do not answer; those that do are held.
        """
        everyone = range(self._plan.world_size)
        timeout_s = self._config.cluster.stop_grace_s
        begun = self._gang.poll(Worker.hold, self.number, ranks=everyone, timeout_s=timeout_s, check=self._check_driver)
        self._awaited = set(everyone) - begun.keys()
        if self._awaited:
            who = " and ".join(self._plan.display_name(rank) for rank in sorted(self._awaited))
            self._events.warn(f"{who} did not answer the request to stop (cluster.stop_grace_s={timeout_s:g})")
            return False
        self._gang.tell(Worker.finish_step, self.number, max(begun.values()), save, ranks=everyone)
        return True

    def _terminate_if_silent(self, member: Member, now: float) -> None:
        """Terminate a rank that has not answered for too long, which is not long if its process is stopped."""
        cluster, info = self._config.cluster, member.info
        silent_s = now - self._heard_at[member.global_rank]
        if silent_s > cluster.stopped_timeout_s and self._nodes.is_stopped(info):
            describe, timeout_s = stopped, cluster.stopped_timeout_s
        elif silent_s > cluster.heartbeat_timeout_s:
            describe, timeout_s = silence, cluster.heartbeat_timeout_s
        else:
            return
        failure = describe(timeout_s, pid=info.pid, hostname=info.hostname, time=time.time())
        self._terminate(member.global_rank, failure)

    def _terminate_culprit(self, hanging: Sequence[int], now: float) -> None:
        """Write the stacks of all ranks to a file, and terminate the rank that most likely causes the hang."""
        answering = [
            rank for rank in range(self._plan.world_size) if now - self._heard_at.get(rank, now) < STACKS_TIMEOUT_S
        ]
        answers = self._gang.poll(Worker.stacks, ranks=answering, timeout_s=STACKS_TIMEOUT_S)
        stacks = cast("dict[int, Stacks]", answers)
        rank, why = culprit(
            hanging,
            waiting={rank: stack.waiting for rank, stack in stacks.items()},
            steps=self._telemetry.last_step,
            enqueued={rank: stack.flight.enqueued for rank, stack in stacks.items() if stack.flight is not None},
        )
        self.hung_at = self._telemetry.last_step.get(rank, 0)
        what = self._hang_detector.describe(rank, now)
        report = write_stacks(self._run_dir, self.number, self._plan, stacks)
        self._terminate(rank, hang(what, why, stacks=report, time=time.time()))

    def _terminate(self, rank: int, failure: Failure) -> None:
        """Kill a rank's process. This closes its connections, which frees the ranks that wait for it."""
        self._record_failure(rank, failure)
        self._gang.kill(rank)


def _failed_call(info: WorkerInfo, error: ray.exceptions.RayError) -> Failure:
    what = describe_error(error)
    return failed_call(what, pid=info.pid, hostname=info.hostname, time=time.time(), traceback=str(error))


def _describe(member: Member) -> str:
    info = member.info
    gpu = "" if info.gpu_index is None else f" gpu {info.gpu_index}"
    return f"{info.place}{gpu} pid {info.pid}"
