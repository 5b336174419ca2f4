"""Streams of each kind, over the samples of a list, and jobs that train on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from helpers.jobs.toys import Toy
from orchestrator.job import Split


class Plain(IterableDataset[Any]):
    """Counts the samples that it has yielded."""

    def __init__(self, items: Sequence[Any]):
        self.items = items
        self.yielded = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.order():
            self.yielded += 1
            yield item

    def order(self) -> Sequence[Any]:
        return self.items


class Epochs(Plain):
    """Another order in each epoch that is set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Sequence[Any]:
        return shuffled(self.items, self.epoch)


class Counting(Plain):
    """Another order at each call of ``__iter__``, by a count of its own."""

    calls = 0

    def __iter__(self) -> Iterator[Any]:
        self.calls += 1
        return super().__iter__()

    def order(self) -> Sequence[Any]:
        return shuffled(self.items, self.calls)


class Stateful(Epochs):
    """Continues where its state says, as streams of Hugging Face datasets do."""

    done = 0
    begin_at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.done, self.begin_at = self.begin_at or 0, None
        for item in self.order()[self.done :]:
            self.done += 1
            self.yielded += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "shards": {"open": [0, 2]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = state["done"]


class Unsavable(Stateful):
    """Its state is not JSON."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"random": torch.get_rng_state()}


def shuffled(items: Sequence[Any], seed: int) -> list[Any]:
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[i] for i in order.tolist()]


KINDS = {kind.__name__: kind for kind in (Plain, Epochs, Counting, Stateful, Unsavable)}


class Measured(Toy):
    """Can be cut into four stages."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(32, 4))

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}


@dataclass(frozen=True, kw_only=True)
class StreamToy(Measured):
    """Reads streams of the ``kind``; the validation set has 33 samples."""

    kind: str = "Plain"

    def dataset(self, split: Split) -> Any:
        items = super().dataset(split).items
        return KINDS[self.kind](items if split == "train" else items[:33])


class Unvalidated(Toy):
    def dataset(self, split: Split) -> Any:
        return super().dataset(split) if split == "train" else None


class Weighed(Measured):
    """Draws the samples of class 0 five times as often as the others, and those of class 3 never."""

    def sample_weights(self, split: Split) -> Tensor:
        assert split == "train"
        targets = torch.tensor([target for _, target in self.dataset("train").items])
        return torch.tensor([5.0, 1.0, 1.0, 0.0])[targets]
