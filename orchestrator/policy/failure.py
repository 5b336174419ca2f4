"""How the part of each rank ended, the first failure, and failures that the driver finds itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from orchestrator.config.operation import ClusterConfig
from orchestrator.config.text import first_few
from orchestrator.protocol.messages import Failure, Outcome, Phase, RecoverableSteps, WorkerInfo


class Outcomes:
    """The outcomes of the ranks of one generation.

    Attributes:
        by_rank: the outcomes that are known.
        returned: the ranks whose process lives.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.by_rank: dict[int, Outcome] = {}
        self.returned: set[int] = set()

    def __contains__(self, rank: int) -> bool:
        return rank in self.by_rank

    def add(self, rank: int, outcome: Outcome) -> None:
        """Add what a rank has returned. What was recorded before stays: the driver has killed the rank for it."""
        self.returned.add(rank)
        self.by_rank.setdefault(rank, outcome)

    def fail(self, rank: int, failure: Failure, *, step: int) -> None:
        """Record that a rank failed after ``step``, as the driver has found."""
        self.by_rank[rank] = Outcome(status="failed", step=step, failure=failure)

    @property
    def unfinished(self) -> list[int]:
        """The ranks whose outcome is not known."""
        return [rank for rank in range(self.world_size) if rank not in self.by_rank]

    @property
    def any_failed(self) -> bool:
        """Whether a rank has failed."""
        return any(outcome.status == "failed" for outcome in self.by_rank.values())

    @property
    def first_failed(self) -> int | None:
        """The rank whose failure caused the others; None if none has failed."""
        return first_failure(self.by_rank)

    def least_advanced(self, last_step: Mapping[int, int]) -> int | None:
        """Return the rank that the others no longer wait for, which has not ended; None unless that is the failure.

        It is so if all failures are broken connections. ``last_step``: the last completed step of each rank.
        """
        rank = self.first_failed
        if rank is None or not self.failure(rank).collateral or not self.unfinished:
            return None
        return min(self.unfinished, key=lambda r: (last_step.get(r, 0), r))

    @property
    def last_step(self) -> int:
        """The last step that an ended rank has completed; 0 if none has ended."""
        return max((outcome.step for outcome in self.by_rank.values()), default=0)

    def failure(self, rank: int) -> Failure:
        """Return the failure of a rank that has failed; of a broken connection, also who has ended it in order."""
        failure = self.by_rank[rank].failure
        assert failure is not None
        if failure.collateral and self.done:
            return replace(failure, message=f"{failure.message}; {self.left_by}")
        return failure

    @property
    def done(self) -> list[int]:
        """The ranks that have done all of their part."""
        return [rank for rank, outcome in self.by_rank.items() if outcome.status == "done"]

    @property
    def left_by(self) -> str:
        """Why the others may wait in vain for the ranks that are :attr:`done`. There is at least one."""
        ranks = first_few([f"rank {rank}" for rank in sorted(self.done)])
        return f"{ranks} ended without an error before, so the ranks disagree on when to end"

    def all_ended(self, status: Literal["done", "stopped"]) -> bool:
        """Return whether every rank has ended with ``status``."""
        return not self.unfinished and all(outcome.status == status for outcome in self.by_rank.values())

    def survivors(self) -> dict[int, RecoverableSteps]:
        """Return the state that each rank holds whose process can continue."""
        return {
            rank: outcome.recoverable_steps
            for rank, outcome in self.by_rank.items()
            if rank in self.returned
            and (outcome.status != "failed" or outcome.failure is None or outcome.failure.collateral)
        }

    @property
    def unsaved(self) -> dict[int, str]:
        """By rank, why a script that was asked to stop may not have saved what it was to save."""
        return {r: o.failure.message for r, o in sorted(self.by_rank.items()) if o.status == "stopped" and o.failure}


CauseOfDeath = Literal["out of memory", "node lost", "unknown"]
"""The cause of a death as Ray reports it; "unknown" unless Ray killed the process or its node is lost."""

_LESS_MEMORY = "lower train.global_batch_size, or use a smaller model"
_DEATHS: dict[CauseOfDeath, str] = {
    "out of memory": f"was killed by Ray, because the node ran out of memory; {_LESS_MEMORY}",
    "node lost": "was lost: the node is gone, no Ray answers there",
    "unknown": (
        "died without a report: killed by SIGKILL from outside or by the kernel's out-of-memory killer, or ended by "
        "os._exit"
    ),
}
_KERNEL_OOM = (
    "died without a report; the kernel's out-of-memory killer ended a process on this node during this time, probably "
    f"this one; {_LESS_MEMORY}"
)

_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
}
"""By the name that faulthandler gives a signal."""
_FATAL_ERROR = re.compile(r"Fatal Python error: (.*)")
_CRASHED_FRAME = re.compile(
    r"^(?:Current thread|Thread) .*\(most recent call first\):\n\s+File \"(.*)\", line (\d+) in (.*)", re.M
)


def first_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """Return the rank whose failure caused the others; None if no rank failed.

    Failures of other ranks are broken connections, or errors found at a later step.
    """
    failed = {
        r: (o.failure.collateral, o.step, o.failure.time, r)
        for r, o in outcomes.items()
        if o.failure and o.status == "failed"
    }
    return min(failed, key=failed.__getitem__, default=None)


def death(
    cause: CauseOfDeath,
    *,
    pid: int,
    hostname: str,
    time: float,
    crash_report: str = "",
    kernel_oom_kill: bool = False,
) -> Failure:
    """Describe a process that died.

    Args:
        cause: the cause that Ray reports.
        time: seconds since the epoch.
        crash_report: what its fault handlers have written into its log; empty if nothing.
        kernel_oom_kill: whether the out-of-memory killer of the kernel was at work on the node.
    """
    what = _DEATHS[cause]
    if cause == "unknown" and crash_report:
        what = f"crashed: {describe_crash(crash_report)}"
    elif cause == "unknown" and kernel_oom_kill:
        what = _KERNEL_OOM
    return replace(_seen_by_driver(f"its process {pid} on {hostname} {what}", time), log_tail=crash_report)


def describe_crash(report: str) -> str:
    """Return the signal that ended a process, and the innermost Python frame, out of its crash report.

    Args:
        report: what the fault handlers of the process have written.
    """
    errors = _FATAL_ERROR.findall(report)
    signals = [f"{_SIGNALS[e]} ({e})" for e in errors if e in _SIGNALS]
    what = [e for e in errors if e not in _SIGNALS][:1] + signals[-1:]
    frame = _CRASHED_FRAME.search(report)
    where = f" in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else ""
    return ", ".join(what) + where


def unreachable_addresses(workers: Iterable[WorkerInfo], lost_nodes: Collection[str]) -> tuple[str, ...]:
    """Return the IP addresses of the nodes whose ids are in ``lost_nodes``.

    Nodes on one machine share an address. One that another node still has is left out.
    """
    places = {(worker.node_id, worker.node_ip) for worker in workers}
    lost = {ip for node_id, ip in places if node_id in lost_nodes}
    return tuple(sorted(lost - {ip for node_id, ip in places if node_id not in lost_nodes}))


def failed_call(error: str, *, pid: int, hostname: str, time: float, traceback: str) -> Failure:
    """Describe a worker that lives, but could not carry out or answer a call of the driver.

    Args:
        time: seconds since the epoch.
    """
    text = (
        f"its process {pid} on {hostname} lives, but a call to it failed: {error}; if it names something that this "
        "project defines, check that all nodes have the same version of it"
    )
    return replace(_seen_by_driver(text, time), traceback=traceback)


def no_store(timeout_s: float, *, pid: int, hostname: str, time: float) -> Failure:
    """Describe a worker that did not open the store of a generation in time; ``time``: seconds since the epoch."""
    return _seen_by_driver(
        f"its process {pid} on {hostname} has not opened the rendezvous store within {timeout_s:g} s "
        "(cluster.rendezvous_timeout_s)",
        time,
    )


def stopped(timeout_s: float, *, pid: int, hostname: str, time: float) -> Failure:
    """Describe a process that a signal has stopped; ``time``: seconds since the epoch."""
    return _seen_by_driver(
        f"no progress for {timeout_s:g} s (cluster.stopped_timeout_s): its process {pid} on {hostname} is stopped "
        "(SIGSTOP or SIGTSTP)",
        time,
    )


def silence(timeout_s: float, *, pid: int, hostname: str, time: float) -> Failure:
    """Describe a process that no longer answers; ``time``: seconds since the epoch."""
    return _seen_by_driver(
        f"its process {pid} on {hostname} has not answered for {timeout_s:g} s (cluster.heartbeat_timeout_s)", time
    )


def node_loss(timeout_s: float, *, hostname: str, time: float) -> Failure:
    """Describe a process whose node no longer answers; ``time``: seconds since the epoch."""
    return _seen_by_driver(f"its node {hostname} has not answered for {timeout_s:g} s (cluster.node_timeout_s)", time)


def hang(what: str, why: str, *, stacks: str, time: float) -> Failure:
    """Describe a process that was killed because it made no progress.

    Args:
        what: for how long it made none.
        why: why this process is to blame.
        stacks: the file with the stacks of all ranks.
        time: seconds since the epoch.
    """
    return _seen_by_driver(f"{what}: {why}; stacks of all ranks: {stacks}", time)


def too_slow(slower_by: float, *, time: float) -> Failure:
    """Describe a process that was killed because it slowed the others down, by the factor ``slower_by``.

    ``time``: seconds since the epoch.
    """
    return _seen_by_driver(f"it was {slower_by:.1f} times slower than the others (recovery.replace_stragglers)", time)


def standstill(config: ClusterConfig, phase: Phase | None, *, time: float) -> Failure:
    """Describe a process that answers and makes no progress, until the others no longer wait for it.

    Args:
        phase: its phase at its last heartbeat; None if it has sent none.
        time: seconds since the epoch.
    """
    if phase in ("start", "join"):
        key, timeout_s = "rendezvous_timeout_s", config.rendezvous_timeout_s
    else:
        key, timeout_s = "collective_timeout_s", config.collective_timeout_s
    return _seen_by_driver(f"no progress while the others waited {timeout_s:g} s for it (cluster.{key})", time)


def cannot_leave_nccl(phases: Mapping[int, Phase | None], *, lost: int) -> str | None:
    """Return a note on the ranks to replace because they were connecting with NCCL to rank ``lost``; None if none was.

    ``phases``: the phase of each rank that has not ended, at its last heartbeat.
    """
    connecting = [rank for rank, phase in sorted(phases.items()) if phase == "connect"]
    if not connecting:
        return None
    return (
        f"ranks {connecting} were connecting with NCCL when rank {lost} was lost; nothing can interrupt that, so they "
        "are replaced too"
    )


def _seen_by_driver(message: str, time: float) -> Failure:
    return Failure(message=message, traceback="", time=time, collateral=False, log_tail="")
