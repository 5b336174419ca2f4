"""``dp``: ``torch.nn.DataParallel``, one process that feeds several devices; on the CPU, threads.

In each step the batch is scattered, the model replicated from the first device, which holds the parameters, and
applied on all. With ``loss_on=device0``, the classic, the outputs are gathered on the first device and the loss is
computed there; with ``loss_on=replicas`` each replica computes its own and a number each is gathered. One
interpreter drives all devices, and the first has the most to do: ``ddp`` is nearly always faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.model.batch import first_rows
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.protocol.metrics import Metric
from orchestrator.strategies.base import EvalSums, StepResult
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.replicas import Replicas
from orchestrator.strategies.replicated.whole_model import WholeModel, weighted


@dataclass(frozen=True, kw_only=True)
class DPConfig(StrategyConfig):
    name: Literal["dp"]
    loss_on: Literal["device0", "replicas"] = option(
        "device0: outputs are gathered there and the loss computed; replicas: each computes its own"
    )
    verbose: bool = option("print the sizes inside the replicas and outside into the worker's log")


@register("dp")
class DP(WholeModel):
    config_class: ClassVar[type[StrategyConfig]] = DPConfig

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        """One process drives all devices: ``strategy.num_workers`` counts these."""
        return Layout(
            mesh=Mesh(),
            devices_per_worker=num_workers,
            notes=("one process feeds all devices and gathers on the first: strategy=ddp is nearly always faster",),
        )

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        options, device = self.context.options, self.context.device
        assert isinstance(options, DPConfig)
        self._options = options
        numbers = range(self.context.num_devices)
        devices = [torch.device("cuda", i) if device.type == "cuda" else device for i in numbers]
        self._replicas = Replicas(self.model, devices)
        self._gathered_bytes = self._steps = 0

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        self._steps += 1
        return super().train_step(microbatches, want_grad_norm=want_grad_norm)

    def close(self) -> None:
        if "_replicas" in vars(self):
            self._replicas.close()

    def metrics(self) -> Mapping[str, Metric]:
        gathered = self._gathered_bytes / max(1, self._steps)
        self._gathered_bytes = self._steps = 0
        return {"dp/gathered_bytes": Metric(gathered, "sum")}

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        return super().evaluate(first_rows(batch, valid), valid)

    def _mean_loss(self, inputs: Any, target: Any) -> Tensor:
        if self._options.loss_on == "device0":
            return super()._mean_loss(inputs, target)
        pieces, wanted = self._replicas.scatter(inputs), self._replicas.scatter(target)
        weights = [self._units(piece) for piece in wanted]

        def mean_loss(replica: nn.Module, piece: Any, target: Any, weight: float | Tensor) -> Tensor:
            return weighted(self.job.loss(self._seen(replica, piece), target), weight)

        losses = self._gather(self._replicas.apply(mean_loss, pieces, wanted, weights))
        total: Tensor = losses.sum() / sum(weights)
        return total

    def _evaluated(self, inputs: Any) -> Any:
        before = self._gathered_bytes
        out = self._forward(inputs)
        self._gathered_bytes = before
        return out

    def _forward(self, inputs: Any) -> Any:
        outputs = self._replicas.apply(self._seen, self._replicas.scatter(inputs))
        out = self._gather(outputs)
        if self._options.verbose:
            print(f"outside: input {_sizes(inputs)}, output {_sizes(out)}", flush=True)
        return out

    def _seen(self, replica: nn.Module, piece: Any) -> Any:
        out = replica(piece)
        if self._options.verbose:
            print(f"in a replica: input {_sizes(piece)}, output {_sizes(out)}", flush=True)
        return out

    def _gather(self, outputs: list[Any]) -> Any:
        out = self._replicas.gather(outputs)
        self._gathered_bytes += sum(t.nbytes for t in pytree.tree_leaves(out) if isinstance(t, Tensor))
        return out

    def _units(self, target: Any) -> float | Tensor:
        weight = self.job.weight(target)
        if weight is not None:
            return weight
        return len(next(t for t in pytree.tree_leaves(target) if isinstance(t, Tensor)))


def _sizes(value: Any) -> str:
    return ", ".join(str(list(t.shape)) for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
