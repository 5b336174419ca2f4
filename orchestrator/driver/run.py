"""The life of a run on the driver: acquire, watch, heal or fail or stop, release. Its states are events."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray.exceptions

from orchestrator.config.redact import redact_text
from orchestrator.config.schema import Config
from orchestrator.driver.calls import GangError, check_ray
from orchestrator.driver.gang import Gang
from orchestrator.driver.generation import Generation
from orchestrator.driver.node_watch import NodeWatch
from orchestrator.driver.signals import StopSignals
from orchestrator.driver.telemetry import Telemetry
from orchestrator.planning import faults as chaos
from orchestrator.policy.aggregate import Aggregator
from orchestrator.policy.elastic import RankAssignment, Sizes, find_rank_assignment, reassigned
from orchestrator.policy.recovery import FailureRecord, GiveUp, RecoverableSteps, RecoveryPlan, decide, plan_after_pause
from orchestrator.policy.transitions import Transition, TransitionLog
from orchestrator.protocol.events import (
    CheckpointSaved,
    Event,
    FirstStepDone,
    MetricsLogged,
    RunStarted,
    Sink,
    TextSampled,
    WaitingForResources,
    Warned,
    WorkerFailed,
    WorkerLost,
)
from orchestrator.protocol.messages import Failure, WorkerEnvironment
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import CRASH, RunDir, log_tail
from orchestrator.state.checkpoint import CheckpointError, find_newest, read_manifest
from orchestrator.timeline.spans import Timeline

LAST_WORDS_S = 2.0
"""For what a worker that has done its part still has to tell."""


class Interrupted(Exception):
    """Asked to stop while no step is being made."""


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
    sizes: Sizes
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
        self._plan = spec.sizes.first
        self._environment = WorkerEnvironment(
            working_dir=str(Path.cwd()),
            import_paths=tuple(str(Path(p).resolve()) for p in sys.path),
            config=self.config,
        )
        self._aggregator = Aggregator(
            mesh=self._plan.mesh,
            global_batch_size=self._plan.global_batch_size,
            tokens_per_sample=spec.tokens_per_sample,
        )
        self._telemetry = Telemetry(
            spec.config, self._plan, self._aggregator, self._emit, tracking_problem=tracking_problem
        )
        self._nodes = NodeWatch(spec.config.cluster.node_timeout_s)
        self._lease = Lease(spec.run_dir)
        self._gang: Gang | None = None
        self._startup: dict[str, float] = {}
        self._first_step_at: float | None = None
        self._checkpoint = spec.checkpoint
        self._checkpoint_step = spec.resumed_from_step or 0
        self._faults = spec.sizes.most.faults
        self._recoverable_steps: Mapping[int, RecoverableSteps] = {}
        self._transitions = TransitionLog()

    def execute(self) -> RunResult:
        """Train to the end, a stop or a failure. No actor of the run is left when it returns.

        Raises:
            SupersededError: the run has another driver now.
        """
        spec, plan = self.spec, self._plan
        self._emit(
            RunStarted(
                name=plan.run_name,
                run_dir=str(spec.run_dir.path),
                strategy=plan.strategy,
                job=plan.job,
                world_size=plan.world_size,
                num_shards=plan.mesh.num_shards,
                steps=plan.steps,
                resumed_from_step=spec.resumed_from_step,
                notes=plan.notes,
            )
        )
        self._startup["driver_s"] = time.time() - spec.started_at
        label = f"{plan.run_name}-{spec.run_uid[:6]}"
        with Gang(plan, self._environment, self._nodes, label=label) as gang:
            self._gang = gang
            try:
                began = time.perf_counter()
                gang.acquire(on_wait=self._on_wait, poll=self._raise_if_stopped)
                self._startup["workers_s"] = time.perf_counter() - began
                return self._train(gang)
            except (GangError, ray.exceptions.RayError) as e:
                if self._stop.received is None:
                    return self._end("FAILED", 1, self._clean(str(e)))
                return self._end(*self._interrupted(None))
            except Interrupted:
                return self._end(*self._interrupted(None))
            finally:
                self._nodes.close()

    def _train(self, gang: Gang) -> RunResult:
        """Generation after generation, until one comes to its end or nothing more can be done."""
        failures: list[FailureRecord] = []
        recovery_plan: RecoveryPlan | None = None
        number = 1
        while True:
            generation = self._generation(number, gang)
            generation.begin(
                self.spec.run_uid,
                recovery_plan,
                recoverable_steps=self._recoverable_steps,
                checkpoint=self._checkpoint,
                faults=self._faults,
            )
            generation.watch()
            guilty = generation.guilty()
            self._recoverable_steps = generation.survivors()
            if guilty is not None and not generation.stop_sent:
                failures.append(self._failure_record(generation, guilty))
                decision = decide(
                    failures, self._recoverable_steps, world_size=self._plan.world_size, config=self.config.recovery
                )
                if isinstance(decision, GiveUp):
                    self._settle(gang, generation)
                    return self._fail(generation, guilty, decision.why)
                self._tell_of_loss(generation, guilty)
            elif generation.paused == "preempted" and self._stop.received is not None:
                return self._end(*self._interrupted(generation))
            elif generation.paused is not None and self._all(generation, "stopped"):
                decision = plan_after_pause(
                    self._recoverable_steps, generation.leaving, world_size=self._plan.world_size
                )
            else:
                break
            recovery_plan = self._transition(gang, generation, guilty, decision)
            number += 1
        self._settle(gang, generation)
        return self._judge(generation)

    def _generation(self, number: int, gang: Gang) -> Generation:
        return Generation(
            number,
            gang,
            self._environment,
            self._plan,
            self.spec.run_dir,
            telemetry=self._telemetry,
            stop=self._stop,
            nodes=self._nodes,
            lease=self._lease,
            emit=self._emit,
            growth=lambda: self._growth(gang),
        )

    def _growth(self, gang: Gang) -> RankAssignment | None:
        """With whom the run could be larger at once; None: it could not."""
        plan = self._plan
        if plan is self.spec.sizes.most:
            return None
        gang.refill(self._workers_wanted)
        if not (ready := gang.ready()):
            return None
        rank_assignment = find_rank_assignment(plan, self.spec.sizes, range(plan.world_size), ready=ready, saved=True)
        return (
            rank_assignment
            if rank_assignment is not None and rank_assignment.plan.world_size > plan.world_size
            else None
        )

    @property
    def _workers_wanted(self) -> int:
        most = self.spec.sizes.most
        return most.world_size + most.spares

    def _failure_record(self, generation: Generation, guilty: int) -> FailureRecord:
        failure = self._failure(generation, guilty)
        return FailureRecord(
            rank=guilty,
            step=self._reached(generation),
            message=failure.message,
            raised=bool(failure.traceback),
            final=failure.final,
        )

    def _reached(self, generation: Generation) -> int:
        """The last step that any rank has completed."""
        ended = [o.step for o in generation.outcomes.values()]
        return max([*ended, *self._telemetry.last_step.values()], default=0)

    def _tell_of_loss(self, generation: Generation, guilty: int) -> None:
        failure = self._failure(generation, guilty)
        self._emit(
            WorkerLost(
                rank=guilty,
                display_name=self._plan.display_name(guilty),
                step=self._reached(generation),
                reason=self._clean(self._message(guilty, failure)),
                traceback=self._clean(failure.traceback),
                log=str(self.spec.run_dir.log_file(guilty)),
            )
        )

    def _transition(
        self, gang: Gang, generation: Generation, guilty: int | None, decision: RecoveryPlan
    ) -> RecoveryPlan:
        """Put workers in the places of those that were lost, or go on with fewer or more of them; the next generation
        can begin with what is returned."""
        check_ray()
        if guilty is not None:
            for rank in decision.lost:
                self._faults = chaos.without_next(self._faults, rank)
        if generation.paused is not None:
            gang.poll("open_gate", ranks=generation.returned, timeout_s=self.config.cluster.stop_grace_s)
        # A stop waits for the next generation: it has something to save.
        deadline = time.monotonic() + decision.pause_s
        while time.monotonic() < deadline and self._stop.received is None:
            time.sleep(0.1)
        workers_before = self._plan.mesh.num_workers
        self._recoverable_steps = {
            rank: recoverable_steps
            for rank, recoverable_steps in self._recoverable_steps.items()
            if rank not in decision.lost
        }
        if (rank_assignment := self._change_size(gang, decision.lost, saved=guilty is None)) is None:
            gang.replace(decision.lost, on_wait=self._on_wait, poll=self._raise_if_stopped)
        else:
            decision = reassigned(decision, rank_assignment, self._recoverable_steps)
            self._plan, self._recoverable_steps = rank_assignment.plan, {}
        if decision.sources is None:
            self._find_checkpoint()
        transition = self._transitions.begin(
            Transition(
                began=generation.paused_at if guilty is None else self._failure(generation, guilty).time,
                reached=self._reached(generation),
                resumed_at=self._checkpoint_step if decision.sources is None else decision.step,
                decision=decision,
                num_workers_before=workers_before,
                num_workers=self._plan.mesh.num_workers,
                planned=generation.paused if guilty is None else None,
            )
        )
        self._telemetry.begin_generation(self._plan, decision.lost, transition.resumed_at)
        return decision

    def _change_size(self, gang: Gang, lost: Collection[int], *, saved: bool) -> RankAssignment | None:
        """Seat the workers that there are, where that makes a run of another size; None: it does not."""
        staying = [rank for rank in range(self._plan.world_size) if rank not in lost]
        while self.spec.sizes.is_elastic:
            rank_assignment = find_rank_assignment(
                self._plan, self.spec.sizes, staying, ready=gang.ready(), saved=saved
            )
            if rank_assignment is None or rank_assignment.plan is self._plan:
                return None
            if gang.reassign_ranks(rank_assignment.plan, rank_assignment.before):
                return rank_assignment
        return None

    def _find_checkpoint(self) -> None:
        """The newest whole one, of which its writer may not have told before it died."""

        def warn(error: CheckpointError) -> None:
            self._emit(Warned(message=f"checkpoint skipped: {error}"))

        newest = find_newest(self.spec.run_dir.checkpoints, warn)
        if newest is not None:
            self._checkpoint, self._checkpoint_step = newest, int(read_manifest(newest)["step"])

    def _settle(self, gang: Gang, generation: Generation) -> None:
        """Let the workers that are left finish their checkpoints, and take their last words."""
        with contextlib.suppress(GangError, ray.exceptions.RayError):
            grace_s = self.config.cluster.stop_grace_s
            gang.poll("finish", grace_s, ranks=generation.returned, timeout_s=grace_s)
            self._telemetry.collect(gang, wait_s=LAST_WORDS_S)

    def _fail(self, generation: Generation, guilty: int, why: str) -> RunResult:
        """``why`` it is not tried again."""
        plan, outcome = self._plan, generation.outcomes[guilty]
        failure = self._failure(generation, guilty)
        log = self.spec.run_dir.log_file(guilty)
        message = self._message(guilty, failure)
        self._emit(
            WorkerFailed(
                rank=guilty,
                display_name=plan.display_name(guilty),
                step=outcome.step,
                reason=self._clean(message),
                traceback=self._clean(failure.traceback),
                log=str(log),
                log_tail=self._clean(failure.log_tail or log_tail(log)),
            )
        )
        reason = f"{plan.display_name(guilty)} failed at step {outcome.step}: {message}" + (f" ({why})" if why else "")
        return self._end("FAILED", 1, self._clean(reason))

    def _failure(self, generation: Generation, rank: int) -> Failure:
        failure = generation.outcomes[rank].failure
        assert failure is not None
        return failure

    def _message(self, rank: int, failure: Failure) -> str:
        """What went wrong, and how the process crashed where its log says so."""
        tail = failure.log_tail or log_tail(self.spec.run_dir.log_file(rank))
        crash = f": {tail.splitlines()[0]}" if not failure.traceback and tail.startswith(CRASH) else ""
        return failure.message + crash

    def _judge(self, generation: Generation) -> RunResult:
        outcomes = generation.outcomes
        lead = outcomes.get(0)
        if lead is not None and lead.text:
            self._emit(TextSampled(text=lead.text))
        if generation.stop_sent and not self._all(generation, "done"):
            return self._end(*self._interrupted(generation))
        return self._end("FINISHED", 0, "")

    def _all(self, generation: Generation, status: str) -> bool:
        outcomes = generation.outcomes.values()
        return len(outcomes) == self._plan.world_size and all(o.status == status for o in outcomes)

    def _interrupted(self, generation: Generation | None) -> tuple[Literal["KILLED"], int, str]:
        assert self._stop.received is not None
        name = self._stop.received.name
        outcomes = generation.outcomes.values() if generation is not None else []
        steps = [o.step for o in outcomes if o.status == "stopped"]
        if len(steps) == self._plan.world_size:
            info = f"at step {max(steps)}"
        elif any(self._telemetry.last_step.values()):
            info = "without a last checkpoint"
        else:
            info = "before training began"
        return "KILLED", 128 + int(self._stop.received), f"stopped by {name} {info}"

    def _end(self, status: Literal["FINISHED", "FAILED", "KILLED"], exit_code: int, reason: str) -> RunResult:
        summary: dict[str, Any] = {
            **self._aggregator.summary(),
            "steps": max(self._telemetry.last_step.values(), default=0),
            **self._transitions.summary(),
        }
        if self._first_step_at is not None:
            summary["startup_s"] = self._first_step_at - self.spec.started_at
            summary["startup"] = self._startup
            elapsed_s, step_s = time.time() - self._first_step_at, float(summary.get("step_ms_p50", 0.0)) / 1e3
            summary["effective_time_pct"] = self._transitions.effective_time_pct(elapsed_s, step_s=step_s)
        return RunResult(
            status=status,
            exit_code=exit_code,
            run_dir=self.spec.run_dir.path,
            reason=reason,
            summary=summary,
            timeline=self._aggregator.timeline,
        )

    def _on_wait(self, waited_s: float, holders: str) -> None:
        plan = self._plan
        wanted = f"{plan.world_size + plan.spares} x {plan.cpus_per_worker:g} CPU"
        if plan.gpus_per_worker:
            wanted += f" and {plan.gpus_per_worker} GPU"
        self._emit(WaitingForResources(waited_s=waited_s, wanted=wanted, holders=holders))

    def _raise_if_stopped(self) -> None:
        self._lease.renew()
        if self._stop.received is not None:
            raise Interrupted

    def _clean(self, text: str) -> str:
        return redact_text(text, self.spec.secrets)

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)
        match event:
            case CheckpointSaved():
                self._checkpoint, self._checkpoint_step = Path(event.path), event.step
            case FirstStepDone():
                self._training_goes(event)

    def _training_goes(self, event: FirstStepDone) -> None:
        """The first step of a generation is done: the start, or the end of a regrouping."""
        if self._first_step_at is None:
            self._first_step_at = event.time
            self._startup |= event.startup
        if self._gang is not None:
            self._gang.refill(self._workers_wanted)
        if (recovered := self._transitions.end(event.generation, event.time)) is not None:
            self._emit(recovered)
            figures = {"recovery/seconds": recovered.seconds, "recovery/num_workers": float(recovered.num_workers)}
            self._emit(MetricsLogged(step=recovered.step, metrics=figures))
