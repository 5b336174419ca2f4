"""The optimizer of a job for the whole model and for parts of it."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from helpers.conformance.cases import having
from helpers.files.golden import Golden
from helpers.jobs.stage_toys import ScheduledChain, plain, tied_ends
from helpers.jobs.step_toys import GAN
from helpers.jobs.toys import Toy
from orchestrator.model.partial_init import build_fake
from orchestrator.model.stages.own_stages import module_of
from orchestrator.strategies.data.datasets import DatasetError, steps_per_epoch
from orchestrator.strategies.training_step import optimizers_of
from orchestrator.strategies.update.job_optimizer import optimizer_of, optimizer_of_part, schedule_of, scheduler_of
from orchestrator.user_code.errors import JobError

Named = Sequence[tuple[str, nn.Parameter]]


def part_of(model: nn.Module, *layers: str) -> nn.Module:
    """Some layers of ``model``, as a stage holds them: with tensors of its own."""
    return module_of({n: t for n, t in model.state_dict(keep_vars=True).items() if n.partition(".")[0] in layers})


def names_in_groups(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[list[str]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def test_a_part_has_all_groups_of_the_model_with_its_own_parameters() -> None:
    job = ScheduledChain(build=plain)
    whole, own = plain(), plain()
    assert [len(names) for names in names_in_groups(optimizer_of(job, own), own)] == [2, 3, 3]
    part = part_of(own, "first", "second")
    optimizer = optimizer_of_part(job, whole, part)
    expected = [[], ["first.weight", "second.weight"], ["first.bias", "second.bias"]]
    assert names_in_groups(optimizer, part) == expected
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.1, 0.0]


class Pairs(Toy):
    """Its optimizer keeps the names of the parameters, as torch's can."""

    def parameter_groups(self, named_parameters: Named) -> Any:
        return named_parameters


class GroupsOfPairs(Toy):
    def parameter_groups(self, named_parameters: Named) -> list[dict[str, Any]]:
        return [{"params": named_parameters[:2]}, {"params": iter(named_parameters[2:]), "lr": 1.0}]


@pytest.mark.parametrize("layers", [("first",), ("second", "head"), ()])
def test_pairs_keep_their_names(layers: tuple[str, ...]) -> None:
    part = part_of(plain(), *layers)
    expected = [name for name, _ in part.named_parameters()]
    (group,) = optimizer_of_part(Pairs(), plain(), part).param_groups
    assert group.get("param_names", []) == expected
    in_groups = optimizer_of_part(GroupsOfPairs(), plain(), part)
    names = [group["param_names"] for group in in_groups.param_groups]
    assert names == names_in_groups(in_groups, part)
    assert list(itertools.chain(*names)) == expected


@dataclass(frozen=True, kw_only=True)
class Rated(Toy):
    """Its rates depend on the parameters themselves; Adagrad has its state before the first update."""

    rate: Callable[[int, nn.Parameter], Any]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": self.rate(place, p)} for place, p in enumerate(parameters)]
        return torch.optim.Adagrad(groups[1:], initial_accumulator_value=0.5)


def fake_plain() -> nn.Module:
    return build_fake(plain, torch.device("cpu")).model


@pytest.mark.parametrize(
    "rate",
    [lambda place, p: 1 / p.shape[0], lambda place, p: 0.1 * p.ndim, lambda place, p: 0.1 * place],
    ids=["size", "dimensions", "place"],
)
def test_rates_are_those_of_the_whole_parameters(rate: Callable[[int, nn.Parameter], Any]) -> None:
    job, own = Rated(rate=rate), plain()
    expected = {name: rate(place, p) for place, (name, p) in enumerate(own.named_parameters()) if place}
    rows = {name: nn.Parameter(p.detach()[:2].clone()) for name, p in own.named_parameters()}
    for part in (module_of(rows), part_of(own, "second", "head")):
        optimizer = optimizer_of_part(job, fake_plain(), part)
        names = {parameter: name for name, parameter in part.named_parameters()}
        held = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert held == {name: expected[name] for name in names.values() if name in expected}
        assert len(held) == len(optimizer.state)
        assert all(torch.equal(state["sum"], torch.full_like(p, 0.5)) for p, state in optimizer.state.items())


@pytest.mark.parametrize("rate", [lambda place, p: float(p.detach().norm()), lambda place, p: p.detach().norm()])
def test_rates_that_depend_on_values_are_refused_for_parts(
    rate: Callable[[int, nn.Parameter], Any], golden: Golden
) -> None:
    job = Rated(rate=rate)
    optimizer_of(job, plain())
    with golden.raises(JobError):
        optimizer_of_part(job, fake_plain(), part_of(plain(), "first"))


def test_a_tied_parameter_is_found_by_any_of_its_names() -> None:
    whole, own = tied_ends(), tied_ends()
    job = ScheduledChain(build=tied_ends)
    last = part_of(own, "head")
    # The model knows the weight as embed.weight alone, and so does the job.
    assert names_in_groups(optimizer_of_part(job, whole, last), last) == [["head.bias"], ["head.weight"], []]


def frozen_first() -> nn.Module:
    model = plain()
    model.get_submodule("first").requires_grad_(False)
    return model


def test_a_frozen_part_has_the_groups_of_the_model() -> None:
    own = frozen_first()
    frozen = part_of(own, "first")
    for job in (Toy(), ScheduledChain(build=frozen_first)):
        groups = optimizer_of_part(job, frozen_first(), frozen).param_groups
        assert [group["lr"] for group in groups] == [group["lr"] for group in optimizer_of(job, own).param_groups]
        assert [group["params"] for group in groups] == [[] for _ in groups]


class DecayingGAN(GAN):
    def parameter_groups(self, named_parameters: Named) -> list[dict[str, Any]]:
        return [
            {"params": [p for name, p in named_parameters if name.endswith(ending)], "weight_decay": decay}
            for ending, decay in (("weight", 0.1), ("bias", 0.0))
        ]


def test_each_model_of_a_training_step_has_its_own_groups() -> None:
    job = DecayingGAN()
    model = job.model()
    for optimizer in optimizers_of(job, model).values():
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert all(group["params"] for group in optimizer.param_groups)


class ByEpochs(Toy):
    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int, steps_per_epoch: float = 7) -> LRScheduler:
        return StepLR(optimizer, step_size=round(30 * steps_per_epoch))


class ByEpochsAlone(Toy):
    def scheduler(  # type: ignore[override]
        self, optimizer: torch.optim.Optimizer, steps: int, steps_per_epoch: float
    ) -> LRScheduler:
        return StepLR(optimizer, step_size=round(30 * steps_per_epoch))


def test_rates_rise_exponentially_and_in_proportion_over_the_steps_of_the_run() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3}], lr=0.1)
    schedule = schedule_of(ByEpochsAlone(), [optimizer], having(steps=5, lr_range=(1e-4, 1.0)), steps_per_epoch=None)
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates == [pytest.approx([10.0**n, 3 * 10.0**n]) for n in range(-4, 1)]


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def step_size(job: Toy, dataset: Any) -> int:
    optimizer = optimizer_of(job, job.model())
    scheduler = scheduler_of(
        job, optimizer, steps=100, steps_per_epoch=steps_per_epoch(job, dataset, having(global_batch_size=64))
    )
    assert isinstance(scheduler, StepLR)
    return scheduler.step_size


@pytest.mark.parametrize("job", [ByEpochs(), ByEpochsAlone()])
def test_a_schedule_by_epochs_knows_the_exact_number_of_steps(job: Toy) -> None:
    assert step_size(job, Toy().dataset("train")) == 94  # 30 x 200 samples in batches of 64 are 93.75 steps
    assert step_size(job, [0] * 64) == 30


def test_a_stream_without_a_length_has_no_epochs(golden: Golden) -> None:
    assert step_size(ByEpochs(), Endless()) == 210
    with golden.raises(DatasetError):
        step_size(ByEpochsAlone(), Endless())
