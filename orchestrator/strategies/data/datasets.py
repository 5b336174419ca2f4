"""The kinds of datasets that a job may return: map-style ones, whose samples have an index, and streams."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from orchestrator.compat.generators import drawing
from orchestrator.compat.ray.refused import is_refused
from orchestrator.config.eval_splits import how_to_leave_out
from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job, Split
from orchestrator.model.batch import leaves, split_batch, tensors_in
from orchestrator.strategies.data.columns import Columns
from orchestrator.user_code.errors import JobError, error_text
from orchestrator.user_code.results import kind_of

SAMPLES = "dataset_samples"
"""The key in a checkpoint's metadata of the number of samples in the training set, if that is known."""
FEEDING = "orchestrator.features.feeding"
"""The package that reads data on a cluster, which nothing imports that does not need it."""
STREAM = "stream"
"""The key in a checkpoint's metadata of the place where the training set can be read from, if that is a stream."""


class DatasetError(ValueError):
    """The job's data cannot be used. The text explains it without a traceback."""


class NeedsFeederError(BaseException):
    """The samples of a split can be read only on the cluster, which this process is not connected to.

    No ``Exception``, because checks suppress those of a job: the driver gets samples, and repeats the check.
    """


class Sampled:
    """The first samples of a stream that only a cluster can read."""

    def __init__(self, samples: Sequence[Any]):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


SAMPLES_OF: dict[str, Sequence[Any] | str] = {}
"""By split, what a forked process knows of data that it cannot read: samples, or why there are none."""


def is_of_ray(value: Any) -> bool:
    """Return whether a value is a ``ray.data.Dataset``, which is imported only by whoever makes one."""
    return type(value).__module__.startswith("ray.data.")


def needs_feeder(dataset: Any) -> bool:
    """Return whether tasks of a cluster read the data: a dataset of Ray Data, or a function that makes one."""
    if is_of_ray(dataset):
        return True
    has_samples = any(hasattr(dataset, name) for name in ("__iter__", "__getitem__"))
    return callable(dataset) and not isinstance(dataset, type) and not has_samples


def is_stream(dataset: Any) -> bool:
    """Return whether the samples can only be read in order, as from a ``torch.utils.data.IterableDataset``."""
    if isinstance(dataset, IterableDataset):
        return True
    # Dataset itself defines a __getitem__, which only raises NotImplementedError.
    no_index = getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__)
    return no_index and hasattr(dataset, "__iter__")


def known_length(dataset: Any) -> int | None:
    """Return the number of samples; None for a stream that does not say how many it has."""
    try:
        return len(dataset) or None
    except (TypeError, NotImplementedError):
        return None


def size_error(dataset: Any, meta: Mapping[str, Any], *, step: int, checkpoint: Path | str | None) -> str | None:
    """Return why a run cannot read on in a training set that has another size than before; None if it can.

    Args:
        meta: the metadata of a checkpoint of this run. A stream with a saved position is read on from there.
        step: of the checkpoint.
        checkpoint: where it is.
    """
    before, now = meta.get(SAMPLES), known_length(dataset)
    reads_on = is_stream(dataset) and meta.get(STREAM, {}).get("position", 0) > 0
    if reads_on or before is None or now is None or before == now:
        return None
    return (
        f"job.dataset('train') has {now:,} samples, and had {before:,} at step {step} of this run, which would "
        "repeat some samples and leave out others; use the same data as before, or start a new run from this "
        f"checkpoint: start_from={checkpoint}"
    )


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator that an epoch of the training set is drawn from."""
    return torch.Generator().manual_seed(mix(seed, epoch))


def mix(*values: int | str) -> int:
    """Return 63 bits that depend on every value and on their order."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def drawn_batches(job: Job, dataset: Any, global_batch_size: int, generator: torch.Generator) -> Tensor | None:
    """Return the samples of an epoch as the job draws them: int64, shape (batches, ``global_batch_size``).

    None if the job leaves the order to the run.

    Raises:
        DatasetError: these are no batches of ``dataset``.
    """
    if type(job).batch_sampler is Job.batch_sampler:
        return None
    if is_stream(dataset):
        raise DatasetError(
            "job.batch_sampler: a stream is read in its own order; return a map-style dataset from "
            "job.dataset('train'), or let the stream yield the samples in the order of the batches"
        )
    with drawing(generator.initial_seed()):  # for samplers that draw from another generator
        made = job.batch_sampler(dataset, global_batch_size, generator)
        if made is None:
            return None
        try:
            batches = [[operator.index(sample) for sample in batch] for batch in made]
        except TypeError as e:
            raise DatasetError(
                f"job.batch_sampler returns {kind_of(made)} ({e}); return lists of the indices of samples"
            ) from e
    if not batches:
        raise DatasetError("job.batch_sampler returns no batch; return at least one, or lower train.global_batch_size")
    for number, batch in enumerate(batches):
        if len(batch) != global_batch_size:
            raise DatasetError(
                f"job.batch_sampler: batch {number} has {len(batch)} samples, and "
                f"train.global_batch_size={global_batch_size}; fill it up, or leave it out (drop_last=True)"
            )
    indices = torch.tensor(batches, dtype=torch.int64)
    if indices.min() < 0 or indices.max() >= len(dataset):
        raise DatasetError(
            f"job.batch_sampler: samples {int(indices.min())} to {int(indices.max())}, but the dataset has those from "
            f"0 to {len(dataset) - 1}"
        )
    return indices


def samples_per_epoch(job: Job, dataset: Any, train: TrainConfig) -> int | None:
    """Return the number of samples in an epoch; None if it is not known."""
    drawn = drawn_batches(job, dataset, train.global_batch_size, epoch_generator(0, 0))
    counts = [known_length(dataset) if drawn is None else drawn.numel(), train.limit_samples]
    return min((count for count in counts if count is not None), default=None)


def steps_per_epoch(job: Job, dataset: Any, train: TrainConfig) -> float | None:
    """Return the number of steps in an epoch, which need not be whole; None if it is not known."""
    samples = samples_per_epoch(job, dataset, train)
    return None if samples is None else samples / train.global_batch_size


def opened_dataset(job: Job, split: Split, seed: int) -> Any:
    """Return ``job.dataset(split)``, which divides or makes samples at random in the same way on every rank."""
    with drawing(seed):
        try:
            dataset = job.dataset(split)
        except Exception as e:
            if not type(e).__module__.startswith("ray.") or not is_refused():
                raise
            dataset = None
        else:
            if not (is_refused() and needs_feeder(dataset)):
                return dataset
    if split not in SAMPLES_OF:
        raise NeedsFeederError(split)
    if isinstance(samples := SAMPLES_OF[split], str):
        raise DatasetError(f"job.dataset({split!r}) is read by tasks of a cluster, {samples}")
    return Sampled(samples)


def check_dataset(dataset: Any, *, split: Split) -> None:
    """Check that ``job.dataset(split)`` has returned something that samples can be read from.

    Raises:
        DatasetError: it has not; the text says what to return instead.
    """
    where, kind = f"job.dataset({split!r})", type(dataset).__name__
    if dataset is None:
        hint = " (only the validation set may be missing)" if split == "train" else f", or {how_to_leave_out(split)}"
        raise DatasetError(f"{where} returns None; return a dataset{hint}")
    if isinstance(dataset, DataLoader):
        raise DatasetError(
            f"{where} returns a {kind}; return its .dataset instead, its collate_fn from job.collate, and weights for "
            "a weighted sampler from job.sample_weights(): train.global_batch_size and data.num_workers set the rest"
        )
    if needs_feeder(dataset):
        raise DatasetError(f"{where} returns a {kind}, which only the workers of a run can read")
    if isinstance(dataset, (str, bytes, Mapping, type)):
        raise DatasetError(f"{where} returns {kind_of(dataset)}; return a dataset of samples, such as a list of pairs")
    if is_stream(dataset):
        if hasattr(dataset, "__next__"):
            raise DatasetError(
                f"{where} returns a {kind}, which can be read only once; return an IterableDataset, or another object "
                "whose __iter__ begins again at each call"
            )
        return
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DatasetError(
            f"{where}: {kind} must be map-style, with __len__ and __getitem__, or a stream, with __iter__"
        )
    try:
        length = len(dataset)
    except (TypeError, ValueError) as e:  # of a number that is negative, or no whole one
        raise DatasetError(f"{where}: the __len__ of {kind_of(dataset)} returns no length ({e})") from e
    if length == 0:
        raise DatasetError(f"{where}: the dataset is empty; give it at least one sample")


def first_item(dataset: Any) -> Any:
    """Return the first sample of the training set, an example of its inputs. Reads a new iterator of a stream.

    Raises:
        DatasetError: there is none, or the dataset cannot be used.
    """
    check_dataset(dataset, split="train")
    if not is_stream(dataset):
        return dataset[0]
    for item in dataset:
        return item
    raise DatasetError("job.dataset('train'): the stream has no samples; give it at least one")


def make_batch(collate: Callable[[list[Any]], Any] | None, items: Any) -> Any:
    """Return the batch of ``items`` that ``collate`` of the job makes, or torch's ``default_collate`` if it is None.

    Raises:
        JobError: there is none; the samples, or ``collate``, are to blame.
    """
    if collate is not None and isinstance(items, Columns):
        items = list(items.own())
    if collate is None:
        try:
            return items.batch() if isinstance(items, Columns) else default_collate(items)
        except (TypeError, KeyError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and "equal size" not in str(e) and unlike_sample(items) is None:
                raise  # such as shared memory that is full
            remedy = "let Job.dataset return tensors or numbers, the same for each sample, or write Job.collate"
            raise JobError(f"torch cannot make a batch of these samples ({error_text(e)}); {remedy}") from e
    batch = collate(items)
    if batch is None or isinstance(batch, (str, bytes)):
        kind = kind_of(batch)
        raise JobError(f"the function of job.collate returns {kind}; return a pair (input, target) or a dict")
    return batch


def unlike_sample(items: Any) -> tuple[int, str, str] | None:
    """Return the position of the first sample that differs from the one at 0 in kind, what it is, and what that is.

    None if all are alike.
    """
    if not isinstance(items, list) or not items:
        return None
    first, *others = (", ".join(map(_kind, leaves(item))) for item in items)
    return next(((i, other, first) for i, other in enumerate(others, 1) if other != first), None)


def _kind(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return type(leaf).__name__
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def example_batch(job: Job, train_set: Any, rows: int) -> tuple[Any, Any]:
    """Return the input and the target of a batch that has the first sample ``rows`` times.

    Raises:
        DatasetError: see :func:`first_item`.
        ValueError: the batch is neither a pair nor a mapping.
    """
    return split_batch(make_batch(job.collate, [first_item(train_set)] * rows))


def is_ragged(tree: Any, rows: int) -> bool:
    """Return whether a tensor of a tree, other than a scalar, has not one row for each of ``rows`` samples.

    Such a tree cannot be cut by samples. Examples are the tokens of all samples one after the other.
    """
    return any(tensor.ndim > 0 and len(tensor) != rows for tensor in tensors_in(tree))


def ragged_error(batch: Any, rows: int, *, strategy: str) -> str | None:
    """Return why ``strategy`` cannot cut a batch into parts by samples; None if it can."""
    if not is_ragged(batch, rows):
        return None
    shape = next(list(t.shape) for t in tensors_in(batch) if t.ndim > 0 and len(t) != rows)
    return (
        f"strategy={strategy}: the batch has a tensor of shape {shape} for {rows} samples, and only tensors with a row "
        "for each sample can be cut; pad the samples to one length in Job.collate, or use strategy=ddp"
    )
