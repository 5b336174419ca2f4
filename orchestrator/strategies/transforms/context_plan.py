"""How the samples of a job are divided by tokens, and the loss of a part of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import FakeTensor
from orchestrator.job import Job
from orchestrator.model.context.division import Division, divide_tokens
from orchestrator.model.context.tokens import ContextPart
from orchestrator.strategies.measure.job_metrics import loss_of
from orchestrator.strategies.reduction import Weight, divisor_of, on_device, weighted, without_gradient
from orchestrator.strategies.transforms.loss_proof import tensors_of_tokens


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How the samples of a job are divided over ``count`` workers.

    Attributes:
        count: the number of parts.
        division: which modules of the model compute what.
        by_rows: whether the loss is the mean of the losses of the parts, so that no worker needs the whole output.
    """

    count: int
    division: Division
    by_rows: bool = False

    def divided(self, build: Callable[[], nn.Module], part: ContextPart) -> Callable[[], nn.Module]:
        """Return a constructor of the model that ``build`` returns, which computes the tokens of ``part``."""

        def built() -> nn.Module:
            model = build()
            divide_tokens(model, self.division, part)
            return model

        return built

    def loss(self, job: Job, output: Any, target: Any, part: ContextPart) -> Tensor:
        """Return the mean loss of whole samples, with the gradient of this rank's output. Collective.

        Args:
            job: the job.
            output: of the tokens of ``part``, or of all if the model ends with them.
            target: of whole samples.
            part: the tokens.
        """
        if self.division.ends_whole:
            return part.shared(loss_of(job, output, target))
        if not self.by_rows:
            return loss_of(job, part.whole(output, self.division.outputs), target)
        own = part.rows(job.aligned(target))
        given = job.weight(own)
        weight = _labels_in(own, part.length // self.count) if given is None else given
        if not isinstance(weight, FakeTensor):
            without_gradient(output, weight, inside=False)  # others use this rank's keys and values
        loss_sum = weighted(loss_of(job, output, own), weight)
        sums = part.peers.sum(torch.stack((loss_sum.detach(), on_device(weight, loss_sum.device).to(loss_sum.dtype))))
        total = cast(Tensor, divisor_of(sums[1]))
        return sums[0] / total + (loss_sum - loss_sum.detach()) / total


def _labels_in(target: Any, tokens: int) -> Weight:
    """Return how many labels a target has for so many tokens of each sample, without those that are ignored."""
    found = tensors_of_tokens(target, tokens)
    counts = [torch.as_tensor(t.numel()) if t.is_floating_point() else (t >= 0).sum() for t in found]
    return torch.stack(counts).sum() if counts else 1
