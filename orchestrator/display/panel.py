"""The live panel: the state of a run as the console knows it, drawn at a given size."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from orchestrator.display.chosen_metrics import ChosenMetrics
from orchestrator.display.event_text import checkpoint_text, stop_text, waiting_text
from orchestrator.display.plain_text import (
    MOST_ROWS,
    duration,
    fill,
    format_value,
    number,
    rate,
    sparkline,
    workers_text,
)
from orchestrator.protocol import events
from orchestrator.protocol.core_metrics import CORE_METRICS, EPOCH, LOSS, SAMPLES_PER_S
from orchestrator.protocol.metrics import MetricRegistry, MetricSpec

_SLOWEST_FROM = 1.25
"""The panel marks a rank whose steps take at least this multiple of the other ranks' median."""

_POINTS = 200
_SPEED_POINTS = 60
_SPEED_INTERVAL_S = 0.5
_SMALLEST_WIDTH, _SMALLEST_HEIGHT = 48, 9


class RunView:
    """The state of a run, updated by events; its size is bounded."""

    def __init__(self, *, steps: int, world_size: int, chosen: ChosenMetrics | None = None):
        self.steps = steps
        self.chosen = chosen or ChosenMetrics()
        self.world_size = world_size
        self.step = 0
        self.started: events.RunStarted | None = None
        self.started_at = 0.0
        self.waiting: events.WaitingForResources | events.WaitingInQueue | None = None
        self.generation: events.GenerationStarted | None = None
        self.checkpoint: events.CheckpointSaved | None = None
        self.stop: events.StopRequested | None = None
        self.failure: events.WorkerFailed | None = None
        self.metrics = MetricRegistry(CORE_METRICS)
        self.latest: dict[str, float] = {}
        self.val_step = 0
        self.losses: deque[tuple[int, float]] = deque(maxlen=_POINTS)
        self.rates: deque[float] = deque(maxlen=_POINTS)
        self.ranks: dict[int, events.RankProgress] = {}
        self._reached_at: deque[tuple[float, int]] = deque(maxlen=_SPEED_POINTS)
        self._reached_from = 0.0

    def update(self, event: events.Event, now: float) -> None:
        """Take over ``event``, which came at ``now``, in seconds of a monotonic clock."""
        match event:
            case events.RunStarted():
                self.started, self.started_at, self.step = event, now, event.resumed_from_step or 0
            case events.WaitingForResources() | events.WaitingInQueue():
                self.waiting = event
            case events.GenerationStarted():
                self.generation, self.waiting, self.failure = event, None, None
                self.world_size = len(event.workers)
                self.ranks.clear()
                self._reached_at.clear()
            case events.MetricsLogged():
                self._metrics(event, now)
            case events.StepsKnown():
                self.steps = event.steps
            case events.RankProgress():
                self.ranks[event.rank] = event
                least = min(r.step for r in self.ranks.values())
                if least > 0 and len(self.ranks) == self.world_size:
                    self._reached(least, now)
            case events.CheckpointSaved():
                self.checkpoint = event
            case events.BestFound():
                self.chosen.best = event.step, event.value
            case events.Continued():
                self.chosen.go_back(event.step)
                while self.losses and self.losses[-1][0] > event.step:
                    self.losses.pop()
            case events.StopRequested():
                self.stop = event
            case events.RunEnded():
                self.chosen.end()
            case events.WorkerFailed() if self.failure is None:
                self.failure = event

    def _metrics(self, event: events.MetricsLogged, now: float) -> None:
        self._reached(event.step, now)
        for spec in event.specs:
            self.metrics.add(spec)
        self.latest.update(event.metrics)
        self.chosen.add(event.step, event.metrics)
        if LOSS.name in event.metrics:
            self.losses.append((event.step, event.metrics[LOSS.name]))
        if SAMPLES_PER_S.name in event.metrics:
            self.rates.append(event.metrics[SAMPLES_PER_S.name])
        if any(name.startswith("val/") for name in event.metrics):
            self.val_step = event.step

    def _reached(self, step: int, time: float) -> None:
        if not self._reached_at:
            self.step = step  # may be lower than before, after a recovery
            self._reached_from = time
        elif step <= self._reached_at[-1][1]:
            return
        elif time - self._reached_from < _SPEED_INTERVAL_S:
            self._reached_at.clear()  # the first point of a batch does not show the speed
        elif len(self._reached_at) >= 2 and time - self._reached_at[-2][0] < _SPEED_INTERVAL_S:
            self._reached_at.pop()
        self._reached_at.append((time, step))
        self.step = max(self.step, step)

    def eta_s(self) -> float | None:
        """Return the seconds that remain at the speed of the last points; None before there are two.

        None if the number of steps is unknown.
        """
        if len(self._reached_at) < 2 or not self.steps:
            return None
        (first_time, first_step), (last_time, last_step) = self._reached_at[0], self._reached_at[-1]
        if last_time <= first_time:
            return None
        remaining = max(0, self.steps - self.step)
        return remaining * (last_time - first_time) / (last_step - first_step)

    def slowest(self) -> int | None:
        """Return the rank whose steps take clearly longer than the steps of the others, None if none do."""
        times = {r.rank: r.step_ms for r in self.ranks.values() if r.step_ms is not None}
        if len(times) < 2:
            return None
        rank = max(times, key=lambda r: times[r])
        others = statistics.median(ms for r, ms in times.items() if r != rank)
        return rank if times[rank] > _SLOWEST_FROM * others else None


def status_line(
    step: int,
    steps: int,
    values: Mapping[str, float],
    eta_s: float | None,
    metrics: MetricRegistry,
    chosen: ChosenMetrics,
) -> str:
    """Return the progress of a run: ``step 120/500  loss 0.2314  val_acc 0.9710  8,310 samples/s  eta 12s``.

    Args:
        steps: the steps of the run; 0 if they are unknown.
        values: the newest values of metrics by name.
        eta_s: the seconds that remain, None if unknown.
        metrics: the declared metrics, in the order in which they appear.
        chosen: further ones, chosen by the user.
    """
    parts = [f"step {step}/{steps}" if steps else f"step {step}", *_progress_texts(values, metrics)]
    parts += [text for name, text in chosen.texts(values, metrics).items() if not _has_progress(name, metrics)]
    if eta_s is not None and step < steps:
        parts.append(f"eta {duration(eta_s)}")
    return "  ".join(parts)


def evaluation_line(done: int, total: int | None) -> str:
    """Return how far an evaluation is: ``evaluating: batch 1,200/4,000``."""
    return f"evaluating: batch {done:,}" + ("" if total is None else f"/{total:,}")


def _progress_texts(values: Mapping[str, float], metrics: Iterable[MetricSpec]) -> list[str]:
    return [
        fill(spec.progress, format_value(values[spec.name], spec.format))
        for spec in metrics
        if spec.progress is not None and spec.name in values
    ]


def _has_progress(name: str, metrics: MetricRegistry) -> bool:
    return name in metrics and metrics[name].progress is not None


def draw(view: RunView, *, width: int, height: int, now: float, unicode: bool = True) -> RenderableType:
    """Return the panel in at most ``height`` - 1 rows; a single line if the terminal is too small.

    ``now``: by the clock of :meth:`RunView.update`.
    """
    if width < _SMALLEST_WIDTH or height < _SMALLEST_HEIGHT:
        shown = {n: v for n, v in view.latest.items() if n in view.chosen or not n.startswith("val/")}
        line = status_line(view.step, view.steps, shown, view.eta_s(), view.metrics, view.chosen)
        return _row(line)
    inside = width - 4
    rows = [_progress(view, now, width=inside, unicode=unicode), *_curves(view, width=inside, unicode=unicode)]
    room = height - len(rows) - 4  # the frame, the last row, and a free row of the terminal
    if view.ranks and room >= min(1 + len(view.ranks), 3):
        rows += _ranks(view, room=room, width=inside, unicode=unicode)
    return Panel(Group(*rows, _state(view)), title=_title(view), title_align="left", border_style="dim")


def _row(*parts: str | tuple[str, str]) -> Text:
    """One row of text and styles, cut if it is too long."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _title(view: RunView) -> Text:
    if view.started is None:
        return Text("starting")
    about = f" ({view.started.strategy}, {view.started.job}, {workers_text(view.world_size, view.started.num_servers)})"
    return _row((view.started.name, "bold"), about)


def _progress(view: RunView, now: float, *, width: int, unicode: bool) -> Text:
    share = min(1.0, view.step / view.steps) if view.steps else 0.0
    parts = [f"{view.step:,}/{view.steps:,}", f"{share:.0%}"] if view.steps else [f"{view.step:,}"]
    if view.started:
        parts.append(duration(now - view.started_at, whole=True))
    if (eta := view.eta_s()) is not None:
        parts.append(f"eta {duration(eta)}")
    if (epoch := view.latest.get(EPOCH.name)) is not None:
        passes = max(1, math.ceil(epoch))
        parts.append(f"epoch {passes} {epoch - passes + 1:.0%}")
    text = "  " + "  ".join(parts)
    length = max(0, width - len(text))
    done = int(share * length)
    full, rest = ("━", "─") if unicode else ("=", "-")
    return _row((full * done, "magenta"), (rest * (length - done), "dim"), text)


def _curves(view: RunView, *, width: int, unicode: bool) -> list[Text]:
    rows: list[Text] = []
    for label, values, text, style in (
        ("loss", [loss for _, loss in view.losses], number, "cyan"),
        ("samples/s", view.rates, rate, "green"),
    ):
        if values:
            head = f"{label:<11}{text(values[-1]):>10}  "
            recent = list(values)[-max(1, width - len(head)) :]
            line = sparkline(recent, unicode=unicode, from_zero=label == "samples/s")
            rows.append(_row(head, (line, style)))
    chosen = view.chosen.texts(view.latest, view.metrics, with_best=True)
    not_chosen = {n: v for n, v in view.latest.items() if n not in chosen}
    validation = [text.removeprefix("val/") for name, text in chosen.items() if name.startswith("val/")]
    validation += [f"{n[4:]} {number(v)}" for n, v in sorted(not_chosen.items()) if n.startswith("val/")]
    if validation:
        rows.append(_row(f"{'val':<11}{'  '.join(validation)}  (step {view.val_step:,})"))
    others = [text for name, text in chosen.items() if not name.startswith("val/")]
    others += _progress_texts(not_chosen, (spec for spec in view.metrics if spec not in CORE_METRICS))
    if others:
        rows.append(_row(f"{'metrics':<11}{'  '.join(others)}"))
    return rows


def _ranks(view: RunView, *, room: int, width: int, unicode: bool) -> list[Text]:
    """A head, as many ranks as fit, always including the slowest, and the number of the others."""
    ranks = [view.ranks[r] for r in sorted(view.ranks)]
    slowest = view.slowest()
    most = min(MOST_ROWS, room - 1)
    if len(ranks) > most:
        most = min(most, room - 2)
    shown = ranks[:most]
    if slowest is not None and slowest not in {r.rank for r in shown}:
        shown[-1] = view.ranks[slowest]
    step_width = max(len("step"), len(f"{view.steps:,}"))
    room_for_node = width - step_width - 40
    node_width = min(max(len("node"), *(cell_len(r.node) for r in shown)), room_for_node)
    cells = [("rank", "node", "step", "phase", "step ms", "")]
    for r in shown:
        step_ms = "-" if r.step_ms is None else f"{r.step_ms:.1f}"
        mark = f"{'◀' if unicode else '<'} slowest" if r.rank == slowest else ""
        cells.append((str(r.rank), r.node, f"{r.step:,}", r.phase, step_ms, mark))
    rows: list[Text] = []
    for rank, node, step, phase, step_ms, mark in cells:
        where = set_cell_size(node, node_width) + "  " if node_width >= len("node") else ""
        line = f"{rank:>4}  {where}{step:>{step_width}}  {phase:<10}  {step_ms:>7}  {mark}"
        rows.append(_row((line, "yellow" if mark else "" if rows else "dim")))
    if more := len(ranks) - len(shown):
        rows.append(_row((f"and {more} more", "dim")))
    return rows


def _state(view: RunView) -> Text:
    """The last row: a stop, what the run waits for, or its backend and checkpoint."""
    text, style = "starting the workers", "dim"
    if view.stop:
        text, style = stop_text(view.stop, step=view.step, started=view.started), "yellow"
    elif view.waiting:
        text, style = waiting_text(view.waiting), ""
    elif view.generation:
        number = view.generation.generation
        text = f"{view.generation.backend} on {view.generation.device} in {view.generation.precision}"
        text += f", generation {number}" if number > 1 else ""
        text += f"; {checkpoint_text(view.checkpoint)}" if view.checkpoint else ""
    return _row((text, style))
