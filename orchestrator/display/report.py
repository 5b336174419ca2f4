"""The plan, the errors and the verdict of a run as plain text."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from orchestrator.config.text import first_few
from orchestrator.display.plain_text import (
    MOST_ROWS,
    bar,
    clean,
    count,
    duration,
    first_line,
    indented,
    number,
    plain_table,
    rate,
    render,
    takes_unicode,
    writable,
)
from orchestrator.display.run_end import RunEnd, run_end
from orchestrator.planning.plan import Node, Plan, WorkerPlan
from orchestrator.protocol.events import (
    ONLY_OWN,
    CheckpointSaved,
    RunEnded,
    RunStarted,
    StopRequested,
    WorkerFailed,
    at_step,
)
from orchestrator.protocol.metrics import summary_value

LONG_WAIT_S = 3.0
"""The verdict names a wait from this time on."""
_TABLE_WIDTH = 100

_DETAIL = re.compile(r"(?:without a last checkpoint: |; (?=what rank ))(.*)")
"""What a verdict on a stopped run says of what was not saved."""


def plan_table(plan: Plan, nodes: tuple[Node, ...]) -> str:
    """Return the plan as text: the request, the cluster, each rank's share of the global batch, notes."""
    unicode = takes_unicode(sys.stdout)
    width = min(shutil.get_terminal_size((_TABLE_WIDTH, 24)).columns, _TABLE_WIDTH)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, value in _facts(plan, nodes):
        facts.add_row(name, value)
    shares = plain_table(unicode=unicode)
    staged = plan.mesh.pipeline > 1
    workers = plan.workers[: plan.mesh.num_workers]
    shares.add_column("ranks" if len(workers) > MOST_ROWS else "rank", no_wrap=True)
    if staged:
        shares.add_column("stages", no_wrap=True)
    for head in ("samples per step", "of the batch", ""):
        shares.add_column(head, justify="right" if head else "left", no_wrap=True)
    largest = max(w.samples_per_step for w in workers)
    for ranks, stages, samples in _shares(workers):
        of_batch = samples / plan.global_batch_size
        drawn = bar(samples / largest, width=16, unicode=unicode).rstrip()
        cells = [ranks, *([stages] if staged else []), f"{samples:,}", f"{of_batch:.1%}", drawn]
        shares.add_row(*cells)
    parts = [
        f"plan: {plan.run_name}",
        indented(render(facts, width=width - 2)),
        "",
        indented(render(shares, width=_TABLE_WIDTH)),
    ]
    if plan.notes:
        parts += ["", *(f"  note: {note}" for note in plan.notes)]
    return writable("\n".join(parts), sys.stdout)


def _facts(plan: Plan, nodes: tuple[Node, ...]) -> list[tuple[str, str]]:
    accumulation = f", gradients accumulated over {plan.grad_accumulation} slices" if plan.grad_accumulation > 1 else ""
    return [
        (
            "request",
            f"strategy {plan.strategy}, job {plan.job}"
            + (f", {count(plan.steps, 'step')} of {count(plan.global_batch_size, 'sample')}" if plan.steps else "")
            + accumulation,
        ),
        ("cluster", f"{count(len(nodes), 'node')}: {first_few(_inventory(nodes))}"),
        (
            "workers",
            f"{count(plan.mesh.num_workers, 'worker')} on {plan.device}, {' and '.join(_of_each(plan))} each; "
            f"{plan.describe()}",
        ),
        *_servers(plan),
        *_pipeline(plan),
    ]


def _of_each(plan: Plan) -> list[str]:
    """What a worker has. The threads are named if there are more than CPUs, as for few workers on an idle machine."""
    cpus, gpus, threads = plan.cpus_per_worker, plan.gpus_per_worker, plan.threads_per_worker
    return [
        f"{cpus:g} {'CPUs' if cpus > 1 else 'CPU'}",
        *([count(gpus, "GPU")] if gpus else []),
        *([count(threads, "thread")] if not gpus and threads > cpus else []),
    ]


def _servers(plan: Plan) -> list[tuple[str, str]]:
    if not plan.mesh.num_servers:
        return []
    return [
        ("servers", f"{count(plan.mesh.num_servers, 'server')} of the parameters, {plan.cpus_per_worker:g} CPU each")
    ]


def _pipeline(plan: Plan) -> list[tuple[str, str]]:
    if plan.pipeline is None:
        return []
    layout = plan.pipeline
    rows = plan.microbatch_rows
    work = f"{layout.schedule}, {count(layout.num_microbatches, 'micro-batch', 'es')} of {count(rows, 'sample')}"
    where = "balanced by measured time" if plan.split is None else f"split before {', '.join(plan.split)}"
    return [("pipeline", f"{count(layout.num_stages, 'stage')} {where}; {work}")]


def _inventory(nodes: tuple[Node, ...]) -> list[str]:
    """The nodes by name; of many nodes, the number of each kind."""
    kinds = [f"{n.cpus:g} CPUs" + (f" and {n.gpus} GPUs" if n.gpus else "") for n in nodes]
    if len(nodes) <= MOST_ROWS // 2:
        return [f"{node.name} ({kind})" for node, kind in zip(nodes, kinds, strict=True)]
    return [f"{number} with {kind}" for kind, number in Counter(kinds).items()]


def _shares(workers: Sequence[WorkerPlan]) -> list[tuple[str, str, int]]:
    """``(ranks, stages, samples per step)`` of each rank; of many ranks, of each range with equal shares."""
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
    """Return a heading and one bullet for each error that keeps a run from starting."""
    bullets = (f"  - {indented(clean(error), '    ').lstrip()}" for error in errors)
    return "\n".join([f"cannot start: {count(len(errors), 'error')}", *bullets])


def verdict(
    ended: RunEnded,
    *,
    step: int,
    started: RunStarted | None,
    stop: StopRequested | None,
    failure: WorkerFailed | None,
    checkpoint: CheckpointSaved | None,
) -> list[str]:
    """Return the last lines about a run: how it ended, where its files are, and which commands may follow.

    Ray keeps the last lines as the message of a job, so they must be understood without the lines before them.

    Args:
        step: the last step that the console has seen.
        started: the start of the run; None if it did not start. The same holds for the other events.
    """
    summary, began = ended.summary, None if started is None else started.time
    end = run_end(summary, status=ended.status, reason=ended.reason, started=began, ended=ended.time)
    if stop and checkpoint and checkpoint.time >= stop.time:
        step = checkpoint.step
    if end.status == "FINISHED":
        lines = [_finished(end, summary, started, step), *([end.reason] if end.reason else [])]
    elif end.status == "PRUNED":
        lines = [ended.reason]
    elif end.status == "KILLED":
        is_script = started is not None and not started.steps
        when = f"at step {step}" if step or not is_script else "while its script ran"
        how = f"stopped by {stop.signal} {when}" if stop else end.reason or "stopped"
        if stop and (why := _DETAIL.search(end.reason)) is not None:
            how += f"; {why[1]}"
        kept = ONLY_OWN if is_script else _newest(checkpoint, step)
        lines = [how if kept in how else f"{how}; {kept}"]
    else:
        lines = [*_failed(ended.reason, failure), *([_newest(checkpoint, step)] if checkpoint else [])]
    if started:
        lines.append(f"run directory: {started.run_dir}")
    if end.bubble_pct is not None:
        timeline = f"; timeline: {summary['timeline']}" if "timeline" in summary else ""
        lines.append("bubble: {:.1f}%, in theory {:.1f}%".format(*end.bubble_pct) + timeline)
    if end.warning:
        lines.append(end.warning)
    if end.advice and end.status == "FINISHED":
        lines.append(end.advice)
    if "profile" in summary:
        lines.append(f"profile: {summary['profile']} (open in https://ui.perfetto.dev)")
    if "samples" in summary:
        lines.append(f"samples: {summary['samples']}")
    lines += [f"next: {command}" for command in ended.next_commands]
    if "mlflow_run_page" in summary:
        lines.append(f"View run: {summary['mlflow_run_page']}")
    if "mlflow_page" in summary:
        lines.append(f"charts: {summary['mlflow_page']}")
    if "mlflow_missing" in summary:
        lines.append(f"not yet in MLflow: {first_line(summary['mlflow_missing'])}")
    return lines


def _finished(end: RunEnd, summary: Mapping[str, Any], started: RunStarted | None, step: int) -> str:
    steps = end.steps or step
    text = f"finished: {count(steps, 'step')}" if steps else "finished"  # a script need not report any
    if started:
        if started.evaluates:
            text = f"evaluated: step {started.resumed_from_step}"
        elif started.resumed_from_step:
            text += f" (resumed at {started.resumed_from_step})"
        if end.took_s is not None:
            text += f" in {end.took_s:,.1f} s"
        waits = {"in the queue": "queue_s", "for resources": "waited_s"}
        seconds = {what: summary_value(summary, key) or 0.0 for what, key in waits.items()}
        if told := [f"{duration(s)} {what}" for what, s in seconds.items() if s >= LONG_WAIT_S]:
            text += f" after waiting {' and '.join(told)}"
    parts = [text]
    if end.samples_per_s is not None:
        parts.append(f"{rate(end.samples_per_s)} samples/s")
    validation = "val_accuracy" if "val_accuracy" in end.results else "val_loss"
    shown = [key for key in ("final_loss", validation) if key in end.results]
    parts += [f"{key.replace('_', ' ')} {number(end.results[key])}" for key in shown]
    if end.restarts:
        lost = f", {count(end.steps_lost, 'step')} repeated" if end.steps_lost else ""
        parts.append(count(end.restarts, "restart") + lost)
    return ", ".join(parts)


def _failed(reason: str, failure: WorkerFailed | None) -> list[str]:
    if failure is None:
        return [f"failed: {first_line(reason) or 'no reason given'}"]
    lines = [f"failed: {failure.display_name}{at_step(failure.step)}: {first_line(failure.reason)}"]
    if reason and first_line(failure.reason) not in reason:
        lines.append(f"reason: {first_line(reason)}")
    return [*lines, f"log: {failure.log}"] if failure.log else lines


def _newest(checkpoint: CheckpointSaved | None, step: int) -> str:
    if checkpoint is None:
        return "no checkpoint was written"
    if checkpoint.step == step:
        return f"a checkpoint is at {checkpoint.path}"
    return f"the newest checkpoint (step {checkpoint.step}) is at {checkpoint.path}"
