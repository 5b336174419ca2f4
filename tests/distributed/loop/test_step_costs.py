"""What a training step costs the host and the device beside the computation."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import LAYOUTS, ddp_pipeline, layout
from helpers.conformance.training import make, steps
from helpers.jobs.quick_jobs import digits
from helpers.jobs.step_toys import NormedGAN
from helpers.jobs.toys import Normed, Toy
from helpers.ranks.gang import Gang
from helpers.ranks.launches import recorded
from orchestrator.compat.torch import FakeTensorMode, TorchDispatchMode
from orchestrator.strategies.reduction import on_device
from orchestrator.strategies.trainer import Trainer

walk_over = nn.Module.named_modules
TRAIN = having(steps=3, global_batch_size=32, on_nonfinite="skip")
WHERE = {
    "single": LAYOUTS["single"].of(Case(job=Normed(), train=TRAIN)),
    "ddp-2": LAYOUTS["ddp-2"].of(Case(job=Normed(), train=TRAIN), bucket_mb=25),
    "GPipe-2x2": LAYOUTS["GPipe-2x2"].of(Case(job=Toy(build=of.normed), train=TRAIN)),
    "own updates": Case(job=NormedGAN(), train=replace(TRAIN, on_nonfinite="stop"), options=DDP),
}


def third_step(rank: int, case: Case) -> tuple[int, Counter[str]]:
    """How often the tree of modules is walked, and what is communicated, by name."""
    strategy = make(case, rank)
    results = steps(strategy)
    next(results)
    next(results)
    with recorded() as launches, patch.object(nn.Module, "named_modules", autospec=True) as walk:
        walk.side_effect = walk_over
        next(results)
    return walk.call_count, Counter(operation.name for launch in launches for operation in launch)


@pytest.mark.parametrize("name", WHERE)
def test_a_step_walks_over_no_modules_and_sends_all_buffers_at_once(gang: Gang, name: str) -> None:
    world_size = {"single": 1, "GPipe-2x2": 4}.get(name, 2)
    for walks, operations in gang.run(third_step, WHERE[name], world_size=world_size):
        assert walks == 0
        assert operations["broadcast"] == (world_size > 1)


def first_sum_and_last_transfer(rank: int, case: Case) -> tuple[int, int]:
    """Where in the launches of a step the first sum of gradients and the last transfer between stages are."""
    results = steps(make(case, rank))
    with recorded() as launches:
        next(results)
    names = [launch[0].name for launch in launches]
    return names.index("allreduce_coalesced"), len(names) - 1 - names[::-1].index("transfer")


def test_the_gradients_of_a_stage_are_summed_while_others_compute(gang: Gang) -> None:
    case = layout(ddp_pipeline("LoopedBFS", 2), 4).of(Case(job=digits(depth=8, hidden=8), train=TRAIN))
    assert all(first < last for first, last in gang.run(first_sum_and_last_transfer, case, world_size=4))


def operations_of_a_step(rank: int, case: Case) -> list[tuple[str, tuple[int, ...]]]:
    """What a rank communicates in the second step, and with which ranks."""
    results = steps(make(case, rank))
    next(results)
    with recorded() as launches:
        next(results)
    return [(operation.name, operation.ranks) for launch in launches for operation in launch]


@pytest.mark.parametrize("name", ["ddp-2", "GPipe-2x2"])
def test_the_norm_is_the_last_operation_before_an_update_that_needs_it(gang: Gang, name: str) -> None:
    world_size = LAYOUTS[name].world_size
    plain = replace(WHERE[name], train=replace(TRAIN, on_nonfinite="stop"))
    clipped = replace(WHERE[name], train=replace(TRAIN, on_nonfinite="stop", clip_norm=1.0))
    without = gang.run(operations_of_a_step, plain, world_size=world_size)
    norm = ("allreduce", tuple(range(world_size)))
    needed = [norm] if name == "ddp-2" else []  # replicas of stages form it in every step
    found = gang.run(operations_of_a_step, clipped, world_size=world_size)
    assert found == [[*each, *needed] for each in without]
    assert {each[-1] for each in found} == {norm}


class Replacing(nn.Module):
    """Counts its calls in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(x)


class ReplacingToy(Normed):
    def model(self) -> nn.Module:
        return Replacing()


def test_a_buffer_that_a_layer_has_replaced_is_found() -> None:
    strategy = make(replace(WHERE["single"], job=ReplacingToy()), 0)
    for _ in steps(strategy):
        pass
    assert isinstance(strategy, Trainer)
    assert strategy.trained.buffers == [strategy.trained.module().calls]
    strategy.trained.undo_step()
    assert strategy.trained.module().calls == 2


class _Copies(TorchDispatchMode):
    """Counts the copies between devices, for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func._schema.name in ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3)])
def test_the_weight_of_a_batch_reaches_the_device_without_a_copy(weight: float | Tensor) -> None:
    assert torch.equal(on_device(weight, torch.device("cpu")), torch.tensor(3.0))
    with FakeTensorMode(allow_non_fake_inputs=True), _Copies() as copies:
        total = on_device(weight, torch.device("cuda"))
    assert (total.device.type, total.dtype, copies.count) == ("cuda", torch.float32, 0)
