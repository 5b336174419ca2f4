"""The memory of optimizer states, as updates of tensors without memory show it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers.conformance.cases import DDP, TRAIN, Case, config_of
from helpers.jobs.toys import Toy
from orchestrator.compat.torch import FakeTensorMode, pytree
from orchestrator.planning.memory import Division, worker_memory
from orchestrator.strategies.checks.memory_plan import parameter_sizes
from orchestrator.strategies.checks.optimizer_memory import state_sizes


class Derived(torch.optim.AdamW):
    """A subclass whose state is that of its parent."""


class Factored(Optimizer):
    """Somebody else's: factors, whose sizes depend on the size of the tensor, and steps on values."""

    def __init__(self, parameters: Any, from_size: int = 20):
        super().__init__(parameters, {"from_size": from_size})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.grad is None or (p.grad.norm() > 1e9 and p.sum().item() > 1e9):
                    continue
                if p.ndim == 2 and min(p.shape) >= group["from_size"]:
                    state["factors"] = [p.new_zeros(p.shape[0], p.shape[0]), p.new_zeros(p.shape[1], p.shape[1])]
                else:
                    state["whole"] = torch.zeros_like(p)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    **{kind: getattr(torch.optim, kind) for kind in ("SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RMSprop", "Rprop")},
    **{kind: getattr(torch.optim, kind) for kind in ("ASGD", "Adadelta", "Adamax", "RAdam", "Adafactor", "LBFGS")},
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "Derived": Derived,
    "Factored": Factored,
    "Muon": torch.optim.Muon,
}


class Wide(Toy):
    bias: bool = True

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(30, 40, bias=self.bias), nn.Linear(40, 7, bias=self.bias))


def tensors_of(optimizer: Optimizer, parameter: nn.Parameter) -> Iterable[Tensor]:
    leaves = pytree.tree_leaves(optimizer.state.get(parameter, {}))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_is_that_of_a_real_update(kind: str) -> None:
    class Given(Wide):
        bias = kind != "Muon"

        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return OPTIMIZERS[kind](parameters)

    job = Given()
    with FakeTensorMode():
        planned = job.model()
    found = state_sizes(job, planned)
    assert found is not None
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step(lambda: torch.ones(()))  # type: ignore[arg-type, return-value]
    for name, p in model.named_parameters():
        own = [*tensors_of(optimizer, p)]
        assert found[name].divided == sum(t.nbytes for t in own if t.shape == p.shape), name
        assert found[name].whole == sum(t.nbytes for t in own if t.shape != p.shape), name


def test_factors_are_not_divided() -> None:
    class Given(Wide):
        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return Factored(parameters)

    job = Given()
    config = config_of(Case(job=job, options=DDP, train=TRAIN), 2)
    sizes = parameter_sizes(config, job, job.model())
    whole, half = (worker_memory(sizes, Division(optimizer=n)).optimizer for n in (1, 2))
    factors = 4 * (30**2 + 40**2)
    divided = 4 * (40 + 40 * 7 + 7)
    assert whole == factors + divided
    assert half == factors + 4 * (20 + 40 * 4 + 4)


def test_an_optimizer_that_cannot_be_tried_has_an_unknown_state() -> None:
    class Odd(Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("needs a device")

    class Given(Wide):
        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return Odd(parameters, {})

    job = Given()
    assert state_sizes(job, job.model()) is None
    config = config_of(Case(job=job, options=DDP, train=TRAIN), 2)
    assert not any(size.state_known for size in parameter_sizes(config, job, job.model()))
