"""State that the training thread and the control thread of a worker share, warnings from either, and planned faults."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from orchestrator.config.redact import Redactor
from orchestrator.planning.faults import Fault
from orchestrator.protocol.events import Event, Warned
from orchestrator.protocol.messages import EvalPoint, Heartbeat, Phase, Reached, TrainPoint
from orchestrator.worker.control.spool import Report, Spool
from orchestrator.worker.process.output import print_error
from orchestrator.worker.process.shown_lines import LineLimit

ALL_SECTIONS = 1 << 32
"""More sections than any step has."""
SMOOTHING = 0.1
"""The weight of the latest batch in the moving average of the time per batch."""


class AbandonedError(ConnectionError):
    """The driver has ended this generation because another rank was lost."""


class PeersMissingError(ConnectionError):
    """Others did not do their part in time; this process is fine."""


class CutOff(BaseException):
    """The ranks have to stop, so that an evaluation, or what the code of the user does beside it, ends here."""


class StepGate:
    """Stops all ranks of a generation at the same place: after a step, or after a batch of an evaluation.

    It costs no communication between ranks. Synchronous ranks are at most one step apart. The driver first holds every
    rank and learns the last place that each has begun. Then it lets all of them come to the most advanced of these
    places, or opens the gates again. The next generation begins with an open gate.

    Attributes:
        saves: whether the ranks save a checkpoint when they stop.
        on_change: called when the driver ends a generation or lets it stop, by the thread of its call.
    """

    def __init__(self, *, timeout_s: float):
        self.saves = True
        self.on_change: Callable[[], None] = lambda: None
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._begun = (0, Reached())  # the generation and the place
        self._held = 0  # the generation
        self._last: Reached | None = None
        self._abandoned = 0

    def begin(self, step: int, generation: int) -> bool:
        """Ask to begin ``step``, and wait while the gate is held.

        Returns:
            False if the rank has to stop instead; it saves a checkpoint first if the gate ``saves``.

        Raises:
            PeersMissingError: the gate is held, and the driver has not decided in time.
            AbandonedError: the generation has ended.
        """
        return self._begin(Reached(step), generation)

    def begin_section(self, step: int, generation: int) -> None:
        """Begin the next section of what follows ``step``, such as a pass over a split. All ranks have the same ones.

        Raises:
            CutOff: the rank has to stop instead.
            PeersMissingError, AbandonedError: see :meth:`begin`.
        """
        begun_in, place = self._begun
        section = place.section if (begun_in, place.step) == (generation, step) else 0
        if not self._begin(Reached(step, section + 1), generation):
            raise CutOff

    def begin_batch(self, generation: int) -> None:
        """Begin the next batch of a section. Raises as :meth:`begin_section`."""
        place = self._begun[1]
        if not self._begin(Reached(place.step, place.section, place.batch + 1), generation):
            raise CutOff

    def _begin(self, place: Reached, generation: int) -> bool:
        with self._changed:
            decided = self._changed.wait_for(
                lambda: self._held != generation or self._last is not None or generation <= self._abandoned,
                timeout=self._timeout_s,
            )
            self.check(generation)
            if not decided:
                raise PeersMissingError(
                    f"held at step {place.step}: no decision from the driver for {self._timeout_s:g} s"
                )
            if self._held == generation and self._last is not None and place > self._last:
                return False
            self._begun = generation, place
            return True

    def hold(self, generation: int) -> Reached:
        """Let nothing further of ``generation`` begin. Return the last place that has begun in it."""
        with self._changed:
            if self._held < generation:
                self._held, self._last, self.saves = generation, None, True
            begun_in, place = self._begun
            return place if begun_in == generation else Reached()

    def abandon(self, generation: int) -> None:
        """End this generation and all before it, even if the training thread has not noticed a failure."""
        with self._changed:
            self._abandoned = max(self._abandoned, generation)
            self._changed.notify_all()
        self.on_change()

    def check(self, generation: int) -> None:
        """Call this regularly in work that needs no other rank, such as evaluation or a wait.

        Raises:
            AbandonedError: the generation has ended.
        """
        if generation <= self._abandoned:
            raise AbandonedError(f"the driver has ended generation {generation} because another rank was lost")

    def is_stopping(self, generation: int) -> bool:
        """Return whether the driver lets ``generation`` stop, for a rank whose steps this process does not see."""
        with self._changed:
            return self._held == generation and self._last is not None

    def is_cut(self, generation: int) -> bool:
        """Return whether ``generation`` stops without the rest of what follows a step."""
        with self._changed:
            return self._held == generation and self._last is not None and self._last.section < ALL_SECTIONS

    def finish_step(self, generation: int, last: int | Reached, save: bool) -> None:
        """Let a held ``generation`` come to its ``last`` place, and stop there.

        Args:
            generation: the generation.
            last: the place; a step is meant with the whole of what follows it, such as an evaluation.
            save: whether to save a checkpoint then.
        """
        with self._changed:
            if self._held == generation:
                self._last = last if isinstance(last, Reached) else Reached(last, ALL_SECTIONS)
                self.saves = save
                self._changed.notify_all()
        self.on_change()

    def open(self, generation: int) -> None:
        """Let steps of a held ``generation`` begin again."""
        with self._changed:
            if self._held == generation:
                self._held = 0
                self._changed.notify_all()


class Outbox:
    """Progress that the training thread reports, until the driver collects it.

    Attributes:
        redactor: masks secrets in events, before anything keeps them.
        log: where all lines of this rank are, for the user.
    """

    log = "its log"

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._lock = threading.Lock()
        self._step = 0
        self._phase: Phase = "start"
        self._batches_done = 0
        self._evaluation: tuple[int, int | None] | None = None  # the batches before it, and those that it has
        self._batch_ended_at: float | None = None
        self._mean_batch_s: dict[Phase, float] = {}
        self._loader_is_new = False
        self._busy_ms: float | None = None
        self._points: list[TrainPoint | EvalPoint] = []
        self._num_reports = 0  # points and events so far
        self._first_report = 0  # the number of the first one that has not been collected
        self._spool: Spool | None = None
        self._outcome_under_way = False
        self._events: list[Event] = []
        self._lines: list[str] = []
        self._num_left_out = 0
        self._line_limit = LineLimit()

    def keep_in(self, spool: Spool) -> None:
        """Keep points and events in ``spool`` too, until the driver has received them."""
        self._spool = spool

    def begin_generation(self) -> None:
        """Take note that the driver has received the last outcome, with the reports that :meth:`collect_last` added."""
        self._outcome_under_way = False

    def enter(self, step: int, phase: Phase) -> None:
        """Set the phase, and the last step that is done."""
        # Without the lock, which would cost more than an inconsistent pair, corrected by the next heartbeat.
        if phase != self._phase:
            self._batch_ended_at = None  # the time until the next batch is not the duration of a batch
        self._step, self._phase = step, phase

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Set the phase during the block, as a part of the phase before."""
        outer, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = outer

    @contextlib.contextmanager
    def evaluating(self, num_batches: int | None) -> Iterator[None]:
        """Count the batches of an evaluation in the block, of which there are ``num_batches``; None if unknown."""
        self._evaluation = self._batches_done, num_batches
        try:
            yield
        finally:
            self._evaluation = None

    def begin_loader(self) -> None:
        """Announce that the next batch comes from a new data loader, whose processes may have to start."""
        self._loader_is_new = True

    def tick(self) -> None:
        """Count one more batch, trained on or evaluated, as a sign of progress."""
        now = time.monotonic()
        if self._batch_ended_at is not None and not self._loader_is_new:
            batch_s = now - self._batch_ended_at
            mean_s = self._mean_batch_s.get(self._phase, batch_s)
            self._mean_batch_s[self._phase] = mean_s + SMOOTHING * (batch_s - mean_s)
        self._batch_ended_at = now
        self._loader_is_new = False
        self._batches_done += 1

    def progress(self) -> None:
        """Give a sign of progress that is not a batch."""
        self._batch_ended_at = None
        self._batches_done += 1

    def put_point(self, point: TrainPoint | EvalPoint) -> None:
        """Report a part of a logged point or of an evaluation."""
        with self._lock:
            self._add_to_spool(point)
            self._points.append(point)
            if isinstance(point, TrainPoint) and point.step_ms:
                mean_ms = sum(point.step_ms) / len(point.step_ms)
                self._busy_ms = mean_ms * (1 - (point.comm_share or 0.0))

    def put_event(self, event: Event) -> None:
        """Report an event, with secrets masked."""
        event = self._redactor.data(event, by_key=False)
        with self._lock:
            self._add_to_spool(event)
            self._events.append(event)

    def put_lines(self, lines: Iterable[str], *, left_out: int = 0) -> None:
        """Show lines on the console, unless there are too many; ``left_out``: how many before them are not given."""
        with self._lock:
            self._lines += map(self._redactor.text, lines)
            self._num_left_out += left_out

    def _taken_lines(self, *, final: bool) -> tuple[str, ...]:
        lines, self._lines = self._lines, []
        left_out, self._num_left_out = self._num_left_out, 0
        return self._line_limit.take(lines, left_out=left_out, log=self.log, final=final)

    def _add_to_spool(self, report: Report) -> None:
        if self._spool is not None:
            self._spool.append(self._num_reports, report)
        self._num_reports += 1

    def collect(
        self,
        system: Mapping[str, float],
        *,
        leaving: bool = False,
        waiting: bool = False,
        held_at: str | None = None,
        final: bool = False,
    ) -> Heartbeat:
        """Return the progress, with the points and events since the last call.

        Args:
            system: readings of the node, by metric name.
            leaving: whether this process has received SIGTERM.
            waiting: whether the training thread waits for other ranks.
            held_at: where a debugger holds it.
            final: whether the part of this rank in the generation is over.
        """
        evaluation = self._evaluation  # the training thread may end it meanwhile
        with self._lock:
            points, self._points = self._points, []
            first, self._first_report = self._first_report, self._num_reports
            if self._spool is not None and not self._outcome_under_way:
                self._spool.turn()
            events, self._events = self._events, []
            return Heartbeat(
                step=self._step,
                phase=self._phase,
                ticks=self._batches_done,
                evaluated=None if evaluation is None else (self._batches_done - evaluation[0], evaluation[1]),
                usual_tick_s=None if self._loader_is_new else self._mean_batch_s.get(self._phase),
                waiting=waiting,
                busy_ms=self._busy_ms,
                first_report=first,
                points=tuple(points),
                events=tuple(events),
                system=system,
                leaving=leaving,
                held_at=held_at,
                lines=self._taken_lines(final=final),
            )

    def collect_last(self) -> Heartbeat:
        """Return the same as :meth:`collect`, to send with the outcome of a generation.

        The spool drops nothing until the next generation begins: the driver may ask for a heartbeat before it has
        received the outcome.
        """
        self._outcome_under_way = True
        return self.collect({}, final=True)


MAX_CALL_WARNINGS = 10
"""The number of different errors of one method of the user that a process warns of."""


class Warner:
    """Puts each warning of rank 0 into the outbox once. The warnings of other ranks would repeat them.

    Attributes:
        rank: the present rank of this process.
    """

    def __init__(self, outbox: Outbox):
        self.rank = 0
        self._outbox = outbox
        self._topics: set[str] = set()

    def warn(self, text: str, *, topic: str) -> None:
        """Warn the user, unless this process has warned of ``topic`` before."""
        if self.rank == 0 and topic not in self._topics:
            self._topics.add(topic)
            self._outbox.put_event(Warned(message=text))

    def warn_from_any_rank(self, text: str) -> None:
        """Warn the user of what one rank alone has found, which need not be rank 0."""
        self._outbox.put_event(Warned(message=text))

    def warn_of_call(self, text: str, *, method: str, step: int) -> None:
        """Warn the user of an error in a ``method`` of theirs, once for each text, and print the present traceback.

        Texts beyond the first few are not shown: they may have a number that differs at every step.
        """
        topic = f"{method}: {text}"
        reported = sum(known.startswith(f"{method}: ") for known in self._topics)
        if topic in self._topics or reported == MAX_CALL_WARNINGS:
            return
        print_error()
        self._topics.add(topic)
        last = f"; further errors of {method} are not reported" if reported + 1 == MAX_CALL_WARNINGS else ""
        self.warn_from_any_rank(f"{text}, at step {step}: see the log of rank {self.rank}; training continues{last}")


_LONG_S = 10**6


def inject_fault(faults: Iterable[Fault], *, rank: int, phase: str, step: int) -> None:
    """Inject the faults that are planned for this rank, phase and step.

    Raises:
        RuntimeError: the planned fault is an exception.
    """
    for fault in faults:
        if (fault.rank, fault.phase, fault.step) == (rank, phase, step):
            print(f"recovery.chaos: {fault.kind} at {time.time():.3f}", flush=True)
            _inject(fault)


def _inject(fault: Fault) -> None:
    match fault.kind:
        case "raise":
            raise RuntimeError(f"planned by recovery.chaos: {fault}")
        case "exit":
            os._exit(1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(_LONG_S)
        case "gil":
            ctypes.PyDLL(None).sleep(_LONG_S)
