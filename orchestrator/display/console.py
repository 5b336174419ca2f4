"""The console: a live panel on a terminal, plain lines elsewhere, and the verdict at the end."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, cast

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType, Segment, SegmentLines
from rich.text import Text

from orchestrator.display.chosen_metrics import ChosenMetrics
from orchestrator.display.event_text import Line, describe_event, stop_text
from orchestrator.display.panel import RunView, draw, evaluation_line, status_line
from orchestrator.display.plain_text import clean, number, takes_unicode, writable
from orchestrator.display.report import verdict
from orchestrator.protocol import events
from orchestrator.protocol.core_metrics import LOSS

_REFRESH_PER_S = 4
_LINE_INTERVAL_S = 1.0
_BURST = 20
"""So many evaluations have a line at once; of more, one each second, and the best one."""
_MOST_MISSED = 100
"""So many of the others are kept until it is known which one is the best."""
_SILENCE_S = 10.0
"""After so long without a line, one says how far an evaluation is."""
_VERDICT_STYLES = {"FINISHED": "bold green", "PRUNED": "bold", "KILLED": "bold yellow"}


def make_console(
    *,
    steps: int,
    world_size: int,
    chosen: ChosenMetrics | None = None,
    live: bool = True,
    stream: IO[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> events.Sink:
    """Return the console of one run on ``stream`` (default: standard output).

    Close it after every other sink, so that their warnings come before the verdict. ``clock`` returns seconds, which
    must never step: the times in events come from clocks that do, on several hosts. ``live``: whether a panel may be
    drawn on a terminal, which nothing else must use. ``chosen``: the metrics that the user has chosen.
    """
    out = cast("IO[str]", _ForgivingStream(stream or sys.stdout))
    view = RunView(steps=steps, world_size=world_size, chosen=chosen)
    if live and out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):  # Rich itself obeys NO_COLOR
        terminal = Console(file=out, force_terminal=True, force_jupyter=False, highlight=False)
        return LiveConsole(view, terminal, clock)
    # In a notebook, Rich would display each line as HTML of its own.
    plain_console = Console(
        file=out, force_terminal=False, force_jupyter=False, color_system=None, highlight=False, width=100
    )
    return PlainConsole(view, plain_console, clock)


class PlainConsole:
    """Prints one line per event; metrics at most once a second, but always the first and the last ones.

    Evaluations have lines of their own, also between these. The best one is never left out.
    """

    def __init__(self, view: RunView, console: Console, clock: Callable[[], float]):
        self._view = view
        self._console = console
        self._clock = clock
        # Reentrant, because a signal handler may emit while the same thread is emitting.
        self._lock = threading.RLock()
        self._unshown: dict[str, float] = {}
        self._unshown_step = 0
        self._shown_at: dict[str, float] = {}
        self._evaluations_left = float(_BURST)
        self._counted_at = clock()
        self._missed: dict[int, dict[str, float]] = {}
        self._missed_best: tuple[int, dict[str, float]] | None = None
        self._verdict: list[Line] = []
        self._printed_after_verdict = False
        self._printed_at = clock()
        self._error_logged = False

    def emit(self, event: events.Event) -> None:
        """Show ``event``."""
        try:
            self._emit(event)
        except Exception:
            if not self._error_logged:  # once, to keep a broken console from flooding the log
                self._error_logged = True
                logging.getLogger(__name__).exception("the console cannot show the event %s", event.kind)

    def close(self) -> None:
        """Print the last metrics, and repeat the verdict if anything was printed after it."""
        try:
            self._print(self._last_metrics())
            if self._printed_after_verdict:
                self._print(self._verdict)
                self._printed_after_verdict = False
        except Exception:
            logging.getLogger(__name__).exception("the console cannot be closed")

    def _emit(self, event: events.Event) -> None:
        with self._lock:
            self._view.update(event, self._clock())
            lines = self._lines(event)
            if (lacking := self._view.chosen.take_warning()) is not None:
                lines = [(f"warning: {lacking}", "yellow"), *lines]
        self._print(lines)
        if isinstance(event, events.TextSampled):
            text = Text(clean(event.text).strip("\n"))
            self._console.print(Panel.fit(text, title=Text(clean(event.name)), title_align="left"))
        if isinstance(event, events.RunEnded):
            self._verdict = lines
        elif lines or isinstance(event, events.TextSampled):
            self._printed_after_verdict = bool(self._verdict)

    def _lines(self, event: events.Event) -> list[Line]:
        match event:
            case events.MetricsLogged() if all(name.startswith("recovery/") for name in event.metrics):
                return []  # an event of its own has reported them
            case events.MetricsLogged():
                if event.step != self._unshown_step:
                    if self._view.chosen.is_evaluation(self._unshown):
                        self._missed[self._unshown_step] = self._unshown
                        self._missed = dict(list(self._missed.items())[-_MOST_MISSED:])
                    self._unshown = {}  # a line has the metrics of one step only
                self._unshown_step = event.step
                self._unshown.update(event.metrics)
                self._keep_best()
                due = self._is_due("metrics") if LOSS.name in event.metrics else self._may_show_evaluation()
                return self._last_metrics() if due else []
            case events.BestFound():
                self._keep_best()
                return []
            case events.CheckpointSaved():
                return [*self._last_metrics(), *describe_event(event)] if self._is_due("checkpoint") else []
            case events.WorkerFailed():
                return [*self._last_metrics(), *describe_event(event)]
            case events.StopRequested():
                text = stop_text(event, step=self._view.step, started=self._view.started)
                return [*self._last_metrics(), (text, "yellow")]
            case events.RunEnded():
                return [*self._last_metrics(), *self._ending(event)]
            case events.RankProgress() if event.evaluated and self._clock() - self._printed_at >= _SILENCE_S:
                return [(evaluation_line(*event.evaluated), "")]
            case _:
                return describe_event(event)

    def _is_due(self, what: str) -> bool:
        now = self._clock()
        due = now - self._shown_at.get(what, -math.inf) >= _LINE_INTERVAL_S
        if due:
            self._shown_at[what] = now
        return due

    def _may_show_evaluation(self) -> bool:
        now = self._clock()
        self._evaluations_left = min(_BURST, self._evaluations_left + (now - self._counted_at) / _LINE_INTERVAL_S)
        self._counted_at = now
        may = self._evaluations_left >= 1
        self._evaluations_left -= may
        return may

    def _keep_best(self) -> None:
        """Keep an evaluation that had no line, if it is the best one by now; the next line comes after it."""
        step = self._view.chosen.best_step
        if step is not None and (missed := self._missed.pop(step, None)) is not None:
            self._missed_best = step, missed

    def _last_metrics(self) -> list[Line]:
        missed, self._missed_best = self._missed_best, None
        points = [*filter(None, [missed]), *([(self._unshown_step, self._unshown)] if self._unshown else [])]
        self._unshown = {}
        view = self._view
        return [
            (status_line(step, view.steps, metrics, view.eta_s(), view.metrics, view.chosen), "")
            for step, metrics in points
        ]

    def _ending(self, event: events.RunEnded) -> list[Line]:
        view = self._view
        first, *rest = verdict(
            event,
            step=view.step,
            started=view.started,
            stop=view.stop,
            failure=view.failure,
            checkpoint=view.checkpoint,
        )
        if view.started is None or not view.started.evaluates:
            rest = [*filter(None, [view.chosen.summary()]), *rest]
        else:
            rest = [*(f"{name} {number(value)}" for name, value in sorted(view.latest.items())), *rest]
        return [(first, _VERDICT_STYLES.get(event.status, "bold red")), *((r, "") for r in rest)]

    def _print(self, lines: list[Line]) -> None:
        if lines:
            self._printed_at = self._clock()
            text = Text("\n").join(Text(clean(line), style=style) for line, style in lines)
            self._console.print(text, soft_wrap=True)


class LiveConsole(PlainConsole):
    """Redraws a panel in place and prints messages above it. At the end it removes the panel."""

    def __init__(self, view: RunView, console: Console, clock: Callable[[], float]):
        super().__init__(view, console, clock)
        self._unicode = takes_unicode(console.file)
        self._frame_lines: list[list[Segment]] = []
        self._live = Live(
            console=console,
            get_renderable=self._frame,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
        )

    def close(self) -> None:
        """Remove the panel, then close like :class:`PlainConsole`."""
        self._stop()
        super().close()

    def _emit(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            self._live.start()
        elif isinstance(event, events.RunEnded):
            self._stop()
        super()._emit(event)

    def _lines(self, event: events.Event) -> list[Line]:
        shown_in_panel = (
            events.RankProgress,
            events.MetricsLogged,
            events.CheckpointSaved,
            events.WaitingForResources,
            events.WaitingInQueue,
        )
        if isinstance(event, shown_in_panel) and self._live.is_started:
            return []
        return super()._lines(event)

    def _stop(self) -> None:
        try:
            self._live.stop()
        except Exception:
            logging.getLogger(__name__).exception("the live panel cannot be removed")

    def _frame(self) -> SegmentLines:
        options = self._console.options
        width, height = options.size
        self._erase_wrapped(width)
        with self._lock:
            panel = draw(self._view, width=width, height=height, now=self._clock(), unicode=self._unicode)
            # The empty last row is for the ^C that a terminal echoes: after a full row it would wrap.
            self._frame_lines = [*self._console.render_lines(panel, options, pad=False), []]
        return SegmentLines(self._frame_lines, new_lines=True)

    def _erase_wrapped(self, width: int) -> None:
        """Erase all rows of the present frame if a terminal that became narrower has wrapped it.

        Leaves the cursor below an unwrapped frame, where Rich expects it.
        """
        lengths = [Segment.get_line_length(line) for line in self._frame_lines]
        rows = sum(max(1, math.ceil(length / width)) for length in lengths)
        if rows > len(lengths):
            up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * (rows - 1)
            self._console.control(Control(*up, (ControlType.CURSOR_DOWN, len(lengths) - 1)))


class _ForgivingStream(io.TextIOBase):
    """A text stream that ignores a lost reader and replaces characters outside of its encoding."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(writable(text, self._stream))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        return self._stream.fileno()
