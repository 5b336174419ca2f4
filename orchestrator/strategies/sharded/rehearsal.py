"""A forward pass with fake tensors, to see what a model does to its own weights.

Weights that are gathered are copies: what ``forward`` writes into them is lost. Outside of the module for which it is
gathered, a weight is only a part, and a number that is read from it is that of the part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import (
    TorchDispatchMode,
    calls_through,
    reads_number,
    storage_key,
    version_of,
    written_tensors,
)
from orchestrator.config.text import first_few
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.precision import Precision
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.sharded.wrapping import SeenCalls, Wrap, groups_of, parameters_together
from orchestrator.user_code.errors import JobError


def check_forward(
    job: Job, whole: FakeModel, train_set: Dataset[Any], *, precision: Precision, wrap: Wrap
) -> SeenCalls:
    """Call the model with one sample, as far as fake tensors lead.

    Args:
        job: calls the model.
        whole: the model, whose buffers may change.
        train_set: provides the sample.
        precision: what the forward pass is computed in.
        wrap: the modules that are gathered one by one.

    Returns:
        The calls of these modules. All ranks see the same.

    Raises:
        JobError: the model changes weights, or reads numbers from them where they are not gathered.
    """
    model = whole.model
    before, uses, complete = _identities(model), _Uses(model, wrap), False
    with contextlib.suppress(Exception), drawing(0):  # whatever the job raises, training will say it
        inputs, _ = map_tensors(whole.fake_like, example_batch(job, train_set, 2))
        with whole.mode, calls_through(uses.call), precision.autocast(), uses:
            job.forward(model, precision.inputs(inputs))
        complete = True
    after = _identities(model)
    if changed := [name for name, seen in before.items() if after.get(name) != seen or seen[-1] in uses.written]:
        raise JobError(
            f"job.model: forward() changes {first_few(changed, 2)}, which is a copy there, gathered from all workers, "
            "so that the change would be lost; use torch.nn.utils.parametrize, or strategy=ddp"
        )
    if read := [name for name, seen in before.items() if seen[-1] in uses.read]:
        raise JobError(
            f"job.model: forward() reads a number from {first_few(read, 2)} outside of the module that is gathered "
            "with it, where each worker has only a part; read it in the forward() of that module, or use strategy=ddp"
        )
    return SeenCalls(inside=uses.calls, complete=complete)


def _identities(model: nn.Module) -> Mapping[str, tuple[int, int, int]]:
    return {n: (id(p), version_of(p), storage_key(p.untyped_storage())) for n, p in model.named_parameters()}


class _Uses(TorchDispatchMode):
    """Collects the storages of weights that operations write, and of those from which they read numbers as parts.

    Attributes:
        calls: the names of the modules that are called in each other, as in :class:`SeenCalls`.
    """

    def __init__(self, model: nn.Module, wrap: Wrap) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.read: set[int] = set()
        groups = groups_of(model, wrap)
        together = [{storage_key(p.untyped_storage()) for p in own} for own in parameters_together(model, groups)]
        self._gathered_by = {m: keys for group, keys in zip(groups, together, strict=False) for m in group}
        self._parts = set[int]().union(*together[:-1])  # which are not gathered at this moment
        self._made_of = {key: {key} for own in together for key in own}
        self._made: list[Tensor] = []  # kept, because another tensor could get the number of its storage
        self._names = {module: name for name, module in model.named_modules() if module in self._gathered_by}
        self._alone = {group[0] for group in groups if len(group) == 1}
        self.calls: dict[str, list[str]] = {"": []}
        self._inside = self.calls[""]

    def call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, for which weights are gathered."""
        parts, outside = self._parts, self._inside
        self._parts = parts - self._gathered_by.get(module, set())
        if (name := self._names.get(module)) is not None:
            outside.append(name)
            if module in self._alone:
                self._inside = []
                self.calls.setdefault(name, self._inside)
        out = original(module, *args, **kwargs)
        self._parts, self._inside = parts, outside
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.written |= {storage_key(t.untyped_storage()) for t in written_tensors(func, args, kwargs)}
        given = [(self._made_of.get(storage_key(t.untyped_storage())), t) for t in tensors_in((args, kwargs))]
        of_weights = all(keys is not None or not t.ndim for keys, t in given)
        keys = set[int]().union(*(keys for keys, _ in given if keys)) if of_weights else set()
        if keys and reads_number(func):
            self.read |= keys & self._parts
            return 1  # any number, so that the pass goes on
        out = func(*args, **kwargs)
        for made in tensors_in(out) if keys else ():
            self._made_of.setdefault(storage_key(made.untyped_storage()), keys)
            self._made.append(made)
        return out
