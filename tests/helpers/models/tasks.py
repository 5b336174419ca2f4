"""What models are trained on: samples, how a model is called with them, and the loss of what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from orchestrator.job import Job

VOCABULARY, LENGTH, CLASSES, IGNORED = 32, 8, 4, -100


@dataclass(frozen=True, kw_only=True)
class Reversible(Job):
    """A job. ``backwards``: whether the samples of a batch are in reverse order, which changes nothing but rounding."""

    backwards: bool = False

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        return (lambda items: default_collate(items[::-1])) if self.backwards else None


class Task:
    """Samples, and the loss of what the model returns for them.

    ``named``: whether samples are dicts, the arguments of the model by name, and not pairs of input and target.
    ``result`` names the outputs that the loss needs.
    """

    named = True
    result: tuple[str, ...] = ("logits",)
    has_own_loss = True

    def item(self, number: int, random: torch.Generator) -> Any:
        raise NotImplementedError

    def loss(self, results: Any, batch: Any) -> Tensor:
        return F.cross_entropy(results[0], batch["labels"])

    def weight(self, batch: Any) -> Tensor | None:
        return None

    def metrics(self, results: Any, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (results[0].argmax(dim=-1) == batch["labels"]).sum()}


class TextClasses(Task):
    """Sequences of different lengths, each of one class."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        tokens, valid = _tokens(number, random)
        return {"input_ids": tokens, "attention_mask": valid.long(), "labels": torch.tensor(number % CLASSES)}


class Translation(Task):
    """Sequences of different lengths, each with a label for every valid token."""

    shift = 0

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        tokens, valid = _tokens(number, random)
        labels = torch.where(valid, tokens, IGNORED)
        return {"input_ids": tokens, "attention_mask": valid.long(), "labels": labels}

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self._aligned(results, batch)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        return (batch["labels"][:, self.shift :] != IGNORED).sum()

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits, labels = self._aligned(results, batch)
        return {"accuracy": (logits.argmax(dim=-1) == labels).sum()}

    def _aligned(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        (logits,) = results
        return logits[:, : logits.shape[1] - self.shift], batch["labels"][:, self.shift :]


class NextToken(Translation):
    """The label of a token is the next one."""

    shift = 1


class Speech(Translation):
    """Sounds, with a transcript of tokens."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        labels = super().item(number, random)["labels"]
        return {"input_features": torch.randn(8, 2 * LENGTH, generator=random), "labels": labels}


@dataclass(frozen=True)
class Classes(Task):
    """Random numbers of a shape, each of one class."""

    name: str
    shape: tuple[int, ...]

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        return {self.name: torch.randn(self.shape, generator=random), "labels": torch.tensor(number % CLASSES)}


@dataclass(frozen=True)
class Reconstruction(Task):
    """Random images, which the model is to return. ``conditions`` are numbers below 10 that it is also given."""

    name: str
    shape: tuple[int, ...]
    conditions: tuple[str, ...] = ()
    result = ("sample",)
    has_own_loss = False

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        conditions = {name: torch.tensor((number + i) % 10) for i, name in enumerate(self.conditions)}
        return {self.name: torch.randn(self.shape, generator=random), **conditions}

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(results[0], batch[self.name])

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (results[0] * batch[self.name] > 0).float().flatten(1).mean(1).sum()}


class Pairs(Task):
    """Texts and images whose embeddings are to be near each other. The loss of a pair does not depend on the others."""

    result = ("text_embeds", "image_embeds")
    has_own_loss = False

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        tokens, _ = _tokens(number, random)
        return {"input_ids": tokens, "pixel_values": torch.randn(1, 8, 8, generator=random)}

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        return (1 - F.cosine_similarity(*results)).mean()

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (F.cosine_similarity(*results) > 0).sum()}


def _tokens(number: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and which of them are valid."""
    valid = torch.arange(LENGTH) < 3 + number % (LENGTH - 2)
    return torch.where(valid, torch.randint(2, VOCABULARY, (LENGTH,), generator=random), 0), valid


class Direct(Task):
    """Pairs of an input, with which alone the model is called, and a target."""

    named = has_own_loss = False

    def loss(self, results: Any, batch: Any) -> Tensor:
        return F.cross_entropy(results, batch)

    def metrics(self, results: Any, batch: Any) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class Numbers(Direct):
    """Random numbers of a shape, each of one class. ``loss_of``: the loss of output and class."""

    shape: tuple[int, ...] = (10,)
    loss_of: Callable[[Any, Tensor], Tensor] = F.cross_entropy

    def item(self, number: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(self.shape, generator=random), torch.tensor(number % CLASSES)

    def loss(self, results: Any, batch: Any) -> Tensor:
        return self.loss_of(results, batch)


class Tokens(Direct):
    """Sequences of tokens of different lengths, with the next token of each."""

    def item(self, number: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, valid = _tokens(number, random)
        return tokens, torch.where(valid, tokens, IGNORED).roll(-1)

    def loss(self, results: Any, batch: Any) -> Tensor:
        return F.cross_entropy(results.flatten(0, 1), batch.flatten(), ignore_index=IGNORED)

    def weight(self, batch: Any) -> Tensor:
        return (batch != IGNORED).sum()


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A model of the zoo.

    Attributes:
        title: its name for readers.
        package: where it comes from.
        build: its constructor.
        task: what it is trained on.
        split: the module at which the second stage begins; empty: ``strategy.split=auto``.
        not_in_stages: the arguments that the model is not given in stages.
        lr: the learning rate of SGD.
        coarse: whether it computes in 16 bits, so that a sum over parts of a batch has another rounding.
    """

    title: str
    package: str
    build: Callable[[], nn.Module]
    task: Task
    split: str = ""
    not_in_stages: tuple[str, ...] = ()
    lr: float = 0.1
    coarse: bool = False
