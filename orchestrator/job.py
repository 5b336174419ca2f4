"""The interface that users implement: a training job in plain PyTorch.

A job is a frozen dataclass. Its fields are its configuration: ``job.hidden=1024`` on the command line sets the field
``hidden``, with the type of its annotation. ``jobs/digits.py`` is a complete example to copy.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

Split = Literal["train", "val"]
"""The part of the data that a dataset holds: samples for training, or held-out samples for evaluation."""


@dataclass(frozen=True, kw_only=True)
class Job(abc.ABC):
    """A training job: a model, its data, its loss and its optimizer.

    Subclasses implement :meth:`model`, :meth:`dataset`, :meth:`loss` and :meth:`optimizer`; the other methods have
    defaults. A job says nothing about devices or processes: each strategy calls the same methods.

    A dataset item is a pair ``(input, target)`` unless :meth:`collate` says otherwise. A batch is a pair
    ``(input, target)``, each a tensor or nested tuples, lists and dicts of tensors whose first dimension is the sample.
    It may also be a single dict of such tensors, which then is both the input and the target.
    """

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, with its weights initialised.

        Every worker calls this with the same seed of torch's generators. For a pipeline, return an ``nn.Sequential`` of
        named layers, which can be cut between any two; any other model is cut at its submodules. A worker then builds
        only its own stages: it calls this method with fake tensors, which have no values, and needs memory for the
        whole model only if the method reads values.
        """

    @abc.abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | Iterable[Any] | None:
        """Return the data: a map-style dataset, or a stream.

        A map-style dataset has ``__len__`` and ``__getitem__``. Training reads it in a new random order in each epoch.

        A stream is a ``torch.utils.data.IterableDataset``, a stream of Hugging Face ``datasets``, or any other iterable
        without ``__getitem__``. It is read in its own order, and its end is the end of an epoch: ``__iter__`` is called
        again, after ``set_epoch(epoch)`` if there is one. Every process reads the whole stream and keeps its share of
        each batch, so do not split it by rank, and seed what it shuffles: the order has to be the same in every
        process. What is expensive belongs into :attr:`collate`, which is called for that share only. A run continues at
        the next sample: from ``state_dict()``, if the stream has it and ``load_state_dict(state)``, otherwise by
        reading past the samples before it.

        Args:
            split: ``"train"`` or ``"val"``.

        Returns:
            The dataset; a stream for ``"val"`` has to end. None for ``"val"`` if there is no validation set: the run
            then makes no evaluation.
        """

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's output for the input of a batch. The default is ``model(inputs)``.

        Override this for a model that takes several arguments: ``return model(**inputs)`` passes the dict of a Hugging
        Face data collator as keyword arguments. Every strategy with a whole model on each worker calls this method, in
        training and in evaluation. A strategy that cuts the model into stages refuses a job that overrides it.

        Args:
            model: the result of :meth:`model`, or a replica of it.
            inputs: the batch's input; the batch itself if it is a dict.

        Returns:
            Tensors, alone or in tuples, lists, dicts, dataclasses, or types such as the ``ModelOutput`` of Hugging
            Face. Tensors whose first dimension is the sample are cut to the samples that count; if there are others,
            such as a loss, the model is called with only these samples. ``strategy=dp`` joins the outputs of its
            replicas: it stacks scalars, and cannot join objects such as caches.
        """
        return model(inputs)

    @abc.abstractmethod
    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the MEAN loss of a batch, over the units that :meth:`weight` counts.

        For a model that computes its own loss, ``return output.loss``; :meth:`weight` then has to count the units that
        the model averages over, if their number differs between batches of the same size.

        Args:
            output: what :meth:`forward` returns for the batch's input.
            target: the batch's target, of shape ``(batch, ...)``; the batch itself if it is a dict.

        Returns:
            A scalar tensor.
        """

    @abc.abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return an optimizer of ``parameters``.

        Args:
            parameters: the parameters to train. In a pipeline, these are the parameters of the worker's own stages.
        """

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Cut the model by hand, for the strategies that divide it into stages.

        Args:
            model: what :meth:`model` returned. Its tensors may be fake, so do not read their values.

        Returns:
            Modules that together do what ``model`` does: each is called with the result of the one before, the first
            with the input and the last returning the output. They hold no tensors but the model's. Stages begin between
            them. None (the default) leaves the cutting to the strategy.
        """
        return None

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Return a learning-rate scheduler, or None (the default) for a constant learning rate.

        Args:
            optimizer: the result of :meth:`optimizer`.
            steps: the number of updates in the run. The scheduler is stepped after each update.
        """
        return None

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """The function that joins a list of dataset items to a batch, a pair ``(input, target)`` or a dict; None (the
        default) for torch's own."""
        return None

    def sample_weights(self, split: Split) -> Tensor | Sequence[float] | None:
        """Return how often to draw each training sample, relative to the others, such as 1 / the size of its class.

        An epoch then has as many samples as the dataset, drawn with replacement with probabilities in proportion to the
        weights. It depends on the seed and the epoch only, so that losses are the same at any number of workers and
        after a resume. The dataset must be map-style.

        Args:
            split: ``"train"``. Evaluation reads each sample of the validation set once.

        Returns:
            A finite weight of at least 0 for each sample, of shape ``(len(dataset),)``. None (the default) to read each
            sample once in an epoch, in random order.
        """
        return None

    def weight(self, target: Any) -> int | Tensor | None:
        """Return the number of units that the mean :meth:`loss` of a batch is taken over, such as its valid tokens.

        Override this if the number differs between batches of the same size. The loss of a global batch is then the
        exact mean over all its units, however the batch is divided.

        Args:
            target: the batch's target, of shape ``(batch, ...)``.

        Returns:
            The number of units. None (the default) if every sample has the same weight, which saves an all-reduce.
        """
        return None

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Return further metrics of an evaluation batch, as SUMS over the units of :meth:`weight`.

        ``{"accuracy": number_correct}`` is logged as ``val/accuracy``, the sum divided by the total weight.

        Args:
            output: what the model returns for the batch's input.
            target: the batch's target, of shape ``(batch, ...)``.

        Returns:
            Scalar tensors by name; empty by default.
        """
        return {}

    @property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens in a sample, to report tokens per second; None to report only samples."""
        return None

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        """Return text to show after training, such as the output of a language model, or None (the default).

        Args:
            model: the trained model.
            generator: a seeded generator on the CPU, to draw random numbers from.
        """
        return None

    def check(self) -> None:  # noqa: B027 - not abstract, because a job need not check anything
        """Check the fields. The driver calls this before it starts anything.

        Raises:
            ValueError: the job cannot run with these values. The text names the field, as in ``job.lr=-1: must be
                greater than 0``, and is shown to the user.
        """
