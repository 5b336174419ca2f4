"""The datasets of a job, opened and checked, and how its batches are drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from orchestrator.compat.generators import drawing
from orchestrator.config.eval_splits import VAL, how_to_leave_out
from orchestrator.job import Job, has_loss
from orchestrator.strategies.data.datasets import (
    DatasetError,
    check_dataset,
    drawn_batches,
    epoch_generator,
    is_stream,
    opened_dataset,
)
from orchestrator.worker.data.batches import Batches, checked_weights


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The data of the job.

    Attributes:
        evaluated: the data to evaluate, by the name of its split.
        weights: the weight by which each training sample is drawn; None to read each once in an epoch.
    """

    train: Any
    evaluated: Mapping[str, Any]
    weights: Tensor | None


def datasets_of(
    job: Job, eval_splits: Sequence[str], seed: int = 0, *, opened: Callable[[Job, str, int], Any] = opened_dataset
) -> Datasets:
    """Return the data of the job. A validation set may be missing.

    Args:
        eval_splits: what to evaluate.
        opened: opens a split.

    Raises:
        DatasetError: a dataset is missing, empty or of a kind that cannot be used, the sampling weights do not fit, or
            the job has data to evaluate but no loss.
    """
    train = opened(job, "train", seed)
    check_dataset(train, split="train")
    # A stream may count its iterators, so that an evaluation reads one of its own.
    shared = {} if is_stream(train) else {"train": train}
    evaluated = {split: shared[split] if split in shared else opened(job, split, seed) for split in eval_splits}
    evaluated = {split: dataset for split, dataset in evaluated.items() if dataset is not None or split != VAL}
    for split, dataset in evaluated.items():
        check_dataset(dataset, split=split)
        if not has_loss(job):
            remedy = how_to_leave_out(split)
            raise DatasetError(f"job.dataset({split!r}) returns data to evaluate; define Job.loss, or {remedy}")
    with drawing(seed):
        weights = job.sample_weights("train")
    return Datasets(train=train, evaluated=evaluated, weights=checked_weights(weights, train))


def batches_of(job: Job, datasets: Datasets, global_batch_size: int) -> Batches | None:
    """Return what draws the batches of an epoch; None if the job leaves the order to the run.

    Raises:
        DatasetError: the job cannot draw batches of this dataset, or draws samples by weight, too.
    """
    draw = functools.partial(drawn_batches, job, datasets.train, global_batch_size)
    if draw(epoch_generator(0, 0)) is None:
        return None
    if datasets.weights is not None:
        raise DatasetError("job.batch_sampler and job.sample_weights both choose the samples; return None from one")
    return cast(Batches, draw)


def no_validation_warning(eval_every: int, *, samples: bool) -> str:
    """Return the warning about a missing validation set. ``samples``: whether the job draws samples."""
    text = "job.dataset('val') returns None: the run makes no evaluation and logs no val/* metrics"
    if not eval_every:
        return text
    effect = "only sets when job.sample is called" if samples else "has no effect"
    return f"{text}; train.eval_every={eval_every} {effect}"
