"""The health of the ranks of a generation: those that are silent, hang or hold up the others are terminated."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from time import time
from typing import cast

import ray.exceptions

from orchestrator.driver.gang.members import Member
from orchestrator.driver.process.calls import describe_error
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.run.run_workers import RunWorkers
from orchestrator.driver.run.telemetry import Telemetry
from orchestrator.planning.plan import Plan
from orchestrator.policy.failure import (
    Outcomes,
    failed_call,
    hang,
    node_loss,
    silence,
    standstill,
    stopped,
    too_slow,
    unreachable_addresses,
)
from orchestrator.policy.hang import HangDetector, culprit
from orchestrator.protocol.messages import Failure, Heartbeat, Phase, Stacks, WorkerInfo
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.worker.base_actor import BaseWorker

STACKS_TIMEOUT_S = 2.0


class Health:
    """Judges the ranks of one generation by their heartbeats, and terminates those that hold it up.

    Attributes:
        hung_at: the last step of the rank that was terminated because it hung; None if none was.
        lost_nodes: the ids of the nodes that were lost in this generation.
    """

    def __init__(
        self,
        generation: int,
        context: RunContext,
        workers: RunWorkers,
        *,
        telemetry: Telemetry,
        outcomes: Outcomes,
        earlier_hangs: Sequence[int],
    ):
        config = context.spec.config
        self.hung_at: int | None = None
        self.lost_nodes: set[str] = set()
        self._generation = generation
        self._gang = workers.gang
        self._nodes = workers.nodes
        self._plan = workers.plan
        self._config = config
        self._run_dir = context.spec.run_dir
        self._telemetry = telemetry
        self._outcomes = outcomes
        self._silent_since: dict[int, float] = {}  # of the ranks that have not answered: the last round before
        self._last_round: float | None = None
        self._events = context.events
        self._held_at: dict[int, str] = {}  # the ranks that a debugger holds
        rules = registry.load(config.strategy.name)
        synchronous = rules.is_synchronous(config.strategy) or rules.runs_script
        self._hangs = HangDetector(config.recovery, synchronous=synchronous, earlier_hangs=earlier_hangs)

    @property
    def is_held(self) -> bool:
        """Whether a debugger holds a rank."""
        return bool(self._held_at.keys() - self._outcomes.by_rank.keys())

    @property
    def usual_s(self) -> float:
        """The usual time of a batch on the slowest rank, in seconds; 0 if unknown."""
        return self._hangs.usual_s

    def check(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Judge all ranks after a round of heartbeats; ``now`` is in seconds of a clock of watched time."""
        unfinished = [self._gang.members[rank] for rank in self._outcomes.unfinished]
        self._observe(heartbeats, now)
        silent_nodes = self._nodes.silent(self._answers_by_node(heartbeats), now)
        on_silent_node = [m for m in unfinished if m.info.node_id in silent_nodes]
        self.lose_nodes({m.info.node_id for m in on_silent_node})
        if self._outcomes.any_failed:
            return
        node_timeout_s = self._config.cluster.node_timeout_s
        for member in on_silent_node:
            failure = node_loss(node_timeout_s, hostname=member.info.hostname, time=time())
            self.terminate(member.global_rank, failure)
        for rank, error in self._gang.failed_heartbeats.items():
            if rank not in self._outcomes:
                self.terminate(rank, failed_call_of(self._gang.members[rank].info, error))
        slow = self._telemetry.straggler
        if slow is not None and self._config.recovery.replace_stragglers and self._is_training(slow.rank):
            self.terminate(slow.rank, too_slow(slow.slower_by, time=time()))
            return
        for rank in sorted(self._silent_since):
            if rank not in self._outcomes:
                self._terminate_if_silent(self._gang.members[rank], now)
        if not self._outcomes.any_failed:
            self._terminate_culprit_of_hang([m.global_rank for m in unfinished], now)

    def terminate(self, rank: int, failure: Failure) -> None:
        """Kill a rank's process. This closes its connections, which frees the ranks that wait for it."""
        self.record(rank, failure)
        self._gang.kill(rank)

    def record(self, rank: int, failure: Failure) -> None:
        """Record that a rank has failed."""
        self._outcomes.fail(rank, failure, step=self._telemetry.last_step.get(rank, 0))

    def record_standstill(self, rank: int) -> None:
        """Record that all others have lost their connection to a rank that has not ended."""
        self.record(rank, standstill(self._config.cluster, self._hangs.phase(rank), time=time()))

    def phase(self, rank: int) -> Phase | None:
        """Return the phase of a rank at its last heartbeat; None if it has sent none."""
        return self._hangs.phase(rank)

    def lose_nodes(self, node_ids: Collection[str]) -> None:
        """Take note of nodes that are lost."""
        self.lost_nodes.update(node_ids)
        self._nodes.lost.update(node_ids)

    def unreachable(self) -> tuple[str, ...]:
        """Return the IP addresses of the nodes that were lost in this generation."""
        return unreachable_addresses([m.info for m in self._gang.members], self.lost_nodes)

    def _observe(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        before = now if self._last_round is None else self._last_round
        self._silent_since = {rank: self._silent_since.get(rank, before) for rank in self._gang.unanswered()}
        self._last_round = now
        for rank, heartbeat in heartbeats.items():
            if rank not in self._outcomes:
                self._hangs.observe(rank, heartbeat, now)
                self._observe_debugger(rank, heartbeat.held_at)

    def _observe_debugger(self, rank: int, held_at: str | None) -> None:
        """Take note of a rank that a debugger holds, and tell the user once for each place."""
        if held_at is None:
            self._held_at.pop(rank, None)
        elif self._held_at.get(rank) != held_at:
            self._held_at[rank] = held_at
            timeout_s = self._config.cluster.collective_timeout_s
            self._events.warn(
                f"{self._plan.display_name(rank)} waits for a debugger at {held_at}; the other ranks wait for it, for "
                f"at most cluster.collective_timeout_s={timeout_s:g}"
            )

    def _is_training(self, rank: int) -> bool:
        return rank not in self._outcomes and self._telemetry.last_step.get(rank, 0) < self._plan.steps

    def _answers_by_node(self, heartbeats: Mapping[int, Heartbeat]) -> dict[str, dict[int, bool]]:
        """For each node with ranks, whether each of their processes has answered."""
        answers: dict[str, dict[int, bool]] = {}
        for member in self._gang.members:
            answers.setdefault(member.info.node_id, {})[member.info.pid] = member.global_rank in heartbeats
        return answers

    def _terminate_if_silent(self, member: Member, now: float) -> None:
        """Terminate a rank that has not answered for too long, which is not long if its process is stopped."""
        cluster, info = self._config.cluster, member.info
        silent_s = now - self._silent_since[member.global_rank]
        if silent_s > cluster.stopped_timeout_s and self._nodes.is_stopped(info):
            describe, timeout_s = stopped, cluster.stopped_timeout_s
        elif silent_s > cluster.heartbeat_timeout_s:
            describe, timeout_s = silence, cluster.heartbeat_timeout_s
            if not self._nodes.has_answered(info.node_id):
                self.lose_nodes({info.node_id})
        else:
            return
        failure = describe(timeout_s, pid=info.pid, hostname=info.hostname, time=time())
        self.terminate(member.global_rank, failure)

    def _terminate_culprit_of_hang(self, unfinished: Sequence[int], now: float) -> None:
        """If the ranks hang, write the stacks of all to a file, and terminate the one that most likely causes it."""
        if not (hanging := self._hangs.hanging(unfinished, now)):
            return
        answering = [
            rank for rank in range(self._plan.world_size) if now - self._silent_since.get(rank, now) < STACKS_TIMEOUT_S
        ]
        answers = self._gang.poll(BaseWorker.stacks, ranks=answering, timeout_s=STACKS_TIMEOUT_S)
        stacks = cast("dict[int, Stacks]", answers)
        rank, why = culprit(
            hanging,
            waiting={rank: stack.waiting for rank, stack in stacks.items()},
            steps=self._telemetry.last_step,
            enqueued={rank: stack.flight.enqueued for rank, stack in stacks.items() if stack.flight is not None},
        )
        if self._outcomes.done:
            why = self._outcomes.left_by
        self.hung_at = self._telemetry.last_step.get(rank, 0)
        what = self._hangs.describe(rank, now)
        report = write_stacks(self._run_dir, self._generation, self._plan, stacks)
        self.terminate(rank, hang(what, why, stacks=report, time=time()))


def failed_call_of(info: WorkerInfo, error: ray.exceptions.RayError) -> Failure:
    """Describe a call to a living worker that has failed."""
    what = describe_error(error)
    return failed_call(what, pid=info.pid, hostname=info.hostname, time=time(), traceback=str(error))


def write_stacks(run_dir: RunDir, generation: int, plan: Plan, stacks: Mapping[int, Stacks]) -> str:
    """Write the stacks of all ranks to a file, and flight records to files beside it.

    Args:
        generation: the number of the generation that hung.
        stacks: what the ranks that answer do.

    Returns:
        The path of the file with the stacks, or why there is none.
    """
    path = run_dir.stacks_file(generation)
    try:
        path.write_text(
            "\n".join(_text(rank, plan, stacks.get(rank)) for rank in range(plan.world_size)), errors="replace"
        )
        for rank, stack in stacks.items():
            if stack.flight is not None:
                run_dir.flight_file(generation, rank).write_bytes(zlib.decompress(stack.flight.dump))
    except OSError as e:
        return f"not written ({e.strerror})"
    return run_dir.location_of(path)


def _text(rank: int, plan: Plan, stacks: Stacks | None) -> str:
    return f"==== {plan.display_name(rank)}\n{'does not answer' if stacks is None else stacks.text}\n"
