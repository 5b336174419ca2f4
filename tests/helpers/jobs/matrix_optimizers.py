"""Optimizers that need whole tensors: for matrices as Muon and SOAP do, with norms of columns, and Adafactor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from helpers.jobs.quick_jobs import TinyGPT
from helpers.jobs.stage_toys import Marked, chain
from helpers.jobs.toys import Toy
from orchestrator.job import Job


class OfMatrices(Optimizer):
    """Momentum, and a direction that a subclass makes of it; AdamW for the groups that say so."""

    def __init__(self, params: Any, lr: float = 0.02):
        super().__init__(params, {"lr": lr, "adamw": False, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if group["adamw"]:
                    squares = state.setdefault("squares", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
                    fraction = 1 - 0.99 ** group["updates"]
                    update = momentum / ((squares / fraction).sqrt() + 1e-4)
                else:
                    update = self.direction(momentum, p.grad, state)
                p.mul_(1 - 0.01 * group["lr"]).sub_(update, alpha=group["lr"])

    def direction(self, momentum: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Orthogonal(OfMatrices):
    """As Muon: the singular values of the momentum become about 1."""

    def direction(self, momentum: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        x = momentum / (momentum.norm() + 1e-4)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


class Preconditioned(OfMatrices):
    """As SOAP and Shampoo: the state has a list with a square matrix for each dimension, and norms of the momentum."""

    def direction(self, momentum: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        rows, columns = state.setdefault("GG", [torch.zeros(size, size) for size in gradient.shape])
        rows.lerp_(gradient @ gradient.T, 0.1)
        columns.lerp_(gradient.T @ gradient, 0.1)
        state["norms"] = momentum.norm(dim=1)
        return _root(rows) @ momentum @ _root(columns)


class OfColumns(OfMatrices):
    """Divides the momentum of each column by its norm."""

    def direction(self, momentum: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return momentum / (momentum.norm(dim=0) + 1e-2)


class Coupled(OfMatrices):
    """Divides the momentum of each tensor by the norm of the largest gradient of all."""

    def direction(self, momentum: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        every = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return momentum / torch.stack(every).max()


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix + 1e-2 * torch.eye(len(matrix)))
    return vectors @ torch.diag(values**-0.25) @ vectors.T


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def tall() -> nn.Module:
    """Half of the first matrix has the shape of the matrix of its columns."""
    return chain(
        first=(10, 20),
        act0=nn.Tanh(),
        second=(20, 12),
        scaled=Scaled(),
        act1=nn.Tanh(),
        third=(12, 12),
        act2=nn.Tanh(),
        head=(12, 4),
    )


@dataclass(frozen=True, kw_only=True)
class OfWholeTensors(Job):
    """Matrices with one of these optimizers, the rest with AdamW, at rates that fall."""

    kind: type[Optimizer] = Orthogonal

    def parameter_groups(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[Any]:
        if not issubclass(self.kind, OfMatrices):
            return [p for _, p in named_parameters]
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for _, parameter in named_parameters:
            groups[parameter.ndim != 2].append(parameter)
        return [{"params": parameters, "adamw": adamw} for adamw, parameters in groups.items()]

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        return self.kind(parameters, lr=0.02)  # type: ignore[call-arg]

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=4, gamma=0.5)


@dataclass(frozen=True, kw_only=True)
class OfTall(OfWholeTensors, Toy):
    def model(self) -> nn.Module:
        return tall()


@dataclass(frozen=True, kw_only=True)
class OfMarked(OfWholeTensors, Marked):
    """With a gradient that is NaN."""


@dataclass(frozen=True, kw_only=True)
class OfGPT(OfWholeTensors, TinyGPT):
    """Of blocks, whose layers workers may divide."""
