"""A pipeline step as a picture, and as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.timeline.spans import ActionKind, Span, Timeline, extent_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_WORKERS = 16
"""Workers in a picture; if more replicas exist than fit, it shows the first ones."""

_NAMES: dict[ActionKind, str] = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
# From Okabe and Ito's colours, which colour-blind people can distinguish; a worker's later stages are paler.
_COLOURS: dict[ActionKind, str] = {"F": "#0072B2", "B": "#D55E00", "I": "#E69F00", "W": "#009E73"}
_WAIT_COLOUR = "#e8e8e8"
_PALER = 0.35
_WIDTH_INCHES, _ROW_INCHES = 12.0, 0.36
_BAR_HEIGHT = 0.84
_DIGIT_INCHES = 0.08


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format, in microseconds: replicas are processes, workers are threads."""
    origin = min(s.start for workers in timeline.replicas for spans in workers for s in spans)
    events: list[dict[str, Any]] = []
    for dp_rank, workers in enumerate(timeline.replicas):
        events.append(_named("process_name", f"replica {dp_rank}", pid=dp_rank))
        for pp_rank, spans in enumerate(workers):
            events.append(_named("thread_name", _stages(spans), pid=dp_rank, tid=pp_rank))
            for span in spans:
                start, end = (round((t - origin) * 1e6, 1) for t in (span.start, span.end))
                events.append(
                    {
                        "name": f"{span.kind}{span.microbatch}",
                        "cat": _NAMES[span.kind],
                        "ph": "X",
                        "ts": start,
                        "dur": round(end - start, 1),
                        "pid": dp_rank,
                        "tid": pp_rank,
                        "args": {"stage": span.stage, "microbatch": span.microbatch},
                    }
                )
    summary = {"step": timeline.step, "bubble": timeline.bubble, "theoretical_bubble": timeline.theoretical_bubble}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def _named(what: str, name: str, **where: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "args": {"name": name}, **where}


def draw(timeline: Timeline, path: Path, *, title: str) -> None:
    """Draw a PNG at ``path``: a row per worker, and a bar per action with the number of its micro-batch.

    Raises:
        OSError: ``path`` cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    depth = len(timeline.replicas[0])
    shown = timeline.replicas[: max(1, _MOST_WORKERS // depth)]
    origin = min(s.start for workers in shown for spans in workers for s in spans)
    end = max(s.end for workers in shown for spans in workers for s in spans)
    rows = len(shown) * (depth + 0.5)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.5 + _ROW_INCHES * rows), layout="constrained")
    axes = figure.subplots()
    ticks: dict[float, str] = {}
    for dp_rank, workers in enumerate(shown):
        waiting = ((min(s.start for w in workers for s in w) - origin) * 1e3, extent_s(workers) * 1e3)
        for pp_rank, spans in enumerate(workers):
            y = dp_rank * (depth + 0.5) + pp_rank
            replica = f"replica {dp_rank}, " if len(timeline.replicas) > 1 else ""
            ticks[y] = replica + _stages(spans)
            axes.broken_barh([waiting], (y - _BAR_HEIGHT / 2, _BAR_HEIGHT), facecolors=_WAIT_COLOUR)
            _draw_row(axes, y, spans, origin=origin, end=end)
    axes.set_xlim(0, (end - origin) * 1e3)
    axes.set_ylim(rows - 0.9, -0.6)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    several = any(len({s.stage for s in spans}) > 1 for spans in shown[0])
    axes.set_xlabel("milliseconds since the step's first forward pass" + several * "; paler: a worker's later stages")
    axes.spines[["top", "right", "left"]].set_visible(False)
    more = f", {len(shown)} of {len(timeline.replicas)} replicas" if len(shown) < len(timeline.replicas) else ""
    axes.set_title(f"{title}, step {timeline.step}{more}", loc="left", fontweight="bold")
    bubbles = f"bubble {timeline.bubble:.1%} measured, {timeline.theoretical_bubble:.1%} in theory"
    axes.set_title(bubbles, loc="right")
    kinds = sorted({s.kind for workers in shown for spans in workers for s in spans}, key="FBIW".index)
    handles = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in kinds]
    handles.append(Patch(color=_WAIT_COLOUR, label="wait"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_row(axes: Axes, y: float, spans: Sequence[Span], *, origin: float, end: float) -> None:
    from matplotlib.colors import to_rgb

    stages = sorted({s.stage for s in spans})
    colours = []
    for span in spans:
        paler = min(_PALER * stages.index(span.stage), 0.8)
        colours.append([c + (1 - c) * paler for c in to_rgb(_COLOURS[span.kind])])
    bars = [((s.start - origin) * 1e3, (s.end - s.start) * 1e3) for s in spans]
    axes.broken_barh(bars, (y - _BAR_HEIGHT / 2, _BAR_HEIGHT), facecolors=colours, edgecolor="white", linewidth=0.5)
    inches_per_ms = 0.85 * _WIDTH_INCHES / (end - origin) / 1e3
    for span, (start, length), colour in zip(spans, bars, colours, strict=True):
        text = str(span.microbatch)
        if length * inches_per_ms > _DIGIT_INCHES * (len(text) + 0.5):
            ink = "black" if sum(colour) > 1.4 else "white"
            axes.text(start + length / 2, y, text, ha="center", va="center_baseline", color=ink, fontsize=8)


def _stages(spans: Sequence[Span]) -> str:
    stages = sorted({s.stage for s in spans})
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
