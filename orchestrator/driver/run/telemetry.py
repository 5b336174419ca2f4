"""Heartbeats of the workers, a few times a second, and the progress, metrics and events that come with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from orchestrator.driver.gang.members import Member, Members
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.process.uploads import Uploader
from orchestrator.driver.reporting import RecordUpload
from orchestrator.planning.plan import Plan
from orchestrator.policy.aggregate import Aggregator
from orchestrator.policy.straggler import SharedMachine, StragglerWatch
from orchestrator.protocol.events import (
    CheckpointSaved,
    Continued,
    Event,
    FirstStepDone,
    MetricsLogged,
    RankPrinted,
    RankProgress,
    Straggler,
    StragglerFound,
    SystemMetricsLogged,
)
from orchestrator.protocol.messages import EvalPoint, Heartbeat, TrainPoint, WorkerInfo
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.worker.control.spool import read_spool, remove_spool

UPLOAD_CHECK_EVERY_S = 5.0
HEARTBEAT_WAIT_S = 0.2
"""Wait this long for the heartbeats of one round; a later one is merged into the next."""
LAST_HEARTBEAT_WAIT_S = 1.0
"""Wait this long for the heartbeats of living workers after a generation has ended."""


@dataclass(frozen=True)
class Collected:
    """One round of heartbeats, by rank, and the ``events`` that the workers reported, which have been emitted."""

    heartbeats: Mapping[int, Heartbeat]
    events: tuple[Event, ...]


class Telemetry:
    """Collects from the workers during the whole run and emits what it learns.

    Args:
        show_page: called once, with the page of the run on the tracking server as soon as there is one.

    Attributes:
        last_step: the last completed step of each rank.
        straggler: the straggler found in this generation; None if there is none.
        aggregator: combines the metrics of the ranks.
        runs_script: whether the ranks report themselves, which some may not do.
    """

    def __init__(
        self, context: RunContext, uploader: Uploader, records: RecordUpload, *, show_page: Callable[[str], None]
    ):
        spec, plan = context.spec, context.spec.sizes.initial
        self.last_step: dict[int, int] = {}
        self.straggler: Straggler | None = None
        self.aggregator = Aggregator(
            mesh=plan.mesh, global_batch_size=plan.global_batch_size, tokens_per_sample=spec.tokens_per_sample
        )
        self.runs_script = registry.load(plan.strategy).runs_script
        self._awaits_report = spec.resumed_from_step is not None and self.runs_script
        self._trained_generation = 0
        self._received: dict[WorkerInfo, int] = {}  # how many points and events of each process
        self._config = spec.config
        self._plan = plan
        self._stragglers = StragglerWatch(plan.mesh.num_workers)
        self._machines = SharedMachine()
        self._driver_s: tuple[float, float] | None = None  # its CPU time at the first and the last reading of machines
        self._events = context.events
        self._uploads: tuple[tuple[str, str, Callable[[], str | None]], ...] = (
            ("MLflow", "point", uploader.problem),
            ("tracking.sinks", "point", uploader.sink_problem),
            ("output_dir", "file", records.problem),
        )
        self._find_page, self._show_page, self._page_shown = uploader.page, show_page, False
        self._failing: set[str] = set()
        self._next_upload_check = time.monotonic() + UPLOAD_CHECK_EVERY_S
        self._system_readings = 0
        self._next_system_reading = time.monotonic()

    def collect(
        self, gang: Members, *, wait_s: float = HEARTBEAT_WAIT_S, ranks: Collection[int] | None = None
    ) -> Collected:
        """Collect one round of heartbeats, of ``ranks`` or of those in turn, and emit what they report.

        ``wait_s``: how long to wait for answers, in seconds.
        """
        every_s = self._config.tracking.system_metrics_every_s
        now = time.monotonic()
        system_due = every_s > 0 and now >= self._next_system_reading
        if system_due:
            self._next_system_reading = now + every_s
        heartbeats = gang.heartbeats(with_system_metrics=system_due, wait_s=wait_s, ranks=ranks)
        nodes = node_names(gang.members)
        system: dict[str, float] = {}
        for rank, heartbeat in sorted(heartbeats.items()):
            info = gang.members[rank].info
            self.last_step[rank] = heartbeat.step
            system |= {f"system/{nodes[info.node_id]}/{name}": value for name, value in heartbeat.system.items()}
            num_reports = len(heartbeat.points) + len(heartbeat.events)
            self._received[info] = heartbeat.first_report + num_reports
            self._add_points(rank, heartbeat.points, gang.members)
            self._events.emit(
                RankProgress(
                    rank=rank,
                    step=heartbeat.step,
                    phase=heartbeat.phase,
                    step_ms=heartbeat.busy_ms,
                    node=info.hostname,
                    evaluated=heartbeat.evaluated,
                )
            )
            if heartbeat.lines:
                self._events.show(RankPrinted(rank=rank, lines=heartbeat.lines))
        if self.runs_script:
            self.complete_points(final=False)
        # After the metrics of all ranks, so that the loss of a step stands before its checkpoint.
        events = self._emit_events(event for _, h in sorted(heartbeats.items()) for event in h.events)
        if system:
            self._system_readings += 1
            self._events.emit(SystemMetricsLogged(step=self._system_readings, metrics=system))
        self._check_uploads(now)
        return Collected(heartbeats, events)

    def collect_last_reports(self, gang: Members, run_dir: RunDir, *, returned: Collection[int]) -> tuple[Event, ...]:
        """Collect the reports that the driver has not received, after a generation.

        A living worker has sent them with its outcome and with the heartbeat that it was asked for before. A worker
        that has died has left them on disk, unless its run directory is not the driver's.

        Args:
            gang: with the ranks of that generation.
            run_dir: the directory of the run.
            returned: the ranks whose process lives.

        Returns:
            The events, which have been emitted.
        """
        asked_before = gang.unanswered().intersection(returned)
        events = list(self.collect(gang, wait_s=LAST_HEARTBEAT_WAIT_S, ranks=asked_before).events)
        for member in gang.members:
            if member.global_rank not in returned:
                spool = run_dir.spool(member.info.node_id, member.info.pid)
                received = self._received.get(member.info, 0)
                unreceived = [report for number, report in read_spool(spool) if number >= received]
                points = [report for report in unreceived if not isinstance(report, Event)]
                self._add_points(member.global_rank, points, gang.members)
                completed = [r.step for r in unreceived if isinstance(r, TrainPoint | EvalPoint | CheckpointSaved)]
                last_step = self.last_step.get(member.global_rank, 0)
                self.last_step[member.global_rank] = max([last_step, *completed])
                events += self._emit_events(report for report in unreceived if isinstance(report, Event))
                remove_spool(spool)
        return tuple(events)

    def complete_points(self, *, final: bool = True) -> None:
        """Emit what :meth:`Aggregator.incomplete` returns."""
        for logged in self.aggregator.incomplete(final=final):
            self._events.emit(logged)

    def has_trained(self, generation: int) -> bool:
        """Return whether a step of ``generation``, or of a later one, is complete."""
        return self._trained_generation >= generation

    def machine_summary(self, *, driver_node: str) -> Mapping[str, float]:
        """Return what other programs used while the run was timed; ``driver_node``: the id of the node of this process.

        It is empty if nothing was measured.
        """
        began_s, ended_s = self._driver_s or (0.0, 0.0)
        return self._machines.summary(driver_node=driver_node, driver_s=ended_s - began_s)

    def begin_generation(self, plan: Plan, lost: Collection[int], step: int) -> None:
        """Prepare for a generation under ``plan``: all ranks are at ``step``, those in ``lost`` have new workers."""
        self._awaits_report = self.runs_script
        self.aggregator.begin_generation(plan.mesh)
        self.last_step = dict.fromkeys(range(plan.world_size), step)
        self.straggler = None
        if plan is not self._plan:
            self._plan, self._stragglers = plan, StragglerWatch(plan.mesh.num_workers)
        for rank in lost:
            self._stragglers.forget(rank)

    def _add_points(self, rank: int, points: Iterable[TrainPoint | EvalPoint], members: tuple[Member, ...]) -> None:
        for point in points:
            if isinstance(point, TrainPoint) and point.machine is not None:
                self._machines.add(rank, members[rank].info.node_id, point.machine)
                now_s = time.process_time()
                self._driver_s = (now_s if self._driver_s is None else self._driver_s[0]), now_s
            if self._awaits_report:  # only now it is known from where the script has started again
                self._awaits_report = False
                self._events.emit(Continued(step=point.step - 1))
            logged = self.aggregator.add(rank, point)
            if logged is not None:
                self._events.emit(logged)
            if rank in self._plan.mesh.servers or not isinstance(point, TrainPoint):
                continue
            if (straggler := self._stragglers.add(rank, point)) is not None:
                self.straggler = straggler
                self._report_straggler(straggler, members[straggler.rank].info.place)

    def _emit_events(self, reported: Iterable[Event]) -> tuple[Event, ...]:
        """Emit and return events of workers, with one :class:`FirstStepDone` for each generation.

        Every rank reports its first step, because any of them may die before the driver hears of it.
        """
        events = []
        for event in reported:
            if isinstance(event, FirstStepDone):
                if event.generation <= self._trained_generation:
                    continue
                self._trained_generation = event.generation
            self._events.emit(event)
            events.append(event)
        return tuple(events)

    def _report_straggler(self, straggler: Straggler, node: str) -> None:
        name = self._plan.display_name(straggler.rank)
        self._events.emit(StragglerFound(**asdict(straggler), display_name=name, node=node))
        metrics = {"recovery/straggler_rank": float(straggler.rank)}
        self._events.emit(MetricsLogged(step=straggler.step, metrics=metrics))

    def _check_uploads(self, now: float) -> None:
        """Warn once when uploads begin to fail, and once when they work again; show the page of the run."""
        if now < self._next_upload_check:
            return
        self._next_upload_check = now + UPLOAD_CHECK_EVERY_S
        if not self._page_shown and (page := self._find_page()) is not None:
            self._show_page(page)
            self._page_shown = True
        for target, what, find_problem in self._uploads:
            problem = find_problem()
            if problem and target not in self._failing:
                self._failing.add(target)
                self._events.warn(f"no upload to {target} ({problem}); training continues, and no {what} is lost")
            elif target in self._failing and not problem:
                self._failing.remove(target)
                self._events.warn(f"uploads to {target} work again")


def node_names(members: tuple[Member, ...]) -> dict[str, str]:
    """Return ``node_0``, ``node_1``, ... by node id, in rank order; MLflow groups the charts of such names."""
    ordered = dict.fromkeys(m.info.node_id for m in members)
    return {node_id: f"node_{number}" for number, node_id in enumerate(ordered)}
