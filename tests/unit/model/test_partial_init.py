"""Part of a model has the values of the whole one, whatever its constructor does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import init
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks.allocations import Allocations
from jobs.gpt import GPT
from jobs.pretrained import save
from orchestrator.model.partial_init import build_divided, build_fake, build_part
from orchestrator.model.tensor_slots import tensor_slots

CPU = torch.device("cpu")
STATES = 2 * torch.get_rng_state().nbytes
"""That are kept of the generator for each tensor."""


class Built(nn.Module):
    """A module whose tensors ``fill`` sets."""

    def __init__(self, fill: Callable[[Built], None]):
        super().__init__()
        fill(self)


def between_linears(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(*middle, nn.Linear(4, 3))


def weights(fill: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """Linear layers whose weights ``fill`` initialises."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 5))
        for layer in model:
            fill(layer.weight)
        return model

    return build


def built(fill: Callable[[Built], None]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), Built(fill), nn.Linear(4, 3))


def constants(module: Built) -> None:
    module.register_buffer("positions", torch.arange(8))
    module.register_buffer("waves", torch.sin(torch.arange(8) / 3), persistent=False)
    module.from_numpy = nn.Parameter(torch.from_numpy(np.ones((3, 2), dtype=np.float32)))
    module.changed = nn.Parameter(torch.as_tensor(np.linspace(0, 1, 6, dtype=np.float32)))
    with torch.no_grad():
        module.changed.mul_(2)
        module.changed[2:4].fill_(5)


def indexed(module: Built) -> None:
    order = torch.randperm(6)
    drawn = torch.randn(6, 6)
    drawn[drawn > 0.5] = 0
    drawn[torch.rand(6, 6) < 0.3] *= 2
    mask = torch.rand(5, 5) > 0.5
    module.register_buffer("order", order)
    module.register_buffer("some", torch.multinomial(torch.ones(10), 4))
    module.rows = nn.Parameter(drawn[order[:3]])
    module.masked = nn.Parameter(torch.randn(5, 5)[mask][:4])
    module.coins = nn.Parameter(torch.bernoulli(torch.full((7,), 0.3)))


def drawn_until(module: Built) -> None:
    drawn = torch.randn(4)
    while drawn.max() > 1:
        drawn = torch.randn(4)
    module.weight = nn.Parameter(drawn)
    module.scale = nn.Parameter(torch.full((2,), float(torch.rand(()))))
    module.rates = torch.linspace(0, 1, 5).tolist()


def other_generators(module: Built) -> None:
    own = torch.Generator().manual_seed(7)
    module.first = nn.Parameter(torch.randn(5, generator=own))
    module.second = nn.Parameter(torch.randn(5, generator=own))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        module.forked = nn.Parameter(torch.randn(5))
    module.after = nn.Parameter(torch.randn(5))


def own_seed(module: Built) -> None:
    torch.manual_seed(99)
    module.weight = nn.Parameter(torch.randn(5))


def by_data(module: Built) -> None:
    module.one, module.other = nn.Linear(4, 4), nn.Linear(4, 4)
    module.one.weight.data.normal_(0, 0.02)
    module.one.bias.data = torch.randn(4) * 3
    module.other.load_state_dict(module.one.state_dict())
    module.table = nn.Embedding(10, 4, padding_idx=0)


def plain_attributes(module: Built) -> None:
    module.mask = torch.tril(torch.ones(4, 4))
    module.tables = [torch.randn(2), {"more": (torch.randn(3),)}]
    module.listed = [nn.Linear(2, 2).weight]


def through_numpy(module: Built) -> None:
    """Do what fake tensors do not support."""
    module.weight = nn.Parameter(torch.as_tensor(np.sin(torch.randn(5).numpy())))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    return model


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "normal": weights(lambda w: init.normal_(w, std=0.02)),
    "orthogonal": weights(init.orthogonal_),
    "trunc-normal": weights(init.trunc_normal_),
    "xavier-uniform": weights(init.xavier_uniform_),
    "xavier-normal": weights(init.xavier_normal_),
    "kaiming-normal": weights(init.kaiming_normal_),
    "sparse": weights(lambda w: init.sparse_(w, 0.3)),
    "eye": weights(init.eye_),
    "exponential": weights(lambda w: w.data.exponential_().log_().clamp_(-2, 2)),
    "cauchy": weights(lambda w: w.data.cauchy_()),
    "weight-norm": lambda: between_linears(parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral-norm": lambda: between_linears(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "orthogonal-parametrization": lambda: between_linears(parametrizations.orthogonal(nn.Linear(4, 4))),
    "recurrent": lambda: between_linears(nn.LSTM(4, 5, 2, bidirectional=True), nn.GRU(4, 4)),
    "attention": lambda: between_linears(nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, 16)),
    "conv-and-norms": lambda: between_linears(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(4), nn.Dropout()),
    "bf16": lambda: between_linears(nn.Linear(4, 4)).to(torch.bfloat16),
    "double": lambda: between_linears(nn.Linear(4, 4)).double(),
    "tied-double": lambda: tied().double(),
    "frozen": lambda: between_linears(nn.Linear(4, 4).requires_grad_(False)),
    "constants": built(constants),
    "indexed": built(indexed),
    "drawn-until": built(drawn_until),
    "other-generators": built(other_generators),
    "own-seed": built(own_seed),
    "by-data": built(by_data),
    "plain-attributes": built(plain_attributes),
    "through-numpy": built(through_numpy),
    "tied": tied,
    "twice": twice,
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_each_part_has_the_values_of_the_whole_and_leaves_the_generator_as_it_would(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(5)
    whole = build()
    drawn_next = torch.randn(3)
    expected = {slot.name: slot.tensor for slot in tensor_slots(whole)}
    assert expected
    for layer in whole._modules:
        part = build_part(build, of(layer), seed=5)
        assert torch.equal(torch.randn(3), drawn_next), "the generator is in another state"
        found = {slot.name: slot.tensor for slot in tensor_slots(part)}
        assert list(found) == list(expected)
        for name, tensor in found.items():
            other = expected[name]
            assert isinstance(tensor, nn.Parameter) == isinstance(other, nn.Parameter), name
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (other.shape, other.stride(), other.dtype), name
            assert tensor.requires_grad == other.requires_grad, name
            if of(layer)(name):
                assert not isinstance(tensor, FakeTensor), name
                assert torch.equal(tensor, other), name
        assert shared(part) == shared(whole)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_the_parts_of_each_parameter_make_up_that_of_the_whole(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    whole = build()
    drawn_next = torch.randn(3)
    parts = []
    for index in range(3):
        model, own = build_divided(build, third(index), seed=5, device=CPU)
        assert torch.equal(torch.randn(3), drawn_next), "the generator is in another state"
        assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
        assert shared(model) == shared(whole)
        values = {slot.name: slot.tensor for slot in tensor_slots(model)}
        for slot in tensor_slots(whole):
            if not isinstance(slot.tensor, nn.Parameter):
                assert torch.equal(values[slot.name], slot.tensor), slot.name
        parts.append(own)
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([own[name].detach() for own in parts]), parameter), name
        assert parts[0][name].requires_grad == parameter.requires_grad
    assert [*parts[0]] == [name for name, _ in whole.named_parameters()]


@pytest.mark.parametrize("of_files", [False, True], ids=["drawn", "read"])
def test_a_part_of_each_parameter_needs_memory_for_one_whole_tensor_more(tmp_path: Path, of_files: bool) -> None:
    job = GPT(layers=4, width=128, heads=4, context=16, vocabulary=1024)
    if of_files:
        save(job.model().state_dict(), job.architecture(), tmp_path / "weights")
        job = GPT(weights=str(tmp_path / "weights"), context=16, path="tokens.bin")
    sizes = [p.nbytes for p in job.model().parameters()]
    with Allocations() as seen:
        _, own = build_divided(job.model, lambda shape: (slice(shape[0] // 8),), seed=5, device=CPU)
    kept = sum(part.nbytes for part in own.values())
    assert kept < sum(sizes) / 7
    assert kept + max(sizes) / 2 < seen.peak_bytes <= kept + max(sizes) + STATES * len(sizes)


class Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not isinstance(out, FakeTensor):
            self.count += out.numel()
        return out


def drawn(build: Callable[[], nn.Module], index: int) -> tuple[dict[str, nn.Parameter], int]:
    """A third of each parameter, drawn by itself, and how many random numbers that took."""
    with Draws() as draws:
        _, own = build_divided(build, third(index), seed=5, device=CPU, draws_as=index)
    return own, draws.count


def test_a_part_that_is_drawn_by_itself_takes_its_own_numbers_and_no_others() -> None:
    job = GPT(layers=2, width=96, heads=4, context=12, vocabulary=300)
    whole = dict(job.model().named_parameters())
    with Draws() as draws:
        build_divided(job.model, third(0), seed=5, device=CPU)
    parts, counts = zip(*(drawn(job.model, index) for index in range(3)), strict=True)
    assert max(counts) < draws.count / 5, "each number of the whole model is drawn twice"
    again = drawn(job.model, 1)[0]
    assert again.keys() == whole.keys()
    for name, parameter in whole.items():
        joined = torch.cat([own[name].detach() for own in parts])
        assert (joined.shape, joined.dtype) == (parameter.shape, parameter.dtype)
        assert torch.equal(again[name], parts[1][name]), "the numbers belong to seed and part"
        std = float(parameter.detach().std())
        if std == 0:
            assert torch.equal(joined, parameter), "a constant"
        else:
            assert not torch.equal(parts[0][name], parts[1][name])
            assert float(joined.std()) == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_whatever_the_constructor_does_parts_that_are_drawn_make_up_one_tensor(build: Callable[[], nn.Module]) -> None:
    whole = build()
    parts = [drawn(build, index)[0] for index in range(3)]
    for name, parameter in whole.named_parameters():
        joined = torch.cat([own[name].detach() for own in parts])
        assert (joined.shape, joined.dtype) == (parameter.shape, parameter.dtype)
        assert bool(joined.isfinite().all())


def test_what_is_not_filled_entry_by_entry_is_drawn_whole() -> None:
    parts = [drawn(weights(init.orthogonal_), index)[0] for index in range(3)]
    weight = torch.cat([own["0.weight"].detach() for own in parts])
    torch.testing.assert_close(weight @ weight.T, torch.eye(5))


def third(index: int) -> Callable[[torch.Size], tuple[slice, ...]]:
    """The rows of one of three parts, of which the first are larger."""

    def part(shape: torch.Size) -> tuple[slice, ...]:
        if not shape:
            return ()
        bounds = [-(-shape[0] * i // 3) for i in range(4)]
        return (slice(bounds[index], bounds[index + 1]),)

    return part


def of(layer: str) -> Callable[[str], bool]:
    return lambda name: name.partition(".")[0] == layer


def shared(model: nn.Module) -> list[list[str]]:
    """The names of each tensor, grouped."""
    names: dict[int, list[str]] = {}
    for slot in tensor_slots(model):
        names.setdefault(id(slot.tensor), []).append(slot.name)
    return list(names.values())


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_a_fake_model_has_every_shape_and_no_values(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = build_fake(build, CPU)
    assert torch.equal(torch.get_rng_state(), before), "the generator was used"
    assert [(n, t.shape) for n, t in found.model.state_dict().items()] == [
        (n, t.shape) for n, t in build().state_dict().items()
    ]
    if build is BUILDS["through-numpy"]:
        assert found.full_build_reason == "RuntimeError: .numpy() is not supported for tensor subclasses."
        assert all(isinstance(t, FakeTensor) for t in found.model.state_dict().values())
    else:
        assert found.full_build_reason is None


WHOLE = torch.arange(10.0)
PART, OTHER_PART = WHOLE[5:], WHOLE[2:4]


def of_constants() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight[0] = 2 * PART
        model[1].weight[0] = 3 * OTHER_PART
    return model


@pytest.mark.parametrize(
    "read",
    [
        lambda path: torch.load(path / "weights.pt"),
        lambda path: torch.load(path / "weights.pt", mmap=True),
        lambda path: safetensors.torch.load_file(path / "weights.safetensors"),
        lambda path: safetensors.torch.load((path / "weights.safetensors").read_bytes()),
        lambda path: of_constants().state_dict(),
    ],
    ids=["torch", "torch-mmap", "safetensors", "safetensors-bytes", "parts-of-constants"],
)
def test_a_part_of_values_that_existed_before(tmp_path: Path, read: Callable[[Path], dict[str, Tensor]]) -> None:
    """They come from a file, say. The constructor still runs only once, so only the part is built."""
    expected = of_constants().state_dict()
    torch.save(expected, tmp_path / "weights.pt")
    safetensors.torch.save_file(expected, tmp_path / "weights.safetensors")
    calls = []

    def build() -> nn.Module:
        calls.append(1)
        model = nn.Sequential(nn.Linear(5, 1), nn.Linear(2, 1))
        model.load_state_dict(read(tmp_path))
        return model

    assert build_fake(build, CPU).full_build_reason is None
    for layer in ("0", "1"):
        calls.clear()
        part = build_part(build, of(layer), seed=5).state_dict()
        assert len(calls) == 1
        for name, tensor in part.items():
            assert isinstance(tensor, FakeTensor) != of(layer)(name)
            assert isinstance(tensor, FakeTensor) or name.endswith("bias") or torch.equal(tensor, expected[name])
    assert torch.equal(WHOLE, torch.arange(10.0))


def test_a_part_can_be_called_and_trained() -> None:
    part = build_part(BUILDS["plain-attributes"], of("1"), seed=5)
    assert torch.equal(part[1].mask, torch.tril(torch.ones(4, 4)))
    part = build_part(BUILDS["attention"], of("1"), seed=5)
    part[1](torch.randn(2, 3, 8)).sum().backward()
    assert part[1].linear1.weight.grad is not None


def test_attributes_and_hooks_of_parameters_are_kept() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight.no_decay = True  # type: ignore[assignment]
        layer.weight.register_hook(lambda gradient: 2 * gradient)
        return nn.Sequential(layer)

    layer = build_part(build, lambda name: True, seed=1)[0]
    assert vars(layer.weight) == {"no_decay": True}
    layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))
    assert torch.equal(layer.bias.grad, torch.ones(4))


def test_an_error_of_the_constructor_is_raised_as_it_is() -> None:
    def build() -> nn.Module:
        raise KeyError("mine")

    for attempt in (lambda: build_fake(build, CPU), lambda: build_part(build, of("0"), seed=1)):
        with pytest.raises(KeyError, match="mine") as error:
            attempt()
        assert error.value.__context__ is None
