"""What a layout would be like on a cluster: memory, speed, cost and goodput, and the best of several. Pure.

Goodput is the share of the time in which steps are trained that last. A failure costs the recovery and the steps since
the last state that can be recovered: half of the time between two of them. Young, 1974, and Daly, 2006, give the
interval at which checkpoints and lost steps cost least together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.features.plan.prediction.calibration import Case
from orchestrator.features.plan.prediction.cost import Stack, Step, StepTime, step_time
from orchestrator.features.plan.prediction.devices import Cluster
from orchestrator.features.plan.prediction.work import ModelWork
from orchestrator.planning.memory import GIB, WorkerMemory
from orchestrator.planning.mesh import DIMENSIONS, Mesh

CONTEXT_BYTES = 0.75 * GIB
"""What a process has on a GPU before it trains; an assumption."""
COMMUNICATOR_BYTES = 0.25 * GIB
"""The buffers of NCCL for each dimension of a mesh; an assumption."""
RESERVED = 0.05
"""What the allocator holds beside what is allocated, relative to it; an assumption."""
IN_PLACE_S, RESTART_S = 60.0, 300.0
"""From a failure to the next step: where replicas have what was lost, and from a checkpoint. Assumptions: of a
simulated gang of 16,384 ranks it takes 37 s (``benchmarks/failures_at_scale.py``), which says nothing of NCCL."""
SNAPSHOT_BYTES_S = 8.7e9
"""The rate at which training state is copied into host memory while training waits: 68 MB in 7.8 ms
(``benchmarks/results/healing-cost.md``)."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A layout and what it would be like.

    Attributes:
        overrides: of the strategy and its layout, as typed on the command line.
        step: the layout.
        memory: of a worker; None if it is unknown.
        time: of a step; None if it does not fit.
        refused: why it cannot train, or does not fit; empty if it can.
    """

    overrides: tuple[str, ...]
    step: Step
    memory: WorkerMemory | None
    refused: str = ""
    time: StepTime | None = None
    goodput: Goodput | None = None

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        return self.step.mesh

    @property
    def communicators(self) -> float:
        """The bytes of the context and of communicators."""
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(self.mesh.size(d) > 1 for d in DIMENSIONS)

    @property
    def reserve(self) -> float:
        """The bytes that the allocator holds in addition."""
        return 0.0 if self.memory is None else RESERVED * self.memory.total

    @property
    def memory_bytes(self) -> float:
        """All memory of a worker."""
        return self.communicators + self.reserve + (0.0 if self.memory is None else self.memory.total)

    @property
    def seconds(self) -> float:
        """The seconds of a step; infinite if it cannot train."""
        return math.inf if self.time is None else self.time.total


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of all layouts.

    Attributes:
        work: of the model.
        cluster: where it would be trained.
        stack: the shares of the peak rates that are reached.
        tokens: how many are to be trained on; None if no whole run is asked for.
        price: of an hour of a device.
        device_hours: see :class:`~orchestrator.features.plan.prediction.forecast.Reliability`.
    """

    work: ModelWork
    cluster: Cluster
    stack: Stack
    tokens: float | None = None
    price: float | None = None
    device_hours: float

    def answered(self, forecast: Forecast) -> Forecast:
        """Return a layout with its time, or refused because it does not fit."""
        there = self.cluster.device.memory_gib * GIB
        if forecast.refused or forecast.memory is None:
            return forecast
        if forecast.memory_bytes > there:
            as_text = "{:.0f} of {:.0f} GiB" if there > 10 * GIB else "{:.3g} of {:.3g} GiB"
            refused = f"needs {as_text.format(forecast.memory_bytes / GIB, there / GIB)}"
            return dataclasses.replace(forecast, refused=refused)
        workers = forecast.mesh.num_workers
        time = step_time(self.work, forecast.step, self.cluster.of(workers), self.stack)
        has_copies = forecast.mesh.replicate > 1
        state = forecast.memory.parameters + forecast.memory.optimizer
        reliability = Reliability(
            device_hours=self.device_hours,
            recovery_s=IN_PLACE_S if has_copies else RESTART_S,
            stall_s=state / SNAPSHOT_BYTES_S,
            copied_s=time.total if has_copies else None,
        )
        return dataclasses.replace(forecast, time=time, goodput=goodput(workers, reliability))

    @property
    def unit(self) -> str:
        """What is counted: tokens, or samples of a job that has no tokens."""
        return "tokens" if self.work.tokens > 1 else "samples"

    def tokens_s(self, forecast: Forecast) -> float:
        """Return the tokens, or samples, in a second on all workers."""
        return forecast.step.samples * self.work.tokens / forecast.seconds

    def tokens_s_device(self, forecast: Forecast) -> float:
        """Return the tokens, or samples, in a second on one worker."""
        return self.tokens_s(forecast) / forecast.mesh.num_workers

    def mfu(self, forecast: Forecast) -> float:
        """Return the share of bf16's peak rate that the model's own operations take, causal attention as a half."""
        peak = forecast.mesh.num_workers * self.cluster.device.peak_flops_s("bf16")
        return forecast.step.samples * self.work.step_flops / forecast.seconds / peak

    def days(self, forecast: Forecast) -> float | None:
        """Return how long the run takes, with its failures; None if no number of tokens is given."""
        if self.tokens is None or forecast.goodput is None:
            return None
        return self.tokens / self.tokens_s(forecast) / forecast.goodput.share / 86_400

    def money(self, forecast: Forecast) -> float | None:
        """Return what that costs; None without a price."""
        days = self.days(forecast)
        return None if days is None or self.price is None else days * 24 * forecast.mesh.num_workers * self.price

    def record(self, forecast: Forecast) -> dict[str, Any]:
        """Return the layout and all figures as values of JSON."""
        memory = forecast.memory
        gib = (
            {}
            if memory is None
            else {
                "parameters": memory.parameters,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "gathered": memory.gathered + memory.casts,
                "activations": memory.activations or 0.0,
                "communicators": forecast.communicators,
                "reserve": forecast.reserve,
                "total": forecast.memory_bytes,
            }
        )
        found: dict[str, Any] = {
            "overrides": list(forecast.overrides),
            "mesh": {d: forecast.mesh.size(d) for d in ("pipeline", "replicate", "shard", "context", "tensor")},
            "rows": forecast.step.rows,
            "passes": forecast.step.passes,
            "memory_gib": {name: size / GIB for name, size in gib.items()},
            "refused": forecast.refused,
        }
        if forecast.time is None or forecast.goodput is None:
            return found
        total = forecast.seconds
        return {
            **found,
            "step_s": total,
            "step_s_by_kind": dataclasses.asdict(forecast.time),
            "tokens_s": self.tokens_s(forecast),
            "tokens_s_device": self.tokens_s_device(forecast),
            "mfu": self.mfu(forecast),
            "bubble": forecast.time.bubble / total,
            "steps_day": 86_400 / total,
            "goodput": dataclasses.asdict(forecast.goodput),
            "days": self.days(forecast),
            "money": self.money(forecast),
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All layouts of a job on a cluster.

    Attributes:
        command: the overrides of a launch, without those of a layout.
        assumed: what was planned although the command line does not say it.
        fitting: the layouts that fit, the fastest first.
        refused: those that do not fit, the ones that need least first.
        pruned: by reason, how many layouts the product refuses.
        case: what is known of the setup, by which the errors of such predictions are known.
        measured: the run that the shares of the peak rates come from; empty for published ones.
        notes: remarks for the user.
    """

    question: Question
    command: tuple[str, ...]
    assumed: tuple[str, ...]
    fitting: tuple[Forecast, ...]
    refused: tuple[Forecast, ...]
    pruned: Mapping[str, int]
    case: Case
    measured: str = ""
    notes: tuple[str, ...] = ()

    @property
    def cheapest(self) -> Forecast | None:
        """The layout that costs least for equal tokens; None if none fits. Failures count."""
        rate = self.question.tokens_s
        return max(self.fitting, key=lambda f: rate(f) * (f.goodput.share if f.goodput else 0.0), default=None)


DEVICE_HOURS = 50_000.0
"""The mean hours between the failures of one device. Llama 3 (arXiv:2407.21783): 419 interruptions of 16,384 GPUs that
were not planned, in 54 days, which is one in 50,700 hours."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """What failures cost.

    Attributes:
        device_hours: the mean hours between the failures of one device.
        recovery_s: from a failure to the next step, without the steps that are made again.
        stall_s: how long training waits for a checkpoint.
        interval_s: the time between two checkpoints; None for the best.
        copied_s: the time between two states that survivors or neighbours have in memory; None if there are none, and
            each failure goes back to a checkpoint.
    """

    device_hours: float = DEVICE_HOURS
    recovery_s: float
    stall_s: float
    interval_s: float | None = None
    copied_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The result.

    Attributes:
        share: of the time in which steps are trained that last.
        failure_s: the mean time between two failures of the run.
        interval_s: the time between two checkpoints.
    """

    share: float
    failure_s: float
    interval_s: float


def goodput(devices: int, reliability: Reliability) -> Goodput:
    """Return the goodput of a run on so many devices."""
    r = reliability
    failure_s = r.device_hours * 3600 / devices
    interval_s = r.interval_s or best_interval_s(failure_s, r.stall_s)
    lost_s = r.recovery_s + (interval_s if r.copied_s is None else r.copied_s) / 2
    useful = (1 - r.stall_s / (interval_s + r.stall_s)) / (1 + lost_s / failure_s)
    return Goodput(share=useful, failure_s=failure_s, interval_s=interval_s)


def best_interval_s(failure_s: float, stall_s: float) -> float:
    """Return the time between checkpoints at which they and the steps that failures undo cost least (Young, 1974)."""
    return math.sqrt(2 * stall_s * failure_s)
