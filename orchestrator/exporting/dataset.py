"""What identifies the training data of a run."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch import Tensor

from orchestrator.compat.torch import as_bytes, pytree
from orchestrator.config.schema import JobSpec
from orchestrator.strategies.data.datasets import is_stream, known_length

_DIGEST_LENGTH = 16


def dataset_facts(spec: JobSpec, dataset: Any) -> dict[str, Any]:
    """Return the ``name``, ``digest`` and number of ``samples`` (None if unknown) of a training set.

    The digest covers the job's class and fields, the number of samples, and of a map-style dataset the first and the
    last sample.
    """
    samples = known_length(dataset)
    digest = hashlib.sha256(repr((spec.target, sorted(spec.fields.items()), samples)).encode())
    if samples is not None and not is_stream(dataset):
        for index in (0, samples - 1):
            for leaf in pytree.tree_leaves(dataset[index]):
                digest.update(_bytes_of(leaf))
    return {"name": spec.target.rpartition(".")[2], "digest": digest.hexdigest()[:_DIGEST_LENGTH], "samples": samples}


def _bytes_of(value: Any) -> bytes:
    """The contents of a part of a sample; of an object of another library, only its type."""
    if isinstance(value, Tensor):
        return as_bytes(value.detach()).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    plain = isinstance(value, (str, bytes, int, float, bool, type(None)))
    return (repr(value) if plain else type(value).__name__).encode()
