"""What is needed to measure a model's layers and to build one rank's stages of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.job import Job
from orchestrator.model.cut import Cut
from orchestrator.model.layers import changing_buffers, costs, flow
from orchestrator.model.modes import in_train_mode
from orchestrator.model.parity import free_memory, parity_error
from orchestrator.model.precision import Precision
from orchestrator.model.sequence import LayerSequence
from orchestrator.model.stages import (
    Shared,
    Stage,
    build_stages,
    sequence_of,
    shared_buffers,
    shared_parameters,
)


@dataclass(frozen=True, kw_only=True)
class BuiltStages:
    """The stages of one rank.

    Attributes:
        stages: This rank's stages, in ascending order.
        shared: The tensors that several stages of the model have, on any rank.
    """

    stages: Sequence[Stage]
    shared: Sequence[Shared]


@dataclass(frozen=True, kw_only=True)
class StageBuilder:
    """An outline of the model and a sample micro-batch. Drop it after the stages are built, to free their memory.

    Attributes:
        job: Builds the model and defines the loss.
        sequence: The layers of the model as fake tensors.
        values: What flows into each layer, and out of the last, as fake tensors.
        inputs: The inputs of a real micro-batch, on the device.
        target: The targets of the same micro-batch.
        device: Where the stages are placed.
        seed: The seed with which the whole model would be initialized.
    """

    job: Job
    sequence: LayerSequence
    values: Sequence[Any]
    inputs: Any
    target: Any
    device: torch.device
    seed: int

    @classmethod
    def outline(
        cls,
        job: Job,
        inputs: Any,
        target: Any,
        *,
        split: Sequence[str],
        device: torch.device,
        seed: int,
        precision: Precision,
    ) -> StageBuilder:
        """Trace the model without memory for its parameters.

        Args:
            job: Builds the model.
            inputs: The inputs of a micro-batch.
            target: The targets of the same micro-batch.
            split: The module names to cut at; empty to cut by measured time.
            device: Where the stages are placed.
            seed: The seed of the model's initialization.
            precision: What the forward pass is computed in.

        Raises:
            ValueError: The model cannot be cut.
        """
        sequence = sequence_of(in_train_mode(job.model), inputs, device, split=split, job=job)
        values = flow(sequence, inputs, precision=precision)
        return cls(job=job, sequence=sequence, values=values, inputs=inputs, target=target, device=device, seed=seed)

    def measure_costs(self, *, precision: Precision) -> list[float]:
        """Return the milliseconds that forward and backward of each layer take; the last one includes the loss."""
        fresh = sequence_of(in_train_mode(self.job.model), self.inputs, self.device, split=(), job=self.job)

        def loss(output: Any) -> Tensor:
            return self.job.loss(output, self.target)

        return costs(fresh, self.values, self.inputs, precision=precision, loss=loss)

    def check_parity(self, *, precision: Precision) -> None:
        """Check on one micro-batch that the pieces of the model train as the whole model does.

        Layers that are the model's own modules in their order do so by construction. Without memory for two copies of
        the model and their gradients, the check is left out, and the log says so.

        Raises:
            ValueError: they do not; the text names the module.
        """
        if self.sequence.runs_modules_as_they_are:
            return
        needed = 4 * sum(p.numel() * p.element_size() for p in self.sequence.whole.model.parameters())
        if needed > (free := free_memory(self.device)) / 2:
            print(
                f"parity with the whole model is not checked: {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB", flush=True
            )
            return

        def loss(output: Any) -> Tensor:
            return self.job.loss(output, self.target)

        error = parity_error(
            in_train_mode(self.job.model),
            self.sequence,
            self.inputs,
            loss,
            device=self.device,
            seed=self.seed,
            precision=precision,
        )
        if error is not None:
            raise ValueError(
                f"the model's stages would not train as the whole model does: {error}; cut elsewhere with "
                "strategy.split, define Job.stages, make job.model() an nn.Sequential, or use strategy=ddp"
            )

    def build(self, cut: Cut, *, own: Collection[int], stage_ranks: Sequence[int], precision: Precision) -> BuiltStages:
        """Build the stages ``own``, initialized as in the whole model.

        Args:
            cut: Where the model is cut.
            own: The indices of this rank's stages.
            stage_ranks: The ``pp_rank`` of each stage.
            precision: What the forward pass is computed in.

        Raises:
            ValueError: Something other than tensors flows between two stages, or stages on different ranks share a
                buffer that forward passes change.
        """
        buffers = shared_buffers(self.sequence, cut)
        if buffers:
            changing = changing_buffers(self.sequence, self.inputs, precision=precision)
            _check_shared_buffers(buffers, changing, stage_ranks)
        build = in_train_mode(self.job.model)
        stages = build_stages(build, self.sequence, self.values, cut, own, device=self.device, seed=self.seed)
        return BuiltStages(stages=stages, shared=[*shared_parameters(self.sequence, cut), *buffers])


def _check_shared_buffers(buffers: Sequence[Shared], changing: Collection[str], stage_ranks: Sequence[int]) -> None:
    for buffer in buffers:
        names = [name for of_stage in buffer.stages.values() for name in of_stage]
        on_several_ranks = len({stage_ranks[stage] for stage in buffer.stages}) > 1
        if on_several_ranks and any(name in changing for name in names):
            raise ValueError(
                f"{names[0]}: forward passes change this buffer, and stages on several workers would each change a "
                "copy of their own; use its layer only once, or set strategy.split so that one worker has all its uses"
            )
