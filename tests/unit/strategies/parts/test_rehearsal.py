"""What ``fsdp`` finds in a pass with fake tensors: what a job does with weights that are gathered, or are parts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.layouts import FSDP
from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.strategies.parts.rehearsal import check_forward
from orchestrator.strategies.parts.wrapping import SeenCalls, Wrap
from orchestrator.user_code.errors import JobError


@torch.no_grad()
def in_place(layer: nn.Linear) -> None:
    layer.weight.clamp_(-0.05, 0.05)


def through_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.9)


def by_assignment(layer: nn.Linear) -> None:
    layer.weight.data = nn.functional.normalize(layer.weight.data)


def scale_of(layer: nn.Linear) -> float:
    return float(layer.weight.detach().abs().max() / torch.tensor(127.0))


def decay_of(layer: nn.Linear) -> Tensor:
    return layer.weight.square().mean()


class Block(nn.Module):
    def __init__(self, use: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(10, 10), use

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * (1.0 if (used := self.use(self.layer)) is None else used)


class Net(nn.Module):
    def __init__(self, inner: Callable[[nn.Linear], Any], outer: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.blocks, self.outer = nn.ModuleList(Block(inner) for _ in range(3)), outer
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (1.0 if (used := self.outer(block.layer)) is None else used)  # type: ignore[arg-type]
        return self.head(x)


def nothing(layer: nn.Linear) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Using(Toy):
    inner: Callable[[nn.Linear], Any] = nothing
    outer: Callable[[nn.Linear], Any] = nothing

    def model(self) -> nn.Module:
        return Net(self.inner, self.outer)


def check(job: Toy, wrap: Wrap = "auto", *, reshard: bool = True) -> SeenCalls:
    whole, options = build_fake(job.model, torch.device("cpu")), replace(FSDP, wrap=wrap, reshard_after_forward=reshard)
    return check_forward(job, whole, job.dataset("train"), precision=Precision.named("fp32", "cpu"), options=options)


@pytest.mark.parametrize("change", [in_place, through_data, by_assignment])
def test_a_forward_that_changes_weights_is_refused(change: Callable[[nn.Linear], None], golden: Golden) -> None:
    for job in (Using(inner=change), Using(outer=change)):
        with golden.raises(JobError):
            check(job)


@pytest.mark.parametrize("use", [scale_of, decay_of])
def test_a_weight_is_used_where_it_is_whole(use: Callable[[nn.Linear], Any]) -> None:
    assert not check(Using(inner=use)).gathers_all
    for job in (Using(outer=use), Using(inner=use, outer=use)):
        with pytest.raises(JobError, match=r"forward\(\) uses blocks\.0\.layer\.weight.* outside .*forward=false"):
            check(job)
        assert check(job, reshard=False).gathers_all, "the whole model is gathered"


def gated(layer: nn.Linear) -> Tensor:
    """Uses a weight in float32 on GPUs, which the fake tensors of a worker need not be on."""
    with torch.autocast("cuda", enabled=False):
        return nn.functional.linear(torch.ones(1, 10), layer.weight).sigmoid().mean()


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_autocast_casts_is_seen(device_type: str) -> None:
    options = replace(FSDP, wrap="auto")

    def seen(use: Callable[[nn.Linear], Any]) -> Any:
        job = Using(inner=use)
        whole = build_fake(job.model, torch.device("cpu"))
        precision = Precision.named("bf16", device_type)
        return check_forward(job, whole, job.dataset("train"), precision=precision, options=options).casts

    names = {f"blocks.{i}.layer.{name}" for i in range(3) for name in ("weight", "bias")}
    assert seen(nothing) == dict.fromkeys(names | {"head.weight", "head.bias"}, True)
    assert {name for name, casts in seen(gated).items() if not casts} == {n for n in names if n.endswith("weight")}


def largest_in_numpy(layer: nn.Linear) -> float:
    return float(layer.weight.detach().numpy().max())


def test_numpy_does_not_get_the_memory_of_a_gathered_weight(golden: Golden) -> None:
    for job in (Using(inner=largest_in_numpy), Using(outer=largest_in_numpy)):
        with golden.raises(JobError):
            check(job, reshard=False)


@dataclass(frozen=True, kw_only=True)
class Keeping(Using):
    """Its loss reads the weights of the model that it has made last."""

    kept: list[nn.Module] = field(default_factory=list)

    def model(self) -> nn.Module:
        self.kept[:] = [super().model()]
        return self.kept[0]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) + sum(p.square().sum() for p in self.kept[0].parameters())


def test_a_loss_of_weights_is_refused(golden: Golden) -> None:
    with golden.raises(JobError):
        check(Keeping(), reshard=False)


@dataclass(frozen=True, kw_only=True)
class Penalised(Using):
    """Differentiates in the forward pass, or in the loss."""

    in_loss: bool

    def forward(self, model: nn.Module, inputs: Tensor) -> Any:
        inputs = inputs.requires_grad_()
        out = model(inputs)
        return (out, inputs) if self.in_loss else (out, self.slopes(out, inputs))

    def slopes(self, out: Tensor, inputs: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return slopes

    def loss(self, output: Any, target: Tensor) -> Tensor:
        out, other = output
        return super().loss(out, target) + (self.slopes(out, other) if self.in_loss else other).square().mean()


@pytest.mark.parametrize("in_loss", [False, True])
def test_gradients_of_gradients_need_weights_that_stay(in_loss: bool, golden: Golden) -> None:
    with golden.raises(JobError):
        check(Penalised(in_loss=in_loss))
    assert check(Penalised(in_loss=in_loss), reshard=False).gathers_all


def test_numbers_of_the_batch_and_of_the_root_are_read_as_ever() -> None:
    class Reading(Using):
        def forward(self, model: Net, inputs: Tensor) -> Tensor:  # type: ignore[override]
            return model(inputs) * scale_of(model.head) * float(inputs.max())

    check(Using())
    check(Reading())


def test_the_order_of_calls_is_seen() -> None:
    class Twice(Using):
        def forward(self, model: Net, inputs: Tensor) -> Tensor:  # type: ignore[override]
            return model.head(model.blocks[0](model.blocks[2](model.blocks[0](inputs))))

    seen = check(Twice())
    assert seen.complete
    assert seen.inside == {"": ["blocks.0", "blocks.2", "blocks.0"], "blocks.0": [], "blocks.2": []}
    assert check(Using(), ("Linear",)).inside[""] == ["blocks.0.layer", "blocks.1.layer", "blocks.2.layer", "head"]


def test_a_pass_that_depends_on_numbers_is_not_seen_to_its_end() -> None:
    class Chosen(Using):
        def forward(self, model: Net, inputs: Tensor) -> Tensor:  # type: ignore[override]
            x = model.blocks[1](inputs)
            return model.head(model.blocks[2](x) if x.sum() > 0 else x)

    seen = check(Chosen())
    assert not seen.complete
    assert seen.inside[""] == ["blocks.1", "blocks.2"]


class Recomputed(torch.autograd.Function):
    """Calls layers without a graph, and again in the backward pass, as reversible ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[nn.Module]) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            out = x = ctx.saved_tensors[0].detach().requires_grad_()
            for layer in ctx.layers:
                out = layer.layer(out).tanh()
        out.backward(gradient)
        return x.grad, None


class Reversible(Net):
    """Calls all blocks in one function, or each in one of its own."""

    def __init__(self, *, together: bool) -> None:
        super().__init__(nothing, nothing)
        self.first = nn.Linear(10, 10)
        if not together:
            for block in self.blocks:
                block.layer = nn.ModuleDict({"inner": Block(nothing)})
                block.forward = lambda x, block=block: Recomputed.apply(x, [block.layer["inner"]])  # type: ignore[assignment]
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.together:
            return self.head(Recomputed.apply(x, [*self.blocks]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_weight_that_a_function_uses_again_is_gathered_with_the_module_that_calls_the_function() -> None:
    apart, together = (Toy(build=partial(Reversible, together=together)) for together in (False, True))
    assert not check(apart).gathers_all
    with pytest.raises(JobError, match=r"forward\(\) uses blocks\.0\.layer\.weight.* outside"):
        check(together)
    assert check(together, reshard=False).gathers_all
