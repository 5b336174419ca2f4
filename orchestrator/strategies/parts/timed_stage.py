"""A stage of ``torch.distributed.pipelining`` that records when it computes, for the timeline and the bubble metric."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from orchestrator.compat.pipelining import (
    PASSES_CONSTANTS,
    ConnectedStage,
    make_input_gradients_contiguous,
    microbatches_in_memory,
    nodes_between,
    nodes_of,
    saved_forward,
)
from orchestrator.compat.torch import parameter_of
from orchestrator.model.precision import Precision
from orchestrator.model.stages.own_stages import Stage
from orchestrator.model.tensor.logits import without_parts
from orchestrator.timeline import ActionKind, Span
from orchestrator.user_code.errors import JobError


class Clock:
    """Records the spans of a step, with CUDA events on a GPU and wall-clock time on a CPU.

    Attributes:
        first_microbatch: added to the schedule's micro-batch numbers, which start at 0 in every slice of a step.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[ActionKind, int, int, Any, Any]] = []
        self._records = True
        self.first_microbatch = 0

    def restart(self, *, records: bool = True) -> None:
        """Discard the spans of the last step; ``records``: whether those of the next one are recorded."""
        self._marks, self._records = [], records

    @contextlib.contextmanager
    def span(self, kind: ActionKind, stage: int, microbatch: int) -> Iterator[None]:
        """Record the block as a span.

        Consecutive blocks of the same kind, stage and micro-batch form one span: the loss counts as part of the
        last stage's forward pass.
        """
        if not self._records:
            yield
            return
        microbatch += self.first_microbatch
        start = self._now()
        yield
        if self._marks and self._marks[-1][:3] == (kind, stage, microbatch):
            start = self._marks.pop()[3]
        self._marks.append((kind, stage, microbatch, start, self._now()))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the step in the order of their ends. Waits for the device."""
        now = self._now()
        if self._cuda:
            now.synchronize()
        now_s = time.time()

        def seconds(mark: Any) -> float:
            return float(now_s - mark.elapsed_time(now) / 1e3 if self._cuda else mark)

        return tuple(
            Span(kind=kind, stage=stage, microbatch=number, start=seconds(start), end=seconds(end))
            for kind, stage, number, start, end in self._marks
        )

    def _now(self) -> Any:
        if not self._cuda:
            return time.time()  # comparable between the processes of a machine, unlike perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class InputBuffer:
    """The model inputs of the micro-batches in flight, which the first stage looks up by number."""

    def __init__(self) -> None:
        self.microbatches: Sequence[Any] = ()


class TimedStage(ConnectedStage):
    """A stage as a schedule calls it. The first stage receives a micro-batch number and looks up its input.

    Attributes:
        output: the last output of the model's last layer, until the loss takes it.
        live: the largest number of micro-batches whose activations the stage has held at once.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        clock: Clock,
        inputs: InputBuffer,
        precision: Precision,
        passed: Callable[[int], None],
        backward_group: dist.ProcessGroup,
    ):
        """Connect ``stage`` to its neighbours.

        Args:
            stage: the stage.
            num_stages: of the whole model.
            device: where it computes.
            group: the ranks of the pipeline, for activations.
            clock: records when it computes.
            inputs: the inputs of the model, for the first stage.
            precision: what it computes in.
            passed: called with the number of the stage when the gradients of a micro-batch have been added to those of
                its parameters.
            backward_group: the same ranks, for the gradients of activations; may be ``group``.

        Raises:
            ValueError: this torch cannot send the values between the stages.
        """
        received = stage.inputs
        if not PASSES_CONSTANTS and received is not None and not all(spec.requires_grad for spec in received.specs):
            raise ValueError(
                f"layer {received.after} returns a tensor without a gradient, such as a mask, which a stage cannot "
                f"receive with torch {torch.__version__}; cut elsewhere with strategy.split, or install torch 2.13"
            )
        microbatch_number, placeholder = (torch.zeros(1, dtype=torch.int64),), (torch.zeros(1),)
        super().__init__(
            stage.module,
            stage.index,
            num_stages,
            device,
            input_args=microbatch_number if received is None else received.examples(device),
            output_args=placeholder if stage.outputs is None else stage.outputs.examples(device),
            group=group,
            backward_group=backward_group,
        )
        self._stage = stage
        self._passed = passed
        self._clock = clock
        self._inputs = inputs
        self._precision = precision
        self._splits_backward: bool | None = None  # decided in the first backward pass
        self.output: Any = None
        self.live = 0

    def forward_maybe_with_nosync(self, *received: Tensor) -> tuple[Tensor, ...]:
        with self._precision.autocast():
            boundary = self._stage.inputs
            value = self._inputs.microbatches[int(received[0])] if boundary is None else boundary.unpack(received)
            out = self._stage.computed(self.submod(value))
        if self._stage.outputs is not None:
            # A stage on the same worker would compute with the part, and not with the input of which it has a gradient.
            return self._stage.outputs.pack(without_parts(out))
        # Of any structure: the schedule accepts only tensors, so the loss reads it from here.
        self.output = self._precision.outputs(out)
        return (torch.zeros(1),)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._clock.span("F", self.stage_index, fwd_chunk_id), _original_error():
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.live = max(self.live, microbatches_in_memory(self))
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        whole = full_backward or not self._can_split_backward(bwd_chunk_id, loss)
        with self._clock.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id), _original_error():
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        make_input_gradients_contiguous(self, bwd_chunk_id)
        if full_backward:
            self._passed(self.stage_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._clock.span("W", self.stage_index, bwd_chunk_id), _original_error():
            if bwd_chunk_id in self.backward_state:  # otherwise the first half was the whole backward pass
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._passed(self.stage_index)

    def _can_split_backward(self, chunk_id: int, loss: Tensor | None) -> bool:
        """Return whether the weights' gradients can be computed after the inputs' gradients, in a pass of their own."""
        if self._splits_backward is None:
            outputs, inputs = saved_forward(self, chunk_id)
            # The first stage sends no gradients back: torch leaves its whole backward pass to the second half.
            self._splits_backward = self.is_first or backward_splits(
                nodes_of([loss]) if self.is_last else outputs, inputs
            )
        return self._splits_backward


def backward_splits(outputs: Sequence[Node], inputs: Sequence[Node]) -> bool:
    """Return whether torch's split backward pass computes every gradient.

    Its second half starts from the paths between outputs and inputs. It misses parameters that contribute beside all
    of these paths, through a branch that takes no input or only inputs without a gradient. Of one that contributes at
    several nodes of the paths, it goes through what lies between them, and frees that before others need it.
    """
    on_path = nodes_between(outputs, inputs)
    if _parameters_off(on_path, [node for node in outputs if node not in on_path]):
        return False
    seen: set[Node] = set()
    for node in on_path:
        found = _parameters_off(on_path, [n for n, _ in node.next_functions if n is not None and n not in on_path])
        if found & seen:
            return False
        seen |= found
    return True


def _parameters_off(path: set[Node], nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes of parameters that ``nodes`` lead to without a node of the path."""
    todo, seen = list(nodes), set(nodes)
    while todo:
        found = {n for n, _ in todo.pop().next_functions if n is not None} - path - seen
        seen |= found
        todo += found
    return {node for node in seen if isinstance(parameter_of(node), nn.Parameter)}


@contextlib.contextmanager
def _original_error() -> Iterator[None]:
    """Raise a layer's own error instead of torch's error that wraps it.

    Raises:
        JobError: a forward pass has changed in place what the backward pass of an earlier micro-batch needs.
    """
    try:
        yield
    except RuntimeError as e:
        original = e.__cause__
        if "modified by an inplace operation" in str(original or e):
            raise JobError(
                "forward() changes a weight or a buffer in place that the backward pass of an earlier micro-batch "
                "still needs; compute a new tensor (self.mean = self.mean * 0.9 + ...), use "
                "torch.nn.utils.parametrize for weights, or use strategy=model_parallel or ddp"
            ) from e
        if original is None:
            raise
        e.__cause__ = None
        try:
            raise original from original.__cause__
        finally:
            del original  # a frame that refers to its own error is a cycle, which would keep the process group alive
