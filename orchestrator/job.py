"""The interface that users implement: a training job in plain PyTorch.

A job is a frozen dataclass. Its fields are its configuration: ``job.hidden=1024`` on the command line sets the field
``hidden``, with the type of its annotation. ``jobs/digits.py`` is a complete example to copy.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from orchestrator.user_code.callbacks import Callback, Evaluation, Steering
from orchestrator.user_code.results import check_results

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

Split = str
"""The part of the data that a dataset holds: ``"train"``, samples for training; ``"val"``, held-out samples for
evaluation; or another name in :attr:`Job.split_names`."""


class MetricObject(Protocol):
    """What :meth:`Job.metric_objects` returns, unless it is a metric of torchmetrics.

    What the workers send each other are the attributes, so these have to be tensors, numbers, collections of them, or
    other values that can be pickled.
    """

    def update(self, output: Any, target: Any) -> None:
        """Add samples, given what :meth:`Job.forward` returns for them, on the device, and their target."""

    def merge(self, other: Any) -> None:
        """Add the samples of another object of this class, whose tensors are on the CPU, as those of this one are."""

    def compute(self) -> float | Tensor | Mapping[str, float | Tensor]:
        """Return the metric, or several by names that replace the name of the object. NaN is a value."""


@dataclass(frozen=True, kw_only=True)
class Job(Callback, abc.ABC):
    """A training job: a model, its data, its loss and its optimizer.

    Subclasses implement :meth:`model`, :meth:`dataset`, :meth:`loss` and :meth:`optimizer`; the other methods have
    defaults. A job does not mention devices or processes: each strategy calls the same methods. A job that overrides
    :meth:`training_step` may leave out :meth:`loss` if it has no validation set, and :meth:`optimizer` if it overrides
    :meth:`optimizers`.

    A dataset item is a pair ``(input, target)`` unless :meth:`collate` says otherwise. A batch is a pair
    ``(input, target)``, each a tensor or nested tuples, lists and dicts of tensors whose first dimension is the sample.
    It may also be a single dict of such tensors, which then is both the input and the target.
    """

    split_names: ClassVar[tuple[Split, ...]] = ("train", "val")
    """The names that :meth:`dataset` knows. Others in ``train.eval_splits`` are refused."""

    export_formats: ClassVar[tuple[str, ...]] = ()
    """The names that :meth:`export` knows, such as ``"hf"``."""

    steerable: ClassVar[tuple[str, ...]] = ()
    """The fields that :meth:`on_evaluation` may change during a run. What is built for the whole of a run, such as
    :meth:`model` and :meth:`dataset`, sees them as they were configured."""

    carried: ClassVar[tuple[str, ...]] = ()
    """The buffers of the model that it changes in one batch and reads in the next, by name, such as the hidden state of
    a recurrent model: row i belongs to row i of every batch. A run then needs ``strategy=single``, and data in an order
    of its own: a stream, or :meth:`batch_sampler`. An evaluation leaves the buffers as they are.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.training_step is not Job.training_step:
            if getattr(cls.loss, "__isabstractmethod__", False):
                cls.loss = _no_loss  # type: ignore[method-assign]
            if cls.optimizers is not Job.optimizers and getattr(cls.optimizer, "__isabstractmethod__", False):
                cls.optimizer = _no_optimizer  # type: ignore[method-assign]
        check_results(cls, except_of=__name__)

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, with its weights initialised.

        Every worker calls this with the same seed of torch's generators. For a pipeline, return an ``nn.Sequential`` of
        named layers, which can be cut between any two; any other model is cut at its submodules. A worker then builds
        only its own stages: it calls this method with fake tensors, which have no values, and needs memory for the
        whole model only if the method reads values.

        Each module trains in the mode, train or eval, that it has here; evaluation does not change it. So
        ``model.norm.eval()`` freezes a BatchNorm. A model that is wholly in eval mode, as ``from_pretrained`` returns
        it, is set to train mode. If a module overrides ``train()``, ``model.train()`` is called once, and what it
        leaves in eval mode trains so.
        """

    @abc.abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | Iterable[Any] | None:
        """Return the data: a map-style dataset, a stream, or a ``ray.data.Dataset``.

        A map-style dataset has ``__len__`` and ``__getitem__``. Training reads it in a new random order in each epoch.

        A stream is a ``torch.utils.data.IterableDataset``, a stream of Hugging Face ``datasets``, or any other iterable
        without ``__getitem__``. It is read in its own order, and its end is the end of an epoch: ``__iter__`` is called
        again, after ``set_epoch(epoch)`` if there is one. Every process reads the whole stream and keeps its share of
        each batch, so do not split it by rank, and seed what it shuffles: the order has to be the same in every
        process. What is expensive belongs into :attr:`collate`, which is called for that share only. A run continues at
        the next sample: from ``state_dict()``, if the stream has it and ``load_state_dict(state)``, otherwise by
        reading past the samples before it.

        The tasks of a ``ray.data.Dataset`` run on the CPUs of the cluster, in the order of its rows. A run continues
        at the next row. A function of the epoch that makes one can give each epoch another order.

        Args:
            split: ``"train"``, or a name in ``train.eval_splits``, which is ``"val"`` by default; all of them are in
                :attr:`split_names`.

        Returns:
            The dataset; a stream that is evaluated has to end. None for ``"val"`` if there is no validation set, which
            the run then does not evaluate.
        """

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Return the model's output for the input of a batch. The default is ``model(inputs)``.

        Override this for a model that takes several arguments: ``return model(**inputs)`` passes the dict of a Hugging
        Face data collator as keyword arguments. Every strategy calls this method, in training and in evaluation. A
        strategy that cuts the model into stages records it once, with the model, and plays the recording: it refuses a
        job whose method reads values of tensors, :func:`current_step`, or tensors that are not the model's.

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

    def positioned(self, inputs: Any) -> Any:
        """Return the input of a batch with the position of each token, for ``strategy.context``.

        Override this if the repeated blocks of the model count the tokens that they are called with, to find the
        positions of these: workers that have some tokens of each sample would count wrongly. The model has to do the
        same with what this returns as with ``inputs``.

        Args:
            inputs: the batch's input, of whole samples.

        Returns:
            What :meth:`forward` is called with; ``inputs`` (the default) if the model finds positions before its
            blocks, or needs none.
        """
        return inputs

    def aligned(self, target: Any) -> Any:
        """Return the target of a batch with the label of each token's output in the place of that token.

        Override this if :meth:`loss` shifts labels, as of causal language models: with ``strategy.context``, a worker
        has some tokens of each sample, and not the ones after them. :meth:`loss` and :meth:`weight` have to take what
        this returns, too. Otherwise, each worker gathers the outputs for all tokens.

        Args:
            target: the batch's target, of whole samples.

        Returns:
            The target with labels of shape (batch, tokens, ...); ``target`` by default.
        """
        return target

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

    def training_step(
        self, models: Mapping[str, nn.Module], batch: Any, optimizers: Mapping[str, Optimizer]
    ) -> Tensor | Mapping[str, Tensor]:
        """Make the updates of one training step, for jobs with several losses or optimizers.

        Overriding this replaces :meth:`forward` and :meth:`loss` in training: they are then used in evaluation only.
        ``strategy=single`` and ``strategy=ddp`` call it, once a step on every worker; other strategies refuse the job.
        It is plain PyTorch: call ``backward()`` on the losses and ``step()`` on the optimizers. Gradients are None at
        its start. In ``step()``, the gradients of that optimizer's parameters become the mean over the global batch,
        if each loss is a mean over the samples of ``batch``, and they are clipped to ``train.clip_norm`` for each
        optimizer alone. A loss over all samples of the global batch has to gather them: ``orchestrator.gather_batch``.

        Every worker has to call the same optimizers in the same order, or it waits for the others until
        that counts as a hang. Do not pass a closure to ``step()``. If the step changes other tensors than
        parameters and buffers, such as a teacher that follows the student, do so after the last ``step()``.

        Args:
            models: the children of the ``nn.ModuleDict`` that :meth:`model` returned, by name; otherwise
                ``{"model": model}``.
            batch: this worker's share of the global batch, as :meth:`collate` made it, on the device.
            optimizers: the result of :meth:`optimizers`.

        Returns:
            The loss to log as ``train/loss``, or a mapping with it under ``"loss"`` and with further scalars to log as
            ``train/<name>``. All are means over the samples of ``batch``.
        """
        raise NotImplementedError

    def parameter_groups(
        self, named_parameters: Sequence[tuple[str, nn.Parameter]]
    ) -> Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]:
        """Return the parameters as :meth:`optimizer` takes them: in groups, or all alike (the default).

        Override this to give parameters options of their own by their names or shapes, such as no weight decay. A
        group is a dict with its parameters under ``"params"`` and with its options, as torch's optimizers take it.

        Args:
            named_parameters: the parameters that are not frozen, with their names in the whole model. In a pipeline
                too, these are the parameters of the whole model, and most have no values there; each worker makes all
                groups, with the parameters of its own stages in them. A job that overrides :meth:`training_step` gets
                the parameters of one model, by their names there.
        """
        return [parameter for _, parameter in named_parameters]

    @abc.abstractmethod
    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Return an optimizer of ``parameters``.

        Args:
            parameters: the result of :meth:`parameter_groups`, by default the parameters to train, of the whole model
                under every strategy. Where workers have only stages or shards of tensors, they have shapes but no
                values; in the optimizer, each worker's own then replace them.
        """

    def optimizers(self, models: Mapping[str, nn.Module]) -> Mapping[str, Optimizer]:
        """Return the optimizers for :meth:`training_step`; no parameter may be in two of them.

        The default makes one for each model that has trainable parameters, by :meth:`parameter_groups` and
        :meth:`optimizer`, so that a teacher whose parameters are frozen gets none. :meth:`scheduler` is called for each
        of them.

        Args:
            models: as in :meth:`training_step`.

        Returns:
            The optimizers by name.
        """
        trained = {key: [(n, p) for n, p in m.named_parameters() if p.requires_grad] for key, m in models.items()}
        return {key: self.optimizer(self.parameter_groups(named)) for key, named in trained.items() if named}

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

        For a schedule by epochs, name a third argument, ``steps_per_epoch``, which receives the samples of an epoch
        divided by ``train.global_batch_size``. It is exact, and so not always a whole number: a batch may span two
        epochs. ``StepLR(optimizer, round(30 * steps_per_epoch))`` acts after every 30 epochs. A stream has it if it has
        ``__len__``; with any other, the argument keeps its default, and the run is refused if it has none.

        Args:
            optimizer: the result of :meth:`optimizer`.
            steps: the number of updates in the run. The scheduler is stepped after each update, or after each
                :meth:`training_step` if the job has one. A resume with another ``train.steps`` makes the scheduler anew
                and steps it as often as the run has.

        A ``ReduceLROnPlateau`` is stepped after each evaluation instead, with the metric of ``checkpoint.best``, or
        with ``val/loss``.
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

    def batch_sampler(
        self, dataset: Any, batch_size: int, generator: torch.Generator
    ) -> Iterable[Sequence[int]] | None:
        """Return the batches of an epoch as lists of sample indices, for an order of your own; None for the run's.

        It is called for each epoch, in every process, and has to return the same batches there: draw random numbers
        from ``generator`` alone. The ranks divide each batch among them. A ``torch.utils.data.BatchSampler`` with
        ``drop_last=True`` is such a list, and ``orchestrator.batches_by_length`` makes one of samples of similar
        length. The dataset must be map-style.

        Args:
            dataset: the training set.
            batch_size: ``train.global_batch_size``, the number of samples in every batch.
            generator: a generator on the CPU, seeded by ``seed`` and the epoch.

        Returns:
            As many batches in every epoch. A sample may be in several batches, or in none.
        """
        return None

    def weight(self, target: Any) -> int | Tensor | None:
        """Return the number of units that the mean :meth:`loss` of a batch is taken over, such as its valid tokens.

        Override this if the number differs between batches of the same size. The loss of a global batch is then the
        exact mean over all its units, however the batch is divided. A part without units has no gradient.

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

    def metric_objects(self, split: Split) -> Mapping[str, Any]:
        """Return the metrics of an evaluation that are no sums, such as an F1 score, as new objects by name.

        An object is a metric of torchmetrics, or any other with the methods of :class:`MetricObject`. Each worker
        updates objects of its own with its share of the split. Their states are joined on one worker, whose
        ``compute()`` is logged as ``val/<name>``: the same for every number of workers.

        A metric of torchmetrics is joined by the reductions of its states, and never by its own communication. To give
        it something else than the output and the target, override its ``update(self, output, target)`` in a subclass.

        Args:
            split: the split that is evaluated, such as ``"val"``.

        Returns:
            The objects, all of them new; empty by default.
        """
        return {}

    @property
    def makes_predictions(self) -> bool:
        """Whether :meth:`predictions` is called: by default, if the job has its own."""
        return type(self).predictions is not Job.predictions

    def predictions(self, model: nn.Module, split: Split, part: int, parts: int) -> Iterable[tuple[Any, Any]]:
        """Yield the pairs that :meth:`metric_objects` are updated with, instead of the outputs of an evaluation.

        Override this for what :meth:`forward` does not return, such as generated texts. Every worker that has the whole
        model calls it in each evaluation; a model that no worker has all of is put together on the CPU of one worker,
        which then has the only part. Limit the number of samples where a prediction takes long. The model is in
        evaluation mode, gradients are off, and a change of the model ends the run.

        Args:
            model: the result of :meth:`model`, on the worker's device.
            split: the split that is evaluated, such as ``"val"``.
            part: the number of this worker's share, from 0; ``range(part, number_of_samples, parts)`` is one.
            parts: the number of shares.

        Yields:
            An output and its target, as ``update()`` of the objects takes them.
        """
        raise NotImplementedError

    def train_metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Return metrics of a training batch in a step that is logged, as SUMS over the units of :meth:`weight`.

        ``{"accuracy": number_correct}`` is logged as ``train/accuracy``, the sum over the whole batch of that step,
        divided by its total weight. It is called in the steps of ``train.log_every`` only.
        To log the same metrics as in an evaluation, ``return self.metrics(output, target)``.

        A batch may come in parts: one for each worker, slice (``train.grad_accumulation``), micro-batch of a pipeline
        and, with ``strategy.loss_on=replicas``, device. This method is called for each part and the sums are added.

        Args:
            output: what :meth:`forward` returned for the loss, without its graph; the model is in training mode.
            target: the batch's target, of shape ``(batch, ...)``.

        Returns:
            Scalar tensors by name; empty by default.
        """
        return {}

    @property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens in a sample, to report tokens per second; None to report only samples."""
        return None

    @property
    def reports_perplexity(self) -> bool:
        """Whether an evaluation also logs the exponential of its loss, ``val/perplexity``; False by default.

        The loss then has to be a mean cross-entropy per token.
        """
        return False

    @property
    def draws_samples(self) -> bool:
        """Whether :meth:`sample` is called: by default, if the job has its own."""
        return type(self).sample is not Job.sample

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | Mapping[str, str | Tensor] | None:
        """Return texts or images that show what the model has learned, or None (the default).

        This is called on one rank every ``train.eval_every`` steps, after the evaluation, and at the end. Each sample
        becomes a file in the run directory, ``samples/step-000100-<name>.txt`` or ``.png``, and is uploaded to MLflow.
        The texts of the last call are shown on the console. Training waits meanwhile, at most
        ``recovery.hang_max_s``.

        The model is in evaluation mode, and gradients are off. Training is the same as without samples: torch's random
        generators and the modes of the modules are restored, and a change of a parameter or a buffer ends the run. An
        exception becomes a warning, and training continues.

        Args:
            model: the whole model, with ``train.ema_decay`` with the averaged weights. It is on the device of the rank;
                one of which no worker has all is put together on the CPU for every call.
            generator: a generator on the CPU to draw random numbers from, with the same seed at every call.

        Returns:
            A text, whose name then is ``sample``; or texts and images by name. An image is a tensor of shape
            (height, width), (channels, height, width) or (images, channels, height, width) with 1 or 3 channels, of
            floats in [0, 1] or of uint8. Several images become a grid.
        """
        return None

    def on_evaluation(self, evaluations: Sequence[Evaluation]) -> Steering | None:
        """Return what holds from the next step on, given all evaluations of the run so far; None to change nothing.

        This is called on rank 0 after every ``train.eval_every`` steps, and its result holds on all ranks. Let it
        depend on ``evaluations`` and the fields of the job alone, which have their configured values in it: after a
        resume or a failure it is called again with those up to that step, and what it returns replaces what it has
        returned before. An exception ends the run.

        Args:
            evaluations: the evaluations in order; the last one has just ended.
        """
        return None

    def export(self, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
        """Write trained weights as files that other programs read, for ``orchestrator export``.

        Args:
            weights: the parameters and buffers by their names in :meth:`model`, each read from the checkpoint when it
                is asked for.
            directory: where to write. It does not exist yet, and is left out if this raises an exception.
            format: a name in :attr:`export_formats`. ``"hf"`` is a directory that ``from_pretrained`` of Hugging Face
                loads.
        """
        raise NotImplementedError

    def exported(self, directory: Path, format: str) -> nn.Module | None:
        """Load what :meth:`export` has written as other programs do, as a model for :meth:`forward`.

        ``orchestrator export`` calls this in a process of its own, and refuses an export that computes something else
        than the trained model. None, the default, says that it cannot be compared.
        """
        return None

    def example_inputs(self) -> Any:
        """Return the input of a batch of the right form, for this comparison where the data of the run is gone.

        None, the default, says that there is none.
        """
        return None

    @classmethod
    def fields_to_evaluate(cls, paths: Sequence[str]) -> Mapping[str, Any] | None:
        """Return the values of the fields that name data of the job, for ``orchestrator evaluate --data``.

        The files that the run was trained with may be gone: ``paths`` serves as its training set, too, from which an
        evaluation learns how a sample looks.

        Args:
            paths: the files to evaluate as the validation set.

        Returns:
            Each field with its value; None if the job has no such field.

        Raises:
            ValueError: the job cannot read so many files.
        """
        return None

    def check(self) -> None:
        """Check the fields. The driver calls this before it starts anything.

        Raises:
            ValueError: the job cannot run with these values. The text names the field, as in ``job.lr=-1: must be
                greater than 0``, and is shown to the user.
        """


def has_training_step(job: Job) -> bool:
    """Return whether the job makes its own updates."""
    return type(job).training_step is not Job.training_step


def has_steering(job: Job) -> bool:
    """Return whether evaluations may change how the job goes on."""
    return type(job).on_evaluation is not Job.on_evaluation


def own_forward(job: Job) -> Callable[[nn.Module, Any], Any] | None:
    """Return ``job.forward``; None if the job does not override it, so that the model is only called."""
    return None if type(job).forward is Job.forward else job.forward


def has_loss(job: Job) -> bool:
    """Return whether the job defines :meth:`Job.loss`, so that it can be evaluated."""
    return type(job).loss is not _no_loss


def _no_loss(self: Job, output: Any, target: Any) -> Tensor:
    raise NotImplementedError("this job has no loss for an evaluation: define Job.loss")


def _no_optimizer(self: Job, parameters: Iterable[Any]) -> Optimizer:
    raise NotImplementedError("this job overrides Job.optimizers and does not define Job.optimizer")
