"""A state is loaded in the memory of the old one: its tensors are counted on a GPU that is fake."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from helpers.ranks.allocations import Allocations
from orchestrator.compat.torch import FakeTensorMode
from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.state.optimizers import JointOptimizer
from orchestrator.state.tensor_memory import with_own_memory
from orchestrator.state.train_state import TrainState, capture, restore
from orchestrator.strategies.update.weight_average import keep_average

LAYERS, WIDTH = 8, 96
TENSOR = 4 * WIDTH * WIDTH


class Nested(Optimizer):
    """Has its moments in a list, as SOAP has, and one more in the state of the whole optimizer."""

    def __init__(self, params: Iterable[Tensor]):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("moments", [torch.zeros_like(p), torch.zeros_like(p)])
            self.state["all"].setdefault(str(len(self.state)), torch.zeros_like(p))


class Quantized(Optimizer):
    """Has numbers of another type in its state, as 8-bit optimizers have."""

    def __init__(self, params: Iterable[Tensor], dtype: torch.dtype = torch.uint8):
        super().__init__(params, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("moment", torch.zeros_like(p, dtype=self.dtype))


def averaged(params: Iterable[Tensor]) -> Optimizer:
    optimizer = AdamW(params)
    keep_average(optimizer, 0.9)
    return optimizer


def two(params: Iterable[Tensor]) -> JointOptimizer:
    every = list(params)
    return JointOptimizer([AdamW(every[:3]), SGD(every[3:], lr=0.1, momentum=0.9)])


OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "AdamW": AdamW,
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": Adagrad,
    "average": averaged,
    "nested": Nested,
    "8 bits": Quantized,
    "more bits": lambda params: Quantized(params, torch.float64),
    "two": two,
}


def trained(kind: str, device: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)))
    optimizer = OPTIMIZERS[kind](model.parameters())
    for one in optimizers_in(optimizer):
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            one.step()
    for parameter in model.parameters():
        parameter.grad = None
    return model, optimizer


def on_host(state: TrainState) -> TrainState:
    model, optimizer = (
        {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        for tensors in (state.model, state.optimizer)
    )
    return replace(state, model=model, optimizer=optimizer)


@pytest.mark.parametrize("consume", [True, False], ids=["received", "own copy"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gpu_needs_no_room_for_two_states(kind: str, consume: bool) -> None:
    saved = capture(*trained(kind, "cpu"), None, step=1, samples_consumed=1, live=True)
    with FakeTensorMode():
        model, optimizer = trained(kind, "cuda")
        state = on_host(saved)
        with Allocations("cuda") as memory:
            restore(state, model, optimizer, None, consume=consume)
        assert memory.peak_bytes <= TENSOR


def test_memory_that_something_else_sees_is_not_written() -> None:
    flat, parameter = torch.zeros(12), torch.zeros(4)
    tensors = {
        "own": torch.zeros(2, 3).t(),
        "in a buffer": flat[:4],
        "beside it": flat[4:6],
        "overlaps": flat[6:9],
        "overlapped": flat[8:],
        "of a parameter": parameter[1:2],
        "expanded": torch.zeros(1).expand(3),
        "sparse": torch.zeros(3).to_sparse(),
        "twice": (twice := torch.zeros(3)),
        "again": twice,
        "empty": torch.zeros(0),
    }
    assert [*with_own_memory(tensors, [parameter])] == ["own", "in a buffer", "beside it", "empty"]


def test_a_state_that_begins_as_the_weights_does_not_change_them() -> None:
    """As a reference that an optimizer takes when it is made, and replaces in its first step."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["anchor"] = parameter.detach() + 1
    saved = capture(model, optimizer, None, step=1, samples_consumed=1)
    other = nn.Linear(3, 2)
    loading = SGD(other.parameters(), lr=0.1)
    for parameter in other.parameters():
        loading.state[parameter]["anchor"] = parameter.detach()
    restore(saved, other, loading, None)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, saved.model[name])
        assert torch.equal(loading.state[parameter]["anchor"], parameter + 1)
