"""The sentences that report events to a user."""

from __future__ import annotations

import textwrap

from orchestrator.config.text import first_few
from orchestrator.display.plain_text import clean, count, duration, first_line, size, workers_text
from orchestrator.protocol import events

Line = tuple[str, str]
"""Text and its style, which is used only on a terminal."""

_LOG_TAIL_LINES = 60


def describe_event(event: events.Event) -> list[Line]:
    """Return the lines that report an event; none for events that only update the progress."""
    match event:
        case events.RunStarted():
            return _started(event)
        case events.WaitingForResources() | events.WaitingInQueue():
            return [(waiting_text(event), "")]
        case events.Yielded():
            text = f"yielded to {event.to} at step {event.step}: the run continues when there is room again"
            return [(text, "yellow")]
        case events.GenerationStarted():
            return _generation(event)
        case events.ModelCut():
            return [(_stage_text(number, stage), "") for number, stage in enumerate(event.stages)]
        case events.CheckpointSaved():
            return [(checkpoint_text(event), "")]
        case events.CheckpointFailed():
            text = f"warning: cannot write the checkpoint of step {event.step}: {first_line(event.reason)}"
            return [(f"{text}; training continues", "yellow")]
        case events.WorkerFailed():
            return _worker_failed(event)
        case events.WorkerLost():
            text = f"{event.what}, the run recovers: {first_line(event.reason)}"
            return [(text, "yellow")]
        case events.StragglerFound():
            return [(_straggler(event), "yellow")]
        case events.Recovered():
            return [(_recovered(event), "green")]
        case events.StopRequested():
            return [(stop_text(event), "yellow")]
        case events.Noted():
            return [(f"note: {event.message}", "")]
        case events.Warned():
            return [(f"warning: {event.message}", "yellow")]
        case events.RankPrinted():
            return [(f"[rank {event.rank}] {line}", "") for line in event.lines]
        case (
            events.StepsKnown()
            | events.BestFound()
            | events.StateChanged()
            | events.FirstStepDone()
            | events.RankProgress()
            | events.SystemMetricsLogged()
            | events.MetricsLogged()
        ):
            return []
        case events.SampleSaved() | events.TextSampled() | events.Continued() | events.RunEnded():
            return []
        case _:
            return [(event.kind.replace("_", " "), "")]


def _started(event: events.RunStarted) -> list[Line]:
    what = f"{event.name}: strategy {event.strategy}, job {event.job}"
    steps = f", {count(event.steps, 'step')}" if event.steps else ""
    lines = [f"{what}, {workers_text(event.world_size, event.num_servers)}{steps}"]
    lines.append(f"run directory: {event.run_dir}")
    if event.source is not None:
        verb = "evaluates" if event.evaluates else "continues from"
        lines.append(f"{verb} the checkpoint of step {event.resumed_from_step} of {event.source}")
    elif event.resumed_from_step is not None:
        lines.append(f"resumed from step {event.resumed_from_step}")
    lines += [f"note: {note}" for note in event.notes]
    return [(lines[0], "bold"), *((line, "") for line in lines[1:])]


def _generation(event: events.GenerationStarted) -> list[Line]:
    ranks = [f"rank {rank} on {place}" for rank, place in enumerate(event.workers)]
    text = f"{event.backend} on {event.device} in {event.precision}: {first_few(ranks)}"
    return [(text if event.generation <= 1 else f"generation {event.generation}: {text}", "")]


def _straggler(event: events.StragglerFound) -> str:
    compute = f"it computes {event.compute_ms:.3g} ms per step (the others {event.others_compute_ms:.3g} ms)"
    data = f"waits {event.data_wait_ms:.3g} ms for data (the others {event.others_data_wait_ms:.3g} ms)"
    rank = f"{event.display_name} on {event.node}"
    cost = f"which costs the run {event.throughput_loss:.0%} of its throughput"
    return f"warning: {rank} is {event.slower_by:.1f} times slower than the others, {cost}: {compute} and {data}"


def _recovered(event: events.Recovered) -> str:
    ranks = ", ".join(str(rank) for rank in event.replaced)
    if event.planned == "yielded":
        how = f"it is the run's turn again with {count(event.num_workers, 'worker')}"
    elif event.num_workers != event.num_workers_before:
        how = f"{count(event.num_workers, 'worker')} instead of {event.num_workers_before}"
    elif ranks:
        how = f"rank{'s' if len(event.replaced) > 1 else ''} {ranks} replaced"
    else:
        how = "process group formed again"
    verb = "recovered" if event.planned is None else "continued"
    if event.steps_lost is None:
        return f"{verb} after {event.seconds:.1f} s: {how}, the script starts again (generation {event.generation})"
    lost = count(event.steps_lost, "step") + " repeated" if event.steps_lost else "no step lost"
    return f"{verb} at step {event.step} after {event.seconds:.1f} s: {how}, {lost} (generation {event.generation})"


def _stage_text(number: int, stage: events.StageSummary) -> str:
    share = "" if stage.time_share is None else f"{stage.time_share:.0%} of the time, "
    return f"stage {number}: {share}{count(stage.num_parameters, 'parameter')}: {first_few(stage.layers)}"


def _worker_failed(event: events.WorkerFailed) -> list[Line]:
    reason = first_line(event.reason)
    lines = [(f"{event.what}: {reason}", "bold red")]
    shown, tail = event.traceback, clean(event.log_tail).strip().splitlines()[-_LOG_TAIL_LINES:]
    if event.own_frames:
        shown, tail = textwrap.dedent(event.own_frames), []
    elif shown:  # a log ends with the traceback, or with the end of it
        in_log = {line.strip() for line in clean(shown).splitlines()}
        tail = tail[: next((i for i, line in enumerate(tail) if line.strip() and line.strip() in in_log), len(tail))]
    lines += [(f"  {line}", "") for line in clean(shown).strip().splitlines()]
    if event.own_frames:
        lines.append((f"the whole traceback is in its log: {event.log}", ""))
        return lines
    if tail:
        lines.append((f"last lines of its log ({event.log}):", "bold"))
        lines += [(f"  {line}", "dim") for line in tail]
    elif event.log:
        lines.append((f"its log: {event.log}", ""))
    return lines


def stop_text(event: events.StopRequested, *, step: int = 1, started: events.RunStarted | None = None) -> str:
    """Return what a signal to stop causes.

    Args:
        step: the last step that the run is known to have done.
        started: the start of the run; None if it is not known.
    """
    does = "writing a checkpoint before stopping"
    if started is not None and started.evaluates:
        does = "stopping"
    elif started is not None and not started.steps:
        does = "waiting for the script, which SIGTERM asks to save and to end"
    elif not step:
        does = "stopping before the first step"
    return f"{event.signal}: {does}; send it again to stop at once"


def waiting_text(event: events.WaitingForResources | events.WaitingInQueue) -> str:
    """Return what the run waits for, and why."""
    if isinstance(event, events.WaitingInQueue):
        place = "without a place" if event.unfit else f"place {len(event.ahead) + 1}"
        parts = [f"waiting {duration(event.waited_s)} in the queue, {place}"]
        parts += [f"before it: {first_few(event.ahead)}"] if event.ahead else []
        parts += [f"running: {first_few(event.running)}"] if event.running else []
        return "; ".join([*parts, event.why])
    why = f": {event.why}" if event.why else ""
    return f"waiting {duration(event.waited_s)} for {event.wanted}{why}"


def checkpoint_text(event: events.CheckpointSaved) -> str:
    """Return that a checkpoint was saved, with its size and time."""
    cost = f"{size(event.size_bytes)} in {event.seconds:.2f} s"
    return f"checkpoint of step {event.step:,} saved ({cost})"
