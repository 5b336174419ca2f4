"""The sums of the gradients of a rank's stages over the ranks that compute the same stages, of other samples.

Over replicas, the sum of a stage begins as soon as the stage has processed its last micro-batch of a step, while the
passes of other stages go on. All replicas run one schedule, so they begin their sums in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.update.gradients import begin_sum


class OfStages(Sums):
    """Sums over replicas of the stages, each of which begins after the last backward pass through its stage."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        stages: Mapping[int, Sequence[nn.Parameter]],
        needed: Mapping[nn.Parameter, str],
        elsewhere: Collection[nn.Parameter] = (),
    ):
        """
        Args:
            group: the ranks that have the same stages; None if there is one replica.
            stages: the trained parameters of each stage. A parameter may belong to several.
            needed: the names of the parameters that must have a gradient in every step.
            elsewhere: those that other ranks of the pipeline have too. They may have the only gradient.
        """
        self._group = group
        self._stages = stages
        self._needed = needed
        self._elsewhere = elsewhere
        self._passes_left: dict[int, int] = {}
        self._stages_left: Counter[nn.Parameter] = Counter()
        self._pending: list[Callable[[], None]] = []

    def begin_step(self, *, passes: int) -> None:
        self._passes_left = dict.fromkeys(self._stages, passes)
        self._stages_left = Counter(p for parameters in self._stages.values() for p in dict.fromkeys(parameters))
        self._pending = []

    def passed(self, stage: int) -> None:
        """Take note of a backward pass. The last one of a stage begins the sum of its gradients.

        Raises:
            ValueError: parameters take no part in the loss.
        """
        self._passes_left[stage] -= 1
        if self._passes_left[stage] == 0:
            self._begin(stage)

    def finish(self, waits: WaitTimer) -> None:
        """Wait for the sums, and count that as waiting.

        Raises:
            ValueError: parameters take no part in the loss.
        """
        for stage, passes in self._passes_left.items():
            if passes:  # no gradient has flowed through the stage
                self._begin(stage)
        for wait in self._pending:
            with waits.waiting():
                wait()
        self._pending = []

    def _begin(self, stage: int) -> None:
        parameters = list(dict.fromkeys(self._stages[stage]))
        self._stages_left.subtract(parameters)
        complete = [p for p in parameters if self._stages_left[p] == 0]
        if self._group is None:
            return
        for parameter in complete:
            if parameter.grad is None and parameter in self._elsewhere:
                parameter.grad = torch.zeros_like(parameter)
        if missing := [self._needed[p] for p in complete if p.grad is None and p in self._needed]:
            raise ValueError(
                f"parameters that take no part in the loss: {', '.join(missing)}; the other replicas would "
                "wait for their gradients. Use these parameters, freeze them (requires_grad=False), or use "
                "strategy=ddp, which has strategy.find_unused_parameters=true; stages have no such option, because "
                "their replicas sum all gradients in one order"
            )
        self._pending.append(begin_sum(self._group, [p.grad for p in complete if p.grad is not None]))
