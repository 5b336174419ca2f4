"""A stage of ``torch.distributed.pipelining`` that notes when it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure

from orchestrator.model.layers import Precision
from orchestrator.model.stages import Stage
from orchestrator.timeline.spans import Kind, Span


class Clock:
    """The spans of a step, on the device's own clock.

    ``first_microbatch`` is added to the numbers that the schedule gives, which begin at 0 in every slice of a step.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Kind, int, int, Any, Any]] = []
        self.first_microbatch = 0

    def restart(self) -> None:
        """A new step begins."""
        self._marks = []

    @contextlib.contextmanager
    def span(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Time the block. What follows on work of the same kind on the same micro-batch, as the loss does, is part
        of it."""
        microbatch += self.first_microbatch
        start = self._now()
        yield
        if self._marks and self._marks[-1][:3] == (kind, stage, microbatch):
            start = self._marks.pop()[3]
        self._marks.append((kind, stage, microbatch, start, self._now()))

    def spans(self) -> tuple[Span, ...]:
        """Those of the step, the first one first. Waits for the device."""
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
            return time.time()  # the same for all processes of a machine, unlike what is counted from an own origin
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TimedStage(PipelineStage):
    """A stage as a schedule calls it: with the number of a micro-batch where the model has its own input.

    ``output``: the last thing that the model's last layer has returned. ``live``: the largest number of micro-batches
    whose activations it has held at once.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        clock: Clock,
        first_input: Callable[[int], Any],
        precision: Precision,
    ):
        number = (torch.zeros(1),)
        super().__init__(
            stage.module,
            stage.index,
            num_stages,
            device,
            input_args=number if stage.inputs is None else stage.inputs.examples(device),
            output_args=number if stage.outputs is None else stage.outputs.examples(device),
            group=group,
        )
        self._stage = stage
        self._clock = clock
        self._first_input = first_input
        self._precision = precision
        self._halves: bool | None = None  # known with the first backward pass
        self.output: Any = None
        self.live = 0

    def forward_maybe_with_nosync(self, *received: Tensor) -> tuple[Tensor, ...]:
        with self._precision():
            inputs = self._stage.inputs
            out = self.submod(self._first_input(int(received[0])) if inputs is None else inputs.unpack(received))
        if self._stage.outputs is not None:
            return self._stage.outputs.pack(out)
        self.output = out  # the loss takes it from here, whatever it is; the schedule wants one tensor
        return (torch.zeros(1),)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._clock.span("F", self.stage_index, fwd_chunk_id), _own_error():
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.live = max(self.live, len(self.fwd_cache) + len(self.backward_state))
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        whole = full_backward or not self._in_halves(bwd_chunk_id, loss)
        with self._clock.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id), _own_error():
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        gradients = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(None if g is None else g.contiguous() for g in gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._clock.span("W", self.stage_index, bwd_chunk_id), _own_error():
            if bwd_chunk_id in self.backward_state:  # else the first half was all of it
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _in_halves(self, chunk_id: int, loss: Tensor | None) -> bool:
        """Whether the gradients of the parameters can wait until those of the inputs have gone back."""
        if self._halves is None:
            outputs, inputs = self.fwd_cache[chunk_id]
            # The first stage has nothing to send back: torch leaves all of it to the second half.
            self._halves = self.is_first or gradients_part([loss] if self.is_last else outputs, inputs)
        return self._halves


def gradients_part(outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> bool:
    """Whether torch's backward pass in halves finds every gradient.

    In its second half it goes on from the ways that lead from outputs to inputs. What a parameter contributes beside
    all of these, by a branch that takes no input or one without a gradient, it leaves out.
    """
    roots, ends = ([_node(t) for t in tensors if t is not None and t.requires_grad] for tensors in (outputs, inputs))
    behind = construct_reverse_graph(roots)
    on_the_way, _ = reverse_closure(ends, set(), behind)
    beside = [node for node in roots if node not in on_the_way]
    seen = set(beside)
    while beside:
        node = beside.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return False
        found = {n for n, _ in node.next_functions if n is not None} - on_the_way - seen
        seen |= found
        beside += found
    return True


def _node(tensor: Tensor) -> Node:
    return get_gradient_edge(tensor).node


@contextlib.contextmanager
def _own_error() -> Iterator[None]:
    """Raise what went wrong in a layer itself, and not torch's error about the stage that it went wrong in."""
    try:
        yield
    except RuntimeError as e:
        own = e.__cause__
        if own is None:
            raise
        e.__cause__ = None
        try:
            raise own from own.__cause__
        finally:
            del own  # a frame that knows its own error would live on, and keep the process group
