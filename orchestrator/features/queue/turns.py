"""The place of a run in the queue of its cluster, as its driver keeps it."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions

from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.driver.process.calls import GangError
from orchestrator.driver.process.run_context import EventStream
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.process.turns import Turns
from orchestrator.driver.process.waiting import TurnLostError, UnfitLimit, cluster_state
from orchestrator.features.queue.entries import QueueAnswer, QueueEntry, QueueState
from orchestrator.features.queue.queue_order import why_waiting
from orchestrator.features.queue.run_queue import POLL_EVERY_S, open_queue
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.events import WaitingInQueue
from orchestrator.protocol.run_label import ID_LENGTH
from orchestrator.records.lock import user_name
from orchestrator.records.run_dir import RunDir

ANSWER_TIMEOUT_S = 5.0
UNREACHABLE_S = 30.0
"""A run whose polls are not answered for so long does not wait for its turn."""
REPORT_EVERY_S = 60.0
"""A wait is reported when the line changes, and at this interval."""
_CHECK_EVERY_S = 0.2
_END_TIMEOUT_S = 2.0


def turns_of(
    config: Config,
    sizes: Sizes,
    run_dir: RunDir,
    redactor: Redactor,
    *,
    run_uid: str,
    submitted_at: float,
    sweep: str | None,
) -> Callable[..., Turns]:
    """Return what makes the turns of a run: its place in the queue, unless it has a Ray of its own, or is not to queue.

    It has the arguments of :class:`~orchestrator.driver.process.turns.Turns`.
    """
    if not config.cluster.queue or is_own_ray():
        return Turns
    plan = sizes.plan(sizes.smallest)
    entry = QueueEntry(
        uid=run_uid,
        name=config.run_name,
        location=run_dir.location,
        user=user_name(),
        host=socket.gethostname(),
        submitted_at=submitted_at,
        priority=config.cluster.priority,
        workers=plan.world_size + plan.spares,
        cpus_per_worker=plan.cpus_per_worker,
        gpus_per_worker=plan.gpus_per_worker,
        one_node=plan.one_node,
        autoscaling=config.cluster.autoscaling,
        since=time.time(),
        user_share=config.cluster.user_share,
        sweep=sweep,
        most_workers=sizes.max_processes,
    )
    return functools.partial(QueuePlace, redactor.data(entry, by_key=False))


class QueuePlace(Turns):
    """Polls the queue about once a second while in the context, whatever the driver is doing.

    Args:
        entry: the run.
        others: see :class:`~orchestrator.driver.process.turns.Turns`.
    """

    def __init__(
        self,
        entry: QueueEntry,
        events: EventStream,
        stop: StopSignals,
        *,
        timeout_s: float | None,
        unfit_timeout_s: float | None,
        known_namesakes: Collection[str] = (),
        reserved: Callable[[], Mapping[str, int]] = dict,
        avoids: Callable[[], Mapping[str, str]] = dict,
    ):
        super().__init__(events, stop)
        self._entry = entry
        self._events = events
        self._stop = stop
        self._timeout_s = timeout_s
        self._unfit_timeout_s = unfit_timeout_s
        self._known_namesakes: Collection[str] | None = known_namesakes  # None after the warning
        self._reserved = reserved
        self._avoids = avoids
        self._queue: Any = None
        self._answered: tuple[QueueEntry, QueueAnswer] | None = None  # the last poll, as it was sent
        self._heard_at = 0.0
        self._problem = "no answer"
        self._lock = threading.Lock()  # of the entry
        self._poll_now = threading.Event()
        self._news = threading.Event()
        self._ended = False
        # A thread of its own, because the driver waits for workers meanwhile.
        self._thread = threading.Thread(target=self._work, name="queue", daemon=True)

    def __enter__(self) -> QueuePlace:
        self._heard_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._poll_now.set()
        self._thread.join(_END_TIMEOUT_S)
        if self._queue is not None:
            with contextlib.suppress(Exception):  # the queue forgets a run that does not poll
                ray.get(self._queue.leave.remote(self._entry.uid), timeout=_END_TIMEOUT_S)

    def wait_for_turn(self, check: Callable[[], None]) -> None:
        """Wait until the run may acquire its workers.

        ``check()`` is called several times a second, and may raise to stop waiting.

        Raises:
            GangError: ``cluster.queue_timeout_s`` has passed.
            UnfitError: the cluster has been too small for ``cluster.unfit_timeout_s``.
        """
        self._enter("waiting", overtook=())
        began, unfit = time.monotonic(), UnfitLimit(self._unfit_timeout_s)
        reported: WaitingInQueue | None = None
        try:
            while not self._is_admitted() and not self._is_unreachable():
                check()
                waited_s = time.monotonic() - began
                if self._timeout_s is not None and waited_s > self._timeout_s:
                    raise GangError(
                        f"not the first in the queue within {waited_s:.0f} s (cluster.queue_timeout_s); raise it or "
                        "cluster.priority, or look at `orchestrator queue list`"
                    )
                answer = self._answer("waiting")
                self._warn_of_namesakes(answer)
                if answer is not None and not answer.may_reserve:
                    reported = self._report(answer, waited_s, reported)
                    unfit.check(answer.unfit, self._why)
                self._news.wait(_CHECK_EVERY_S)
                self._news.clear()
        finally:
            self.waited_s += time.monotonic() - began
        answer = self._answer("waiting")
        self._warn_of_namesakes(answer)
        self._enter("reserving", overtook=() if answer is None else answer.overtakes)
        if answer is not None and answer.overtakes:
            self._events.note(
                f"the run overtakes {first_few(answer.ahead)}, for which there is no room yet; it makes room as soon "
                "as the first in the line could start with its resources"
            )

    def check_turn(self) -> None:
        """Check that no other run has come before this one, which acquires its workers.

        Raises:
            TurnLostError: one has.
        """
        answer = self._answer("reserving")
        if answer is not None and not answer.may_reserve:
            raise TurnLostError

    def offer_turn(self) -> None:
        """Give the turn back if other runs wait: the queue does not know yet why this one finds no room.

        Raises:
            TurnLostError: others wait.
        """
        if self.others_wait:
            raise TurnLostError

    def has_workers(self) -> None:
        """Report that the run has its workers."""
        self._enter("running")

    def begin_yielding(self) -> None:
        """Report that the run is about to release its workers."""
        self._enter("yielding")

    @property
    def state(self) -> QueueState:
        """The state of the run, as it is reported."""
        return self._entry.state

    @property
    def yield_to(self) -> str | None:
        """The name of the run that needs the resources of this one; None to keep them."""
        answer = self._answer("running")
        return None if answer is None else answer.yield_to

    @property
    def others_wait(self) -> bool:
        """Whether other runs wait for resources."""
        return self._answered is not None and self._answered[1].others_wait

    def _enter(self, state: QueueState, *, overtook: tuple[str, ...] | None = None) -> None:
        """Report a new state at once; ``overtook``: see :class:`QueueEntry`, None to keep it."""
        with self._lock:
            if self._entry.state == state:
                return
            overtook = self._entry.overtook if overtook is None else overtook
            self._entry = replace(self._entry, state=state, overtook=overtook, since=time.time())
        self._poll_now.set()

    def _is_admitted(self) -> bool:
        answer = self._answer("waiting")
        return answer is not None and answer.may_reserve

    def _is_unreachable(self) -> bool:
        if time.monotonic() - self._heard_at <= UNREACHABLE_S:
            return False
        self._events.warn(
            f"the queue of the cluster cannot be reached ({self._problem}); the run goes on without it "
            "(cluster.queue=false)"
        )
        return True

    def _report(self, answer: QueueAnswer, waited_s: float, last: WaitingInQueue | None) -> WaitingInQueue:
        """Report the wait if the line has changed since the last report, or after a while; returns the last report."""
        line = (answer.ahead, answer.running, answer.unfit)
        if (
            last is not None
            and line == (last.ahead, last.running, last.unfit)
            and waited_s - last.waited_s < REPORT_EVERY_S
        ):
            return last
        report = WaitingInQueue(
            waited_s=waited_s, ahead=answer.ahead, running=answer.running, unfit=answer.unfit, why=self._why()
        )
        self._events.emit(report)
        return report

    def _warn_of_namesakes(self, answer: QueueAnswer | None) -> None:
        """Warn of other runs of this name at the first answer."""
        if answer is None or self._known_namesakes is None:
            return
        unknown, self._known_namesakes = set(answer.namesakes).difference(self._known_namesakes), None
        if unknown:
            ids = sorted(uid[:ID_LENGTH] for uid in unknown)
            self._events.warn(
                f"the queue has another run named {self._entry.name} (id {first_few(ids)}): name=... tells them apart, "
                f"and `orchestrator queue cancel {ids[0]}` ends the other one"
            )

    def _why(self) -> str:
        return why_waiting(self._entry, cluster_state(trouble=self._avoids()), now=time.time())

    def _answer(self, state: QueueState) -> QueueAnswer | None:
        """Return the answer to a poll in the present state, which is ``state``; None if there is none yet."""
        if self._answered is None:
            return None
        sent, answer = self._answered
        return answer if sent.state == state and sent.since == self._entry.since else None

    def _work(self) -> None:
        while not self._ended:
            self._poll()
            self._poll_now.wait(POLL_EVERY_S)
            self._poll_now.clear()

    def _poll(self) -> None:
        entry = self._entry
        try:
            if self._queue is None:
                self._queue = open_queue(again=self._answered is not None)
            entry = replace(entry, workers_by_node=dict(self._reserved()), avoids=dict(self._avoids()))
            answer: QueueAnswer = ray.get(self._queue.poll.remote(entry), timeout=ANSWER_TIMEOUT_S)
        except Exception as e:  # of any type, also from the start of the queue
            self._problem = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
            if isinstance(e, ray.exceptions.ActorDiedError):
                self._queue = None
            return
        with self._lock:
            if self._entry.priority != answer.priority:
                self._entry = replace(self._entry, priority=answer.priority)
        self._answered, self._heard_at = (entry, answer), time.monotonic()
        self._news.set()
        if answer.cancelled_by is not None:
            self._stop.request(signal.SIGTERM, f"`orchestrator queue cancel` of {answer.cancelled_by}")
