"""The training loop of a rank without Ray, from the first step or a checkpoint to the last step."""

from dataclasses import dataclass
from math import fsum
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.conformance.cases import Case, assignment
from helpers.conformance.training import CPU, default_store, made, make, model_of
from helpers.ranks.gang import own_device
from orchestrator.config.redact import Redactor
from orchestrator.protocol.events import Event, Warned
from orchestrator.protocol.messages import Assignment, EvalPoint, Outcome, TrainPoint
from orchestrator.strategies.base import Strategy
from orchestrator.worker.control.control import Outbox, StepGate
from orchestrator.worker.loop import Loop


@dataclass(frozen=True, kw_only=True)
class Ran:
    outcome: Outcome
    points: list[TrainPoint | EvalPoint]
    warnings: list[str]
    events: list[Event]
    training: bool
    owns_reducer: bool


def loop_of(
    orders: Assignment,
    case: Case,
    strategy: Strategy,
    *,
    outbox: Outbox | None = None,
    gate: StepGate | None = None,
    device: torch.device = CPU,
) -> Loop:
    """The loop of a rank, on the CPU unless said otherwise."""
    return Loop(
        assignment=orders,
        job=case.job,
        strategy=strategy,
        device=device,
        gate=gate or StepGate(timeout_s=60),
        outbox=outbox or Outbox(Redactor()),
        redactor=Redactor(),
        callbacks=case.callbacks,
    )


def run_loop(rank: int, case: Case, run_dir: Path | str, checkpoint: Path | str | None = None, every: int = 0) -> Ran:
    """Train on this rank of the default group, from a checkpoint or the first step, and save ``every`` so many."""
    Path(run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    orders = assignment(
        rank=rank,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        generation=1,
        store_port=0,
        run_dir=str(run_dir),
        case=case,
        checkpoint=None if checkpoint is None else str(checkpoint),
        checkpoint_every=every,
    )
    strategy, outbox = make(case, rank), Outbox(Redactor())
    loop = loop_of(orders, case, strategy, outbox=outbox, device=own_device())
    try:
        outcome = loop.run({}, store=default_store())
    finally:
        made.clear()  # closing the loop's strategy has to be enough
        replica = getattr(getattr(strategy, "reduction", None), "replica", None)
        strategy.close()
        loop.finish(timeout_s=60)
    return ran(
        outcome,
        outbox,
        training=model_of(strategy).training,
        owns_reducer=replica is not None and "reducer" in vars(replica),
    )


def ran(outcome: Outcome, outbox: Outbox, *, training: bool, owns_reducer: bool) -> Ran:
    heartbeat = outbox.collect({})
    return Ran(
        outcome=outcome,
        points=list(heartbeat.points),
        warnings=[event.message for event in heartbeat.events if isinstance(event, Warned)],
        events=list(heartbeat.events),
        training=training,
        owns_reducer=owns_reducer,
    )


def evaluation(ranks: list[Ran]) -> dict[str, float]:
    """The sums over the ranks at the end; those of splits other than ``val`` have its name before theirs."""
    last = [next(p for p in reversed(r.points) if isinstance(p, EvalPoint)) for r in ranks]
    found: dict[str, float] = {}
    for parts in zip(*((p, *p.others) for p in last), strict=True):
        names = {name for p in parts for name in p.sums}
        assert names, "the job has a metric"
        sums = {name: fsum(p.sums.get(name, 0.0) for p in parts) for name in names}
        of_split = {"loss": fsum(p.loss_sum for p in parts), "weight": fsum(p.weight for p in parts), **sums}
        prefix = "" if parts[0].split == "val" else f"{parts[0].split} "
        found |= {f"{prefix}{name}": value for name, value in of_split.items()}
    return found


def losses_by_step(ranks: list[Ran]) -> dict[int, float]:
    """The loss of the run at every logged step, over all ranks."""
    steps: dict[int, list[TrainPoint]] = {}
    for rank in ranks:
        for point in rank.points:
            if isinstance(point, TrainPoint):
                steps.setdefault(point.step, []).append(point)
    return {step: fsum(p.loss_sum for p in ps) / fsum(p.weight for p in ps) for step, ps in steps.items()}
