"""Models that are no Sequential are cut at their submodules, skip connections and all."""

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import MODEL_PARALLEL, SGD, assert_as_alone, ddp_pipeline, pipeline
from helpers.conformance.training import losses, train
from helpers.jobs.stage_toys import NestedBatches
from helpers.jobs.toys import Branched, Toy
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.config import schema


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        (pipeline("1F1B", 4, ("deep.2",)), 2),
        (pipeline("1F1B", 4), 4),
        *in_campaign(
            (replace(MODEL_PARALLEL, split=("deep",)), 2),
            (pipeline("ZBVZeroBubble", 4), 2),
            (ddp_pipeline("Interleaved1F1B", 4), 4),
        ),
    ],
    ids=["inside-a-layer", "auto-4", "model_parallel", "ZBVZeroBubble", "2x2"],
)
def test_a_model_that_is_no_sequential(gang: Gang, options: schema.StrategyConfig, world_size: int) -> None:
    case = Case(job=Toy(build=Branched), train=having(global_batch_size=32), options=options)
    (alone,) = gang.run(train, case, world_size=1)
    ranks = gang.run(train, case, world_size=world_size)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        whole |= rank.model
    torch.testing.assert_close(whole, alone.model, rtol=100 * SGD, atol=10 * SGD)


class Structured(nn.Module):
    """Takes a dict or a tuple, of which one tensor is needed at the end alone, another is not needed; returns a dict,
    to which two layers contribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, value: Any) -> dict[str, Any]:
        one, (other,) = (value["one"], value["other"]) if isinstance(value, Mapping) else value[:2]
        hidden = self.second(self.first(one).tanh()).tanh()
        return {"more": (hidden,), "logits": self.head(hidden) + other[:, :4]}


@dataclass(frozen=True, kw_only=True)
class StructuredBatches(NestedBatches):
    build: Callable[[], nn.Module] = Structured

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Any, Any]:
        value, targets = super().item(index, inputs, target)
        return ({**value, "unused": inputs} if self.as_dict else (*value, inputs)), targets

    def loss(self, output: Any, target: Any) -> Tensor:
        return super().loss(output["logits"], target) + output["more"][0].square().mean()


@pytest.mark.in_turn
@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize(
    ("name", "split"), [("model_parallel-2", ("second",)), ("GPipe-2x2", ("head",)), ("1F1B-2", "auto")]
)
def test_inputs_and_outputs_of_any_structure(gang: Gang, as_dict: bool, name: str, split: Any) -> None:
    case = Case(job=StructuredBatches(as_dict=as_dict), train=having(global_batch_size=16))
    assert_as_alone(gang, case, name, split=split)


@dataclass
class Targets:
    batch: Any
    scale: Tensor


class OwnContainers(StructuredBatches):
    """A collate function that returns containers which ``torch.utils._pytree`` does not know, and a scalar tensor."""

    def collate(self, items: list[Any]) -> tuple[Any, Targets]:  # type: ignore[override]
        inputs, targets = default_collate(items)
        return UserDict(inputs), Targets(batch=targets, scale=torch.tensor(0.5))

    def loss(self, output: Any, target: Any) -> Tensor:
        return super().loss(output, target.batch) * target.scale

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return super().metrics(output["logits"], target.batch)


@pytest.mark.parametrize(
    ("name", "split"), [("GPipe-2x2", ("head",)), *in_campaign(("model_parallel-2", ("second",)), ("1F1B-2", "auto"))]
)
def test_batches_in_containers_of_other_libraries(gang: Gang, name: str, split: Any) -> None:
    assert_as_alone(gang, Case(job=OwnContainers(), train=having(global_batch_size=16)), name, split=split)
