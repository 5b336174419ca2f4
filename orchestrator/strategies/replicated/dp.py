"""``dp``: ``torch.nn.DataParallel``. One process feeds several devices; on a CPU it feeds threads.

The first device holds the parameters and the optimizer. In each step the batch is scattered, the model is replicated
to all devices, and every replica processes its part in a thread. With ``loss_on=device0``, as in PyTorch, the outputs
are gathered on the first device, which computes the loss. With ``loss_on=replicas`` each replica computes the loss of
its part and only one number per replica is gathered. Gradients are summed on the first device. One Python interpreter
drives all devices and the first device does extra work, so ``ddp`` is nearly always faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.job import Job
from orchestrator.model.batch import first_rows, join, num_rows, split_batch, tensors_in
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.protocol.metrics import Metric
from orchestrator.strategies.base import Context, EvalSums, StepResult
from orchestrator.strategies.batch_parts import LossOfParts, Part
from orchestrator.strategies.job_metrics import add_metrics, train_metrics
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.replicas import Replicas
from orchestrator.strategies.replicated.whole_model import WholeModel, weighted


@dataclass(frozen=True, kw_only=True)
class DPConfig(StrategyConfig):
    """The keys of ``dp``."""

    name: Literal["dp"]
    loss_on: Literal["device0", "replicas"] = option(
        "device0: outputs are gathered there and the loss computed; replicas: each computes its own"
    )
    verbose: bool = option("print the sizes inside the replicas and outside into the worker's log")


@register("dp")
class DP(WholeModel):
    """One process that trains on several devices."""

    config_class: ClassVar[type[StrategyConfig]] = DPConfig
    counts_flops = False  # the replicas run in threads of their own

    @classmethod
    def default_num_workers(cls, options: StrategyConfig, *, gpus: Sequence[int], spares: int) -> int:
        """Return the most GPUs that one process can have, with as many on the nodes for each spare process."""
        if not gpus:
            return 2
        processes = 1 + spares
        return next((n for n in range(max(gpus), 1, -1) if sum(g // n for g in gpus) >= processes), 1)

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        """One process drives all devices: ``strategy.num_workers`` counts these."""
        return Layout(
            mesh=Mesh(),
            devices_per_worker=num_workers,
            notes=("one process feeds all devices and gathers on the first: strategy=ddp is nearly always faster",),
        )

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        return "it copies the model in every step, and compiled code belongs to the original; use strategy=ddp"

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        assert isinstance(context.options, DPConfig)
        self._options = context.options
        self._replicas: Replicas | None = None
        self._gathered_bytes = self._steps = 0

    def attach(self) -> None:
        super().attach()
        device = self.context.device
        numbers = range(self.context.num_devices)
        devices = [torch.device("cuda", i) if device.type == "cuda" else device for i in numbers]
        self._replicas = Replicas(self.model, devices)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        self._steps += 1
        return super().train_step(microbatches, want_grad_norm=want_grad_norm, want_metrics=want_metrics)

    def close(self) -> None:
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    def metrics(self) -> Mapping[str, Metric]:
        gathered = self._gathered_bytes / max(1, self._steps)
        self._gathered_bytes = self._steps = 0
        return {**super().metrics(), "dp/gathered_bytes": Metric(gathered, "sum")}

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        return super().evaluate(first_rows(split_batch(batch), valid), valid)

    def _mean_loss(self, inputs: Any, target: Any) -> Tensor:
        if self._options.loss_on == "device0":
            return super()._mean_loss(inputs, target)
        assert self._replicas is not None
        pieces, targets = self._replicas.scatter(inputs), self._replicas.scatter(target)
        weights = [self._weight_of(piece) for piece in targets]

        def sums(
            replica: nn.Module, piece: Any, target: Any, weight: float | Tensor
        ) -> tuple[Tensor, Mapping[str, Tensor]]:
            output = self.precision.outputs(self._apply(replica, piece))
            loss = weighted(self.job.loss(output, target), weight)
            return loss, {} if self._metrics is None else train_metrics(self.job, output, target)

        results = self._replicas.apply(sums, pieces, targets, weights)
        if self._metrics is not None:
            for _, metrics in results:
                add_metrics(self._metrics, metrics)
        losses = self._gather([loss for loss, _ in results])
        total: Tensor = losses.sum() / sum(self._replicas.collect(weights))
        return total

    def _loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss. A loss that the model computes is gathered as one mean per replica."""
        loss = self.job.loss(output, target)
        if loss.numel() == 1:
            return loss
        assert self._replicas is not None
        weights = self._replicas.collect([self._weight_of(piece) for piece in self._replicas.scatter(target)])
        if loss.shape != (len(weights),):
            raise ValueError(f"Job.loss returned a tensor of shape {tuple(loss.shape)}; return the mean, a scalar")
        total: Tensor = torch.stack([weighted(mean, w) for mean, w in zip(loss, weights, strict=True)]).sum()
        return total / sum(weights)

    def _loss_of_parts(self) -> LossOfParts:
        mean = super()._loss_of_parts()
        if self._options.loss_on == "replicas" or self.context.train.grad_accumulation > 1:
            return mean

        def of_gathered(outputs: Sequence[Any], parts: Sequence[Part]) -> Tensor:
            device = self.context.device
            loss = self.job.loss(join(outputs, device), join([part.target for part in parts], device))
            return loss if loss.numel() == 1 else mean(outputs, parts)

        return of_gathered

    def _evaluated(self, inputs: Any) -> Any:
        before = self._gathered_bytes
        out = self._forward(inputs)
        self._gathered_bytes = before  # the metric counts training only
        return out

    def _forward(self, inputs: Any) -> Any:
        assert self._replicas is not None
        outputs = self._replicas.apply(self._apply, self._replicas.scatter(inputs))
        out = self._gather(outputs)
        if self._options.verbose:
            print(f"outside: input {_sizes(inputs)}, output {_sizes(out)}", flush=True)
        return out

    def _apply(self, replica: nn.Module, piece: Any) -> Any:
        out = self.job.forward(replica, piece)
        if self._options.verbose:
            print(f"in a replica: input {_sizes(piece)}, output {_sizes(out)}", flush=True)
        return out

    def _gather(self, outputs: list[Any]) -> Any:
        assert self._replicas is not None
        out = self._replicas.gather(outputs)
        self._gathered_bytes += sum(t.nbytes for t in tensors_in(out))
        return out

    def _weight_of(self, target: Any) -> float | Tensor:
        """Return the job's weight of a piece, or its number of samples."""
        weight = self.job.weight(target)
        if weight is not None:
            return weight
        return num_rows(target) or 0


def _sizes(value: Any) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors_in(value))
