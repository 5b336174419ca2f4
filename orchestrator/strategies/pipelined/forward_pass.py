"""The forward pass through all stages of a pipeline, for evaluation. It is the same for every schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
) -> Iterator[Any]:
    """Run the forward pass of every micro-batch, and yield the model's outputs one at a time, to hold only one.

    Every rank must read all of it, also where nothing is yielded: a rank that stops sends nothing to the others.

    All ranks go through :func:`forward_steps` and exchange activations after each step, each rank in one batch. NCCL
    does not buffer sends, so ranks that send to each other must receive at the same time.

    Args:
        stages: this rank's stages, in ascending order.
        inputs: the model's inputs, one per micro-batch; read only on the rank of the first stage.
        layout: which rank has which stage, and the number of micro-batches.
        group: the ranks of the pipeline.
        device: where received activations are placed.

    Yields:
        The output of each micro-batch, in order, on the rank of the last stage; nothing on the other ranks.
    """
    own = {stage.index: stage for stage in stages}
    arrived: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by stage and micro-batch
    for step in forward_steps(layout):
        exchange: list[dist.P2POp] = []
        finished: list[Any] = []
        for index, number in step:
            stage, following = own.get(index), own.get(index + 1)
            if stage is not None:
                value = inputs[number] if stage.inputs is None else stage.inputs.unpack(arrived.pop((index, number)))
                out = stage.module(value)
                if stage.outputs is None:
                    finished.append(out)
                    continue
                tensors = stage.outputs.pack(out)
                if following is not None:
                    arrived[index + 1, number] = tensors
                else:
                    to = layout.stage_ranks[index + 1]
                    exchange += [dist.P2POp(dist.isend, t, group=group, group_peer=to) for t in tensors]
            elif following is not None:
                assert following.inputs is not None
                tensors = following.inputs.examples(device)
                arrived[index + 1, number] = tensors
                sender = layout.stage_ranks[index]
                exchange += [dist.P2POp(dist.irecv, t.detach(), group=group, group_peer=sender) for t in tensors]
        for work in dist.batch_isend_irecv(exchange) if exchange else []:
            work.wait()
        yield from finished


def forward_steps(layout: PipelineLayout) -> Iterator[list[tuple[int, int]]]:
    """Yield, step by step, which stages process which micro-batches: at most one on each rank.

    Of its stages that have a micro-batch to process, a rank takes the first one.
    """
    m = layout.num_microbatches
    done = [0] * layout.num_stages
    while done[-1] < m:
        chosen: dict[int, int] = {}
        for stage, rank in enumerate(layout.stage_ranks):
            if done[stage] < (done[stage - 1] if stage else m):
                chosen.setdefault(rank, stage)
        yield [(stage, done[stage]) for stage in chosen.values()]
        for stage in chosen.values():
            done[stage] += 1
