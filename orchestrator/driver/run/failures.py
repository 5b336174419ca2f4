"""What the user is told of a worker that has failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from orchestrator.driver.process.origin import this_origin
from orchestrator.policy.run_state import GenerationEnd
from orchestrator.protocol.events import WorkerFailed, WorkerFailure, WorkerLost
from orchestrator.records.rank_log import log_tail
from orchestrator.records.run_dir import RunDir

E = TypeVar("E", bound=WorkerFailure)


def worker_lost(end: GenerationEnd, rank: int, name: str, run_dir: RunDir) -> WorkerLost:
    """Return an event for the failure of ``rank``, called ``name``, from which the run recovers."""
    return _event(WorkerLost, end, rank, name, run_dir, step=end.last_step)


def worker_failed(end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, last_step: int) -> WorkerFailed:
    """Return an event for the failure of ``rank``, called ``name``, that ends the run.

    ``last_step``: the last step of the rank in its reports. Those that a dead worker has left may be of later steps
    than the driver knew of when it recorded the death.
    """
    raised = bool(end.outcomes.failure(rank).traceback)
    step = end.outcomes.by_rank[rank].step if raised else last_step
    failed = _event(WorkerFailed, end, rank, name, run_dir, step=step)
    return failed if failed.log_tail or raised else replace(failed, log_tail=log_tail(run_dir.log_file(rank)))


def _event(kind: type[E], end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, step: int) -> E:
    failure = end.outcomes.failure(rank)
    return kind(
        rank=rank,
        display_name=name,
        step=step,
        reason=failure.message,
        traceback=failure.traceback,
        log=this_origin().log(run_dir, rank),
        log_tail=failure.log_tail,
    )
