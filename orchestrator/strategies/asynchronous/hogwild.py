"""``hogwild``: every worker of a node trains on its own share of the data and updates one model in shared memory.

No lock is taken (Niu et al. 2011): updates may overwrite parts of each other, which sparse gradients seldom do,
because only the rows that they touch are written. The optimizer's state is shared too. A step of the run is one
update by each worker; workers wait for each other only to evaluate and to save. Adam alone takes a lock for the
update itself: it divides one mean by another, and where a worker sees a first gradient in the one and not yet in the
other, the quotient has no bound. ``locked_sgd``, what hogwild is compared with, takes a lock around reading, computing
and updating, or around updating alone.

The memory outlives a lost worker: the new one maps it from any that is left, and all go on from the last step that
every worker has made, the lost one too. Workers that were further make the steps in between again, and the lost one may
have written a part of its last update, which is no more than what updates without a lock do to each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.utils.data import Dataset

from orchestrator.config.schema import Config, StrategyConfig
from orchestrator.job import Job
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.protocol.metrics import Metric
from orchestrator.state import train_state
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state, receive_state, send_state
from orchestrator.strategies.asynchronous.preflight import statistics_notes
from orchestrator.strategies.asynchronous.shared_memory import SharedMemory, in_common
from orchestrator.strategies.asynchronous.staleness import staleness_figures
from orchestrator.strategies.base import StepResult
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.whole_model import WholeModel

PROBES = 1024
"""Counters that every update adds one to without a lock, to see how many updates get lost."""


@dataclass(frozen=True, kw_only=True)
class HogwildConfig(StrategyConfig):
    name: Literal["hogwild"]


@register("hogwild")
class Hogwild(WholeModel):
    config_class: ClassVar[type[StrategyConfig]] = HogwildConfig
    cpu_only = "its workers share the memory of a machine, which GPUs cannot"

    @classmethod
    def is_synchronous(cls, options: StrategyConfig) -> bool:
        return False

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        return Layout(mesh=Mesh(data_parallel_size=num_workers), one_node=True)

    @classmethod
    def check_job(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        return statistics_notes(job)

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        make_state(self.optimizer)
        self._memory: SharedMemory | None = None
        self._has_state = False
        self._scheduled = 0  # the last step that the scheduler has seen
        self._staleness: list[int] = []

    def attach(self) -> None:
        super().attach()
        world_size, rank = self.context.mesh.world_size, self.context.global_rank
        own = {
            "steps": torch.zeros(world_size, dtype=torch.int64),
            "updates": torch.zeros(world_size, dtype=torch.int64),
            "probes": torch.zeros(PROBES, dtype=torch.float64),
            **{f"model/{name}": p.detach() for name, p in self.model.named_parameters()},
            **{f"optimizer/{path}": t for path, t in optimizer_tensors(self.optimizer).items()},
        }
        memory = in_common(self._memory, own, rank=rank, world_size=world_size)
        if self._memory is None:
            self._use(memory)

    def _use(self, memory: SharedMemory) -> None:
        """Train on what is there."""
        self._memory, shared = memory, memory.tensors
        self._steps, self._updates, self._probes = shared["steps"], shared["updates"], shared["probes"]
        for name, parameter in self.model.named_parameters():
            parameter.data = shared[f"model/{name}"]
        share_state(self.optimizer, {p.removeprefix("optimizer/"): t for p, t in shared.items()})

    def sync_initial_state(self) -> None:
        self._has_state = True

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        with self._exclusive():
            before = int(self._updates.sum())
            result = super().train_step(microbatches, want_grad_norm=want_grad_norm)
            self._staleness.append(int(self._updates.sum()) - before - 1)
            self._steps[self.context.global_rank] += 1
        return result

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        state = broadcast_state(state, source=source, rank=context.global_rank, device=context.device)
        with self.quiesced():
            self._load(state)
            self._steps.fill_(state.step)
        self._scheduled = state.step
        self._has_state = True
        return state.meta

    def recoverable_steps(self, step: int, *, update_complete: bool) -> Mapping[int, tuple[int, ...]]:
        """Everything, after the last step that every worker has come to the end of."""
        if not self._has_state:
            return {}
        return dict.fromkeys(range(self.context.mesh.world_size), (int(self._steps.min()),))

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """The memory is there; the new workers need buffers, the optimizer's options and the schedule."""
        rank, device = self.context.global_rank, self.context.device
        batch_size = self.context.train.global_batch_size
        samples_before = samples_consumed - step * batch_size  # a run may have had another batch size
        for receiver, sender in enumerate(sources):
            if rank == sender != receiver:
                at = self._scheduled
                state = self.snapshot(step=at, samples_consumed=samples_before + at * batch_size)
                send_state(state, to=receiver, device=device)
            elif rank == receiver != sender:
                state = receive_state(sender, device=device)
                self._load(state)
                self._scheduled = state.step
                samples_before = state.samples_consumed - state.step * batch_size
        with self.quiesced():
            if rank == 0:
                self._steps.fill_(source_step)
                self._updates.zero_()  # a lost worker may have counted half of an update
                self._probes.zero_()
        self._has_state = True
        return {"step": source_step, "samples_consumed": samples_before + source_step * batch_size}

    def _load(self, state: TrainState) -> None:
        """``state`` into the shared memory."""
        shared = optimizer_tensors(self.optimizer)
        train_state.restore(state, self.model, self.optimizer, self.scheduler)
        # Loading makes tensors of its own for the optimizer.
        for path, loaded in optimizer_tensors(self.optimizer).items():
            shared[path].copy_(loaded)
        share_state(self.optimizer, shared)

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        dist.barrier()
        yield
        dist.barrier()

    def metrics(self) -> Mapping[str, Metric]:
        staleness, self._staleness = self._staleness, []
        updates = int(self._updates.sum())
        lost_pct = 100 * (1 - float(self._probes.mean()) / max(1, updates))
        return {"hogwild/lost_updates_pct": Metric(lost_pct, "max"), **staleness_figures(staleness)}

    def _update(self) -> None:
        with self._lock() if self._locks_update else contextlib.nullcontext():
            super()._update()
            self._probes += 1
        self._updates[self.context.global_rank] += 1

    def _schedule(self) -> None:
        """Once for each step: one that is made again has the learning rate that was reached already."""
        if (step := int(self._steps[self.context.global_rank]) + 1) > self._scheduled:
            super()._schedule()
            self._scheduled = step

    def _lock(self) -> contextlib.AbstractContextManager[None]:
        assert self._memory is not None
        return self._memory.lock()

    @property
    def _locks_update(self) -> bool:
        return isinstance(self.optimizer, Adam)

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _sum_over_ranks(self, weight: float | Tensor) -> float | Tensor:
        """As if every worker had this one's share: an update is by one worker's mean."""
        return weight * self.context.mesh.world_size


def make_state(optimizer: Optimizer) -> None:
    """Make the state that the optimizer would make in its first step, so that it can be shared before.

    Raises:
        ValueError: it is of a kind whose state cannot be shared.
    """
    if not isinstance(optimizer, (SGD, Adagrad, Adam)):
        raise ValueError(
            f"Job.optimizer: {type(optimizer).__name__}: its state cannot be shared by several workers; "
            "use SGD, Adagrad, Adam or AdamW, or strategy=ddp"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if isinstance(optimizer, SGD) and group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            elif isinstance(optimizer, Adam):
                state["step"] = torch.zeros(())
                names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
                state.update({name: torch.zeros_like(parameter) for name in names})


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of its state, by the parameter's number and the state's name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{number}/{name}": value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def share_state(optimizer: Optimizer, shared: Mapping[str, Tensor]) -> None:
    """Let the optimizer work on these tensors, named as :func:`optimizer_tensors` names them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for path in optimizer_tensors(optimizer):
        number, _, name = path.partition("/")
        optimizer.state[parameters[int(number)]][name] = shared[path]
