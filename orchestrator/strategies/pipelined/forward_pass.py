"""The forward pass alone through a chain of stages, for evaluation: the same for every schedule."""

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
    chain: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """The model's output for each micro-batch, on the rank of the last stage; elsewhere nothing.

    Stage after stage, each for all micro-batches: stages of a rank are in ascending order, so nobody waits for
    what waits for him. ``inputs``: the micro-batches, on the rank of the first stage.
    """
    outputs: list[Any] = []
    here: dict[int, list[tuple[Tensor, ...]]] = {}
    sends = []
    for stage in stages:
        for number in range(layout.num_microbatches):
            if stage.inputs is None:
                value = inputs[number]
            else:
                received = here[stage.index][number] if stage.index in here else _receive(stage, layout, chain, device)
                value = stage.inputs.unpack(received)
            out = stage.module(value)
            if stage.outputs is None:
                outputs.append(out)
                continue
            tensors = stage.outputs.pack(out)
            to = layout.stage_ranks[stage.index + 1]
            if to == layout.stage_ranks[stage.index]:
                here.setdefault(stage.index + 1, []).append(tensors)
            else:
                sends += [(t, dist.isend(t, group=chain, group_dst=to)) for t in tensors]
    for _, work in sends:
        assert work is not None
        work.wait()
    return outputs


def _receive(
    stage: Stage, layout: PipelineLayout, chain: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, ...]:
    assert stage.inputs is not None
    tensors = stage.inputs.examples(device)
    for tensor in tensors:
        dist.recv(tensor.detach(), group=chain, group_src=layout.stage_ranks[stage.index - 1])
    return tensors
