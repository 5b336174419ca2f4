"""The life of a run on the driver: acquire, watch, stop or fail, release. Its states are events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import ray
import ray.exceptions

from orchestrator.config.redact import redact_text
from orchestrator.config.schema import Config
from orchestrator.driver.aggregate import Aggregator
from orchestrator.driver.failure import death, first_failure, silence, standstill
from orchestrator.driver.gang import Gang, GangError, Member, check_ray
from orchestrator.driver.signals import StopSignals
from orchestrator.events import (
    Event,
    GenerationStarted,
    RankProgress,
    RunStarted,
    Sink,
    StopRequested,
    SystemMetricsLogged,
    TextSampled,
    WaitingForResources,
    Warned,
    WorkerFailed,
)
from orchestrator.messages import Assignment, Outcome
from orchestrator.plan import Plan
from orchestrator.rundir import CRASH, RunDir, log_tail
from orchestrator.spans import Timeline

SETTLE_S = 2.0
"""After a failure, time for the other ranks to say what they saw."""


TRACKING_CHECK_EVERY_S = 5.0


class Interrupted(Exception):
    """Asked to stop before training began."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. ``exit_code``: 0 done, 1 failed, 130 or 143 interrupted; ``timeline``: a step of its stages."""

    status: Literal["FINISHED", "FAILED", "KILLED"]
    exit_code: int
    run_dir: Path
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything a run needs beside a Ray that it is connected to."""

    config: Config
    plan: Plan
    run_dir: RunDir
    run_uid: str
    checkpoint: Path | None
    resumed_from_step: int | None
    started_at: float
    tokens_per_sample: int | None
    secrets: tuple[str, ...]


class Run:
    """``tracking_problem()`` says why nothing reaches the tracking server at present, if so."""

    def __init__(
        self,
        spec: RunSpec,
        sinks: list[Sink],
        stop: StopSignals,
        *,
        tracking_problem: Callable[[], str | None],
    ):
        self.spec = spec
        self.config = spec.config
        self._sinks = sinks
        self._stop = stop
        self._stop_sent = False
        self._outcomes: dict[int, Outcome] = {}
        self._aggregator = Aggregator(
            mesh=spec.plan.mesh,
            global_batch_size=spec.plan.global_batch_size,
            tokens_per_sample=spec.tokens_per_sample,
        )
        self._tracking_problem = tracking_problem
        self._known_problem: str | None = None
        self._next_tracking_check = time.monotonic() + TRACKING_CHECK_EVERY_S
        self._system_readings = 0
        self._next_system_reading = time.monotonic()
        self._silent_since: dict[int, float] = {}
        self._last_step: dict[int, int] = {}

    def execute(self) -> RunResult:
        """Train to the end, a stop or a failure. No actor of the run is left when it returns."""
        spec, plan = self.spec, self.spec.plan
        self._emit(
            RunStarted(
                name=plan.run_name,
                run_dir=str(spec.run_dir.path),
                strategy=plan.strategy,
                job=plan.job,
                world_size=plan.world_size,
                steps=plan.steps,
                resumed_from_step=spec.resumed_from_step,
                notes=plan.notes,
            )
        )
        startup = {"driver_s": time.time() - spec.started_at}
        label = f"{plan.run_name}-{spec.run_uid[:6]}"
        with Gang(plan, self.config.cluster, label=label) as gang:
            try:
                began = time.perf_counter()
                gang.acquire(on_wait=self._on_wait, poll=self._raise_if_stopped)
                startup["workers_s"] = time.perf_counter() - began
                self._train(gang)
            except (GangError, ray.exceptions.RayError) as e:
                if self._stop.received is None:
                    return self._end("FAILED", 1, self._clean(str(e)), startup)
                return self._end(*self._interrupted(), startup)
            except Interrupted:
                return self._end(*self._interrupted(), startup)
        return self._judge(startup)

    def _train(self, gang: Gang) -> None:
        lead = gang.members[0]
        cluster = self.config.cluster
        host, port = ray.get(
            lead.actor.open_store.remote(cluster.rendezvous_timeout_s),
            timeout=cluster.rendezvous_timeout_s,
        )
        backend: Literal["gloo", "nccl"] = "nccl" if all(m.where.gpu_uuid for m in gang.members) else "gloo"
        if backend == "gloo" and self.spec.plan.device == "cuda":
            self._emit(Warned(message="Ray has GPUs, the workers see no CUDA device: on CPUs with gloo"))
        self._emit(
            GenerationStarted(
                generation=1,
                backend=backend,
                device="cuda" if backend == "nccl" else "cpu",
                workers=tuple(_describe(m) for m in gang.members),
            )
        )
        pending = {
            m.actor.train.remote(
                Assignment(
                    generation=1,
                    global_rank=m.global_rank,
                    local_rank=m.local_rank,
                    store_host=host,
                    store_port=port,
                    backend=backend,
                    num_threads=self.spec.plan.threads_per_worker,
                    run_dir=str(self.spec.run_dir.path),
                    run_uid=self.spec.run_uid,
                    working_dir=str(Path.cwd()),
                    import_paths=tuple(str(Path(p).resolve()) for p in sys.path),
                    plan=self.spec.plan,
                    config=self.config,
                    checkpoint=None if self.spec.checkpoint is None else str(self.spec.checkpoint),
                )
            ): m
            for m in gang.members
        }
        give_up_at: float | None = None
        while pending:
            wait_s = cluster.heartbeat_s if give_up_at is None else 0.1
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=wait_s)
            check_ray()
            for reference in ready:
                self._take_outcome(reference, pending.pop(reference))
            self._collect(gang)
            self._check_tracking(time.monotonic())
            if give_up_at is None and any(o.status == "failed" for o in self._outcomes.values()):
                give_up_at = time.monotonic() + SETTLE_S
            if give_up_at is not None and time.monotonic() > give_up_at:
                return
            if self._stop.received and not self._stop_sent:
                self._coordinate_stop(gang)
                give_up_at = time.monotonic() + cluster.stop_grace_s

    def _take_outcome(self, reference: Any, member: Member) -> None:
        where = member.where
        try:
            outcome = cast(Outcome, ray.get(reference))
        except ray.exceptions.RayError as e:
            failure = death(e, pid=where.pid, hostname=where.hostname, time=time.time())
            outcome = Outcome(status="failed", step=self._last_step.get(member.global_rank, 0), failure=failure)
        self._outcomes[member.global_rank] = outcome

    def _collect(self, gang: Gang) -> None:
        """Ask every worker where it stands, and pass on what it has to tell."""
        every = self.config.tracking.system_metrics_every_s
        now = time.monotonic()
        due = every > 0 and now >= self._next_system_reading
        if due:
            self._next_system_reading = now + every
        beats = gang.heartbeats(with_system_metrics=due)
        node_names = _node_names(gang.members)
        system: dict[str, float] = {}
        told: list[Event] = []
        for member in gang.members:
            beat = beats.get(member.global_rank)
            if beat is None:
                self._notice_silence(member, now)
                continue
            self._silent_since.pop(member.global_rank, None)
            self._last_step[member.global_rank] = beat.step
            node = node_names[member.where.node_id]
            system |= {f"system/{node}/{name}": value for name, value in beat.system.items()}
            told += beat.events
            for point in beat.points:
                logged = self._aggregator.add(member.global_rank, point)
                if logged is not None:
                    self._emit(logged)
            self._emit(
                RankProgress(
                    rank=member.global_rank,
                    step=beat.step,
                    phase=beat.phase,
                    step_ms=beat.busy_ms,
                    node=node,
                )
            )
        for event in told:  # after the figures of all ranks: a checkpoint of a step after its loss
            self._emit(event)
        if system:
            self._system_readings += 1
            self._emit(SystemMetricsLogged(step=self._system_readings, metrics=system))

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

    def _notice_silence(self, member: Member, now: float) -> None:
        """A worker that has answered nothing for too long counts as lost."""
        rank = member.global_rank
        if rank in self._outcomes:
            return
        since = self._silent_since.setdefault(rank, now)
        timeout_s = self.config.cluster.heartbeat_timeout_s
        if now - since > timeout_s:
            where = member.where
            failure = silence(timeout_s, pid=where.pid, hostname=where.hostname, time=time.time())
            self._outcomes[rank] = Outcome(status="failed", step=self._last_step.get(rank, 0), failure=failure)

    def _coordinate_stop(self, gang: Gang) -> None:
        """Let all ranks finish the most advanced step that any of them has begun."""
        assert self._stop.received is not None
        self._stop_sent = True
        self._emit(StopRequested(signal=self._stop.received.name))
        grace_s = self.config.cluster.stop_grace_s
        try:
            begun = gang.ask("hold", timeout_s=grace_s)
            gang.ask("stop_after", max(begun), timeout_s=grace_s)
        except (GangError, ray.exceptions.RayError) as e:
            self._emit(Warned(message=f"not every rank could be asked to stop: {e}"))

    def _judge(self, startup: dict[str, float]) -> RunResult:
        plan = self.spec.plan
        guilty = self._guilty()
        if guilty is not None and not self._stop_sent:
            outcome = self._outcomes[guilty]
            assert outcome.failure is not None
            log = self.spec.run_dir.log_file(guilty)
            tail = outcome.failure.log_tail or log_tail(log)
            message = outcome.failure.message
            if not outcome.failure.traceback and tail.startswith(CRASH):
                message += f": {tail.splitlines()[0]}"
            reason = f"{plan.title(guilty)} failed at step {outcome.step}: {message}"
            self._emit(
                WorkerFailed(
                    rank=guilty,
                    title=plan.title(guilty),
                    step=outcome.step,
                    reason=self._clean(message),
                    traceback=self._clean(outcome.failure.traceback),
                    log=str(log),
                    log_tail=self._clean(tail),
                )
            )
            return self._end("FAILED", 1, self._clean(reason), startup)
        lead = self._outcomes.get(0)
        if lead is not None:
            startup |= dict(lead.startup)
            if lead.text:
                self._emit(TextSampled(text=lead.text))
        if self._stop_sent and not (
            len(self._outcomes) == plan.world_size and all(o.status == "done" for o in self._outcomes.values())
        ):
            return self._end(*self._interrupted(), startup)
        return self._end("FINISHED", 0, "", startup)

    def _guilty(self) -> int | None:
        """The rank that failed first; where the others only waited in vain, the one that stands still."""
        guilty = first_failure(self._outcomes)
        still = [rank for rank in range(self.spec.plan.world_size) if rank not in self._outcomes]
        failure = None if guilty is None else self._outcomes[guilty].failure
        if failure is None or not failure.collateral or not still:
            return guilty
        rank = min(still, key=lambda r: (self._last_step.get(r, 0), r))
        failure = standstill(self.config.cluster.collective_timeout_s, time=time.time())
        self._outcomes[rank] = Outcome(status="failed", step=self._last_step.get(rank, 0), failure=failure)
        return rank

    def _interrupted(self) -> tuple[Literal["KILLED"], int, str]:
        assert self._stop.received is not None
        name = self._stop.received.name
        steps = [o.step for o in self._outcomes.values() if o.status == "stopped"]
        if len(steps) < self.spec.plan.world_size:
            where = "without a last checkpoint" if any(self._last_step.values()) else "before training began"
        else:
            where = f"at step {max(steps)}"
        return "KILLED", 128 + int(self._stop.received), f"stopped by {name} {where}"

    def _end(
        self,
        status: Literal["FINISHED", "FAILED", "KILLED"],
        exit_code: int,
        reason: str,
        startup: dict[str, float],
    ) -> RunResult:
        lead = self._outcomes.get(0)
        first_step_at = lead.first_step_at if lead is not None else None
        summary: dict[str, Any] = {
            **self._aggregator.summary(),
            "steps": max([*self._last_step.values(), *(o.step for o in self._outcomes.values())], default=0),
            "restarts": 0,
            "steps_lost": 0,
            "recovery_s": [],
        }
        if first_step_at is not None:
            summary["startup_s"] = first_step_at - self.spec.started_at
            summary["startup"] = startup
        return RunResult(
            status=status,
            exit_code=exit_code,
            run_dir=self.spec.run_dir.path,
            reason=reason,
            summary=summary,
            timeline=self._aggregator.timeline,
        )

    def _on_wait(self, waited_s: float, holders: str) -> None:
        plan = self.spec.plan
        wanted = f"{plan.world_size} x {plan.cpus_per_worker:g} CPU"
        if plan.gpus_per_worker:
            wanted += f" and {plan.gpus_per_worker} GPU"
        self._emit(WaitingForResources(waited_s=waited_s, wanted=wanted, holders=holders))

    def _raise_if_stopped(self) -> None:
        if self._stop.received is not None:
            self._stop_sent = True
            raise Interrupted

    def _clean(self, text: str) -> str:
        return redact_text(text, self.spec.secrets)

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


def _node_names(members: tuple[Member, ...]) -> dict[str, str]:
    """``node_0``, ``node_1``, ... in the order of the ranks: MLflow charts such names together."""
    ordered = dict.fromkeys(m.where.node_id for m in members)
    return {node_id: f"node_{number}" for number, node_id in enumerate(ordered)}


def _describe(member: Member) -> str:
    where = member.where
    gpu = "" if where.gpu_index is None else f" gpu {where.gpu_index}"
    return f"{where.hostname} ({where.node_ip}){gpu} pid {where.pid}"
