"""Figures, the plan, the faults and the verdict as plain text for people, without escape codes."""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from orchestrator.planning.plan import Node, Plan, WorkerPlan
from orchestrator.protocol.events import CheckpointSaved, RunEnded, RunStarted, StopRequested, WorkerFailed

MOST_ROWS = 8
"""Longer lists of ranks or nodes are summarised."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TABLE_WIDTH = 100
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_]?)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def takes_unicode(stream: Any) -> bool:
    """Whether box lines, blocks and arrows can be written to ``stream``."""
    try:
        (_BLOCKS + _EIGHTHS + "─│╭◀·").encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def writable(text: str, stream: Any) -> str:
    """``text`` with ``?`` for what the encoding of ``stream`` cannot take."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def clean(text: str) -> str:
    """Foreign text without escapes and control characters; a carriage return ends a line."""
    text = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", text)


def figure(value: float) -> str:
    """A loss or an accuracy: four significant digits."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.4f}" if 0.01 <= abs(value) < 10 else f"{value:.4g}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float, *, whole: bool = False) -> str:
    """``4.2s``, ``31s``, ``3m05s``, ``2h05m``."""
    if seconds < 9.95 and not whole:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def size(size_bytes: float) -> str:
    """``812 B``, ``2.1 MB``."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(int(math.log(max(size_bytes, 1), 1000)), len(units) - 1)
    return f"{size_bytes / 1000**power:.3g} {units[power]}"


def count(number: int, noun: str, plural: str = "s") -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def crew(world_size: int, num_shards: int) -> str:
    """``2 workers``, ``2 workers and 1 shard``."""
    workers = count(world_size - num_shards, "worker")
    return f"{workers} and {count(num_shards, 'shard')}" if num_shards else workers


def first_few(items: Sequence[str], most: int = MOST_ROWS) -> str:
    """The items with commas, or the first of them and how many more there are."""
    shown = list(items[:most])
    more = len(items) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def sparkline(values: Sequence[float], *, unicode: bool, from_zero: bool = False) -> str:
    """One character per value, scaled to their range, or from zero to the largest of them."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "?" * len(values)
    low, high = 0.0 if from_zero else min(finite), max(finite)
    top = len(blocks) - 1

    def block(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.5
        return blocks[round(max(share, 0.0) * top)]

    return "".join(block(v) if math.isfinite(v) else "?" for v in values)


def bar(share: float, *, width: int, unicode: bool) -> str:
    """A horizontal bar, ``share`` of ``width`` characters long, padded to ``width``."""
    share = min(max(share, 0.0), 1.0)
    if not unicode:
        return ("#" * round(share * width)).ljust(width)
    eighths = round(share * width * 8)
    text = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return text.ljust(width)


def render(renderable: RenderableType, *, width: int) -> str:
    """Rich's layout as plain text; trailing blanks cut."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def plain_table(*, unicode: bool, **options: Any) -> Table:
    """A table with no more than a rule below its head."""
    style = box.SIMPLE_HEAD if unicode else box.ASCII
    return Table(box=style, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="", **options)


def plan_table(plan: Plan, nodes: tuple[Node, ...]) -> str:
    """The plan in full: what is asked, what is there, who gets which share of the batch, notes."""
    unicode = takes_unicode(sys.stdout)
    width = min(shutil.get_terminal_size((_TABLE_WIDTH, 24)).columns, _TABLE_WIDTH)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, value in _facts(plan, nodes):
        facts.add_row(name, value)
    shares = plain_table(unicode=unicode)
    staged = plan.mesh.pipeline_parallel_size > 1
    workers = plan.workers[: plan.mesh.num_workers]
    shares.add_column("ranks" if len(workers) > MOST_ROWS else "rank", no_wrap=True)
    if staged:
        shares.add_column("stages", no_wrap=True)
    for head in ("samples a step", "of the batch", ""):
        shares.add_column(head, justify="right" if head else "left", no_wrap=True)
    largest = max(w.samples_per_step for w in workers)
    for ranks, stages, samples in _shares(workers):
        portion = samples / plan.global_batch_size
        picture = bar(samples / largest, width=16, unicode=unicode).rstrip()
        cells = [ranks, *([stages] if staged else []), f"{samples:,}", f"{portion:.1%}", picture]
        shares.add_row(*cells)
    parts = [
        f"plan: {plan.run_name}",
        _indented(render(facts, width=width - 2)),
        "",
        _indented(render(shares, width=_TABLE_WIDTH)),
    ]
    if plan.notes:
        parts += ["", *(f"  note: {note}" for note in plan.notes)]
    return writable("\n".join(parts), sys.stdout)


def _facts(plan: Plan, nodes: tuple[Node, ...]) -> list[tuple[str, str]]:
    accumulation = f", each share in {plan.grad_accumulation} slices" if plan.grad_accumulation > 1 else ""
    each = [f"{plan.cpus_per_worker:g} CPU"] + ([f"{plan.gpus_per_worker} GPU"] if plan.gpus_per_worker else [])
    grid = f"data parallel {plan.mesh.data_parallel_size}"
    if plan.mesh.pipeline_parallel_size > 1:
        grid += f" x pipeline {plan.mesh.pipeline_parallel_size}"
    return [
        (
            "asked",
            f"strategy {plan.strategy}, job {plan.job}, {count(plan.steps, 'step')} "
            f"of {count(plan.global_batch_size, 'sample')}{accumulation}",
        ),
        ("there", f"{count(len(nodes), 'node')}: {first_few(_inventory(nodes))}"),
        (
            "workers",
            f"{count(plan.mesh.num_workers, 'worker')} on {plan.device}, {' and '.join(each)} each; {grid}",
        ),
        *_shards(plan),
        *_pipeline(plan),
    ]


def _shards(plan: Plan) -> list[tuple[str, str]]:
    if not plan.mesh.num_shards:
        return []
    return [("shards", f"{count(plan.mesh.num_shards, 'shard')} of the parameters, {plan.cpus_per_worker:g} CPU each")]


def _pipeline(plan: Plan) -> list[tuple[str, str]]:
    if plan.pipeline is None:
        return []
    layout = plan.pipeline
    samples = plan.workers[0].samples_per_step // plan.grad_accumulation // layout.num_microbatches
    work = f"{layout.schedule}, {count(layout.num_microbatches, 'micro-batch', 'es')} of {count(samples, 'sample')}"
    where = "of equal measured time" if plan.split is None else f"cut before {', '.join(plan.split)}"
    return [("pipeline", f"{count(layout.num_stages, 'stage')} {where}; {work}")]


def _inventory(nodes: tuple[Node, ...]) -> list[str]:
    """The nodes by name, or how many of each kind if there are many."""
    kinds = [f"{n.cpus:g} CPUs" + (f" and {n.gpus} GPUs" if n.gpus else "") for n in nodes]
    if len(nodes) <= MOST_ROWS // 2:
        return [f"{node.name} ({kind})" for node, kind in zip(nodes, kinds, strict=True)]
    return [f"{number} with {kind}" for kind, number in Counter(kinds).items()]


def _shares(workers: Sequence[WorkerPlan]) -> list[tuple[str, str, int]]:
    """``(ranks, stages, samples a step)``: a row per rank, or per run of equal shares if many."""
    if len(workers) <= MOST_ROWS:
        return [(str(w.global_rank), ", ".join(map(str, w.stages)), w.samples_per_step) for w in workers]
    rows = []
    for samples, same in groupby(workers, key=lambda w: w.samples_per_step):
        group = list(same)
        ranks = _span(w.global_rank for w in group)
        rows.append((f"{ranks} ({len(group)})", _span(stage for w in group for stage in w.stages), samples))
    return rows


def _span(numbers: Iterable[int]) -> str:
    found = sorted(numbers) or [0]
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}-{found[-1]}"


def errors_text(errors: Sequence[str]) -> str:
    """What has to change before a run can start: a heading and one bullet per fault."""
    bullets = (f"  - {_indented(error, '    ').lstrip()}" for error in errors)
    return "\n".join([f"cannot start: {count(len(errors), 'thing')} to change", *bullets])


def verdict(
    ended: RunEnded,
    *,
    step: int,
    started: RunStarted | None,
    stop: StopRequested | None,
    failure: WorkerFailed | None,
    checkpoint: CheckpointSaved | None,
) -> list[str]:
    """How the run ended, where its files lie and what to type next: lines that stand alone."""
    if stop and checkpoint and checkpoint.time >= stop.time:
        step = checkpoint.step
    if ended.status == "FINISHED":
        lines = [_finished(ended, started, step)]
    elif ended.status == "KILLED":
        how = f"stopped by {stop.signal} at step {step}" if stop else first_line(ended.reason) or "stopped"
        lines = [f"{how}; {_newest(checkpoint, step)}"]
    else:
        lines = _failed(ended, failure)
        if checkpoint:
            lines.append(_newest(checkpoint, step))
    if started:
        lines.append(f"run directory: {started.run_dir}")
    if "bubble_pct" in ended.summary:
        lines.append(_bubble(ended.summary))
    if "profile" in ended.summary:
        lines.append(f"profile: {ended.summary['profile']} (open a file of it in https://ui.perfetto.dev)")
    return lines + [f"next: {command}" for command in ended.next_commands]


def _finished(ended: RunEnded, started: RunStarted | None, step: int) -> str:
    summary = ended.summary
    text = f"finished: {count(int(summary.get('steps') or step), 'step')}"
    if started:
        if started.resumed_from_step:
            text += f" (resumed at {started.resumed_from_step})"
        text += f" in {ended.time - started.time:,.1f} s"
    parts = [text]
    validation = "val_accuracy" if summary.get("val_accuracy") is not None else "val_loss"
    if (value := summary.get("samples_per_s")) is not None:
        parts.append(f"{rate(value)} samples/s")
    for key in ("final_loss", validation):
        if (value := summary.get(key)) is not None:
            parts.append(f"{key.replace('_', ' ')} {figure(value)}")
    if restarts := summary.get("restarts"):
        lost = summary.get("steps_lost")
        parts.append(count(restarts, "restart") + (f", {lost} steps lost" if lost else ""))
    return ", ".join(parts)


def _bubble(summary: Mapping[str, Any]) -> str:
    text = f"bubble: {summary['bubble_pct']:.1f}%, in theory {summary['bubble_theory_pct']:.1f}%"
    return f"{text}; timeline: {summary['timeline']}" if "timeline" in summary else text


def _failed(ended: RunEnded, failure: WorkerFailed | None) -> list[str]:
    if failure is None:
        return [f"failed: {first_line(ended.reason) or 'no reason given'}"]
    lines = [f"failed: {failure.display_name} at step {failure.step}: {first_line(failure.reason)}"]
    if ended.reason and first_line(failure.reason) not in ended.reason:
        lines.append(f"reason: {first_line(ended.reason)}")
    return [*lines, f"log: {failure.log}"] if failure.log else lines


def _newest(checkpoint: CheckpointSaved | None, step: int) -> str:
    if checkpoint is None:
        return "no checkpoint was written"
    if checkpoint.step == step:
        return f"a checkpoint is at {checkpoint.path}"
    return f"the newest checkpoint, of step {checkpoint.step}, is at {checkpoint.path}"


def first_line(text: str) -> str:
    return next((line for line in clean(text).splitlines() if line.strip()), "").strip()


def _indented(text: str, by: str = "  ") -> str:
    return "\n".join(by + line if line else line for line in text.splitlines())
