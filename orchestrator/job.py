"""What a person writes: a job, as plain PyTorch.

A job is a frozen dataclass; its fields are its configuration (``job.hidden=1024``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

Split = Literal["train", "val"]


@dataclass(frozen=True, kw_only=True)
class Job(abc.ABC):
    """One training job. Four methods are required, the others have sensible answers.

    A dataset item is ``(input, target)`` unless :meth:`collate` says otherwise; a batch is always the pair
    ``(input, target)``, of tensors or of nested tuples, lists and dicts of them.
    """

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The model. An ``nn.Sequential`` of named layers can be cut between any two."""

    @abc.abstractmethod
    def dataset(self, split: Split) -> Dataset[Any]:
        """A map-style dataset: ``__len__`` and ``__getitem__``."""

    @abc.abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """The MEAN loss of a batch, a scalar, over the units that :meth:`weight` counts."""

    @abc.abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """A learning-rate schedule over ``steps`` updates, stepped after each; None: constant."""
        return None

    @property
    def collate(self) -> Callable[[list[Any]], tuple[Any, Any]] | None:
        """Joins dataset items to a batch; None: torch's default."""
        return None

    def weight(self, target: Any) -> int | Tensor | None:
        """Units that the loss of this batch is a mean over, where samples differ in it: valid tokens.

        None: every sample weighs the same, and no rank has to ask the others.
        """
        return None

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Further figures of an evaluation batch as SUMS over the units of :meth:`weight`.

        ``{"accuracy": number_correct}`` is logged as ``val/accuracy``, divided by the total weight.
        """
        return {}

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens in a sample, to log tokens per second as well."""
        return None

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        """Text to show after training, e.g. what a language model writes."""
        return None

    def check(self) -> None:  # noqa: B027 - a job without demands of its own has nothing to check
        """Called on the driver before anything starts.

        Raises:
            ValueError: this job cannot run; the text names the field and the remedy.
        """
