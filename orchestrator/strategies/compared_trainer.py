"""What a strategy does for the comparison with the whole model, which ``whole_check.py`` makes."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.compat.generators import kept_generators
from orchestrator.model.precision import Precision
from orchestrator.planning.mesh import TOGETHER
from orchestrator.strategies.base import Compared, Strategy
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.measure.job_metrics import BatchMetrics, SumCheck, evaluation_metrics
from orchestrator.strategies.reduction import Reduction, Weight
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.undivided import Batches
from orchestrator.strategies.whole_check import compare_with_whole


class ComparedTrainer(Strategy):
    """A strategy whose passes can be made without an update."""

    compares_whole: ClassVar[bool] = False
    """Whether what several ranks compute together is compared with the whole model."""

    precision: Precision
    trained: Trained
    reduction: Reduction
    _eval_metrics: SumCheck

    @abc.abstractmethod
    def add_gradients(self, slices: Sequence[Any], metrics: BatchMetrics) -> tuple[Tensor, Weight]:
        """Add the gradients of a batch. Return the summed loss of this rank, and its weight."""

    @abc.abstractmethod
    def around_step(self, *, logged: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the whole of a step; ``logged``: whether the step is logged."""

    @abc.abstractmethod
    def is_first_with(self, name: str) -> bool:
        """Return whether this is the first rank that has the parameter, or this part of it."""

    @abc.abstractmethod
    def on_device(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the target of a batch on the device, the inputs in the model's dtype."""

    def compare_with_whole(
        self, train_set: Dataset[Any], *, known: Callable[[str], bool], is_cut: Callable[[], bool]
    ) -> Compared:
        if not self.compares_whole or self.context.mesh.world_size == 1:
            return Compared()
        return compare_with_whole(self, train_set, known=known, is_cut=is_cut)

    @property
    def compares_together(self) -> bool:
        """Whether layers see the samples of all replicas at once, as those of ``strategy.sync_batchnorm`` do."""
        return False

    @property
    def compared_slices(self) -> tuple[int, int, int]:
        """How many slices are compared, of how many samples, and the number of micro-batches of each.

        The second one shows what the first has left in the model.
        """
        rows = self.eval_batch_size
        return (1, rows, 1) if self.job.carried else (2, min(rows, 2), 1)

    @property
    def compared_dtypes(self) -> Sequence[torch.dtype]:
        """In what passes and sums compute."""
        of_passes = self.precision.autocast_dtype or self.precision.model_dtype or torch.float32
        has_tf32 = self.context.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        own = {p.dtype for p in self.trained.module().parameters() if p.is_floating_point()}
        return [of_passes, *own, *([torch.float16] if has_tf32 else [])]  # TF32 has the digits of float16

    @property
    def kept(self) -> Sequence[object]:
        """What passes change beside the model."""
        return (self.job,)

    @contextlib.contextmanager
    def comparing(self) -> Iterator[Callable[[], None]]:
        """Return a context for passes that leave no trace; it yields what puts the model back before its end."""
        trained, loss_scale, metrics = self.trained, self.trained.loss_scale, self._eval_metrics
        of_modules = (p for module in trained.modules for p in module.parameters() if not hasattr(p, "to_local"))
        kept = KeptState(trained.modules, [*trained.module().parameters(), *of_modules], others=self.kept)

        def restore() -> None:
            kept.restore()
            trained.drop_gradients()

        measure = functools.partial(evaluation_metrics, self.job)
        trained.loss_scale, self._eval_metrics = None, SumCheck("metrics", measure, batches=0)
        try:
            with kept_generators(self.context.device):
                yield restore
        finally:
            trained.loss_scale, self._eval_metrics = loss_scale, metrics
            restore()
        self.renew_sums()

    def pass_once(self, microbatches: Sequence[Any], batches: Batches) -> tuple[Tensor, Weight, Tensor]:
        """Make the passes of a step with this rank's part of ``batches``. Return its loss, its weight, and the norm."""
        context, reduction = self.context, self.reduction
        slices = len(microbatches)
        samples = slices * batches.rows * context.mesh.data_parallel_size
        train = replace(context.train, global_batch_size=samples, grad_accumulation=slices)
        self.context = replace(context, train=train)
        try:
            with reduction.of(self.context), self.around_step(logged=False):
                found = self.add_gradients([self.on_device(batch) for batch in microbatches], BatchMetrics())
                return *found, reduction.norm(self.trained.parameters, context.device)
        finally:
            self.context = context

    def share_parameters(self) -> None:
        """Give what passes use the values of the parameters, if these are not the same. Collective."""

    def renew_sums(self) -> None:
        """Forget what sums of gradients have learned from passes. Collective."""

    @property
    def divided_by(self) -> str:
        """The keys that divide the model, or its samples, as typed on the command line."""
        options, mesh = self.context.options, self.context.mesh
        keys = [f"strategy={options.name}"]
        keys += [f"strategy.{d}={mesh.size(d)}" for d in reversed(TOGETHER) if mesh.size(d) > 1]
        return " ".join([*keys, "strategy.sequence=true"] if getattr(options, "sequence", False) else keys)

    @property
    def remedy(self) -> str:
        """Which strategies train a model that this one does not."""
        mesh = self.context.mesh
        other = "strategy=single"
        if mesh.workers_per_sample > 1 or mesh.pipeline > 1:
            other = "strategy=ddp or strategy=fsdp" + (" without these keys" if mesh.workers_per_sample > 1 else "")
        elif self.traits.divides_model:
            other = "strategy=ddp"
        return f"Use {other}"
