"""How a strategy builds the model of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from orchestrator.compat.torch import setting_fake_data
from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job
from orchestrator.model.modes import in_train_mode
from orchestrator.model.partial_init import FakeModel, build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.repeated_blocks import with_blocks
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
