"""The weights that a run exports: the moving averages in a checkpoint, if its evaluations are judged by these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.tensor_file import StoredTensors

KEY = "param_ema"
"""The key of the average in the optimizer state of a parameter."""


def exports_average(store: CheckpointStore, checkpoint: str) -> bool:
    """Return whether the model of a checkpoint has averaged weights: ``checkpoint.best`` is a metric of these."""
    best = BestSoFar.from_meta(store.read_manifest(checkpoint)["meta"])
    return best is not None and best.of_average


def exported_weights(store: CheckpointStore, checkpoint: str, folder: Path) -> Mapping[str, Tensor]:
    """Return the parameters and buffers of the model of a checkpoint, each read when it is asked for.

    Arguments and errors as of :meth:`CheckpointStore.model`.
    """
    if not exports_average(store, checkpoint):
        return store.model(checkpoint, folder)
    names = list(store.model(checkpoint, folder))
    tied = store.read_manifest(checkpoint)["meta"].get("tied", {})
    return _Averaged(store.model(checkpoint, folder, "optimizer"), names, tied)


class _Averaged(Mapping[str, Tensor]):
    """The tensors of a model, with the averages of those that have one."""

    def __init__(self, stored: StoredTensors, names: list[str], tied: Mapping[str, str]):
        self._stored, self._names, self._tied = stored, names, tied

    def __getitem__(self, name: str) -> Tensor:
        average = f"{self._tied.get(name, name)}/{KEY}"
        return self._stored[average if average in self._stored else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
