"""Which models ``strategy.sync_batchnorm=true`` converts, and what the plan says about BatchNorm under ``ddp``."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from helpers.machines.plans import notes_of
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, synchronize

CPU = torch.device("cpu")


class WithActivation(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@dataclass(frozen=True, kw_only=True)
class Norms(Toy):
    norm: type[nn.Module] = nn.BatchNorm1d

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16), self.norm(16), nn.Linear(16, 16), self.norm(16), nn.Linear(16, 4))


@dataclass(frozen=True, kw_only=True)
class NeedsValues(Norms):
    """A constructor that needs the memory of a tensor."""

    seen: list[float] = field(default_factory=list)

    def model(self) -> nn.Module:
        self.seen += torch.linspace(0, 1, 3).numpy().tolist()
        return super().model()


class ReadsNumbers(Norms):
    def model(self) -> nn.Module:
        return super().model().requires_grad_(torch.linspace(0, 1, 3)[1].item() == 0.5)


@dataclass(frozen=True, kw_only=True)
class FrozenNorms(Norms):
    """``frozen``: which BatchNorms are in eval mode, in which they use their running statistics."""

    frozen: tuple[int, ...] = (1, 3)

    def model(self) -> nn.Module:
        model = super().model()
        for index in self.frozen:
            model.get_submodule(str(index)).eval()
        return model


class Pretrained(Norms):
    """Its model is in eval mode, as ``from_pretrained`` returns it, and is therefore set to train mode."""

    def model(self) -> nn.Module:
        return super().model().eval()


def notes(job: Toy, *words: str) -> tuple[tuple[str, ...], list[str]]:
    words = words if words[:1] and words[0].startswith("strategy=") else ("strategy=ddp", *words)
    return notes_of(job, *words)


def test_modules_are_converted_in_place_and_keep_names_hooks_and_identity() -> None:
    model = Norms().model()
    norm, names = model[1], list(model.state_dict())
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    converted = synchronize(model, CPU)
    assert converted == (model[1], model[3])
    assert model[1] is norm
    assert type(norm) is SyncBatchNorm1d
    assert isinstance(norm, nn.BatchNorm1d)
    assert list(model.state_dict()) == names
    model(torch.randn(8, 10))
    assert calls == [1]
    assert synchronize(copy.deepcopy(model), CPU) == (), "a converted model is left alone"


def test_on_cuda_they_become_those_of_torch() -> None:
    model = Norms().model()
    assert synchronize(model, torch.device("cuda")) == ()
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert model[1].process_group is None
    model(torch.randn(8, 10))


def test_without_other_ranks_it_is_the_plain_module() -> None:
    plain, model, x = Norms().model(), Norms().model(), torch.randn(8, 10)
    model.load_state_dict(plain.state_dict())
    synchronize(model, CPU)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model[1].running_var, plain[1].running_var)


@pytest.mark.parametrize("kind", [WithActivation, nn.LazyBatchNorm1d])
def test_a_batchnorm_of_another_class_is_refused(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(4) if kind is WithActivation else kind())
    with pytest.raises(ValueError, match=rf"strategy.sync_batchnorm=true: 1 is a {kind.__name__}"):
        synchronize(model, CPU)
    assert not any(isinstance(m, SyncBatchNorm) for m in model.modules())


def test_the_plan_says_that_workers_use_their_own_statistics(golden: Golden) -> None:
    ((note,), errors) = notes(Norms())
    golden.says(note)
    assert errors == []


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Norms(), ("strategy.sync_batchnorm=true",)),
        (Norms(), ("strategy.num_workers=1",)),
        (Norms(norm=nn.LayerNorm), ()),
        (Norms(norm=nn.SyncBatchNorm), ()),
        (Toy(), ()),
        (FrozenNorms(), ()),
    ],
    ids=["synchronized", "one worker", "LayerNorm", "SyncBatchNorm", "no norm", "frozen"],
)
def test_nothing_is_said_where_losses_are_equal(job: Toy, words: tuple[str, ...]) -> None:
    assert notes(job, *words) == ((), [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ("strategy=dp", "strategy.num_workers=2"),
            "each device's own samples, with strategy=single",
            marks=pytest.mark.needs("asynchronous"),
        ),
        pytest.param(
            ("strategy=parameter_server", "strategy.consistency=sync"),
            "each worker's own samples, with strategy=single",
            marks=pytest.mark.needs("asynchronous"),
        ),
        (("strategy=single", "train.grad_accumulation=2"), "slices of "),
    ],
)
def test_every_strategy_that_divides_a_batch_says_so(words: tuple[str, ...], said: str) -> None:
    ((note,), errors) = notes(Norms(), *words)
    assert note.startswith(f"BatchNorm (1, 3) uses the statistics of {said}")
    assert errors == []


def test_a_frozen_batchnorm_is_left_out() -> None:
    ((note,), _) = notes(FrozenNorms(frozen=(1,)))
    assert note.startswith("BatchNorm (3) uses")
    ((note,), _) = notes(Pretrained())
    assert note.startswith("BatchNorm (1, 3) uses")


def test_accumulation_changes_the_statistics_even_with_the_key() -> None:
    ((note,), _) = notes(Norms(), "strategy.sync_batchnorm=true", "train.grad_accumulation=2")
    assert "train.grad_accumulation=2 these hold other samples" in note


def test_a_batchnorm_of_another_class_is_an_error_of_the_plan() -> None:
    (nothing, (error,)) = notes(Norms(norm=WithActivation), "strategy.sync_batchnorm=true")
    assert nothing == ()
    assert error.startswith("strategy.sync_batchnorm=true: 1 is a WithActivation")
    ((note,), _) = notes(Norms(norm=WithActivation))
    assert note.startswith("BatchNorm (1, 3)")


def test_a_model_whose_constructor_reads_numbers_is_known() -> None:
    assert notes(ReadsNumbers()) == notes(Norms())


def test_a_model_that_cannot_be_built_without_memory_is_not_passed_over_in_silence(golden: Golden) -> None:
    job = NeedsValues()
    ((note,), errors) = notes(job)
    golden.says(note)
    assert (errors, job.seen) == ([], []), "the driver does not build it with memory"
