"""Private parts of ``torch.distributed.pipelining``, an alpha API, and its differences between torch 2.11 and 2.15.

The import of pipelining is slow; import this module only where a model is cut into stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

PASSES_CONSTANTS = hasattr(PipelineStage, "_validate_stage_tensors")
"""Whether a stage can receive tensors without a gradient, such as masks. With torch 2.11 it cannot."""


class ConnectedStage(PipelineStage):
    """A stage that can have a neighbour on its own rank under every backend, and a group for each direction.

    ``backward_group`` has the ranks of ``group``, and carries the gradients of activations.
    """

    def __init__(self, *args: Any, backward_group: dist.ProcessGroup, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._backward_group = backward_group

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._backward(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._backward(super().get_bwd_send_ops(bwd_chunk_id))

    def _backward(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        group = self._backward_group
        return [dist.P2POp(o.op, o.tensor, group=group, tag=o.tag, group_peer=o.group_peer) for o in operations]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 connects a rank to itself too, which gloo refuses. Newer versions do not call this.
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def sends_one_way(schedule: str) -> bool:
    """Return whether all that a schedule sends at once goes one way through the stages, so may have a group for each.

    The others send activations and gradients in one batch, which is of one group: in two, they might wait for each
    other.
    """
    return issubclass(get_schedule_class(schedule), _PipelineScheduleRuntime)


def microbatches_in_memory(stage: PipelineStage) -> int:
    """Return the number of micro-batches whose activations ``stage`` holds."""
    return len(_forward_passes(stage)) + len(stage.backward_state)


def saved_forward(stage: PipelineStage, microbatch: int) -> tuple[list[Node], list[Node]]:
    """Return the autograd nodes of the outputs and of the inputs of a forward pass that awaits its backward pass."""
    saved = _forward_passes(stage)[microbatch]
    if isinstance(saved, tuple):
        outputs, inputs = saved
    else:  # from torch 2.15
        outputs, inputs = saved.stage_output_for_backward(), saved.input_values
    return nodes_of(outputs), nodes_of(inputs)


def make_input_gradients_contiguous(stage: PipelineStage, microbatch: int) -> None:
    """Make the gradients that ``stage`` is about to send back contiguous, as the backends require."""
    gradients = stage.bwd_cache[microbatch]
    stage.bwd_cache[microbatch] = tuple(None if g is None else g.contiguous() for g in gradients)


def nodes_of(values: Iterable[Tensor | GradientEdge | None]) -> list[Node]:
    """Return the autograd nodes of the values that have a gradient."""
    edges = (
        value if isinstance(value, GradientEdge) else get_gradient_edge(value)
        for value in values
        if value is not None and (isinstance(value, GradientEdge) or value.requires_grad)
    )
    return [edge.node for edge in edges]


def nodes_between(outputs: Sequence[Node], inputs: Sequence[Node]) -> set[Node]:
    """Return the nodes of the autograd graph on any path from ``outputs`` back to ``inputs``.

    The search is the one with which torch splits a backward pass into gradients of inputs and gradients of weights.
    """
    nodes, _ = reverse_closure(list(inputs), set(), construct_reverse_graph(list(outputs)))
    return nodes


def computations(
    schedule: str, workers: int, microbatches: int, stages_per_rank: int = 1
) -> list[list[tuple[Literal["F", "B", "I", "W"], int, int]]]:
    """Return what each worker of a pipeline computes, in order: the kind of pass, the stage and the micro-batch.

    1F1B is written out, because torch does not follow its own list, which has the last stage wrong.
    """
    if schedule != "1F1B":
        listed = get_schedule_ops(schedule, workers, microbatches, stages_per_rank if stages_per_rank > 1 else None)
        return [[found for action in actions for found in _computations_in(action)] for actions in listed]
    orders: list[list[tuple[Literal["F", "B", "I", "W"], int, int]]] = []
    for stage in range(workers):
        ahead = workers - 1 - stage
        order: list[tuple[Literal["F", "B", "I", "W"], int, int]] = [("F", stage, i) for i in range(ahead)]
        for i in range(microbatches - ahead):
            order += [("F", stage, ahead + i), ("B", stage, i)]
        orders.append(order + [("B", stage, i) for i in range(microbatches - ahead, microbatches)])
    return orders


def _computations_in(action: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the forward and backward passes in an action of torch's, which may be a pair of others."""
    if action is not None and action.sub_actions:
        yield from (found for part in action.sub_actions for found in _computations_in(part))
    elif action is not None and action.computation_type.value in "FBIW":
        yield action.computation_type.value, action.stage_index, action.microbatch_index


def _forward_passes(stage: PipelineStage) -> dict[int, Any]:
    """Return what ``stage`` keeps of each micro-batch whose backward pass has not begun."""
    name = "fwd_cache" if hasattr(stage, "fwd_cache") else "_forward_chunk_states"  # from torch 2.15
    passes: dict[int, Any] = getattr(stage, name)
    return passes
