"""What the workers tell, a few times a second: the heartbeat, and with it progress, figures and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields

from orchestrator.config.schema import Config
from orchestrator.driver.gang import Gang, Member
from orchestrator.planning.plan import Plan
from orchestrator.policy.aggregate import Aggregator
from orchestrator.policy.straggler import Straggler, StragglerWatch
from orchestrator.protocol.events import (
    Event,
    FirstStepDone,
    MetricsLogged,
    RankProgress,
    StragglerFound,
    SystemMetricsLogged,
    Warned,
)
from orchestrator.protocol.messages import Heartbeat, TrainPoint

TRACKING_CHECK_EVERY_S = 5.0
ANSWER_S = 0.2
"""For a heartbeat; one that takes longer comes with the next."""


class Telemetry:
    """Collects for the whole run and passes on.

    ``last_step`` is the last completed one of each rank; ``straggler`` the one found in this generation, if any.
    ``tracking_problem()`` says why nothing reaches the tracking server at present, if so.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        aggregator: Aggregator,
        emit: Callable[[Event], None],
        *,
        tracking_problem: Callable[[], str | None],
    ):
        self.last_step: dict[int, int] = {}
        self.straggler: Straggler | None = None
        self._trained_generation = 0
        self._config = config
        self._plan = plan
        self._stragglers = StragglerWatch(plan.mesh.num_workers)
        self._aggregator = aggregator
        self._emit = emit
        self._tracking_problem = tracking_problem
        self._known_problem: str | None = None
        self._next_tracking_check = time.monotonic() + TRACKING_CHECK_EVERY_S
        self._system_readings = 0
        self._next_system_reading = time.monotonic()

    def collect(self, gang: Gang, *, wait_s: float = ANSWER_S) -> Mapping[int, Heartbeat]:
        """Ask every worker where it stands, and pass on what it has to tell; the answers of those that gave one."""
        every = self._config.tracking.system_metrics_every_s
        now = time.monotonic()
        due = every > 0 and now >= self._next_system_reading
        if due:
            self._next_system_reading = now + every
        beats = gang.heartbeats(with_system_metrics=due, wait_s=wait_s)
        names = node_names(gang.members)
        system: dict[str, float] = {}
        told: list[Event] = []
        for rank, beat in sorted(beats.items()):
            node = names[gang.members[rank].info.node_id]
            self.last_step[rank] = beat.step
            system |= {f"system/{node}/{name}": value for name, value in beat.system.items()}
            told += beat.events
            for point in beat.points:
                logged = self._aggregator.add(rank, point)
                if logged is not None:
                    self._emit(logged)
                if rank in self._plan.mesh.shards:
                    continue
                if isinstance(point, TrainPoint) and (found := self._stragglers.add(rank, point)):
                    self._name_straggler(found, names[gang.members[found.rank].info.node_id])
            self._emit(RankProgress(rank=rank, step=beat.step, phase=beat.phase, step_ms=beat.busy_ms, node=node))
        for event in told:  # after the figures of all ranks: a checkpoint of a step after its loss
            if isinstance(event, FirstStepDone):  # each rank tells, for any of them may be lost before it is asked
                if event.generation <= self._trained_generation:
                    continue
                self._trained_generation = event.generation
            self._emit(event)
        if system:
            self._system_readings += 1
            self._emit(SystemMetricsLogged(step=self._system_readings, metrics=system))
        self._check_tracking(now)
        return beats

    def has_trained(self, generation: int) -> bool:
        """Whether a step of the generation, or of a later one, is done."""
        return self._trained_generation >= generation

    def begin_generation(self, plan: Plan, lost: Collection[int], step: int) -> None:
        """All ranks of ``plan`` are at ``step``; the ``lost`` have new workers."""
        self._aggregator.begin_generation(plan.mesh)
        self.last_step = dict.fromkeys(range(plan.world_size), step)
        self.straggler = None
        if plan is not self._plan:
            self._plan, self._stragglers = plan, StragglerWatch(plan.mesh.num_workers)
        for rank in lost:
            self._stragglers.forget(rank)

    def _name_straggler(self, found: Straggler, node: str) -> None:
        self.straggler = found
        figures = {f.name: getattr(found, f.name) for f in fields(found)}
        self._emit(
            StragglerFound(
                **figures, slower_by=found.slower_by, display_name=self._plan.display_name(found.rank), node=node
            )
        )
        self._emit(MetricsLogged(step=found.step, metrics={"recovery/straggler_rank": float(found.rank)}))

    def _check_tracking(self, now: float) -> None:
        """Say once that the tracking server is away, and once that it is back."""
        if now < self._next_tracking_check:
            return
        self._next_tracking_check = now + TRACKING_CHECK_EVERY_S
        problem = self._tracking_problem()
        if problem and not self._known_problem:
            self._emit(Warned(message=f"MLflow is not reached ({problem}); training goes on, no point is lost"))
        elif self._known_problem and not problem:
            self._emit(Warned(message="MLflow is reached again"))
        self._known_problem = problem


def node_names(members: tuple[Member, ...]) -> dict[str, str]:
    """``node_0``, ``node_1``, ... in the order of the ranks: MLflow charts such names together."""
    ordered = dict.fromkeys(m.info.node_id for m in members)
    return {node_id: f"node_{number}" for number, node_id in enumerate(ordered)}
