"""Clipping; and hooks that make another gradient of the parts of a batch, which are refused where that matters."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.cases import DDP, SINGLE, having
from helpers.conformance.training import built
from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from helpers.machines.plans import GPU_BOX, config_of, plan_of
from helpers.models.zoo_cells import STRATEGIES
from orchestrator.model.partial_init import build_fake
from orchestrator.strategies import registry
from orchestrator.strategies.update.gradients import ROW, check_gradient_hooks, clip, norm_over
from orchestrator.user_code.errors import JobError

CPU = torch.device("cpu")
Hook = Callable[[nn.Parameter], object]


def each(change: Callable[[Tensor], Tensor | None]) -> Hook:
    return lambda parameter: parameter.register_hook(change)


def accumulated(change: Callable[[Tensor], object]) -> Hook:
    def hook(parameter: Tensor) -> None:
        change(parameter.grad)

    return lambda parameter: parameter.register_post_accumulate_grad_hook(hook)


def updates(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())


def averages(parameter: nn.Parameter) -> None:
    state = torch.zeros_like(parameter)
    parameter.register_hook(lambda gradient: gradient + state.mul_(0.9).add_(gradient))


def takes_away(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


MASK = (torch.arange(12.0) % 2).reshape(3, 4)

HOOKS: dict[str, tuple[Hook, bool, bool]] = {
    "masks": (each(lambda gradient: gradient * MASK), True, True),
    "scales": (each(lambda gradient: 0.1 * gradient), True, True),
    "reads": (each(lambda gradient: print(float(gradient.norm()))), True, True),
    "replaces NaN": (each(lambda gradient: gradient.nan_to_num()), True, True),
    "projects": (each(lambda gradient: gradient - gradient.mean(1, keepdim=True)), True, True),
    "clips values": (each(lambda gradient: gradient.clamp(-100, 100)), False, False),
    "clips the norm": (each(lambda gradient: gradient / gradient.norm().clamp(min=1e-4)), False, False),
    "normalises": (each(lambda gradient: gradient / (gradient.norm() + 1e-3)), False, False),
    "takes the sign": (each(torch.sign), False, False),
    "adds noise": (each(lambda gradient: gradient + torch.randn_like(gradient)), False, False),
    "averages over calls": (averages, False, False),
    "masks the sum": (accumulated(lambda gradient: gradient.mul_(MASK)), True, True),
    "scales the sum": (accumulated(lambda gradient: gradient.mul_(0.5)), True, False),
    "keeps the largest": (each(lambda g: g * (g.abs() >= g.abs().max())), False, False),
    "clips the sum": (accumulated(lambda gradient: gradient.clamp_(-1, 1)), False, False),
    "updates": (updates, False, False),
    "takes the gradient away": (takes_away, False, False),
}
"""A hook, and whether it may be used where gradients are summed over replicas, and where they are added in turn."""


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("in_turn", [False, True])
def test_the_sum_of_parts_is_compared_with_the_whole(name: str, in_turn: bool) -> None:
    register, *equal = HOOKS[name]
    parameter, state = nn.Parameter(torch.ones(3, 4)), torch.get_rng_state()
    register(parameter)

    def check() -> None:
        check_gradient_hooks([("w", parameter)], by="strategy=ddp", replicas=not in_turn, in_turn=in_turn)

    if equal[in_turn]:
        check()
        assert parameter.grad is None
        assert torch.equal(parameter, torch.ones(3, 4))
        assert torch.equal(torch.get_rng_state(), state)
    else:
        with pytest.raises(JobError, match=r"^strategy=ddp: the gradient hook of w would run on the gradients"):
            check()


def test_a_hook_that_reads_a_tensor_without_values_is_refused(golden: Golden) -> None:
    """A stage is built without the tensors of other stages, and no stage has those of a closure."""

    def build() -> nn.Module:
        masks.append(torch.ones(3, 4))
        return nn.Linear(4, 3)

    masks: list[Tensor] = []
    build_fake(build, torch.device("cpu"))
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.register_hook(lambda gradient: gradient * masks[0])
    with golden.raises(JobError):
        check_gradient_hooks([("w", parameter)], by="strategy=pipeline", replicas=True, in_turn=True)


@dataclass(frozen=True, kw_only=True)
class Hooked(Toy):
    name: str = "normalises"

    def model(self) -> nn.Sequential:
        middle = nn.Linear(4, 3, bias=False)
        HOOKS[self.name][0](middle.weight)
        return nn.Sequential(nn.Linear(10, 4), middle, nn.Linear(3, 4))


class Steps(Hooked):
    def training_step(self, models: object, batch: object, optimizers: object) -> Tensor:
        raise NotImplementedError


def test_strategies_that_divide_a_batch_refuse_such_hooks() -> None:
    twice: dict[str, int] = {"replicas": 1, "accumulation": 2}
    for options, layout in ((DDP, {}), (SINGLE, twice)):
        with pytest.raises(JobError, match=rf"^strategy={options.name} .*: the gradient hook of 1\.weight"):
            built(Hooked(), options, **layout)
    with pytest.raises(JobError, match=r"the gradient hook of 1\.weight"):
        built(Steps(), DDP)
    built(Hooked(name="masks"), DDP, accumulation=2)
    built(Hooked(), SINGLE, replicas=1)


@pytest.mark.needs("asynchronous")
def test_strategies_that_sum_or_update_before_them_do_not() -> None:
    hogwild, dp = STRATEGIES["hogwild"][0], STRATEGIES["dp"][0]
    with pytest.raises(JobError, match=r"^strategy=hogwild .*: the gradient hook of 1\.weight"):
        built(Hooked(), hogwild, replicas=1, accumulation=2)
    built(Hooked(), dp, replicas=1, devices=2)  # the sum over its replicas is made before the hook runs
    built(Hooked(), hogwild)  # each worker updates from its own gradients


class Backward(Toy):
    def model(self) -> nn.Module:
        model = super().model()
        list(model.modules())[1].register_full_backward_hook(lambda module, before, after: None)
        return model


def checked(job: Toy, *overrides: str) -> tuple[str, str]:
    config, plan = config_of(*overrides), plan_of(GPU_BOX, *overrides)
    errors: list[str] = []
    notes = registry.load(config.strategy.name).check(config, job, plan, errors)
    return "\n".join(errors), "\n".join(notes)


def test_backward_hooks_of_modules_are_said_where_a_batch_is_divided(golden: Golden) -> None:
    golden.says(checked(Backward(), "strategy=ddp", "strategy.num_workers=2")[1])
    assert "backward hooks" not in checked(Toy(), "strategy=ddp", "strategy.num_workers=2")[1]
    assert "backward hooks" not in checked(Backward(), "strategy=single")[1]


def test_schedules_that_do_not_run_hooks_after_accumulation_are_refused(golden: Golden) -> None:
    def errors(name: str, schedule: str) -> str:
        keys = ("strategy=pipeline", "strategy.num_workers=2", f"strategy.schedule={schedule}")
        return checked(Deep(name=name), *keys, "strategy.num_microbatches=4")[0]

    golden.says(errors("masks the sum", "ZBVZeroBubble"))
    assert errors("masks the sum", "1F1B") == errors("masks", "ZBVZeroBubble") == ""


class Deep(Hooked):
    def model(self) -> nn.Sequential:
        return nn.Sequential(*super().model(), nn.Linear(4, 4))


# Clipping -----------------------------------------------------------------------------------------


def test_each_entry_of_a_gradient_is_clipped_by_its_value() -> None:
    dense, sparse, none = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    dense.grad = torch.tensor([-5.0, 0.25, 0.75])
    # The first index has two entries, which are over the limit only together, the last one two that are not.
    sparse.grad = torch.sparse_coo_tensor([[0, 0, 2, 2]], [0.4, 0.4, 0.7, -0.6], (3,), check_invariants=False)
    clip([dense, sparse, none], having(clip_value=0.5), None)
    assert dense.grad.tolist() == [-0.5, 0.25, 0.5]
    torch.testing.assert_close(sparse.grad.to_dense(), torch.tensor([0.5, 0.0, 0.1]))
    assert none.grad is None


@pytest.mark.parametrize("count", [5, ROW, 3 * ROW + 1, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_norm_of_a_gradient_does_not_depend_on_its_size(count: int, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(count, dtype=dtype))
    parameter.grad = torch.linspace(0, 1, count).to(dtype)
    wanted = parameter.grad.double().norm()
    torch.testing.assert_close(norm_over(None, [parameter], CPU).double(), wanted, rtol=1e-6, atol=0)
