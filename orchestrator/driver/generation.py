"""One generation: the group formed, watched until every rank has come to an end, one has failed, or all pause."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import ray
import ray.exceptions

from orchestrator.driver.calls import GangError, cause_of_death, check_ray
from orchestrator.driver.gang import Gang, Member
from orchestrator.driver.node_watch import NodeWatch
from orchestrator.driver.signals import StopSignals
from orchestrator.driver.telemetry import Telemetry
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import RankAssignment
from orchestrator.policy.failure import death, first_failure, hang, node_loss, silence, standstill, too_slow
from orchestrator.policy.hang import HangDetector, culprit
from orchestrator.policy.recovery import RecoverableSteps, RecoveryPlan
from orchestrator.protocol.events import Event, GenerationStarted, StopRequested, Warned
from orchestrator.protocol.messages import Assignment, Failure, Heartbeat, Outcome, Stacks, WorkerEnvironment
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import RunDir, write_json

SETTLE_S, SETTLE_STEPS = 3.0, 2.0
"""After a failure, time for the other ranks to say what they saw: seconds, or usual steps where these take longer."""
STACKS_TIMEOUT_S = 2.0
Pause = Literal["preempted", "growing"]
LISTENING_S = 0.1
"""Between two looks while something is known to be wrong."""


class Generation:
    """``outcomes``: what became of each rank, as far as it is known; ``returned``: the ranks whose process lives on.

    ``paused``: why all ranks were asked to end it after a step, for the next generation to go on with other workers.
    ``paused_at``: when, in seconds since the epoch. ``leaving``: the ranks that have to go by then.
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
        emit: Callable[[Event], None],
        growth: Callable[[], RankAssignment | None],
    ):
        self.number = number
        self.outcomes: dict[int, Outcome] = {}
        self.returned: set[int] = set()
        self.stop_sent = False
        self.paused: Pause | None = None
        self.paused_at = 0.0
        self.leaving: tuple[int, ...] = ()
        self._gang = gang
        self._environment = environment
        self._config = environment.config
        self._plan = plan
        self._run_dir = run_dir
        self._telemetry = telemetry
        self._stop = stop
        self._nodes = nodes
        self._lease = lease
        self._emit = emit
        self._growth = growth
        self._pending: dict[Any, Member] = {}
        self._silent_since: dict[int, float] = {}
        self._unreachable: tuple[str, ...] = ()
        self._hang_detector = HangDetector(self._config.recovery)

    def begin(
        self,
        run_uid: str,
        recovery_plan: RecoveryPlan | None,
        *,
        recoverable_steps: Mapping[int, RecoverableSteps],
        checkpoint: Path | None,
        faults: tuple[Fault, ...],
    ) -> None:
        """Have every rank join and train; ``recovery_plan``: where it goes on from, after another generation.

        ``recoverable_steps``: what the workers have from before.

        Raises:
            GangError: Ray is gone.
        """
        members, cluster = self._gang.members, self._config.cluster
        timeout_s = cluster.rendezvous_timeout_s
        try:
            host, port = self._gang.ask_one(0, "open_store", timeout_s, timeout_s=timeout_s)
        except ray.exceptions.RayError as e:
            self._lost_before(members[0], e, recoverable_steps)
            return
        backend: Literal["gloo", "nccl"] = "nccl" if all(m.info.gpu_uuid for m in members) else "gloo"
        if backend == "gloo" and self._plan.device == "cuda":
            self._emit(Warned(message="Ray has GPUs, the workers see no CUDA device: on CPUs with gloo"))
        self._emit(
            GenerationStarted(
                generation=self.number,
                backend=backend,
                device="cuda" if backend == "nccl" else "cpu",
                workers=tuple(_describe(m) for m in members),
            )
        )
        fence = f"{uuid.uuid4().hex} generation {self.number}"
        with contextlib.suppress(OSError):  # a full disk is told of where something is lost by it
            write_json(self._run_dir.fence_file, {"generation": fence})
        for member in members:
            orders = Assignment(
                generation=self.number,
                global_rank=member.global_rank,
                local_rank=member.local_rank,
                store_host=host,
                store_port=port,
                backend=backend,
                run_dir=str(self._run_dir.path),
                run_uid=run_uid,
                environment=self._environment,
                plan=self._plan,
                fence=fence,
                sources=None if recovery_plan is None else recovery_plan.sources,
                source_step=0 if recovery_plan is None else recovery_plan.step,
                checkpoint=None if checkpoint is None else str(checkpoint),
                faults=faults,
            )
            self._pending[member.actor.train.remote(orders)] = member

    def watch(self) -> None:
        """Returns when every rank has come to an end, when one has failed and the others have had time to notice, or
        when the time after a stop is over."""
        give_up_at: float | None = None
        abandoned = False
        while self._pending:
            wait_s = self._config.cluster.heartbeat_s if give_up_at is None else LISTENING_S
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
            check_ray()
            self._lease.renew()
            for reference in ready:
                self._take_outcome(reference, self._pending.pop(reference))
            if give_up_at is not None and time.monotonic() > give_up_at:
                return
            self._look_after(self._telemetry.collect(self._gang), time.monotonic())
            if not abandoned and self._failed():
                abandoned = True
                give_up_at = time.monotonic() + max(SETTLE_S, SETTLE_STEPS * self._hang_detector.usual_s)
                left = [m.global_rank for m in self._pending.values()]
                self._gang.tell("abandon", self.number, self._unreachable, ranks=left)
            if self._stop.received and not self.stop_sent and self.paused is None:
                self._coordinate_stop()
                give_up_at = time.monotonic() + self._config.cluster.stop_grace_s

    def guilty(self) -> int | None:
        """The rank that failed first; where the others only waited in vain, the one that stands still."""
        guilty = first_failure(self.outcomes)
        failure = None if guilty is None else self.outcomes[guilty].failure
        still = [rank for rank in range(self._plan.world_size) if rank not in self.outcomes]
        if failure is None or not failure.collateral or not still:
            return guilty
        rank = min(still, key=lambda r: (self._telemetry.last_step.get(r, 0), r))
        self._fail(rank, standstill(self._config.cluster.collective_timeout_s, time=time.time()))
        return rank

    def survivors(self) -> dict[int, RecoverableSteps]:
        """The ranks whose process can go on, and what they hold."""
        return {
            rank: outcome.recoverable_steps
            for rank, outcome in self.outcomes.items()
            if rank in self.returned and (outcome.failure is None or outcome.failure.collateral)
        }

    def _failed(self) -> bool:
        return any(o.status == "failed" for o in self.outcomes.values())

    def _take_outcome(self, reference: Any, member: Member) -> None:
        info, rank = member.info, member.global_rank
        try:
            outcome = cast(Outcome, ray.get(reference))
        except ray.exceptions.RayError as e:
            if rank not in self.outcomes:  # otherwise it has been ended for a reason that is known
                self._fail(rank, death(cause_of_death(e), pid=info.pid, hostname=info.hostname, time=time.time()))
            return
        self.returned.add(rank)
        self.outcomes.setdefault(rank, outcome)

    def _lost_before(self, member: Member, error: Exception, recoverable_steps: Mapping[int, RecoverableSteps]) -> None:
        """A worker is gone before the generation has begun; the others are as they were."""
        info = member.info
        for other in self._gang.members:
            if other is not member:
                rank = other.global_rank
                self.returned.add(rank)
                step = self._telemetry.last_step.get(rank, 0)
                self.outcomes[rank] = Outcome(
                    status="stopped", step=step, recoverable_steps=recoverable_steps.get(rank, {})
                )
        self._fail(
            member.global_rank, death(cause_of_death(error), pid=info.pid, hostname=info.hostname, time=time.time())
        )

    def _fail(self, rank: int, failure: Failure) -> None:
        self.outcomes[rank] = Outcome(status="failed", step=self._telemetry.last_step.get(rank, 0), failure=failure)

    def _look_after(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        """End what does not answer any more, or does not get on."""
        waited_for = [m for m in self._pending.values() if m.global_rank not in self.outcomes]
        for member in waited_for:
            rank, beat = member.global_rank, beats.get(member.global_rank)
            if beat is None:
                self._silent_since.setdefault(rank, now)
            else:
                self._silent_since.pop(rank, None)
                self._hang_detector.observe(rank, beat, now)
        silent = self._nodes.silent(self._nodes_heard(beats), now)
        if self._failed():
            return
        self._unreachable = tuple({m.info.node_ip for m in waited_for if m.info.node_id in silent})
        for member in waited_for:
            if member.info.node_id in silent:
                timeout_s = self._config.cluster.node_timeout_s
                self._end(member.global_rank, node_loss(timeout_s, hostname=member.info.hostname, time=time.time()))
        slow = self._telemetry.straggler
        if slow is not None and self._config.recovery.replace_stragglers and self._is_training(slow.rank):
            self._end(slow.rank, too_slow(slow.slower_by, time=time.time()))
            return
        timeout_s = self._config.cluster.heartbeat_timeout_s
        for member in waited_for:
            rank, info = member.global_rank, member.info
            if now - self._silent_since.get(rank, now) > timeout_s:
                self._end(rank, silence(timeout_s, pid=info.pid, hostname=info.hostname, time=time.time()))
        if not self._failed() and any(rank not in self.outcomes for rank in self._hang_detector.hanging(now)):
            self._end_hanging(now)
        all_train = self._telemetry.has_trained(self.number) and not self.outcomes
        if all_train and self.paused is None and self._stop.received is None:
            self._pause_if_due(beats)

    def _is_training(self, rank: int) -> bool:
        return rank not in self.outcomes and self._telemetry.last_step.get(rank, 0) < self._plan.steps

    def _nodes_heard(self, beats: Mapping[int, Heartbeat]) -> dict[str, bool]:
        """The nodes of the ranks, and whether one of those on each has answered."""
        heard: dict[str, bool] = {}
        for member in self._gang.members:
            node_id = member.info.node_id
            heard[node_id] = heard.get(node_id, False) or member.global_rank in beats
        return heard

    def _pause_if_due(self, beats: Mapping[int, Heartbeat]) -> None:
        """End the generation in good order, if workers have to leave or more could join."""
        gone = self._nodes.leaving
        leaving = [m.global_rank for m in self._gang.members if m.info.node_id in gone]
        leaving += [rank for rank, beat in beats.items() if beat.leaving]
        if leaving:
            self.leaving = tuple(sorted(set(leaving)))
            who = " and ".join(self._plan.display_name(rank) for rank in self.leaving)
            why = "drained, or the process got SIGTERM"
            self._emit(Warned(message=f"{who} must leave (the node is {why}): a checkpoint, and the place is given on"))
            self._stop_all("preempted", save=True)
        elif (larger := self._growth()) is not None:
            self._stop_all("growing", save=larger.state_sources is None)

    def _stop_all(self, why: Pause | None, *, save: bool) -> None:
        """Let all ranks finish the most advanced step that any of them has begun; ``why`` they pause."""
        self.paused, self.paused_at = why, time.time()
        grace_s = self._config.cluster.stop_grace_s
        try:
            begun = self._gang.ask("hold", timeout_s=grace_s)
            self._gang.ask("stop_after", max(begun), save, timeout_s=grace_s)
        except (GangError, ray.exceptions.RayError) as e:
            self._emit(Warned(message=f"not every rank could be asked to stop: {e}"))

    def _end_hanging(self, now: float) -> None:
        """Write down what every rank is doing, and end the one that is most likely to blame."""
        answering = [
            rank for rank in range(self._plan.world_size) if now - self._silent_since.get(rank, now) < STACKS_TIMEOUT_S
        ]
        answers = self._gang.poll("stacks", ranks=answering, timeout_s=STACKS_TIMEOUT_S)
        stacks = cast("dict[int, Stacks]", answers)
        waited_for = [m.global_rank for m in self._pending.values() if m.global_rank not in self.outcomes]
        rank, why = culprit(
            waited_for,
            waiting={rank: stack.waiting for rank, stack in stacks.items()},
            steps=self._telemetry.last_step,
        )
        path = self._run_dir.stacks_file(self.number)
        path.write_text("\n".join(self._stack(r, stacks.get(r)) for r in range(self._plan.world_size)))
        stood_s = self._hang_detector.standing_s(now)
        message = f"it has not got on for {stood_s:.0f} s: {why}; the stacks of all ranks: {path}"
        self._end(rank, hang(message, time=time.time()))

    def _stack(self, rank: int, stacks: Stacks | None) -> str:
        return f"==== {self._plan.display_name(rank)}\n{'does not answer' if stacks is None else stacks.text}\n"

    def _end(self, rank: int, failure: Failure) -> None:
        """End a rank's process. That closes its connections, which frees the ranks that wait for it."""
        self._fail(rank, failure)
        self._gang.kill(rank)

    def _coordinate_stop(self) -> None:
        assert self._stop.received is not None
        self.stop_sent = True
        self._emit(StopRequested(signal=self._stop.received.name))
        self._stop_all(None, save=True)


def _describe(member: Member) -> str:
    info = member.info
    gpu = "" if info.gpu_index is None else f" gpu {info.gpu_index}"
    return f"{info.hostname} ({info.node_ip}){gpu} pid {info.pid}"
