"""One launch: executes the runs of a command, which have been checked, on one Ray."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator import features
from orchestrator.compat.ray.gcs import add_job_metadata
from orchestrator.compat.ray_job import submission_id
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.config.text import path_override
from orchestrator.display.chosen_metrics import ChosenMetrics
from orchestrator.display.console import make_console
from orchestrator.display.report import plan_table
from orchestrator.driver.brief_runs import remove_run, shortened, without_samples
from orchestrator.driver.checked_runs import CheckedRun, planned_on, with_choice, with_shared_cores
from orchestrator.driver.choosing import Choice, NotMeasuredError, chooser
from orchestrator.driver.code.worker_code import CodeCache, WorkerCode, pickle_job
from orchestrator.driver.ending import RunEnding
from orchestrator.driver.joined_ray import ray_of
from orchestrator.driver.loops import Loop, PlannedRun
from orchestrator.driver.orphans import recover_orphans
from orchestrator.driver.preflight.record import command_line, open_run, settings_for_name
from orchestrator.driver.preflight.run_config import output_dir, tracking_note
from orchestrator.driver.process.origin import report_end, report_run, this_origin
from orchestrator.driver.process.run_context import EventStream, RunContext, RunResult, RunSpec, Silent
from orchestrator.driver.process.signals import StopRequests, StopSignals, stop_wait_warning
from orchestrator.driver.process.turns import turns_of
from orchestrator.driver.process.uploads import Uploader, tracking
from orchestrator.driver.reporting import JobStateSink, PrometheusSink, RecordUpload, enter_output
from orchestrator.driver.run.run import Run
from orchestrator.driver.run.worker_reports import take_left_reports
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.events import Noted, Sink, Warned
from orchestrator.records.journal import Journal, read_metrics
from orchestrator.records.lease import Lease, SupersededError
from orchestrator.records.lock import end_with_parent
from orchestrator.records.run_search import active_namesakes, namesake_warning
from orchestrator.records.sweep_dir import membership
from orchestrator.strategies import registry

if TYPE_CHECKING:
    from orchestrator.driver.debug.debug_run import DebugRun


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What all runs of a launch share: the nodes of Ray, the code for the workers, and the signals.

    ``watcher``: receives the events of a run that was asked for; None if nothing else does.
    """

    nodes: tuple[Node, ...]
    codes: CodeCache
    stop: StopSignals
    watcher: Sink | None


def run_all(
    checked_runs: Sequence[CheckedRun],
    stop: StopSignals,
    *,
    loop: Loop | None = None,
    part_of: Mapping[str, str] | None = None,
    started_at: float | None = None,
    watcher: Sink | None = None,
) -> list[RunResult]:
    """Execute the runs one after another on one Ray.

    Args:
        checked_runs: what :func:`check_all` returned.
        loop: executes the runs; None for a single one.
        part_of: the id and name of the sweep in whose records the only run is, with its number; None to ask the process
            that has started this one.
        started_at: when the first run was requested, in seconds since the epoch; None for now.
        watcher: receives the events of the runs too.

    Returns:
        The results of the runs that were started. In a loop, a run that could not be started has none.

    Raises:
        ConfigError: the cluster cannot be joined, or a plan does not fit it; nothing was started.
        KeyboardInterrupt: SIGINT or SIGTERM came while Ray was starting, and nothing was started; or a second SIGINT
            came during a run.
        SystemExit: a second SIGTERM came during a run.
    """
    started_at = time.time() if started_at is None else started_at
    if part_of is None and (part_of := membership()) is not None:
        end_with_parent(signal.SIGTERM)
    with CodeCache() as codes, ray_of(checked_runs, loop, codes) as (nodes, planned):
        launch = _Launch(nodes=nodes, codes=codes, stop=stop, watcher=watcher)
        if checked_runs[0].config.plan:
            _print_plans(launch, planned, loop)
            return []
        stop.exit_at_once = False
        if stop.received is not None:
            raise KeyboardInterrupt
        resumed = [c.resume.run_dir for c in checked_runs if c.resume is not None]
        if not checked_runs[0].config.debug:  # which starts no process
            recover_orphans(output_dir(checked_runs[0].config), resumed=resumed)
        if loop is None:
            ((checked_run, sizes),) = planned
            return [_execute(launch, checked_run, sizes, sweep=part_of, started_at=started_at)]
        runs = []
        for number, (c, sizes) in enumerate(planned):
            execute = functools.partial(_execute, launch, c, sizes, started_at=None if number else started_at)
            runs.append(PlannedRun(checked=c, sizes=sizes, execute=execute))
        return loop.execute(runs, nodes, stop)


def _print_plans(launch: _Launch, planned: Sequence[tuple[CheckedRun, Sizes]], loop: Loop | None) -> None:
    """Print the plan of each run; if its strategy is chosen, the plan of the best prediction."""
    for checked_run, sizes in planned:
        if loop is not None:
            loop.say(f"\n{loop.title_of(checked_run.overrides)}")
        config = checked_run.config
        if config.strategy.is_choice:
            choice = _choice(launch, checked_run, sizes.initial, measure=False)
            print(choice.text)
            sizes, config = choice.sizes, choice.config
        plan = sizes.initial
        print(plan_table(plan, launch.nodes))
        predicted = [f.notes(config, checked_run.job, plan, launch.nodes) for f in features.modules("plan_notes")]
        for note in (*itertools.chain.from_iterable(predicted), *tracking_note(checked_run.config)):
            print(f"  note: {note}")
        for warning in checked_run.warnings:
            print(f"  warning: {warning}")


def _choice(launch: _Launch, checked_run: CheckedRun, plan: Plan, *, measure: bool) -> Choice:
    """Choose the strategy of ``checked_run``; ``plan``: on as many workers as it may have."""

    def run(config: Config, plan: Plan, job: Job) -> RunResult:
        return _execute_briefly(launch, checked_run, config, plan, job, Silent())

    return chooser().choose(
        checked_run.config,
        checked_run.job,
        plan,
        launch.nodes,
        run,
        redactor=checked_run.redactor,
        oversubscribe_cpus=checked_run.embeds_ray,
        measure=measure,
    )


def _execute_briefly(
    launch: _Launch, checked_run: CheckedRun, config: Config, plan: Plan, job: Job, console: Sink
) -> RunResult:
    """Execute a run that nobody asked for in place of ``checked_run``."""
    errors: list[str] = []
    given = pickle_job(job, job, errors)
    if given is None:
        raise ConfigError(errors)
    brief = replace(checked_run, config=config, job=job, given=given, resume=None, source=None, warnings=(), notes=())
    return _execute(launch, brief, Sizes.of(plan), sweep=None, started_at=None, console=console)


@contextlib.contextmanager
def brief_runs(
    checked_run: CheckedRun, stop: StopSignals, *, folder: str
) -> Iterator[Callable[[CheckedRun, int], tuple[Plan, RunResult]]]:
    """Yield what trains a run on as many workers as ``checked_run`` for a few steps, and leaves nothing of it.

    ``folder``: the directory below ``output_dir`` in which the runs are until they end.
    """
    with CodeCache() as codes, ray_of([checked_run], None, codes) as (nodes, _):
        launch = _Launch(nodes=nodes, codes=codes, stop=stop, watcher=None)
        stop.exit_at_once = False

        def run(brief: CheckedRun, steps: int) -> tuple[Plan, RunResult]:
            sizes = brief.sizes or planned_on(nodes, [brief], None)[0][1]
            config, plan = shortened(brief.config, sizes.initial, steps=steps, log_every=steps, folder=folder)
            result = _execute_briefly(launch, brief, config, plan, without_samples(brief.job), Silent())
            remove_run(result)
            return plan, result

        yield run


def _chosen(launch: _Launch, checked_run: CheckedRun, plan: Plan) -> tuple[CheckedRun, Sizes]:
    """Choose the strategy, show why, and return the run that trains with it. Raises like :meth:`Choosing.choose`."""
    choice = _choice(launch, checked_run, plan, measure=True)
    print(choice.text, flush=True)
    overrides = with_choice(checked_run.overrides, checked_run.config, choice.overrides)
    return replace(checked_run, overrides=overrides, config=choice.config, choice=choice), choice.sizes


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A run with its records open: what its driver has at hand, and what it writes when the run has ended.

    ``code``: None if this process trains.
    """

    context: RunContext
    code: WorkerCode | None
    uploader: Uploader
    records: RecordUpload
    ending: RunEnding


def _execute(
    launch: _Launch,
    checked_run: CheckedRun,
    sizes: Sizes,
    *,
    sweep: Mapping[str, str] | None,
    started_at: float | None,
    console: Sink | None = None,
) -> RunResult:
    """Execute one run, whose strategy may have to be chosen first.

    Args:
        launch: what it shares with the other runs.
        sizes: the sizes that it may have.
        sweep: the sweep that it belongs to.
        started_at: when it was requested, in seconds since the epoch; None for now.
        console: what shows it, for a run that measures a job; None for the usual one.

    Raises:
        ConfigError: the run directory cannot be written, or another process drives the run; or the code of the job
            cannot travel to the nodes.
        KeyboardInterrupt, SystemExit: see :class:`StopSignals`.
    """
    started_at = time.time() if started_at is None else started_at
    if checked_run.config.strategy.is_choice and console is None:
        try:
            checked_run, sizes = _chosen(launch, checked_run, sizes.initial)
        except NotMeasuredError as e:
            return e.result
    with _opened(launch, checked_run, sizes, sweep=sweep, started_at=started_at, console=console) as run:
        try:
            with StopRequests(run.context.spec.run_dir, launch.stop):
                result = _run_of(run).execute()
        except SupersededError as e:
            return run.ending.leave(str(e))
        except (KeyboardInterrupt, SystemExit):
            number = launch.stop.received or signal.SIGINT
            run.ending.abort("KILLED", 128 + int(number), f"stopped by a second {number.name}")
            raise
        except Exception as e:  # a bug in the orchestrator; the records still say that the run failed
            run.ending.abort("FAILED", 1, f"{type(e).__name__}: {e}")
            raise
        with launch.stop.raising():
            return run.ending.finish(result)


def _run_of(run: _Opened) -> Run | DebugRun:
    if run.code is not None:
        return Run(run.context, run.code, run.uploader, run.records)
    from orchestrator.driver.debug.debug_run import DebugRun  # with what workers import

    return DebugRun(run.context, run.uploader, run.records)


@contextlib.contextmanager
def _opened(
    launch: _Launch,
    checked_run: CheckedRun,
    sizes: Sizes,
    *,
    sweep: Mapping[str, str] | None,
    started_at: float,
    console: Sink | None,
) -> Iterator[_Opened]:
    """Open the directory and the records of a run, with one stream of events to all of them, and close them.

    The arguments, and what it raises, are as for :func:`_execute`.
    """
    config, resume, plan, redactor = checked_run.config, checked_run.resume, sizes.initial, checked_run.redactor
    source = checked_run.source
    start = source or resume
    code = None if config.debug else launch.codes.get(config.cluster, checked_run.scripts)
    origin = this_origin()
    as_job = checked_run.given.display if checked_run.given is not None else ""
    command = command_line(checked_run.overrides, redactor, job=as_job, origin=origin)
    run_dir, uid = open_run(
        config,
        checked_run.job,
        plan,
        resume,
        seen=checked_run.seen,
        command=command,
        settings=settings_for_name(checked_run.overrides, checked_run.job, redactor),
        sweep=sweep,
        redactor=redactor,
    )
    start_dir = run_dir if source is None else source.run_dir
    if source is not None:
        key = "started_from" if config.evaluate is None else "evaluated"
        found = {"run": source.run_dir.location, "step": source.step}
        run_dir.update_record(**{key: redactor.data(found, by_key=False)})
    add_job_metadata({"run_dir": run_dir.location})
    if not config.debug:
        enter_output(run_dir, redactor)
    if checked_run.choice is not None:
        checked_run.choice.write_to(run_dir)
    lease = Lease(run_dir)
    records = RecordUpload(run_dir, lease, config.storage, redactor)
    chosen = ChosenMetrics.of(config)
    shown = console or make_console(steps=plan.steps, world_size=plan.world_size, chosen=chosen, live=not config.debug)
    launch.stop.console = shown
    journal = Journal(run_dir, warn=lambda text: events.show(Warned(message=text)))
    watchers = [] if launch.watcher is None or console is not None else [launch.watcher]
    of_ray = [] if config.debug else [JobStateSink(), PrometheusSink()]
    events = EventStream([shown, *of_ray, *watchers], redactor, journal=journal)
    for event in take_left_reports(run_dir, up_to_step=resume.step) if resume is not None else ():
        events.record(event)
    if resume is not None:
        chosen.look_back(read_metrics(run_dir), up_to_step=resume.step)
    namesakes = active_namesakes(run_dir)
    sweep_id = None if sweep is None else sweep["id"]
    turns = turns_of(config, sizes, run_dir, redactor, run_uid=uid, submitted_at=started_at, sweep=sweep_id)
    spec = RunSpec(
        config=with_shared_cores(config, processes_per_core=sizes.largest.processes_per_core),
        sizes=sizes,
        run_dir=run_dir,
        run_uid=uid,
        checkpoint=None if start is None or start.checkpoint is None else start_dir.checkpoints / start.checkpoint.name,
        resumed_from_step=None if start is None else start.step,
        source=None if source is None else source.run_dir,
        started_at=started_at,
        tokens_per_sample=checked_run.job.tokens_per_sample,
        secrets=tuple(redactor.secrets),
        pickled_job=None if checked_run.given is None else checked_run.given.data,
        turns=turns,
        checked_nodes=frozenset(node.node_id for node in launch.nodes),
        known_namesakes=frozenset(namesakes),
    )
    runs_script = registry.load(config.strategy.name).runs_script
    uploader = tracking().start(run_dir, config.tracking, redactor.secrets, shared=runs_script)
    resume_command = command_line(
        (*checked_run.overrides, path_override("resume", run_dir.location)), redactor, job=as_job, origin=origin
    )
    ending = RunEnding(
        plan=plan,
        run_dir=run_dir,
        tracking=config.tracking,
        uploader=uploader,
        records=records,
        journal=journal,
        events=events,
        redactor=redactor,
        resume_command=resume_command,
        in_sweep=sweep is not None,
        finds_rate=config.train.lr_range is not None,
        owns_process=launch.stop.owns_process,
        origin=origin,
    )
    with contextlib.ExitStack() as at_end:
        if console is None:
            report_run(run_dir)
            at_end.callback(report_end)
        at_end.callback(launch.stop.end_run)
        at_end.enter_context(contextlib.closing(events))
        at_end.enter_context(lease)  # until others can read how the run ended, however long that takes
        others = [namesake_warning(config.run_name, location) for location in namesakes.values()]
        short = None if submission_id() is None else stop_wait_warning(config.cluster.stop_grace_s, os.environ)
        for warning in (*checked_run.warnings, *others, *filter(None, [short])):
            events.show(Warned(message=warning))
        for note in (*checked_run.notes, *tracking_note(config)):
            events.show(Noted(message=note))
        context = RunContext(spec=spec, events=events, stop=launch.stop, lease=lease)
        yield _Opened(context=context, code=code, uploader=uploader, records=records, ending=ending)
