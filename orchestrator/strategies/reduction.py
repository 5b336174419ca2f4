"""How the loss is weighed, how the gradients of all ranks become one sum, and what its norm is.

A sample counts as much in the batch of many ranks as it would on one rank alone: the gradient of each part of the batch
has the part's share of the weight of the global batch. The gradients of a step are therefore summed, over slices,
micro-batches and ranks, and never averaged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from orchestrator.job import Job
from orchestrator.model.batch import tensors_in
from orchestrator.model.precision import summable
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.update.gradients import norm_over
from orchestrator.strategies.update.whole_tensors import ShardMap

Weight = float | Tensor


class Reduction:
    """The gradients of a rank that has no peers; the base of those that sum gradients over ranks."""

    averages_over = 1
    """The number of ranks over which gradients are averaged where a sum is needed; the loss is multiplied by it."""

    settles = False
    """Whether the norm is formed in every step. A rank that has it knows that all ranks have their gradients, so that
    each can make its update, even if another one is lost then."""

    shard_map = ShardMap()
    """How the tensors are divided that an optimizer needs whole."""

    def of(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the batch is that of ``context``."""
        return contextlib.nullcontext()

    def sync_initial_state(self) -> None:
        """Give all ranks the same initial values, in case the model's constructor ignores the seed."""

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        """Return the weight of the batch whose gradient an update applies: of the global batch, on several ranks.

        Args:
            own: the weight of this rank's part of it.
            counts_samples: whether weights are numbers of samples.
        """
        return own

    def weigh(self, job: Job, targets: Sequence[object], rows: Sequence[int]) -> tuple[Sequence[Weight], Weight]:
        """Return the weight of each part of this rank's batch, and, as a divisor, that of the whole batch of an update.

        Args:
            job: the job, whose ``weight`` counts.
            targets: the targets of each part; not empty.
            rows: the samples in each part, which are its weight if the job does not define one.
        """
        weights = [job.weight(target) for target in targets]
        if weights[0] is None:
            return rows, self.total_weight(sum(rows), counts_samples=True)
        defined = [weight for weight in weights if weight is not None]
        return defined, divisor_of(self.total_weight(sum(defined), counts_samples=False))

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward pass of a slice; ``last``: the last slice of the step."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Complete the sum after the backward passes of a step. Buffers become equal on the ranks that share them."""

    def mean_loss(self, loss_sum: Tensor, weight: Weight) -> Tensor:
        """Return the mean loss of the batch of an update: of the global batch, on several ranks, and equal on all."""
        return loss_sum / divisor_of(weight)

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of the gradient of the whole model, the same on all ranks.

        On several ranks this is the last collective operation before an update.
        """
        return norm_over(None, parameters, device)


def weight_sum(weight: Weight, *, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of ``weight`` over the ranks of ``group``; None: of the default group."""
    total = on_device(weight, device)
    dist.all_reduce(total, group=group)
    return total


def weighted(loss: Tensor, weight: Weight) -> Tensor:
    """Return the summed loss of a batch, given its mean. It is 0 for a weight of 0, for which the mean is NaN."""
    loss = summable(loss)
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))
    return loss * weight if weight else torch.zeros_like(loss)


def without_gradient(output: Any, weight: Weight, *, inside: bool = True) -> None:
    """Let the gradients of a loss of ``output`` be 0 if the part of the batch has a ``weight`` of 0.

    The mean over nothing is NaN, and so is its gradient, also 0 times. It must not reach the parameters: the gradients
    of other parts are added there, and other ranks wait for those of this one. A weight on a GPU is not read, which
    would wait for it, unless the model has computed the loss itself, so that the NaN is inside the model.

    ``inside``: whether gradients inside of the model are to be 0 too; others pass through it if ranks compute together.
    """
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    counts = weight > 0
    if isinstance(counts, Tensor) and counts.device.type != "cpu" and any(tensor.ndim for tensor in tensors):
        for tensor in tensors:
            tensor.register_hook(functools.partial(_without, counts.logical_not()))
    elif not counts and not inside:
        for tensor in tensors:
            tensor.register_hook(torch.zeros_like)
    elif tensors and not counts:
        for node in _nodes(tensors):
            node.register_prehook(_zeros)


def _without(empty: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(empty, 0)  # torch.where would copy the 0 to the device, and wait for it


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _nodes(tensors: Sequence[Tensor]) -> Iterator[Node]:
    """Yield the operations that have led to ``tensors``. Those of leaves outlive the step, so they are left out."""
    left, seen = [tensor.grad_fn for tensor in tensors], set[Node]()
    while left:
        node = left.pop()
        if node is not None and node not in seen and node.next_functions:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def divisor_of(weight: Weight) -> Weight:
    """Return the weight of a batch as a divisor: 1 for a weight of 0, so that its loss of 0 does not become NaN."""
    return weight.masked_fill(weight <= 0, 1) if isinstance(weight, Tensor) else weight or 1.0


def on_device(weight: Weight, device: torch.device) -> Tensor:
    """Return a weight as a new float32 scalar on ``device``, as which ranks can add it up.

    A number becomes an argument of a kernel. A copy of it would wait for everything that the device has still to do.
    """
    return torch.zeros((), device=device).add_(weight)
