"""What the workers of a driver that has died have reported since its last heartbeats, for the driver that resumes.

Such workers train on until Ray ends them. The next driver continues from a checkpoint that they may have saved then.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict

from orchestrator.driver.gang.gang import Member
from orchestrator.planning.mesh import recorded_mesh
from orchestrator.planning.plan import Plan
from orchestrator.policy.aggregate import Aggregator
from orchestrator.protocol.events import Event, FirstStepDone, MetricsLogged
from orchestrator.records.journal import read_lines
from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.spool import read_spool


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
