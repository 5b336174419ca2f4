"""What the workers of a run report, during a generation and at its end, and the summary of it.

Workers of a dead driver train on until Ray ends them. Their reports since its last heartbeats are for the driver that
resumes. It may continue from a checkpoint of that time.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import ray
import ray.exceptions

from orchestrator.driver.gang.members import Member
from orchestrator.driver.nodes.node_uploads import NodeUploads
from orchestrator.driver.process.calls import GangError, check_ray
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.process.uploads import Uploader
from orchestrator.driver.reporting import RecordUpload, add_tracking_page
from orchestrator.driver.run.run_recorder import RunRecorder, SavedCheckpoints
from orchestrator.driver.run.run_workers import AnyWorkers
from orchestrator.driver.run.telemetry import Telemetry
from orchestrator.planning.mesh import recorded_mesh
from orchestrator.planning.plan import Plan
from orchestrator.policy.aggregate import Aggregator
from orchestrator.policy.failure import Outcomes
from orchestrator.protocol.events import (
    BestFound,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    FirstStepDone,
    MetricsLogged,
)
from orchestrator.records.journal import read_lines
from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.spool import read_spool, spool_files

FINAL_HEARTBEAT_S = 2.0
"""Wait this long for the heartbeat of a worker that has finished its part."""


class WorkerReports:
    """Receives what workers report, and tells the parts of the driver that act on it.

    ``node_id``: the id of the node of this process.

    Attributes:
        telemetry: the heartbeats that bring the reports.
    """

    def __init__(
        self,
        context: RunContext,
        workers: AnyWorkers,
        recorder: RunRecorder,
        checkpoints: SavedCheckpoints,
        *,
        uploader: Uploader,
        records: RecordUpload,
        node_id: str,
    ):
        self.telemetry = Telemetry(context, uploader, records, show_page=add_tracking_page)
        self._spec = spec = context.spec
        self._events = context.events
        self._workers = workers
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._node_id = node_id
        self._node_uploads = NodeUploads(spec.run_dir, spec.config.storage, spec.secrets)
        self._best: BestFound | None = None

    def begin_generation(self) -> None:
        """Prepare for what the workers write on their nodes."""
        plan, members = self._workers.plan, self._workers.gang.members
        self._node_uploads.cover(member.info.node_id for member in members)
        record_ranks(self._spec.run_dir, plan, members, tokens_per_sample=self._spec.tokens_per_sample)

    def handle(self, events: Iterable[Event]) -> None:
        """Act on what workers have reported."""
        for event in events:
            match event:
                case CheckpointSaved() | CheckpointFailed():
                    self._checkpoints.record(event)
                case BestFound():
                    self._best = event
                    self._recorder.record(best={"metric": event.metric, "step": event.step, "value": event.value})
                case FirstStepDone():
                    self._recorder.begin_training(event)
                    self._workers.refill()

    def collect_last(self, outcomes: Outcomes) -> None:
        """Collect the reports of the workers of a generation, also of dead ones, on any node."""
        gang, run_dir = self._workers.gang, self._spec.run_dir
        for member in gang.members:
            if member.global_rank not in outcomes.returned:
                spool = run_dir.spool(member.info.node_id, member.info.pid)
                self._node_uploads.bring(member.info.node_id, spool_files(spool))
        self.handle(self.telemetry.collect_last_reports(gang, run_dir, returned=outcomes.returned))
        if self.telemetry.runs_script:
            self.telemetry.complete_points()

    def finish_workers(self, outcomes: Outcomes) -> None:
        """Let the living workers finish their checkpoints, and collect their last reports."""
        gang, everyone = self._workers.gang, range(self._workers.plan.world_size)
        with contextlib.suppress(GangError, ray.exceptions.RayError):
            self._checkpoints.wait_for_last(gang, outcomes.returned)
            self.handle(self.telemetry.collect(gang, wait_s=FINAL_HEARTBEAT_S, ranks=everyone).events)
        if self.telemetry.runs_script:
            self.telemetry.complete_points()

    def finish_uploads(self) -> None:
        """Upload the rest of what workers have written on other nodes."""
        with contextlib.suppress(GangError):
            check_ray()  # calls to a dead Ray do not return
            if (problem := self._node_uploads.finish()) is not None:
                self._events.warn(problem)

    @property
    def has_trained(self) -> bool:
        """Whether any step was done since the launch."""
        return any(self.telemetry.last_step.values())

    def summary(self) -> dict[str, Any]:
        """Return the last values of the metrics, and the best one, for ``run.json``."""
        telemetry, best = self.telemetry, self._best
        summary: dict[str, Any] = {
            **telemetry.aggregator.summary(),
            **telemetry.machine_summary(driver_node=self._node_id),
            "steps": max(telemetry.last_step.values(), default=0),
        }
        if best is not None:
            summary |= {f"best_{best.metric.replace('/', '_')}": best.value, "best_step": best.step}
        return summary


def record_ranks(run_dir: RunDir, plan: Plan, members: Sequence[Member], *, tokens_per_sample: int | None) -> None:
    """Write which process has which rank, for :func:`take_left_reports`. Disk errors are ignored.

    ``members``: the workers, by rank.
    """
    ranks = {
        "mesh": asdict(plan.mesh),
        "global_batch_size": plan.global_batch_size,
        "tokens_per_sample": tokens_per_sample,
        "processes": [{"node_id": m.info.node_id, "pid": m.info.pid} for m in members],
    }
    with contextlib.suppress(OSError):
        run_dir.spools.mkdir(exist_ok=True)
        write_json(run_dir.ranks_file, ranks)


def take_left_reports(run_dir: RunDir, *, up_to_step: int) -> list[Event]:
    """Return what the last generation of a dead driver has reported and its journal lacks, oldest first.

    The files with the reports are deleted. Metrics that the journal has may be among them; it writes none twice. There
    are none from workers whose run directory was not this one.

    ``up_to_step``: leave out metrics of later steps, which are repeated.
    """
    left = _read(run_dir)
    shutil.rmtree(run_dir.spools, ignore_errors=True)
    kept = (event for event in left if not isinstance(event, MetricsLogged) or event.step <= up_to_step)
    return sorted(kept, key=lambda event: event.time)


def _read(run_dir: RunDir) -> list[Event]:
    try:
        ranks = read_json(run_dir.ranks_file)
        spools = [run_dir.spool(process["node_id"], process["pid"]) for process in ranks.get("processes", ())]
        aggregator = Aggregator(
            mesh=recorded_mesh(ranks.get("mesh", {})),
            global_batch_size=ranks.get("global_batch_size", 0),
            tokens_per_sample=ranks.get("tokens_per_sample"),
        )
    except (OSError, ValueError, KeyError, TypeError):  # the file is damaged, or cannot be read
        return []
    known = {(record.get("event"), record.get("time")) for record, _ in read_lines(run_dir.events_file)}
    left: list[Event] = []
    for rank, spool in enumerate(spools):
        for _, report in read_spool(spool):
            if not isinstance(report, Event):
                metrics = aggregator.add(rank, report)
                left += [] if metrics is None else [metrics]
            # The first step ends the start of a generation in its driver.
            elif (report.kind, report.time) not in known and not isinstance(report, FirstStepDone):
                left.append(report)
    return left
