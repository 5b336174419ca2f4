"""What a model predicts for a whole split, for a function that ``Trainer`` of ``transformers`` takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jobs.tokens import IGNORED


class Predictions:
    """A metric object that computes what the function ``name`` does, such as ``my_metrics.compute_metrics``.

    The function receives an ``EvalPrediction``: ``predictions`` and ``label_ids`` are arrays with a row for each
    sample; shorter rows are filled up with -100.
    """

    def __init__(self, name: str):
        self.name = name
        self.predictions: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, output: Tensor, target: Mapping[str, Tensor]) -> None:
        """Add a batch: logits of classes, or of tokens, of which the most probable are kept; or tokens themselves."""
        kept = output.argmax(dim=-1) if output.ndim == 3 else output
        self.predictions.append(kept.float().cpu() if kept.is_floating_point() else kept.int().cpu())
        self.labels.append(target["labels"].int().cpu())

    def merge(self, other: Predictions) -> None:
        self.predictions += other.predictions
        self.labels += other.labels

    def compute(self) -> Any:
        from transformers import EvalPrediction

        given = EvalPrediction(predictions=_rows(self.predictions), label_ids=_rows(self.labels))
        return function_named(self.name)(given)


def function_named(name: str) -> Callable[..., Any]:
    """Return the function ``name``, with its module in front.

    Raises:
        ValueError: there is none; the text says why.
    """
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(f"{e}; set it to the name of a function, as in my_metrics.compute_metrics") from e
    if not callable(found):
        raise ValueError("it is no function")
    made: Callable[..., Any] = found
    return made


def _rows(batches: Sequence[Tensor]) -> Any:
    longest = max(batch.shape[-1] for batch in batches)
    if batches[0].ndim == 2:
        batches = [F.pad(batch, (0, longest - batch.shape[-1]), value=IGNORED) for batch in batches]
    return torch.cat(list(batches)).numpy()
