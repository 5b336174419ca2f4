"""A model whose parameters are divided over ranks, and the passes of batches through it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.fully_sharded import FullySharded
from orchestrator.compat.torch import FakeTensor
from orchestrator.job import Job
from orchestrator.model.batch import first_rows, has_row_per_sample, num_rows
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.partial_init import build_divided, build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages import module_of
from orchestrator.model.tensor_slots import move, tensor_slots
from orchestrator.state.boxes import Box
from orchestrator.strategies.base import Context, EvalSums
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.sharded.wrapping import Wrap, groups_of
from orchestrator.strategies.whole_model import WholeModel


class ShardedModel(WholeModel):
    """The model, of whose parameters this rank has a part. They are gathered group by group while they are used.

    Attributes:
        parts: this rank's part of each parameter, by the parameter's first name. Optimizers update these.
        boxes: where the parts are, by each name of a parameter.
        scalars: the parts that are whole parameters, because they have no dimension.
        saved_names: the names of all tensors of a checkpoint.
    """

    def __init__(self, job: Job, context: Context, precision: Precision, *, wrap: Wrap):
        """Compute this rank's part of the initial values of the whole model, without other ranks."""
        self.job = job
        self.precision = precision
        self._device = context.device
        self._build = constructor_of(job, context.train, precision)
        index, count = context.mesh.coords(context.global_rank).shard, context.mesh.shard

        def part(whole: Tensor) -> Tensor:
            if whole.ndim > 0:
                whole = whole[Box.shard(whole.shape, index, count).slices_in(Box.whole(whole.shape))]
            return whole.to(context.device, copy=True)

        self.model, self.parts = build_divided(self._build, part, seed=context.seed)
        move([slot for slot in tensor_slots(self.model) if not isinstance(slot.tensor, FakeTensor)], context.device)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        first = {parameter: name for name, parameter in self.model.named_parameters()}
        self.boxes = {name: Box.shard(p.shape, index, count) for name, p in named.items() if p.ndim > 0}
        self.saved_names = tuple(self.model.state_dict())
        self.scalars = [part for part in self.parts.values() if part.ndim == 0]
        self._first = {name: first[parameter] for name, parameter in named.items()}
        self._wrap = wrap
        self._wrapped: FullySharded | None = None
        self._divided = False

    def divide(self, group: dist.ProcessGroup, *, keep_whole: bool) -> None:
        """Divide the model over the ranks of ``group``. After :meth:`close`, it may be divided again, over others.

        Args:
            group: the ranks.
            keep_whole: whether what a step has gathered is kept up to its end.
        """
        if self._divided:
            self._rebuild()
        self._divided = True
        self.forward_model = self.unwrapped
        fakes = {id(parameter): name for name, parameter in self.model.named_parameters()}
        slots = [slot for slot in tensor_slots(self.model) if id(slot.tensor) in fakes]

        def fill(owners: Collection[nn.Module]) -> None:
            """Give modules tensors of any values, which are divided at once, or their scalars."""
            memory: dict[int, Tensor] = {}
            for slot in slots:
                fake, key = slot.tensor, id(slot.tensor)
                if slot.owner in owners and key not in filled:
                    filled.add(key)
                    own = self.parts[fakes[key]]
                    whole = own if own.ndim == 0 else torch.empty(fake.shape, dtype=fake.dtype, device=self._device)
                    memory[key] = whole
            for slot in slots:
                if id(slot.tensor) in memory:
                    slot.fill(memory)

        filled: set[int] = set()
        self._wrapped = wrapped = FullySharded(
            self.forward_model, group, self._device, keep_whole=keep_whole, undivided=self.scalars
        )
        for modules in (*groups_of(self.model, self._wrap), (self.forward_model,)):
            fill({inner for module in modules for inner in module.modules()})
            wrapped.gather_together(modules)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 0:
                self.parts[name].data = wrapped.local_part(parameter).copy_(self.parts[name].data)

    def _rebuild(self) -> None:
        """Build the model again, with its buffers, and with parameters that have no memory."""
        tensors = {slot.name: slot.tensor for slot in tensor_slots(self.model)}
        model = build_fake(self._build, torch.device("cpu")).model
        parameters = {*model.parameters()}
        slots = [slot for slot in tensor_slots(model) if slot.tensor not in parameters]
        kept = {id(slot.tensor): tensors[slot.name] for slot in slots}
        for slot in slots:
            slot.fill(kept)
        self.model = model

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of the passes of a slice; ``last``: the last one of the step."""
        assert self._wrapped is not None
        return self._wrapped.around_slice(last=last)

    def take_gradients(self) -> None:
        """Give the parts their gradients, after the backward passes of a step."""
        assert self._wrapped is not None
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.ndim > 0:
                self.parts[name].grad = self._wrapped.local_part(parameter.grad)
                parameter.grad = None

    def evaluate(self, batch: tuple[Any, Any], valid: int) -> EvalSums:
        """Compute loss and metrics of the first ``valid`` samples, also of none, because all ranks gather together."""
        assert self._wrapped is not None
        try:
            if valid > 0:
                return super().evaluate(batch, valid)
            with evaluation_mode(self.model), torch.no_grad(), self.precision.autocast():
                self.valid_output(batch[0], num_rows(batch), None)
            zero = torch.zeros((), device=self._device)
            return EvalSums(loss_sum=zero, weight=torch.zeros(()), metrics={})
        finally:
            self._wrapped.free()  # updates and averages change the parts, not what has been gathered

    def valid_output(self, inputs: Any, rows: int | None, valid: int | None) -> Any:
        """Return the output for the first ``valid`` samples, after equally many passes on all ranks."""
        output = self.evaluated(inputs)
        if rows is None:
            return output
        if has_row_per_sample(output, rows):
            return output if valid is None else first_rows(output, valid)
        return self.evaluated(inputs if valid is None else first_rows(inputs, valid))

    def forward(self, inputs: Any) -> Any:
        """Return the output for training."""
        try:
            return self.forward_model(inputs)
        except RuntimeError as e:
            if "mixed torch.Tensor and DTensor" not in str(e):
                raise
            raise ValueError(
                "strategy.wrap: the model calls a part of a module that does not run itself, so its parameters are not "
                "gathered; the log shows where. Name classes in strategy.wrap whose parts are called by them alone, or "
                f"use strategy=ddp: {e}"
            ) from e

    def evaluated(self, inputs: Any) -> Any:
        """Return the output for an evaluation."""
        return self.forward(inputs)

    def module(self) -> nn.Module:
        """Return a bare module with this rank's parts, and the buffers that are saved, under the model's own names."""
        return module_of(
            {
                name: self.parts[self._first[name]] if name in self._first else self.model.get_buffer(name)
                for name in self.saved_names
            }
        )

    def close(self) -> None:
        """Release everything that refers to the process group. It cannot run then; parts and buffers remain."""
        if self._wrapped is not None:
            self._wrapped.release()
            self._wrapped = None
