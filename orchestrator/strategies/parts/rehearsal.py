"""A forward pass with fake tensors, to see what a job does with the weights of its model.

Weights that are gathered are copies: what ``forward`` writes into them is lost, and NumPy may not keep their memory.
Outside of the module for which it is gathered, a weight is only a shard. A gradient that is computed inside of a
forward pass would free the weights, although another one is still to be computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from orchestrator.compat.autocast import autocast_of
from orchestrator.compat.generators import drawing
from orchestrator.compat.modules import calls_through
from orchestrator.compat.torch import (
    is_view_operator,
    running_node_number,
    storage_key,
    unset_fake_temporarily,
    without_fake_tensor_logs,
)
from orchestrator.config.text import first_few
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.precision import Casts, Precision
from orchestrator.model.tensor_slots import random_like
from orchestrator.strategies.constructor import Weights, Writes
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.parts.wrapping import SeenCalls, groups_of, parameters_together
from orchestrator.user_code.errors import JobError


def check_forward(
    job: Job,
    whole: FakeModel,
    train_set: Dataset[Any],
    *,
    precision: Precision,
    options: MeshConfig,
    layers: nn.Module | None = None,
    begin: Callable[[Any], Any] = lambda inputs: inputs,
) -> SeenCalls:
    """Call the model and the loss with one sample, forward and backward, as far as fake tensors lead.

    Args:
        job: calls the model.
        whole: the model, whose buffers may change.
        train_set: provides the sample.
        precision: what the forward pass is computed in.
        options: say what is gathered together, and for how long.
        layers: the layers of ``whole`` in turn, if these are called; None if the job calls the model.
        begin: returns what the layers are called with for the inputs of a batch.

    Returns:
        The calls of the modules that are gathered one by one. All ranks see the same.

    Raises:
        JobError: the job changes weights, or uses them where they are not gathered.
    """
    model = whole.model
    weights = Weights(model)
    # Fake tensors may be elsewhere than those that train; code that turns autocast off names the type of the latter.
    device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
    precision = replace(precision, device_type=device_type)
    casts = Casts(model, precision.autocast_dtype)
    uses, in_loss, in_backward, in_evaluation = (_Uses(model, options, layers, casts) for _ in range(4))
    ended = False
    with (
        contextlib.suppress(Exception),
        drawing(0),
        autocast_of(device_type),
        without_fake_tensor_logs(),
    ):  # whatever the job raises, training will say it
        inputs, target = map_tensors(whole.fake_like, example_batch(job, train_set, 2))
        with whole.mode, precision.autocast():
            inputs = precision.inputs(inputs)

            def called() -> Any:
                return job.forward(model, inputs) if layers is None else layers(begin(inputs))

            with uses.watched():
                output = called()
            with in_loss.watched():
                loss = job.loss(precision.outputs(output), target)
        with whole.mode, in_backward.watched():
            loss.backward()
        ended = True
        if precision.autocast_dtype is not None:
            with whole.mode, precision.autocast(), torch.no_grad(), evaluation_mode(model), in_evaluation.watched():
                called()

    def named(storages: Collection[int]) -> str | None:
        names = [name for name, storage in weights.storages.items() if storage in storages]
        return first_few(names, 2) if names else None

    if changed := weights.changed(uses.written):
        raise JobError(
            f"job.model: forward() changes {first_few(changed, 2)}, which is a copy there, gathered from all workers, "
            "so that the change would be lost; use torch.nn.utils.parametrize, or strategy=ddp"
        )
    if names := named(uses.shared):
        raise JobError(
            f"job.model: forward() gives the memory of {names} to NumPy, and this memory, gathered from all workers, "
            "is freed after the pass; compute with torch, or with a clone(), or use strategy=ddp"
        )
    if names := named(in_loss.used | in_loss.shared):
        raise JobError(
            f"job.loss uses {names}, which no worker has outside of the forward pass; let forward() of the model "
            "return this term of the loss, or use strategy=ddp"
        )
    remedy = (
        "set strategy.reshard_after_forward=false, with which the whole model is gathered for each step, or use "
        "strategy=ddp"
    )
    if (differentiates := uses.differentiates or in_loss.differentiates) and options.reshard_after_forward:
        raise JobError(
            f"job.model: a gradient is computed in forward() or Job.loss, for which weights have to stay; {remedy}"
        )
    in_parts = uses.parts & (uses.used | in_backward.used - uses.needed_again)
    if (names := named(in_parts)) and options.reshard_after_forward:
        raise JobError(
            f"job.model: forward() uses {names} outside of the module that is gathered with it, where each worker has "
            f"only a shard; {remedy}"
        )
    gathers_all = not options.reshard_after_forward and (differentiates or names is not None or not ended)
    # A number that is read is arbitrary here, and so may be what the pass does then.
    complete = ended and not uses.numbers
    return SeenCalls(inside=uses.calls, complete=complete, gathers_all=gathers_all, casts=casts.seen)


class _Uses(Writes):
    """Collects what is done with the storages of weights.

    Attributes:
        used: those that operations read, except while they are gathered for a module below the root, and by autograd
            alone, as outside of all modules in a backward pass.
        parts: those that are not gathered for the root.
        needed_again: those that are gathered for the backward pass of a module too.
        shared: those whose memory is given away, also of other tensors.
        differentiates: whether a gradient is computed.
        calls: the names of the modules that are called in each other, as in :class:`SeenCalls`.
    """

    def __init__(self, model: nn.Module, options: MeshConfig, root: nn.Module | None, casts: Casts) -> None:
        super().__init__()
        self._casts = casts
        groups = groups_of(model, options.wrap, root)
        together = [
            {storage_key(p.untyped_storage()) for p in own} for own in parameters_together(root or model, groups)
        ]
        self.used, self.shared, self.needed_again = (set[int]() for _ in range(3))
        self.parts = set[int]().union(*together[:-1])
        self.differentiates = False
        self._gathered_by = {m: keys for group, keys in zip(groups, together, strict=False) for m in group}
        self._left = self.parts | together[-1]
        self._names = {module: name for name, module in model.named_modules() if module in self._gathered_by}
        self._alone = {group[0] for group in groups if len(group) == 1}
        self.calls: dict[str, list[str]] = {"": []}
        self._inside = self.calls[""]
        self._calls = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what runs in the block."""
        with calls_through(self.call), _GivenAway(self.shared), self:
            yield

    def call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, for which weights are gathered."""
        left, outside, gathered = self._left, self._inside, self._gathered_by.get(module, set())
        self._left = left - gathered
        self._calls += 1
        if (name := self._names.get(module)) is not None:
            outside.append(name)
            if module in self._alone:
                self._inside = []
                self.calls.setdefault(name, self._inside)
        try:
            out = original(module, *args, **kwargs)
        finally:
            self._left, self._inside = left, outside
            self._calls -= 1
        if any(tensor.requires_grad for tensor in tensors_in(out)):
            self.needed_again |= gathered
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = running_node_number() is not None
        self.differentiates |= in_backward
        if (self._calls or not in_backward) and not is_view_operator(func):
            self.used |= self._left & {storage_key(t.untyped_storage()) for t in tensors_in((args, kwargs or {}))}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not in_backward:
            self._casts.note(func, args, kwargs or {}, result)
        return result


_MEMORY = ("numpy", "__array__", "__dlpack__", "data_ptr")
"""Functions of torch that give away the memory of a tensor."""


class _GivenAway(TorchFunctionMode):
    """Adds the storages whose memory is given away to ``storages``."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _MEMORY:
            self._storages.add(storage_key(args[0].untyped_storage()))
            with unset_fake_temporarily():
                return func(random_like(args[0]).detach(), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
