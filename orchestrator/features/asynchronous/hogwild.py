"""``hogwild``: all workers of a node update one model in shared memory without locks; ``locked_sgd``: with a lock.

Recht, Re, Wright and Niu, NIPS 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent".
Each worker computes the loss of its own share of the data and applies its gradient directly to the shared parameters
and the shared optimizer state; nothing else is communicated. Concurrent updates may overwrite parts of each other. With
sparse gradients this is rare, because they write only the rows they touch. A step of the run is one update by each
worker. Workers wait for each other only to evaluate and to save. Adam takes a lock for the update alone: it divides one
moment by the other, and the quotient is unbounded if a worker sees a new first and an old second moment. Adagrad needs
none, because a worker divides by the sum that it has computed itself.

The memory outlives a lost worker. The replacement maps it from any survivor, and the run continues from the last step
that every worker has completed. Workers that were ahead repeat their steps. The lost worker may have applied part of
its last update, which does no more harm than concurrent updates do.

``locked_sgd`` is the baseline. A lock excludes the other workers for the whole step (``strategy.lock=step``: read,
compute, update), so that no gradient is stale, or only for the update (``strategy.lock=update``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.utils.data import Dataset

from orchestrator.config.schema import Config, StrategyConfig, TrainConfig
from orchestrator.config.text import first_few
from orchestrator.features.asynchronous.shared_memory import SharedMemory, map_shared, take_gradients
from orchestrator.features.asynchronous.staleness import staleness_metrics, statistics_notes
from orchestrator.features.asynchronous.strategies import LockedSGDConfig
from orchestrator.job import Job
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import ANY_RANK, RecoverableSteps
from orchestrator.protocol.metrics import Metric
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state, receive_state, send_state
from orchestrator.strategies.base import Traits
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update.job_optimizer import with_modes
from orchestrator.strategies.whole_model import WholeModel

PROBES = 1024
"""The number of counters that every update increments without a lock, to estimate how many updates are lost."""


@register("hogwild", "locked_sgd")
class HogwildRules(Rules[StrategyConfig]):
    """The rules of workers that update one model in the memory of a machine."""

    averages_weights = False
    observes_gradients = False
    refused_precisions: ClassVar[Mapping[str, str]] = {
        "fp16": "its workers update one after another, so they cannot agree on which steps to skip",
    }
    cpu_only = "its workers share the memory of a machine, which GPUs cannot"

    @classmethod
    def is_synchronous(cls, options: StrategyConfig) -> bool:
        return False

    @classmethod
    def plan_layout(cls, options: StrategyConfig, train: TrainConfig, num_workers: int, errors: list[str]) -> Layout:
        return Layout(mesh=Mesh(replicate=num_workers), one_node=True)

    @classmethod
    def trainer(cls, options: StrategyConfig, mesh: Mesh, job: Job) -> type[Hogwild]:
        return Hogwild

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        if (model := outline.model) is None:
            return ()
        errors += _optimizer_errors(config, outline.job, model)
        return statistics_notes(model)


class Hogwild(Trainer):
    """One worker."""

    passes: WholeModel
    traits = Traits(moves_parameters=True)

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        create_state(self.trained.optimizer)
        self._memory: SharedMemory | None = None
        self._has_state = False
        self._scheduled = 0  # the last step that the scheduler has counted
        self._staleness: list[int] = []

    def attach(self) -> None:
        super().attach()
        world_size, rank = self.context.mesh.world_size, self.context.global_rank
        own = {
            "steps": torch.zeros(world_size, dtype=torch.int64),
            "updates": torch.zeros(world_size, dtype=torch.int64),
            "probes": torch.zeros(PROBES, dtype=torch.float64),
            **{f"model/{name}": p.detach() for name, p in self.passes.model.named_parameters()},
            **{f"optimizer/{path}": t for path, t in optimizer_tensors(self.trained.optimizer).items()},
        }
        memory = map_shared(self._memory, own, rank=rank, world_size=world_size)
        if self._memory is None:
            self._adopt(memory)

    def _adopt(self, memory: SharedMemory) -> None:
        """Move parameters and optimizer state into ``memory``."""
        self._memory, shared = memory, memory.tensors
        self._steps, self._updates, self._probes = shared["steps"], shared["updates"], shared["probes"]
        for name, parameter in self.passes.model.named_parameters():
            parameter.data = shared[f"model/{name}"]
        share_state(self.trained.optimizer, {p.removeprefix("optimizer/"): t for p, t in shared.items()})

    def sync_initial_state(self) -> None:
        self._has_state = True

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        with self._lock(of="step"):
            self._updates_before = int(self._updates.sum())
            yield
            self._steps[self.context.global_rank] += 1

    def end_step(self, norm: Tensor | None) -> bool:
        if admitted := super().end_step(norm):
            self._staleness.append(int(self._updates.sum()) - self._updates_before - 1)
        return admitted

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        assert source is not None  # there is one writer
        context = self.context
        state = broadcast_state(state, source=source, rank=context.global_rank, device=context.device)
        with self.quiesced():
            self._load(state)
            self._steps.fill_(state.step)
        self._scheduled = state.step
        self._has_state = True
        return state.meta

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Offer the state of every rank after the last step that all workers have completed."""
        if not self._has_state:
            return {}
        return {ANY_RANK: (int(self._steps.min()),)}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Send new workers what is not in shared memory: buffers, optimizer settings and the schedule."""
        rank, device = self.context.global_rank, self.context.device
        batch_size = self.context.train.global_batch_size
        samples_before = samples_consumed - step * batch_size  # an earlier run may have had another batch size
        for receiver, sender in enumerate(sources):
            if rank == sender != receiver:
                scheduled = self._scheduled
                samples = samples_before + scheduled * batch_size
                own = self.trained.snapshot(step=scheduled, samples_consumed=samples, live=True)
                parameters = dict(self.passes.model.named_parameters(remove_duplicate=False))
                others = {name: tensor for name, tensor in own.model.items() if name not in parameters}
                send_state(replace(own, model=others, optimizer={}), to=receiver, device=device)
            elif rank == receiver != sender:
                own = self.trained.snapshot(step=step, samples_consumed=samples_consumed, live=True)
                state = receive_state(sender, device=device)
                self._load(replace(own, model={**own.model, **state.model}, meta=state.meta))
                self._scheduled = state.step
                samples_before = state.samples_consumed - state.step * batch_size
        with self.quiesced():
            if rank == 0:
                self._steps.fill_(source_step)
                self._updates.zero_()  # a lost worker may have counted its last update in only one of the two
                self._probes.zero_()
        self._has_state = True
        return {"step": source_step, "samples_consumed": samples_before + source_step * batch_size}

    def _load(self, state: TrainState) -> None:
        """Copy ``state`` into the shared memory."""
        shared = optimizer_tensors(self.trained.optimizer)
        self.load(state)
        # Loading may replace the optimizer's tensors by new ones outside the shared memory.
        for path, loaded in optimizer_tensors(self.trained.optimizer).items():
            shared[path].copy_(loaded)
        share_state(self.trained.optimizer, shared)

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        dist.barrier()
        yield
        dist.barrier()

    def metrics(self) -> Mapping[str, Metric]:
        staleness, self._staleness = self._staleness, []
        updates = int(self._updates.sum())
        lost_pct = 100 * (1 - float(self._probes.mean()) / max(1, updates))
        return {"hogwild/lost_updates_pct": Metric(lost_pct, "max"), **staleness_metrics(staleness)}

    def apply(self) -> None:
        """Update the shared parameters, and advance the schedule once per step: not again for a repeated step."""
        with self._lock(of="update"):
            if type(self.trained.optimizer) is Adagrad:  # a class of the user's may have a step of its own
                take_gradients(self.trained.optimizer)
            self.trained.optimizer.step()  # also without gradients, because schedules and hooks count on it
            self._probes += 1
        self._updates[self.context.global_rank] += 1
        if (step := int(self._steps[self.context.global_rank]) + 1) > self._scheduled:
            self.trained.schedule()
            self._scheduled = step

    def _lock(self, *, of: Literal["step", "update"]) -> contextlib.AbstractContextManager[None]:
        assert self._memory is not None
        return self._memory.lock() if self._locked == of else contextlib.nullcontext()

    @property
    def _locked(self) -> Literal["step", "update"] | None:
        """What excludes all other workers."""
        if isinstance(options := self.context.options, LockedSGDConfig):
            return options.lock
        return "update" if isinstance(self.trained.optimizer, Adam) else None


def _optimizer_errors(config: Config, job: Job, model: nn.Module) -> list[str]:
    """Return why workers cannot share the optimizer's state, as a trial with small parameters shows it."""
    from orchestrator.strategies.checks.optimizer_trials import trial_of  # which no rank needs

    what = f"strategy={config.strategy.name}: "
    try:
        trial = trial_of(model, job, config.train, seed=0)
        if not isinstance(optimizer := trial.optimizer, Optimizer):
            return []
    except Exception:  # whatever the job raises, the workers will say it
        return []
    try:
        create_state(optimizer)
    except ValueError as e:
        return [f"{what}{e}"]
    before = {*optimizer_tensors(optimizer)}
    with contextlib.suppress(Exception):  # as above
        trial.update(range(1), {name: p.shape for name, p in trial.parameters.items()})
    others = sorted({path.partition("/")[2] for path in {*optimizer_tensors(optimizer)} - before})
    others += [f"{method}()" for method in ("train", "eval") if with_modes(optimizer)]
    if not others:
        return []
    return [
        f"{what}Job.optimizer: {type(optimizer).__name__}: several workers cannot share its {first_few(others, 2)}; "
        "use SGD, Adagrad, Adam or AdamW, or strategy=ddp"
    ]


def create_state(optimizer: Optimizer) -> None:
    """Create the state that the optimizer would create in its first step, so that it can be moved to shared memory.

    Raises:
        ValueError: the state of this optimizer cannot be shared.
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
    """Return every tensor of the optimizer's state under ``"<parameter index>/<state key>"``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{number}/{name}": value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def share_state(optimizer: Optimizer, shared: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's state by tensors named as in :func:`optimizer_tensors`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for path in optimizer_tensors(optimizer):
        number, _, name = path.partition("/")
        optimizer.state[parameters[int(number)]][name] = shared[path]
