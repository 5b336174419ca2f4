import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lr

from helpers.files.golden import Golden
from helpers.jobs.optimizers import KINDS, Unsavable
from orchestrator.state.checkpoint import load, save
from orchestrator.state.merge import merge
from orchestrator.state.model_state import mismatches
from orchestrator.state.train_state import TrainState, capture, restore

STEPS = 4

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam-fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw-foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True, betas=(0.8, 0.95)),
    "adamw-amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    **{name: make for name, make in KINDS.items() if name != "schedule-free"},
}


class Warmup:
    """A callable with state, as LambdaLR may hold."""

    def __init__(self) -> None:
        self.scale = np.float64(0.5)

    def __call__(self, epoch: int) -> float:
        return float(self.scale) / (1 + epoch)


SCHEDULERS: dict[str, Callable[[optim.Optimizer], lr.LRScheduler]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "callable": lambda o: lr.LambdaLR(o, Warmup()),
    "one-cycle": lambda o: lr.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=20),
    "cosine-restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=3),
    "multi-step": lambda o: lr.MultiStepLR(o, milestones=[2, 6]),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, total_iters=3), lr.CosineAnnealingLR(o, T_max=10)], milestones=[6]
    ),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
    "cyclic": lambda o: lr.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
}


class Net(nn.Module):
    """Buffers, a 0-d parameter and a parameter without a gradient."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.fc1 = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x)))) * self.scale


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": [p for p in net.parameters() if p.ndim <= 1]}]


def train(
    net: nn.Module, optimizer: optim.Optimizer, scheduler: lr.LRScheduler | None, *, start: int, steps: int
) -> None:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = net(torch.randn(5, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        elif scheduler is not None:
            scheduler.step()


def snapshot(
    net: nn.Module, optimizer: optim.Optimizer, scheduler: lr.LRScheduler | None = None, **more: Any
) -> TrainState:
    return capture(net, optimizer, scheduler, step=STEPS, samples_consumed=STEPS * 5, **more)


def assert_equal(a: TrainState, b: TrainState) -> None:
    for one, other in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype, name
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)
    assert a.meta == b.meta


def continue_both_ways(
    tmp_path: Path,
    make_optimizer: Callable[[Any], optim.Optimizer],
    make_scheduler: Callable[[optim.Optimizer], lr.LRScheduler] | None,
) -> tuple[TrainState, TrainState]:
    """The end of uninterrupted training, and of one that went over the disk half-way."""

    def build(seed: int) -> tuple[nn.Module, optim.Optimizer, lr.LRScheduler | None]:
        net = Net(seed)
        optimizer = make_optimizer(groups_of(net))
        return net, optimizer, make_scheduler(optimizer) if make_scheduler else None

    first = build(0)
    train(*first, start=0, steps=STEPS)
    state = load(save(tmp_path, snapshot(*first), run_uid="r"))
    second = build(1)
    restore(state, *second)
    train(*first, start=STEPS, steps=STEPS)
    train(*second, start=STEPS, steps=STEPS)
    return snapshot(*first), snapshot(*second)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    straight, resumed = continue_both_ways(tmp_path, OPTIMIZERS[name], None)
    assert_equal(straight, resumed)
    assert "unused/step" not in straight.optimizer or name == "adagrad"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    straight, resumed = continue_both_ways(tmp_path, lambda p: optim.SGD(p, lr=0.1, momentum=0.9), SCHEDULERS[name])
    assert_equal(straight, resumed)
    rates = [g["lr"] for g in straight.meta["param_groups"]]
    assert rates != [0.1, 0.1], "the schedule did nothing, so nothing was tested"


def test_state_of_plain_numbers_and_of_sparse_gradients(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Embedding, optim.Optimizer]:
        torch.manual_seed(seed)
        table = nn.Embedding(5, 3, sparse=True)
        return table, optim.SparseAdam(table.parameters(), lr=0.1)

    def step(table: nn.Embedding, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).square().sum().backward()
        optimizer.step()

    first, second = build(0), build(1)
    step(*first)
    state = snapshot(*first)
    assert state.meta["optimizer_scalars"] == {"weight": {"step": 1}}
    restore(load(save(tmp_path, state, run_uid="r")), *second, None)
    step(*first)
    step(*second)
    assert_equal(snapshot(*first), snapshot(*second))


def test_a_momentum_buffer_of_none_is_kept() -> None:
    net = Net(0)
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[net.scale]["momentum_buffer"] = None
    state = snapshot(net, optimizer)
    assert state.meta["optimizer_scalars"] == {"scale": {"momentum_buffer": None}}
    fresh = Net(1)
    other = optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    restore(state, fresh, other, None)
    assert other.state[fresh.scale] == {"momentum_buffer": None}


def test_a_snapshot_and_training_never_touch_each_other() -> None:
    net = Net(0)
    optimizer = optim.Adam(net.parameters())
    train(net, optimizer, None, start=0, steps=1)
    state = snapshot(net, optimizer)
    kept = {name: t.clone() for name, t in (state.model | state.optimizer).items()}
    train(net, optimizer, None, start=1, steps=2)
    fresh = Net(1)
    other = optim.Adam(fresh.parameters())
    restore(state, fresh, other, None)
    train(fresh, other, None, start=1, steps=2)
    for name, tensor in (state.model | state.optimizer).items():
        assert torch.equal(tensor, kept[name]), name


def test_memory_of_an_old_snapshot_is_used_again_where_it_fits() -> None:
    net = Net(0)
    optimizer = optim.Adam(net.parameters())
    before = snapshot(net, optimizer)  # without optimizer state
    train(net, optimizer, None, start=0, steps=1)
    after = snapshot(net, optimizer, into=before)
    again = snapshot(net, optimizer, into=after)
    for name in again.model:
        assert again.model[name].data_ptr() == before.model[name].data_ptr()
    for name in again.optimizer:
        assert again.optimizer[name].data_ptr() == after.optimizer[name].data_ptr()
    smaller = nn.Linear(6, 2)
    other = snapshot(smaller, optim.SGD(smaller.parameters()), into=again)
    assert torch.equal(other.model["weight"], smaller.weight)


@pytest.mark.parametrize("live", [False, True])
def test_state_of_an_optimizer_has_the_memory_format_of_its_parameter(live: bool) -> None:
    """A fused update goes through the memory of both in the same order."""

    def made() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def train(model: nn.Module, optimizer: optim.Optimizer, *, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    train(model, optimizer, seed=1)
    state = capture(model, optimizer, None, step=1, samples_consumed=2, live=live)
    for part in (state.model, state.optimizer):
        part.update({name: tensor.contiguous().clone() for name, tensor in part.items()})  # as in a file or a message
    resumed, its_optimizer = made()
    restore(state, resumed, its_optimizer, None)
    for one, of_one in ((model, optimizer), (resumed, its_optimizer)):
        train(one, of_one, seed=2)
    torch.testing.assert_close(dict(resumed.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


def test_names_have_no_prefix_of_a_wrapper() -> None:
    net = Net(0)
    state = snapshot(nn.DataParallel(net), optim.SGD(net.parameters()))
    assert state.model.keys() == net.state_dict().keys()
    other = Net(1)
    restore(state, nn.DataParallel(other), optim.SGD(other.parameters()), None)
    assert torch.equal(other.fc1.weight, net.fc1.weight)


def test_hyperparameters_come_from_the_checkpoint_but_not_how_they_are_computed() -> None:
    net = Net(0)
    optimizer = optim.AdamW(net.parameters(), lr=0.3, betas=(0.5, 0.6), foreach=True)
    train(net, optimizer, None, start=0, steps=1)
    state = snapshot(net, optimizer)
    other = Net(1)
    fused = optim.AdamW(other.parameters(), lr=torch.tensor(0.1), fused=True)
    restore(state, other, fused, None)
    (group,) = fused.param_groups
    assert isinstance(group["lr"], Tensor)
    assert group["lr"].item() == pytest.approx(0.3)
    assert group["betas"] == (0.5, 0.6)
    assert group["fused"]
    assert not group["foreach"]


def test_dtype_stays_that_of_the_model() -> None:
    net = Net(0)
    optimizer = optim.Adam(net.parameters())
    train(net, optimizer, None, start=0, steps=1)
    half = Net(1).to(torch.bfloat16)
    other = optim.Adam(half.parameters())
    restore(snapshot(net, optimizer), half, other, None)
    assert half.fc1.weight.dtype == torch.bfloat16
    assert torch.equal(half.fc1.weight, net.fc1.weight.to(torch.bfloat16))
    assert other.state[half.fc1.weight]["exp_avg"].dtype == torch.bfloat16
    assert other.state[half.fc1.weight]["step"].dtype == torch.float32


def stages_of(net: Net) -> list[nn.Module]:
    """Two parts of one model, under the model's own names."""
    first, second = nn.Module(), nn.Module()
    first.fc1, first.norm, first.unused = net.fc1, net.norm, net.unused
    second.fc2, second.scale = net.fc2, net.scale
    return [first, second]


def test_stages_merge_to_the_whole_and_load_their_own_part() -> None:
    net = Net(0)
    parts = stages_of(net)
    optimizers = [optim.Adam(groups_of(part), lr=0.01) for part in parts]
    for optimizer in optimizers:
        train(net, optimizer, None, start=0, steps=2)
    captured = [snapshot(p, o) for p, o in zip(parts, optimizers, strict=True)]
    merged = merge(captured[::-1], order=list(net.state_dict()))
    assert list(merged.model) == list(net.state_dict())

    whole = Net(1)
    optimizer = optim.Adam(groups_of(whole), lr=0.5)
    restore(merged, whole, optimizer, None)
    train(whole, optimizer, None, start=2, steps=1)
    for step_of_part in optimizers:
        step_of_part.zero_grad()
    loss = net(torch.randn(5, 6, generator=torch.Generator().manual_seed(2))).square().mean()
    loss.backward()
    for step_of_part in optimizers:
        step_of_part.step()
    assert_same_values(net, whole)

    state = snapshot(whole, optimizer)
    parts_again = stages_of(Net(2))
    for part in parts_again:
        own = optim.Adam(groups_of(part), lr=0.5)
        restore(state, part, own, None, partial=True)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, state.model[name])
            if name != "unused":
                assert torch.equal(own.state[parameter]["exp_avg"], state.optimizer[f"{name}/exp_avg"])
    part = stages_of(Net(2))[0]
    own = optim.Adam(groups_of(part))
    with pytest.raises(ValueError, match=r"fc2\.weight: not in the model"):
        restore(state, part, own, None)


def assert_same_values(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_stages_with_different_hyperparameters_do_not_merge(golden: Golden) -> None:
    parts = stages_of(Net(0))
    rates = (0.1, 0.2)
    states = [snapshot(p, optim.SGD(p.parameters(), lr=r)) for p, r in zip(parts, rates, strict=True)]
    with golden.raises(ValueError):
        merge(states, order=list(Net(0).state_dict()))


def test_a_parameter_of_any_stage_that_is_not_finite_is_found_in_the_whole() -> None:
    net = Net(0)
    net.fc2.weight.data[0, 0] = float("nan")
    states = [snapshot(part, optim.SGD(part.parameters())) for part in stages_of(net)]
    assert states[0].nonfinite_parameter is None
    assert merge(states, order=list(net.state_dict())).nonfinite_parameter == "fc2.weight"


class Tied(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def test_tied_parameters_are_saved_under_both_names_and_load_under_either() -> None:
    net = Tied(0)
    optimizer = optim.Adam(net.parameters())
    net(torch.arange(7)).square().mean().backward()
    optimizer.step()
    state = snapshot(net, optimizer)
    assert set(state.model) == {"embed.weight", "head.weight"}
    other = Tied(1)
    other_optimizer = optim.Adam(other.parameters())
    restore(state, other, other_optimizer, None)
    assert other.head.weight is other.embed.weight
    assert_equal(state, snapshot(other, other_optimizer))

    last_stage = nn.Module()
    last_stage.head = Tied(2).head
    own = optim.Adam(last_stage.parameters())
    restore(state, last_stage, own, None, partial=True)
    averages = own.state[last_stage.head.weight]["exp_avg"]
    assert torch.equal(averages, state.optimizer["embed.weight/exp_avg"])


def test_mismatches_name_the_parameters_and_the_nearest(golden: Golden) -> None:
    saved = {
        "fc_1.weight": torch.zeros(4, 2),
        "fc2.weight": torch.zeros(3, 4),
        "ids": torch.zeros(2, dtype=torch.int64),
    }
    shapes = {
        "fc1.weight": ((4, 2), torch.float32),
        "fc2.weight": ((3, 8), torch.bfloat16),
        "ids": ((2,), torch.float32),
    }
    lines = mismatches(shapes, saved)
    golden.says(lines)
    assert mismatches(shapes, saved, partial=True) == [lines[0], *lines[-2:]]
    assert mismatches({n: (tuple(t.shape), t.dtype) for n, t in saved.items()}, saved) == []


def test_another_architecture_is_one_sentence(golden: Golden) -> None:
    saved = {"head": torch.zeros(2), **{f"block{i}.qkv": torch.zeros(6, 2) for i in range(3)}}
    shapes = {
        "head": ((3,), torch.float32),
        **{f"block{i}.{n}": ((2, 2), torch.float32) for i in range(3) for n in "qkv"},
    }
    golden.says(mismatches(shapes, saved))
    del shapes["head"]
    golden.says(mismatches(shapes, saved, partial=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: (optim.AdamW(net.parameters()), None), "the checkpoint has SGD, the job has AdamW"),
        (lambda net: (optim.SGD(groups_of(net)), None), "1 parameter groups in the checkpoint, 2"),
        (
            lambda net: (optim.SGD([net.fc1.weight]), None),
            "fc1.bias: not in this parameter group of the job's optimizer",
        ),
        (
            lambda net: (o := optim.SGD(net.parameters()), lr.ExponentialLR(o, 0.9)),
            "scheduler: the checkpoint has None, the job has ExponentialLR",
        ),
    ],
)
def test_a_state_of_another_optimizer_is_refused_untouched(make: Callable[[Net], Any], message: str) -> None:
    source = Net(0)
    state = snapshot(source, optim.SGD(source.parameters()))
    net = Net(1)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        restore(state, net, *make(net))
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_cannot_be_saved_names_its_owner(golden: Golden) -> None:
    net = Net(0)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    scheduler = lr.ExponentialLR(optimizer, 0.9)
    scheduler.shape = lambda epoch: epoch  # type: ignore[attr-defined]
    with golden.raises(ValueError):
        snapshot(net, optimizer, scheduler)

    unsavable = Unsavable(net.parameters())
    train(net, unsavable, None, start=0, steps=1)
    with golden.raises(ValueError):
        snapshot(net, unsavable)
    with golden.raises(ValueError):
        snapshot(net, optim.SGD(Net(1).parameters()))


def test_meta_is_json_with_the_callers_own_entries() -> None:
    net = Net(0)
    more = {"layout": {"pp": 2, 0: (1, np.float32(0.5))}, "rate": torch.tensor(0.25)}
    state = snapshot(net, optim.SGD(net.parameters()), **more)
    assert state.meta["layout"] == [["pp", 2], [0, [1, 0.5]]]
    assert state.meta["rate"] == 0.25
    assert json.loads(json.dumps(state.meta)) == state.meta
    assert (state.step, state.samples_consumed) == (STEPS, STEPS * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_trained_parameter_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).to(dtype)
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model.register_buffer("mask", torch.full((2,), -float("inf")))
    frozen = model[0].bias.requires_grad_(False)
    frozen.fill_(float("nan"))
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def found() -> str | None:
        return capture(model, optimizer, None, step=1, samples_consumed=1).nonfinite_parameter

    assert found() is None
    model[1].weight.data.fill_(torch.finfo(dtype).max)
    assert found() is None, "only the sum is infinite"
    model[1].bias.data[1] = value
    assert found() == "1.bias"
