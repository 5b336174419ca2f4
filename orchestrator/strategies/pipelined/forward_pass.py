"""The forward pass through all stages of a pipeline, for evaluation. It is the same for every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.model.stages import Stage
from orchestrator.planning.schedules import PipelineLayout


def forward_only(
    stages: Sequence[Stage],
    inputs: Sequence[Any],
    *,
    layout: PipelineLayout,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """Run the forward pass of every micro-batch and return the model's outputs.

    Each stage processes all micro-batches before the next stage of the same rank starts. A rank's stages are in
    ascending order, so this order cannot deadlock.

    Args:
        stages: This rank's stages, in ascending order.
        inputs: The model's inputs, one per micro-batch; read only on the rank of the first stage.
        layout: Which rank has which stage, and the number of micro-batches.
        group: The ranks of the pipeline.
        device: Where received activations are placed.

    Returns:
        The output of each micro-batch on the rank of the last stage; an empty list on the other ranks.
    """
    outputs: list[Any] = []
    local: dict[int, list[tuple[Tensor, ...]]] = {}  # inputs of stages whose predecessor is on this rank too
    sends = []
    for stage in stages:
        for number in range(layout.num_microbatches):
            if stage.inputs is None:
                value = inputs[number]
            elif stage.index in local:
                value = stage.inputs.unpack(local[stage.index][number])
            else:
                value = stage.inputs.unpack(_receive(stage, layout, group, device))
            out = stage.module(value)
            if stage.outputs is None:
                outputs.append(out)
                continue
            tensors = stage.outputs.pack(out)
            to = layout.stage_ranks[stage.index + 1]
            if to == layout.stage_ranks[stage.index]:
                local.setdefault(stage.index + 1, []).append(tensors)
            else:
                sends += [(t, dist.isend(t, group=group, group_dst=to)) for t in tensors]
    for _, work in sends:
        assert work is not None
        work.wait()
    return outputs


def _receive(
    stage: Stage, layout: PipelineLayout, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, ...]:
    assert stage.inputs is not None
    tensors = stage.inputs.examples(device)
    for tensor in tensors:
        dist.recv(tensor.detach(), group=group, group_src=layout.stage_ranks[stage.index - 1])
    return tensors
