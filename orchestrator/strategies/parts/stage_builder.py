"""Builds one rank's stages of a model, after measuring and checking its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.config.text import first_few
from orchestrator.job import Job, has_steering, own_forward
from orchestrator.model.batch import tensors_in
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.cut import Cut
from orchestrator.model.stages.layers import changing_tensors, costs, flow
from orchestrator.model.stages.own_stages import Shared, Stage, build_stages, sequence_of, shared_tensors
from orchestrator.model.stages.sequence import LayerSequence
from orchestrator.model.stages.tape import Call
from orchestrator.strategies.measure.job_metrics import loss_of


@dataclass(frozen=True, kw_only=True)
class BuiltStages:
    """The stages of one rank.

    Attributes:
        stages: this rank's stages, in ascending order.
        shared: the tensors that several stages of the model have, on any rank.
    """

    stages: Sequence[Stage]
    shared: Sequence[Shared]


@dataclass(frozen=True, kw_only=True)
class StageBuilder:
    """An outline of the model and a sample micro-batch. Drop it after the stages are built, to free their memory.

    Attributes:
        job: defines the loss.
        constructor: builds the model.
        sequence: the layers of the model as fake tensors.
        values: what flows into each layer, and out of the last, as fake tensors.
        inputs: the inputs of a real micro-batch, on the device.
        target: the targets of the same micro-batch.
        device: where the stages are placed.
        seed: the seed with which the whole model would be initialized.
        precision: what the model is stored and computed in.
    """

    job: Job
    constructor: Callable[[], nn.Module]
    sequence: LayerSequence
    values: Sequence[Any]
    inputs: Any
    target: Any
    device: torch.device
    seed: int
    precision: Precision

    @classmethod
    def outline(
        cls,
        job: Job,
        inputs: Any,
        target: Any,
        *,
        constructor: Callable[[], nn.Module],
        split: Sequence[str],
        num_stages: int,
        device: torch.device,
        seed: int,
        precision: Precision,
        call: Call | None = None,
    ) -> StageBuilder:
        """Divide the model into layers, without memory for its parameters.

        Args:
            job: defines the loss, and may define the stages.
            inputs: the inputs of a micro-batch, in any dtype.
            target: the targets of the same micro-batch.
            constructor: builds the model, in ``precision``.
            split: the module names to cut at; empty to cut by measured time.
            num_stages: the number of stages.
            device: where the stages are placed.
            seed: the seed of the model's initialization.
            precision: what the model is stored and computed in.
            call: calls the model with the inputs; None to only call it.

        Raises:
            ValueError: the model cannot be cut.
        """
        inputs = precision.inputs(inputs)
        whole = build_fake(constructor, device)
        sequence = sequence_of(whole, inputs, split=split, num_stages=num_stages, job=job, call=call)
        return cls(
            job=job,
            constructor=constructor,
            sequence=sequence,
            values=flow(sequence, inputs, precision=precision),
            inputs=inputs,
            target=target,
            device=device,
            seed=seed,
            precision=precision,
        )

    def measure_costs(self) -> list[float]:
        """Measure the milliseconds of both passes of each layer; the last one includes the loss."""
        # Of another instance of the model, because a layer may keep what it has computed with real tensors.
        model = build_fake(self.constructor, self.device).model
        layers = self.sequence.of(model, range(len(self.sequence.names)))
        ordered = [layers[index] for index in sorted(layers)]
        return costs(ordered, self.values, self.inputs, precision=self.precision, loss=self._loss)

    def build(
        self,
        cut: Cut,
        *,
        own: Collection[int],
        stage_ranks: Sequence[int],
        build_layers: Callable[[Sequence[int]], Mapping[int, nn.Module]] | None = None,
    ) -> BuiltStages:
        """Build the stages ``own``, initialized as in the whole model.

        Args:
            cut: where the model is cut.
            own: the indices of this rank's stages.
            stage_ranks: the ``pp_rank`` of each stage.
            build_layers: returns the layers of some indices, by index; by default, with all their tensors.

        Raises:
            ValueError: something other than tensors flows between two stages, or stages on different ranks share a
                parameter or buffer that forward passes change.
        """
        shared = shared_tensors(self.sequence, cut)
        if shared:
            changing = changing_tensors(self.sequence, self.inputs, precision=self.precision)
            _check_shared(shared, changing, stage_ranks)
        stages = build_stages(
            build_layers or self._build_layers, self.sequence, self.values, cut, own, precision=self.precision
        )
        return BuiltStages(stages=stages, shared=shared)

    def _build_layers(self, indices: Sequence[int]) -> Mapping[int, nn.Module]:
        layers = self.sequence.build_layers(self.constructor, indices, seed=self.seed)
        nn.ModuleList(layers.values()).to(self.device)
        return layers

    def _loss(self, output: Any) -> Tensor:
        output, weight = self.precision.outputs(output), self.job.weight(self.target)
        if weight is None or weight > 0:
            try:
                return loss_of(self.job, output, self.target)
            except RuntimeError as e:
                if "differentiated Tensor" not in str(e):
                    raise
                raise ValueError(
                    "Job.loss computes a gradient through the model, of which the worker that computes the loss has "
                    "only the last stage; compute it in the forward() of one layer, or use strategy=ddp"
                ) from e
        # The sample has no label, and a job may have no loss of it.
        squares = [tensor.square().mean() for tensor in tensors_in(output) if tensor.is_floating_point()]
        return sum(squares, torch.zeros((), device=self.device))


def recorded_call(job: Job) -> Call | None:
    """Return how a job calls its model, to be recorded with it; None if it only calls it.

    Raises:
        ValueError: evaluations change what the recording would keep.
    """
    call = own_forward(job)
    if call is not None and job.steerable and has_steering(job):
        raise ValueError(
            "stages play a recording of Job.forward, which does not see what Job.on_evaluation changes "
            f"({first_few(job.steerable, 2)}); use strategy=fsdp or strategy=ddp, or read the field in Job.loss"
        )
    return call


def _check_shared(shared: Sequence[Shared], changing: Collection[str], stage_ranks: Sequence[int]) -> None:
    for tensor in shared:
        names = [name for of_stage in tensor.stages.values() for name in of_stage]
        on_several_ranks = len({stage_ranks[stage] for stage in tensor.stages}) > 1
        if on_several_ranks and any(name in changing for name in names):
            raise ValueError(
                f"{names[0]}: forward passes change this tensor, and stages on several workers would each change a "
                "copy of their own; use its layer only once, or set strategy.split so that one worker has all its uses"
            )
