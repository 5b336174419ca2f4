"""The names of the data that is evaluated, and of what its evaluation measures."""

from __future__ import annotations

import re
from collections.abc import Sequence

TRAIN = "train"
VAL = "val"
"""The validation set, the only split that a job may lack."""
_OTHER_METRICS = (
    *("async", "dp", "hogwild", "lr", "memory", "parameter_server", "perf", "pipeline", "recovery", "summary"),
    *("system", "train_eval"),
)
"""The first parts of the names of other metrics."""


def check_splits(splits: Sequence[str]) -> None:
    """Check the value of ``train.eval_splits``.

    Raises:
        ValueError: a name is not possible for a split, or is there twice.
    """
    for split in splits:
        key = f"train.eval_splits=[{','.join(splits)}]: {split!r}"
        if not re.fullmatch(r"[A-Za-z]\w*", split, re.ASCII):
            raise ValueError(f"{key}: expected a letter, followed by letters, digits and '_'")
        if split in _OTHER_METRICS:
            raise ValueError(f"{key} begins the names of other metrics; rename the split")
        if splits.count(split) > 1:
            raise ValueError(f"{key} is there twice; keep one")


def unknown_split(splits: Sequence[str], known: Sequence[str]) -> str | None:
    """Return what is wrong with ``train.eval_splits`` for a job with the splits ``known``; None if nothing is."""
    unknown = [split for split in splits if split not in known]
    if not unknown:
        return None
    return (
        f"train.eval_splits=[{','.join(splits)}]: the job has no data named {unknown[0]}, only {' and '.join(known)}; "
        f"if its dataset({unknown[0]!r}) returns data, add the name to Job.split_names"
    )


def check_metric(metric: str, splits: Sequence[str]) -> None:
    """Check the value of ``checkpoint.best``, as far as that is possible before an evaluation.

    Raises:
        ValueError: no evaluation of ``splits`` has a metric of this name.
    """
    prefixes = [metric_prefix(split) for split in splits]
    if not metric.startswith(tuple(prefixes)):
        known = f"their metrics begin with {' or '.join(prefixes)}" if prefixes else "nothing is evaluated"
        raise ValueError(
            f"checkpoint.best={metric}: no evaluation reports it with train.eval_splits=[{','.join(splits)}]: {known}"
        )


def metric_prefix(split: str) -> str:
    """Return what the names of the metrics of a split begin with: ``val/``; ``train/`` belongs to training itself."""
    return f"{'train_eval' if split == TRAIN else split}/"


def how_to_leave_out(split: str) -> str:
    """Return what a user does so that a split is not evaluated."""
    return "return None from job.dataset('val')" if split == VAL else f"leave {split} out of train.eval_splits"
