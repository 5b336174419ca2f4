"""Models that a strategy refuses before anything starts, with a sentence."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from helpers.conformance.cases import DDP, SINGLE, Case, checked, having
from helpers.conformance.layouts import DP, EVERY, FSDP, HOGWILD, MODEL_PARALLEL, PARAMETER_SERVER, pipeline
from helpers.files.golden import Golden
from helpers.jobs.batch_toys import Ragged
from helpers.jobs.toys import Toy
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job

NEEDED = partial(pytest.param, marks=pytest.mark.needs("asynchronous"))


def errors_of(job: Job, options: StrategyConfig, *, world_size: int = 2, **train: Any) -> list[str]:
    return checked(Case(job=job, options=options, train=having(**train)), world_size)[0]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    "options", [DDP, NEEDED(PARAMETER_SERVER), MODEL_PARALLEL, SINGLE], ids=lambda options: options.name
)
def test_parameters_without_a_shape(options: StrategyConfig, golden: Golden) -> None:
    world_size = 1 if options is SINGLE else 4 if options is PARAMETER_SERVER else 2
    [error] = errors_of(Toy(build=lazy), options, world_size=world_size)
    golden.says(error)


@dataclass(frozen=True, kw_only=True)
class Counted(Toy):
    calls: list[str] = field(default_factory=list)

    def model(self) -> nn.Module:
        self.calls.append("model")
        return nn.Sequential(nn.Linear(10, 16), *(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 4))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self.calls.append("optimizer")
        return super().optimizer(parameters)


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("layout", ["single", "ddp-2"])
def test_how_many_optimizers_the_checks_of_a_start_make(layout: str, plan: bool) -> None:
    """As it is, for its memory, and two for the trial of a resume."""
    assert calls_of(layout, plan=plan).count("optimizer") == 4


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("layout", EVERY)
def test_the_checks_of_a_start_build_one_model(layout: str, plan: bool) -> None:
    """It may take minutes to build."""
    assert calls_of(layout, plan=plan).count("model") == 1


def calls_of(layout: str, *, plan: bool) -> list[str]:
    job, of = Counted(), EVERY[layout]
    assert checked(of.of(Case(job=job)), of.world_size, config={"plan": plan})[0] == []
    return job.calls


class TiedByData(nn.Sequential):
    """Two parameters in the same memory; ``reads``: whether building it needs memory, which fake tensors lack."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        self[3].weight.data = self[2].weight.data
        if reads:
            self[0].bias.detach().numpy()


SHARDED_OPTIMIZER = replace(DDP, shard_optimizer=True)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("options", "world_size"),
    [(FSDP, 2), (MODEL_PARALLEL, 2), NEEDED(PARAMETER_SERVER, 4), NEEDED(HOGWILD, 2), (SHARDED_OPTIMIZER, 2)],
    ids=["fsdp", "model_parallel", "parameter_server", "hogwild", "shard_optimizer"],
)
def test_parameters_in_the_same_memory_are_refused_where_they_would_be_apart(
    options: StrategyConfig, world_size: int, reads: bool, golden: Golden
) -> None:
    job = Toy(build=partial(TiedByData, reads=reads))
    [error] = errors_of(job, options, world_size=world_size)
    if options is FSDP:
        assert errors_of(job, options, precision="bf16-true") == [error]  # which would part them silently
    golden.says(error)


@pytest.mark.parametrize(("options", "world_size"), [(SINGLE, 1), (DDP, 2)], ids=["single", "ddp"])
def test_parameters_in_the_same_memory_stay_there(options: StrategyConfig, world_size: int) -> None:
    assert errors_of(Toy(build=partial(TiedByData, reads=False)), options, world_size=world_size) == []


class Halves(nn.Module):
    """Halves its input, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.head = nn.Linear(10, 16), nn.Linear(16, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].mul_(0.5) if self.in_place else batch["x"] * 0.5
        return self.head(self.first(x).tanh())


class Dicts(Toy):
    """The loss reads the same dict as the model."""

    def item(self, index: int, inputs: Tensor, target: int) -> Any:
        return {"x": inputs, "y": torch.tensor(target)}

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output, target["y"])


@pytest.mark.parametrize("options", [pipeline("1F1B", 2), MODEL_PARALLEL], ids=lambda options: options.name)
def test_a_batch_that_is_changed_in_place_although_the_loss_reads_it(options: StrategyConfig, golden: Golden) -> None:
    [error] = errors_of(Dicts(build=partial(Halves, in_place=True)), options)
    golden.says(error)
    assert errors_of(Dicts(build=partial(Halves, in_place=False)), options) == []


class NeedsAnEnd(nn.Sequential):
    """Looks for something in its batch, as models that classify the last token do."""

    def forward(self, x: Tensor) -> Tensor:
        if not (x == 1).any():
            raise ValueError("no end")
        return super().forward(x)


def test_a_model_that_raises_with_random_values(golden: Golden) -> None:
    job = Toy(build=lambda: NeedsAnEnd(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)))
    [error] = errors_of(job, MODEL_PARALLEL)
    golden.says(error)


class TimeMajor(nn.Sequential):
    """Returns a row per step of time, or a row per sample with a loss beside it."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scalar = scalar

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return (out, out.square().mean()) if self.scalar else torch.stack([out, out, out])


@dataclass(frozen=True, kw_only=True)
class Views(Toy):
    scalar: bool
    reads: bool = True

    def model(self) -> nn.Module:
        return TimeMajor(scalar=self.scalar)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        if self.scalar:
            return F.cross_entropy(output[0], target) + (output[1] if self.reads else 0.0)
        return F.cross_entropy(output[-1], target)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Views(scalar=False, samples=201), "returns a tensor of shape [3, 32, 4] for 32 samples, so the padding"),
        (Views(scalar=True, samples=201), "the loss has a part that the model has computed over a whole batch"),
        (Views(scalar=True, reads=False, samples=201), None),
        (Views(scalar=False, samples=192), None),
    ],
    ids=["time-major", "scalar", "scalar that the loss does not read", "no padding"],
)
def test_outputs_from_which_padding_cannot_be_cut_are_refused_before_training(job: Views, said: str | None) -> None:
    errors = errors_of(job, pipeline("1F1B", 2))
    assert errors == [] if said is None else said in errors[0]


class ScalarInEvaluation(TimeMajor):
    def forward(self, x: Tensor) -> Any:
        out, scalar = super().forward(x)
        return out, (scalar.expand(len(x)) if self.training else scalar)


@dataclass(frozen=True, kw_only=True)
class Particular(Views):
    """Its loss refuses random outputs, or it has a scalar only in evaluation."""

    checks: bool

    def model(self) -> nn.Module:
        return super().model() if self.checks else ScalarInEvaluation(scalar=True)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        if self.checks and bool((output[0] > 0).all()):
            raise ValueError("no logits")
        return F.cross_entropy(output[0], target) + output[1].mean()


@pytest.mark.parametrize("checks", [False, True])
def test_scalars_that_random_outputs_do_not_show_are_refused_too(checks: bool, golden: Golden) -> None:
    [error] = errors_of(Particular(scalar=True, checks=checks, samples=201), pipeline("1F1B", 2))
    golden.says(error)
    assert errors_of(Particular(scalar=True, checks=checks, samples=192), pipeline("1F1B", 2)) == []


class Texts(IterableDataset[Any]):
    """A stream of pairs, without a length."""

    def __init__(self, samples: int):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(10), i % 4) for i in range(self.samples))


@dataclass(frozen=True, kw_only=True)
class Streamed(Views):
    """Its ``test`` split is a stream."""

    split_names: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    def dataset(self, split: str) -> Any:
        return Texts(self.samples) if split == "test" else super().dataset("train")


@pytest.mark.parametrize("samples", [192, 193])
def test_padding_at_the_end_of_a_stream_that_is_evaluated_is_refused_before_training(samples: int) -> None:
    case = Case(job=Streamed(scalar=False, samples=samples), options=pipeline("1F1B", 2))
    case = replace(case, train=having(eval_splits=("test",)))
    errors, _ = checked(case, 2)
    assert len(errors) == samples % 2
    assert all("let job.dataset('test') have a multiple of 32 samples" in error for error in errors)


@pytest.mark.parametrize("options", [pipeline("1F1B", 2), NEEDED(DP)])
def test_batches_without_a_row_for_each_sample_are_refused_where_they_are_cut(
    options: StrategyConfig, golden: Golden
) -> None:
    [error] = errors_of(Ragged(), options)
    golden.says(error)
    assert errors_of(Ragged(), DDP) == errors_of(Ragged(), MODEL_PARALLEL) == []


def longest(items: list[tuple[Tensor, int]]) -> Any:
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in items], batch_first=True)
    return tokens, torch.tensor([target for _, target in items])


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class AllButTheLast(nn.Sequential):
    """Its own code depends on the length of the sequences, which a recording has as a constant."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, : tokens.shape[1] - 1])


@dataclass(frozen=True, kw_only=True)
class Lengths(Ragged):
    """Batches as wide as their longest sample."""

    collate = property(lambda self: longest)

    recorded: bool = False

    def model(self) -> nn.Module:
        layers = {"embed": nn.Embedding(10, 16), "mix": nn.Linear(16, 16), "pool": Mean(), "head": nn.Linear(16, 4)}
        return (AllButTheLast if self.recorded else nn.Sequential)(OrderedDict(layers))


def test_widths_that_differ_between_batches_are_refused_before_training_where_they_cross_a_cut(golden: Golden) -> None:
    [error] = errors_of(Lengths(), pipeline("1F1B", 2, ("mix",)))
    golden.says(error)
    for split in (("head",), "auto"):
        assert errors_of(Lengths(), pipeline("1F1B", 2, split)) == []
    assert errors_of(Lengths(), DDP) == []


def test_widths_that_differ_between_batches_are_refused_for_a_recorded_model_wherever_it_is_cut(golden: Golden) -> None:
    [error] = errors_of(Lengths(recorded=True), pipeline("1F1B", 2, ("head",)))
    golden.says(error)
