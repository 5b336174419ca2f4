"""The end of a generation that has failed, on all of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from orchestrator.driver.gang.gang import Gang
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
