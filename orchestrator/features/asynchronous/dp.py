"""``dp``: ``torch.nn.DataParallel``. One process feeds several devices; on a CPU it feeds threads.

The first device holds the parameters and the optimizer. In each step the batch is scattered, the model is replicated
to all devices, and every replica processes its part in a thread. With ``loss_on=device0``, as in PyTorch, the outputs
are gathered on the first device, which computes the loss. With ``loss_on=replicas`` each replica computes the loss of
its part and only one number per replica is gathered. Gradients are summed on the first device. One Python interpreter
drives all devices and the first device does extra work, so ``ddp`` is nearly always faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from orchestrator.compat.modules import data_parallel_replica, own_buffers, own_children, own_parameters
from orchestrator.config.schema import Config, TrainConfig
from orchestrator.config.text import first_few
from orchestrator.features.asynchronous.strategies import DPConfig
from orchestrator.job import Job
from orchestrator.model.batch import join, map_tensors, num_rows, rows_between, tensors_in, to_device
from orchestrator.model.precision import Precision
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.protocol.metrics import Metric
from orchestrator.strategies.base import Traits
from orchestrator.strategies.constructor import Outline, changed_weights
from orchestrator.strategies.data.batch_parts import BatchPart, LossOfParts
from orchestrator.strategies.data.datasets import example_batch, opened_dataset, ragged_error
from orchestrator.strategies.measure.job_metrics import BatchMetrics, loss_of
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Weight, divisor_of, weighted, without_gradient
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.whole_model import WholeModel
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of

T = TypeVar("T")


class Replicas:
    """Runs a function on replicas of a model, one per device, at the same time.

    On GPUs this uses ``torch.nn.parallel``. On a CPU, ``torch.nn.DataParallel`` would split nothing. The same steps run
    on threads there, with replicas that share the parameters, so that autograd sums their gradients.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]):
        """``model`` holds the parameters and is on the first of ``devices``."""
        self._model = model
        self._devices = list(devices)
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="replica")

    def scatter(self, value: Any) -> list[Any]:
        """Cut nested tensors along their first dimension into one piece per device and move each piece there.

        Returns:
            Consecutive pieces of nearly equal size; fewer than there are devices if there are too few rows.
        """
        rows = num_rows(value)
        if rows is None:
            raise ValueError("the batch has no tensors that strategy=dp could divide among the devices")
        pieces = [
            rows_between(value, int(numbers[0]), int(numbers[-1]) + 1)
            for numbers in torch.arange(rows).chunk(len(self._devices))
        ]
        if self._devices[0].type == "cpu":  # a replica may change its piece in place, and autograd counts such changes
            return [map_tensors(Tensor.clone, piece) for piece in pieces]
        return [to_device(piece, device) for piece, device in zip(pieces, self._devices, strict=False)]

    def apply(self, function: Callable[..., Any], *pieces: Sequence[Any]) -> list[Any]:
        """Call ``function(replica, piece, ...)`` on every device, each in a thread.

        The threads take over the caller's gradient and autocast modes. An exception in a replica is raised here.
        """
        grad = torch.is_grad_enabled()
        device_type = self._devices[0].type
        autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

        def run(device: torch.device, *arguments: Any) -> Any:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.set_grad_enabled(grad), torch.autocast(device_type, enabled=autocast[0], dtype=autocast[1]):
                return function(*arguments)

        replicas = self._replicate(len(pieces[0]))
        futures = [self._pool.submit(run, *work) for work in zip(self._devices, replicas, *pieces, strict=False)]
        return [future.result() for future in futures]

    def gather(self, outputs: Sequence[Any]) -> Any:
        """Join outputs of the same structure on the first device, as ``model.batch.join`` does."""
        return join(outputs, self._devices[0])

    def collect(self, values: Sequence[T]) -> list[T]:
        """Return ``values``, one of each replica, with their tensors on the first device."""
        return [to_device(value, self._devices[0]) for value in values]

    def close(self) -> None:
        """Stop the threads without waiting for them."""
        self._pool.shutdown(wait=False)

    def _replicate(self, count: int) -> list[nn.Module]:
        if self._devices[0].type == "cuda":
            return replicate(self._model, self._devices[:count], detach=not torch.is_grad_enabled())
        return [_copy_of(self._model, clone_buffers=number > 0) for number in range(count)]


def _copy_of(model: nn.Module, *, clone_buffers: bool) -> nn.Module:
    """Copy the tree of modules, but not its parameters, and no modules of TorchScript, which cannot be copied.

    ``clone_buffers``: copy the buffers, so that updates of them are lost, as on GPUs in all replicas but the first.
    """
    copies: dict[nn.Module, nn.Module] = {m: m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)}
    for module in [module for module in model.modules() if module not in copies]:
        copy = data_parallel_replica(module)
        own_parameters(copy).update(own_parameters(module))
        if clone_buffers:
            own_buffers(copy).update({n: None if b is None else b.clone() for n, b in own_buffers(module).items()})
        copies[module] = copy
    for module, copy in ((module, copy) for module, copy in copies.items() if copy is not module):
        own_children(copy).update({n: None if c is None else copies[c] for n, c in own_children(module).items()})
    return copies[model]


class Scattered(WholeModel):
    """Passes through replicas of the model, one per device.

    Attributes:
        gathered_bytes: the size of what training has gathered on the first device.
        replicas: set by :meth:`DP.attach`.
    """

    replicas: Replicas

    def __init__(self, job: Job, context: Context, precision: Precision):
        super().__init__(job, context, precision)
        self.gathered_bytes = 0
        self._options = DPConfig.of(context.options)
        self._outputs: Sequence[Any] = ()  # of the replicas, until the loss is computed

    def mean_loss(self, inputs: Any, target: Any, weight: Weight, metrics: BatchMetrics) -> Tensor:
        if self._options.loss_on == "device0":
            return super().mean_loss(inputs, target, weight, metrics)
        pieces, targets = self.replicas.scatter(inputs), self.replicas.scatter(target)
        weights = [self._weight_of(piece) for piece in targets]

        def sums(replica: nn.Module, piece: Any, target: Any, weight: Weight) -> tuple[Tensor, Mapping[str, Tensor]]:
            output = self.precision.outputs(self._apply(replica, piece))
            without_gradient(output, weight)
            return weighted(loss_of(self.job, output, target), weight), metrics.of(output, target)

        results = self.replicas.apply(sums, pieces, targets, weights)
        for _, measured in results:
            metrics.add(measured)
        losses = self._gather([loss for loss, _ in results])
        total: Tensor = losses.sum() / divisor_of(sum(self.replicas.collect(weights)))
        return total

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss. A loss that the model computes is gathered as one mean per replica."""
        loss = loss_of(self.job, output, target, scalar=False)
        outputs, self._outputs = self._outputs, ()
        if loss.numel() == 1:
            return loss
        weights = self.replicas.collect([self._weight_of(piece) for piece in self.replicas.scatter(target)])
        if loss.shape != (len(weights),):
            raise JobError(f"job.loss returns {kind_of(loss)}; return the mean over the batch, a scalar tensor")
        for output, weight in zip(outputs, weights, strict=True):
            without_gradient(output, weight)
        total: Tensor = torch.stack([weighted(mean, w) for mean, w in zip(loss, weights, strict=True)]).sum()
        return total / divisor_of(sum(weights))

    def loss_of_parts(self, context: Context) -> LossOfParts:
        mean = super().loss_of_parts(context)
        if self._options.loss_on == "replicas" or context.train.grad_accumulation > 1:
            return mean

        def of_gathered(outputs: Sequence[Any], parts: Sequence[BatchPart]) -> Tensor:
            loss = self.job.loss(join(outputs, context.device), join([part.target for part in parts], context.device))
            return loss if loss.numel() == 1 else mean(outputs, parts)

        return of_gathered

    def evaluated(self, inputs: Any) -> Any:
        before = self.gathered_bytes
        out = self.forward(inputs)
        self.gathered_bytes = before  # the metric counts training only
        return out

    def forward(self, inputs: Any) -> Any:
        self._outputs = self.replicas.apply(self._apply, self.replicas.scatter(inputs))
        out = self._gather(self._outputs)
        if self._options.verbose:
            print(f"outside: input {_sizes(inputs)}, output {_sizes(out)}", flush=True)
        return out

    def _apply(self, replica: nn.Module, piece: Any) -> Any:
        out = self.job.forward(replica, piece)
        if self._options.verbose:
            print(f"in a replica: input {_sizes(piece)}, output {_sizes(out)}", flush=True)
        return out

    def _gather(self, outputs: list[Any]) -> Any:
        out = self.replicas.gather(outputs)
        self.gathered_bytes += sum(t.nbytes for t in tensors_in(out))
        return out

    def _weight_of(self, target: Any) -> Weight:
        """Return the job's weight of a piece, or its number of samples."""
        weight = self.job.weight(target)
        if weight is not None:
            return weight
        return num_rows(target) or 0


@register("dp")
class DPRules(Rules[DPConfig]):
    """One process for all devices."""

    @classmethod
    def trainer(cls, options: DPConfig, mesh: Mesh, job: Job) -> type[DP]:
        return DP

    @classmethod
    def default_num_workers(cls, options: DPConfig, *, gpus: Sequence[int], spares: int) -> int:
        """Return the most GPUs that one process can have, with as many on the nodes for each spare process."""
        if not gpus:
            return 2
        processes = 1 + spares
        return next((n for n in range(max(gpus), 1, -1) if sum(g // n for g in gpus) >= processes), 1)

    @classmethod
    def plan_layout(cls, options: DPConfig, train: TrainConfig, num_workers: int, errors: list[str]) -> Layout:
        """One process drives all devices: ``strategy.num_workers`` counts these."""
        return Layout(
            mesh=Mesh(),
            devices_per_worker=num_workers,
            notes=("one process feeds all devices and gathers on the first: strategy=ddp is nearly always faster",),
        )

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        job, rows = outline.job, plan.global_batch_size // plan.grad_accumulation
        ragged = ragged_error(
            example_batch(job, opened_dataset(job, "train", config.seed), rows), rows, strategy=plan.strategy
        )
        if plan.devices_per_worker > 1:
            errors += [ragged] if ragged is not None else []
            if changed := changed_weights(outline):
                errors.append(
                    f"job.model: forward() changes {first_few(changed, 2)}, and strategy=dp calls it once for each "
                    "device, so that the change would be made several times, or be lost; use "
                    "torch.nn.utils.parametrize, or strategy=ddp"
                )
        from orchestrator.strategies.checks.mesh_checks import check_whole  # which no rank needs

        return check_whole(config, outline, plan, errors)

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        return "it copies the model in every step, and compiled code belongs to the original; use strategy=ddp"


class DP(Trainer):
    """The process."""

    passes_class = Scattered
    passes: Scattered
    _replicas: Replicas | None = None
    _steps = 0
    traits = Traits(counts_flops=False)  # the replicas run in threads of their own

    def attach(self) -> None:
        super().attach()
        device = self.context.device
        numbers = range(self.context.num_devices)
        devices = [torch.device("cuda", i) if device.type == "cuda" else device for i in numbers]
        self._replicas = self.passes.replicas = Replicas(self.passes.model, devices)

    def end_step(self, norm: Tensor | None) -> bool:
        self._steps += 1
        return super().end_step(norm)

    def close(self) -> None:
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    def metrics(self) -> Mapping[str, Metric]:
        gathered = self.passes.gathered_bytes / max(1, self._steps)
        self.passes.gathered_bytes = self._steps = 0
        return {**super().metrics(), "dp/gathered_bytes": Metric(gathered, "sum")}


def _sizes(value: Any) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors_in(value))
