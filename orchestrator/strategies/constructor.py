"""How a strategy builds the model of a job, and which of its weights change by themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import (
    TorchDispatchMode,
    reads_number,
    setting_fake_data,
    storage_key,
    version_of,
    written_tensors,
)
from orchestrator.config.schema import TrainConfig
from orchestrator.config.text import first_few
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors
from orchestrator.model.modes import in_train_mode
from orchestrator.model.partial_init import FakeModel, build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.repeated_blocks import with_blocks
from orchestrator.planning.plan import Plan
from orchestrator.strategies.data.datasets import example_batch, opened_dataset
from orchestrator.strategies.transforms.blocks import uses_blocks
from orchestrator.user_code.errors import JobError

T = TypeVar("T")


def constructor_of(job: Job, train: TrainConfig, precision: Precision) -> Callable[[], nn.Module]:
    """Return a constructor of the job's model in ``precision``, whose blocks run as ``train`` says."""
    return _as_trained(job.model, train, precision)


def _as_trained(build: Callable[[], nn.Module], train: TrainConfig, precision: Precision) -> Callable[[], nn.Module]:
    build = precision.converted(in_train_mode(build))
    return with_blocks(build, recomputes=train.activation_checkpointing) if uses_blocks(train) else build


@dataclass(frozen=True)
class Outline:
    """A job and its model as it is trained, without memory. The model is built once, when it is first asked for.

    Attributes:
        transform: returns the constructor of what a worker has of the model, given that of the model.
        found: what checks have found of it, so that they look once.
    """

    job: Job
    train: TrainConfig
    transform: Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]] = lambda build: build
    found: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def precision(self) -> Precision:
        """What a CPU would compute the model in."""
        return Precision.named(self.train.precision, "cpu")

    @property
    def build(self) -> Callable[[], nn.Module]:
        """The constructor of the model."""
        return self.transform(constructor_of(self.job, self.train, self.precision))

    @functools.cached_property
    def model(self) -> nn.Module | None:
        """The model; None if its constructor needs memory, or fails. A worker, which has memory, reports the failure.

        Raises:
            JobError: ``Job.model`` does not return a model.
        """
        if self._of_fakes is not None:
            return self._of_fakes.model
        with torch.device("meta"):  # where parameters may have no shape yet
            return _unless_it_fails(self.build)

    @functools.cached_property
    def whole(self) -> FakeModel:
        """The model, which has memory while it is built if fake tensors do not suffice.

        Raises:
            Exception: whatever ``Job.model`` raises.
        """
        return self._of_fakes or self._built()

    @functools.cached_property
    def _of_fakes(self) -> FakeModel | None:
        return _unless_it_fails(lambda: self._built(without_memory=True))

    def _built(self, *, without_memory: bool = False) -> FakeModel:
        whole = build_fake(self.transform(self.job.model), torch.device("cpu"), without_memory=without_memory)
        with setting_fake_data():  # after the look at what shares memory, because conversion would part it
            _as_trained(lambda: whole.model, self.train, self.precision)()
        return whole


def _unless_it_fails(build: Callable[[], T]) -> T | None:
    try:
        return build()
    except JobError:
        raise
    except Exception:
        return None


def lazy_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that get their shapes in the first forward pass, as in ``LazyLinear``."""
    return [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]


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
            whole.fake_like, example_batch(job, opened_dataset(job, "train", 0) if train_set is None else train_set, 2)
        )
        weights, writes = Weights(whole.model), Writes()
        with contextlib.suppress(Exception), whole.mode, precision.autocast(), writes:
            job.forward(whole.model, precision.inputs(inputs))
        return weights.changed(writes.written)
    return []


def _identities(model: nn.Module) -> Mapping[str, tuple[int, int, int]]:
    return {n: (id(p), version_of(p), storage_key(p.untyped_storage())) for n, p in model.named_parameters()}


def diverging_errors(model: nn.Module | None, plan: Plan) -> list[str]:
    """Return why the replicas of a ``model`` would not stay equal; empty if nothing is known to change them.

    ``max_norm`` of an embedding rescales the rows that a replica looks up, and only there. Shards that hold the
    parameters never see it.
    """
    copies = plan.mesh.data_parallel_size * plan.devices_per_worker + plan.mesh.num_servers
    if copies == 1 or model is None:
        return []
    tables = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    if not tables:
        return []
    return [
        f"max_norm of {first_few(tables, 2)}: each replica would rescale only the rows that its own samples look up, "
        "and its weights would no longer equal the others'; leave it out, or use strategy=single or "
        "strategy=pipeline"
    ]
