"""Optimizers of workers that share memory: Adagrad needs no lock, and state that cannot be shared is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.conformance.layouts import EVERY
from helpers.jobs.optimizers import Lists, OptimizedDigits
from orchestrator.features.asynchronous.hogwild import HogwildRules
from orchestrator.features.asynchronous.shared_memory import take_gradients
from orchestrator.strategies.constructor import Outline


def made(sparse: bool, **options: Any) -> tuple[nn.EmbeddingBag, Adagrad]:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(20, 2, mode="sum", sparse=sparse)
    return model, Adagrad(model.parameters(), lr=0.1, **options)


def compute_gradients(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    words = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))
    model(words).square().sum().backward()


@pytest.mark.parametrize(
    ("sparse", "options"),
    [
        (True, {"lr_decay": 0.3}),
        (True, {"maximize": True, "initial_accumulator_value": 0.2}),
        (False, {"lr_decay": 0.3, "weight_decay": 0.1}),
        (False, {"maximize": True}),
    ],
)
def test_the_updates_are_those_of_torch(sparse: bool, options: dict[str, Any]) -> None:
    (model, optimizer), (other, of_torch) = made(sparse, **options), made(sparse, **options)
    for seed in range(5):
        compute_gradients(model, seed)
        compute_gradients(other, seed)
        take_gradients(optimizer)
        optimizer.step()
        of_torch.step()
    torch.testing.assert_close(model.weight, other.weight)
    torch.testing.assert_close(optimizer.state_dict(), of_torch.state_dict())


class Overwriting(TorchDispatchMode):
    """Another process overwrites the sums, as if it had not seen them, whenever this one has changed them."""

    def __init__(self, sums: Tensor):
        super().__init__()
        self.sums = sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and args[0] is self.sums and func is not torch.ops.aten.zero_.default:
            self.sums.zero_()
        return result


@pytest.mark.parametrize("sparse", [True, False])
def test_an_update_has_a_bound_although_others_overwrite_the_sums(sparse: bool) -> None:
    model, optimizer = made(sparse)
    before = model.weight.detach().clone()
    compute_gradients(model, 0)
    with Overwriting(optimizer.state[model.weight]["sum"]):
        take_gradients(optimizer)
    assert float((model.weight - before).abs().max()) == pytest.approx(0.1), "a step as long as the rate"


class Steered(torch.optim.SGD):
    """Has a tensor of its own in the state of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("trust", torch.ones(()))
        super().step()


def test_workers_that_share_memory_refuse_state_that_they_would_not_share() -> None:
    for job, words in (
        (OptimizedDigits(kind=Steered), "Job.optimizer: Steered: several workers cannot share its trust; use SGD"),
        (OptimizedDigits(kind=Lists), "Job.optimizer: Lists: its state cannot be shared by several workers"),
    ):
        found: list[str] = []
        chosen = EVERY["hogwild-2"]
        config = config_of(chosen.of(Case(job=job, train=having(steps=6, global_batch_size=24))), chosen.world_size)
        HogwildRules.check_job(config, Outline(job, config.train), plan_of(config), found)
        assert len(found) == 1
        assert found[0].startswith(f"strategy=hogwild: {words}")
