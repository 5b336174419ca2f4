"""``hogwild``: every worker of a node trains on its own share of the data and updates one model in shared memory.

No lock is taken (Niu et al. 2011): updates may overwrite parts of each other, which sparse gradients seldom do,
because only the rows that they touch are written. The optimizer's state is shared too. A step of the run is one
update by each worker; workers wait for each other only to evaluate and to save. Adam alone takes a lock for the
update itself: it divides one mean by another, and where a worker sees a first gradient in the one and not yet in the
other, the quotient has no bound. ``locked_sgd``, what hogwild is compared with, takes a lock around reading, computing
and updating, or around updating alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.utils.data import Dataset

from orchestrator.config.schema import LockedSGDConfig
from orchestrator.figures import Figure
from orchestrator.strategies.base import StepResult
from orchestrator.strategies.shared_memory import SharedMemory
from orchestrator.strategies.single import Single
from orchestrator.strategies.staleness import staleness_figures
from orchestrator.worker.state import TrainState
from orchestrator.worker.transfer import broadcast_state

PROBES = 1024
"""Counters that every update adds one to without a lock, to see how many updates get lost."""


class Hogwild(Single):
    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        make_state(self.optimizer)
        world_size = self.context.mesh.world_size
        own = {
            "updates": torch.zeros(world_size, dtype=torch.int64),
            "probes": torch.zeros(PROBES, dtype=torch.float64),
            **{f"model/{name}": p.detach() for name, p in self.model.named_parameters()},
            **{f"optimizer/{path}": t for path, t in optimizer_tensors(self.optimizer).items()},
        }
        self._memory = SharedMemory(own, rank=self.context.global_rank)
        shared = self._memory.tensors
        self._updates, self._probes = shared["updates"], shared["probes"]
        for name, parameter in self.model.named_parameters():
            parameter.data = shared[f"model/{name}"]
        share_state(self.optimizer, {p.removeprefix("optimizer/"): t for p, t in shared.items()})
        self._staleness: list[int] = []

    def close(self) -> None:
        if "_memory" in vars(self):
            self._memory.close()

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        with self._exclusive():
            before = int(self._updates.sum())
            result = super().train_step(microbatches, want_grad_norm=want_grad_norm)
            self._staleness.append(int(self._updates.sum()) - before - 1)
        return result

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        state = broadcast_state(state, source=source, rank=context.global_rank, device=context.device)
        with self.together():
            shared = optimizer_tensors(self.optimizer)
            meta = super().restore(state, source=context.global_rank)
            # Loading makes tensors of its own for the optimizer.
            for path, loaded in optimizer_tensors(self.optimizer).items():
                shared[path].copy_(loaded)
            share_state(self.optimizer, shared)
        return meta

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        dist.barrier()
        yield
        dist.barrier()

    def figures(self) -> Mapping[str, Figure]:
        staleness, self._staleness = self._staleness, []
        updates = int(self._updates.sum())
        lost_pct = 100 * (1 - float(self._probes.mean()) / max(1, updates))
        return {"hogwild/lost_updates_pct": Figure(lost_pct, "max"), **staleness_figures(staleness)}

    def _update(self) -> None:
        with self._memory.lock() if self._locks_update else contextlib.nullcontext():
            super()._update()
            self._probes += 1
        self._updates[self.context.global_rank] += 1

    @property
    def _locks_update(self) -> bool:
        return isinstance(self.optimizer, Adam)

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _sum_over_ranks(self, weight: float | Tensor) -> float | Tensor:
        """As if every worker had this one's share: an update is by one worker's mean."""
        return weight * self.context.mesh.world_size


class LockedSGD(Hogwild):
    @property
    def _locks_update(self) -> bool:
        return not self._locks_step

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        return self._memory.lock() if self._locks_step else contextlib.nullcontext()

    @property
    def _locks_step(self) -> bool:
        options = self.context.options
        assert isinstance(options, LockedSGDConfig)
        return options.lock == "step"


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
