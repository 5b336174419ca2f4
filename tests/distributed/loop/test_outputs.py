"""Models that take keyword arguments, compute their own loss and return more than tensors, under every strategy that
holds the whole model: they train and evaluate as the same model that returns logits."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.conformance.cases import DDP, Case, having, options_of
from helpers.conformance.layouts import HOGWILD, LAYOUTS, LOCKED, PARAMETER_SERVER, SGD
from helpers.conformance.training import Steps, losses, make, steps, train, watched
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.batches import validated
from helpers.ranks.gang import Gang
from orchestrator.config.schema import StrategyConfig
from orchestrator.features.asynchronous.strategies import DPConfig
from orchestrator.job import Job
from orchestrator.protocol.messages import EvalPoint

DP = options_of("dp", num_workers=3)
TRAIN = having(steps=6, global_batch_size=25, grad_accumulation=2)
SAMPLES = 33
"""Of the validation set: the last batch of every layout is padded."""


class Cache:
    """What a language model returns beside its logits. No tensor, and nothing that pytree knows."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    cache: Cache


class KeywordModel(nn.Module):
    """Computes a loss over the valid tokens, as the models of Hugging Face do."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers

    def forward(self, *, tokens: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.layers(tokens)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
        return Output(loss=loss, logits=logits, cache=Cache(logits))


class Dicts(Tokens):
    """The items are dicts. Every sample has its own number of tokens."""

    def item(self, index: int, inputs: Tensor, target: int) -> Any:
        tokens, labels = super().item(index, inputs, target)
        return {"tokens": tokens, "labels": labels}

    def weight(self, target: Any) -> Tensor:
        return super().weight(target["labels"])


class Labelled(Dicts):
    """The model takes keyword arguments and returns the loss."""

    def model(self) -> nn.Module:
        return KeywordModel(super().model())

    def forward(self, model: nn.Module, inputs: Any) -> Output:
        assert isinstance(model, KeywordModel), "the model itself, not a wrapper"
        return model(**inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        return output.loss

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output.logits, target["labels"])


class Unlabelled(Labelled):
    """As :class:`Labelled`, but the job computes the loss from the logits."""

    def forward(self, model: nn.Module, inputs: Any) -> Output:
        return super().forward(model, {"tokens": inputs["tokens"]})

    def loss(self, output: Any, target: Any) -> Tensor:
        return Tokens.loss(self, output.logits, target["labels"])


def trained(rank: int, case: Case) -> tuple[Steps, EvalPoint]:
    """Train on this rank, and evaluate as the training loop does."""
    strategy = make(case, rank)
    seen = watched(strategy, steps(strategy))
    val = replace(case.job, samples=SAMPLES).dataset("val")  # type: ignore[call-arg]
    return seen, validated(strategy, rank, val, step=case.train.steps)


def evaluated(points: list[EvalPoint]) -> dict[str, float]:
    weight = sum(point.weight for point in points)
    sums = {"loss": sum(p.loss_sum for p in points), "accuracy": sum(p.sums.get("accuracy", 0) for p in points)}
    return {"weight": weight, **{name: total / weight for name, total in sums.items()}}


def case_of(job: Job, options: StrategyConfig | None = None) -> Case:
    return Case(job=job, train=TRAIN, options=options or DDP, alone=options if isinstance(options, DPConfig) else None)


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, dict[str, float]]:
    """Training and evaluation of the model that returns logits, on one worker."""
    seen, point = trained(0, case_of(Tokens()))
    return losses([seen]), evaluated([point])


@pytest.mark.in_turn
@pytest.mark.parametrize("job", [Labelled(), Unlabelled()], ids=["its-own-loss", "loss-of-the-job"])
@pytest.mark.parametrize(
    ("options", "world_size"),
    [(None, 1), (DP, 1), (replace(DP, loss_on="replicas"), 1), (DDP, 2), (PARAMETER_SERVER, 4)],
    ids=["single", "dp", "dp-replicas", "ddp", "parameter_server"],
)
def test_equal_loss(
    gang: Gang, job: Job, options: StrategyConfig | None, world_size: int, expected: tuple[Tensor, dict[str, float]]
) -> None:
    ranks = gang.run(trained, case_of(job, options), world_size=world_size)
    torch.testing.assert_close(losses([seen for seen, _ in ranks]), expected[0], rtol=SGD, atol=0)
    assert evaluated([point for _, point in ranks]) == pytest.approx(expected[1], rel=SGD)


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 20)

    def forward(self, batch: Any) -> Tensor:
        return self.head(self.hidden(self.embedding(batch["tokens"])))


class Whole(Dicts):
    """The model takes the dict as it is, and the job does not override ``forward``."""

    def model(self) -> nn.Module:
        return TakesBatch()

    def loss(self, output: Any, target: Any) -> Tensor:
        return super().loss(output, target["labels"])

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output, target["labels"])


@pytest.mark.parametrize("layout", ["ddp-2", "GPipe-2"])
def test_a_model_that_takes_the_dict_as_it_is(gang: Gang, layout: str) -> None:
    case = replace(case_of(Whole()), train=having(steps=6))
    (alone,) = gang.run(trained, case, world_size=1)
    ranks = gang.run(trained, LAYOUTS[layout].of(case), world_size=2)
    torch.testing.assert_close(losses([seen for seen, _ in ranks]), losses([alone[0]]), rtol=SGD, atol=0)
    assert evaluated([point for _, point in ranks]) == pytest.approx(evaluated([alone[1]]), rel=SGD)


class ReturnsLoss(TakesBatch):
    """Computes a loss over the whole batch, as :class:`KeywordModel` does."""

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        loss = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class LossOfTheModel(Whole):
    def model(self) -> nn.Module:
        return ReturnsLoss()

    def loss(self, output: Any, target: Any) -> Tensor:
        return output["loss"]

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output["logits"], target)


class PartOfTheLossOfTheModel(LossOfTheModel):
    """As a model with experts that adds a loss for their balance."""

    def loss(self, output: Any, target: Any) -> Tensor:
        return Whole.loss(self, output["logits"], target) + 0.1 * output["loss"]


@pytest.mark.parametrize("job", [LossOfTheModel(), PartOfTheLossOfTheModel()], ids=["all of it", "a part"])
def test_stages_train_on_a_loss_of_the_model_and_refuse_to_evaluate_padding_with_it(gang: Gang, job: Whole) -> None:
    case = replace(case_of(job), train=having(steps=2))
    (alone,) = gang.run(train, case, world_size=1)
    in_stages = LAYOUTS["GPipe-2"].of(case)
    assert case.train.global_batch_size != SAMPLES, "the last batch of the evaluation is padded"
    torch.testing.assert_close(losses(gang.run(train, in_stages, world_size=2)), losses([alone]), rtol=SGD, atol=0)
    errors = [answer.error for answer in gang.ask(trained, in_stages, world_size=2)]
    (refused,) = [error for error in errors if error]
    assert "the loss has a part that the model has computed over a whole batch, so it counts the padding" in refused
    assert "compute it in Job.loss, or use strategy=ddp" in refused


@pytest.mark.parametrize(
    "options",
    [HOGWILD, LOCKED],
    ids=["hogwild", "locked_sgd"],
)
def test_asynchronous_strategies_train_and_evaluate(
    gang: Gang, options: StrategyConfig, expected: tuple[Tensor, dict[str, float]]
) -> None:
    ranks = gang.run(trained, case_of(Labelled(), options), world_size=2)
    assert all(torch.isfinite(losses([seen for seen, _ in ranks])))
    assert evaluated([point for _, point in ranks])["weight"] == expected[1]["weight"]


class UsesCache(Unlabelled):
    def loss(self, output: Any, target: Any) -> Tensor:
        return Tokens.loss(self, output.cache.hidden, target["labels"])


def test_dp_refuses_a_loss_that_needs_what_cannot_be_joined() -> None:
    strategy = make(case_of(UsesCache(), DP), 0)
    with pytest.raises(ValueError, match=r"a Cache of each replica.*strategy=ddp"):
        next(steps(strategy))


def test_dp_refuses_a_loss_per_sample() -> None:
    strategy = make(case_of(Toy(loss_of=partial(F.cross_entropy, reduction="none")), DP), 0)
    with pytest.raises(
        ValueError, match=r"job\.loss returns a tensor of shape \(13,\) and type torch.float32; return the mean"
    ):
        next(steps(strategy))


class Tripled(Toy):
    def item(self, index: int, inputs: Tensor, target: int) -> Any:
        return inputs, target, index


def test_a_batch_that_is_no_pair_is_refused() -> None:
    strategy = make(case_of(Tripled()), 0)
    with pytest.raises(ValueError, match=r"the batch is a list of 3: .*Job\.collate"):
        next(steps(strategy))
