"""The weights that forward() of a model changes itself, as a pass with fake tensors shows."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import TorchDispatchMode, reads_number, storage_key, version_of, written_tensors
from orchestrator.model.batch import map_tensors
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch

MOST_ONES, MOST_NUMBERS = 50, 1000
"""The numbers that a pass reads as 1, and all that it may read: a loop may wait for another one."""


class Writes(TorchDispatchMode):
    """Collects what operations write, and gives them an arbitrary number where they read one.

    Attributes:
        written: the storages that operations write.
        numbers: how many numbers have been read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written = set[int]()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.written |= {storage_key(t.untyped_storage()) for t in written_tensors(func, args, kwargs)}
        if reads_number(func) and self.numbers < MOST_NUMBERS:
            self.numbers += 1
            return 1 if self.numbers <= MOST_ONES else self.numbers % 2  # any number, so that the pass goes on
        return func(*args, **kwargs)


class Weights:
    """The parameters of a model as they are now.

    Attributes:
        storages: the storage of each, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = _identities(model)
        self.storages = {name: seen[-1] for name, seen in self._seen.items()}

    def changed(self, written: Collection[int]) -> list[str]:
        """Return the names of those that have changed since, or whose storages have been ``written``."""
        after = _identities(self._model)
        return [n for n, seen in self._seen.items() if after.get(n) != seen or seen[-1] in written]


def changed_weights(outline: Outline, train_set: Any = None) -> list[str]:
    """Return the names of the parameters that a forward pass changes, as far as fake tensors lead.

    ``train_set``: provides a sample; None to let the job open it.
    """
    job, precision = outline.job, outline.precision
    with contextlib.suppress(Exception), drawing(0):  # whatever the job raises, training will say it
        whole = outline.whole
        inputs, _ = map_tensors(
            whole.fake_like, example_batch(job, job.dataset("train") if train_set is None else train_set, 2)
        )
        weights, writes = Weights(whole.model), Writes()
        with contextlib.suppress(Exception), whole.mode, precision.autocast(), writes:
            job.forward(whole.model, precision.inputs(inputs))
        return weights.changed(writes.written)
    return []


def _identities(model: nn.Module) -> Mapping[str, tuple[int, int, int]]:
    return {n: (id(p), version_of(p), storage_key(p.untyped_storage())) for n, p in model.named_parameters()}
