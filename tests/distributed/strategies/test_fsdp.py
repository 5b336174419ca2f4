"""What is particular to parameters that are divided over ranks, in whole models, in stages and in optimizers alone."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import evaluated_in_slices
from helpers.conformance.layouts import ADAMW, FSDP_5, LAYOUTS, SGD, TENSOR, Layout, assert_as_alone, whole_model
from helpers.conformance.training import losses, make, steps, train
from helpers.jobs.mixed_jobs import MixedDigits
from helpers.jobs.quick_jobs import TinyGPT, digits
from helpers.jobs.toys import Toy
from helpers.ranks.allocations import Allocations
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from jobs.gpt import GPT
from orchestrator.strategies.measure.device import WaitTimer, clock_of
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.parts.gathered import Gathered
from orchestrator.strategies.parts.timed_stage import Clock


class Block(nn.Module):
    """Counts its calls, if ``counts``."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.layer, self.norm = nn.Linear(10, 10), nn.LayerNorm(10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((10,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return x + self.norm(self.layer(x).tanh()) * self.scale


class Odd(nn.Module):
    """Has tied layers inside and outside of blocks, frozen and unused parameters, and a scalar."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 4)
        self.blocks = nn.ModuleList(Block(counts) for _ in range(4))
        self.last.weight = self.first.weight
        self.blocks[2].layer.weight = self.blocks[0].layer.weight
        self.blocks[1].requires_grad_(False)
        self.blocks[3].norm.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x)) * self.scale


def counting_nothing() -> nn.Module:
    return Odd(counts=False)


@dataclass(frozen=True, kw_only=True)
class OddToy(Toy):
    """Gives the model's norms another learning rate. Its buffers do not change: a call is one of a micro-batch."""

    adamw: bool = False
    build: Callable[[], nn.Module] = counting_nothing

    def parameter_groups(self, parameters: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        norms = [p for name, p in parameters if "norm" in name]
        return [{"params": [p for name, p in parameters if "norm" not in name]}, {"params": norms, "lr": self.lr / 2}]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01) if self.adamw else super().optimizer(parameters)


@dataclass(frozen=True, kw_only=True)
class OddCalls(OddToy):
    """Calls parts of the model in ``forward``. Buffers change."""

    build: Callable[[], nn.Module] = Odd

    def forward(self, model: Any, inputs: Tensor) -> Tensor:
        x = model.first(inputs).tanh()
        for block in model.blocks:
            x = block(x)
        return model.head(model.last(x)) * model.scale


@pytest.mark.parametrize("adamw", [True, *in_campaign(False)])
def test_any_parameters_have_the_losses_norms_and_values_of_one_worker(gang: Gang, adamw: bool) -> None:
    case = Case(job=OddCalls(adamw=adamw, lr=0.02), train=having(global_batch_size=24, steps=8))
    rtol = ADAMW if adamw else SGD
    assert_as_alone(gang, case, "fsdp-3", "hsdp-2x2", rtol=rtol, want_grad_norm=True)
    assert_as_alone(gang, case, "sharded-ddp-3", rtol=rtol, want_grad_norm=True, find_unused_parameters=True)


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")


@pytest.mark.campaign  # the conformance matrix has sharded stages, and the test above any parameters
@pytest.mark.parametrize(
    ("schedule", "reshard"),
    [*((s, False) for s in (*SCHEDULES, "ZBVZeroBubble")), *((s, True) for s in SCHEDULES[:4])],
)
def test_any_parameters_of_stages_have_the_losses_norms_and_values_of_one_worker(
    gang: Gang, schedule: str, reshard: bool
) -> None:
    case = Case(job=OddToy(lr=0.02), train=having(global_batch_size=32, grad_accumulation=2, clip_norm=0.5))
    keys = {"schedule": schedule, "num_microbatches": 4, "reshard_after_forward": reshard, "prefetch": 2}
    assert_as_alone(gang, case, "fsdp-1F1B-2x2", want_grad_norm=True, **keys)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fsdp-3", {"reshard_after_forward": False}),
        ("fsdp-3", {"cpu_offload": True}),
        ("sharded-ddp-3", {}),
        *in_campaign((FSDP_5, {}), ("fsdp-3", {"wrap": ("Linear",), "prefetch": 2})),
    ],
    ids=["kept", "offloaded", "optimizer", "five", "classes"],
)
def test_slices_clipping_and_uneven_shares(gang: Gang, name: str | Layout, changes: dict[str, Any]) -> None:
    train = having(global_batch_size=34, grad_accumulation=3, clip_norm=0.2)
    case = Case(job=digits(depth=3, hidden=23), train=train)
    seen = assert_as_alone(gang, case, name, want_grad_norm=True, **changes)
    norms = seen[name][0].norms
    assert any(norm is not None and norm > 0.2 for norm in norms), "nothing was clipped"


def held(rank: int, case: Case) -> dict[str, int]:
    """The elements that this rank holds after a step, by what they are for."""
    strategy = make(case, rank)
    assert isinstance(strategy, MeshTrainer)
    list(steps(strategy, last=1))
    sizes: dict[str, int] = {}
    for size in strategy.tensor_sizes():
        sizes[size.kind] = sizes.get(size.kind, 0) + size.size_bytes // 4
    return sizes


def test_each_rank_holds_its_part_of_parameters_gradients_and_optimizer_state(gang: Gang) -> None:
    job = digits(depth=3, hidden=24)
    case = LAYOUTS["fsdp-3"].of(Case(job=job, train=having(global_batch_size=24)))
    shapes = [p.shape for p in job.model().parameters()]
    share = sum(math.ceil(shape[0] / 3) * math.prod(shape[1:]) for shape in shapes)
    sizes = gang.run(held, case, world_size=3)
    for kind in ("parameter", "gradient", "optimizer state"):
        assert max(size[kind] for size in sizes) == share
        assert sum(size[kind] for size in sizes) == sum(math.prod(shape) for shape in shapes)


def held_at_most(rank: int, case: Case) -> tuple[int, int]:
    """The bytes that this rank has at one time until it can train, and those of its parts."""
    with Allocations() as seen:
        strategy = make(case, rank)
    assert isinstance(strategy, MeshTrainer)
    assert isinstance(strategy.part, Gathered)
    return seen.peak_bytes, sum(part.nbytes for part in strategy.part.passes.divided.distinct)


def test_a_rank_that_begins_never_has_more_than_its_parts_and_one_block(gang: Gang) -> None:
    job = GPT(layers=4, width=128, heads=4, context=16)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in job.model()]
    case = Case(job=job, train=having(check="never"))
    _, *others = gang.run(held_at_most, LAYOUTS["fsdp-3"].of(case), world_size=3)  # rank 0 compares a batch
    for peak, own in others:
        assert own < sum(sizes) / 2.5
        assert own < peak < own + 2 * max(sizes)


def test_parts_that_are_drawn_by_themselves_train(gang: Gang) -> None:
    case = Case(job=digits(depth=3), train=having(global_batch_size=32, init="fast"))
    seeded, drawn = (
        gang.run(train, LAYOUTS["hsdp-2x2"].of(replace(case, train=having(case.train, init=init))), world_size=4)
        for init in ("seeded", "fast")
    )
    whole_model(drawn)
    curve = losses(drawn)
    assert curve[-1] < curve[0]
    assert curve[0] != losses(seeded)[0]


def gathered_model(rank: int, case: Case) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
    """What rank 0 gathers to show it to the job, and what it would save alone."""
    strategy = make(case, rank)
    list(steps(strategy, last=2))
    shown = strategy.gather_model()
    saved = strategy.capture(step=2, samples_consumed=2 * case.train.global_batch_size, into=None)
    return None if shown is None else dict(shown), None if saved is None else dict(saved.model)


@pytest.mark.parametrize("name", ["fsdp-3", *in_campaign("hsdp-2x2", "fsdp-1F1B-2x2", "1F1B-2x2")])
def test_rank_0_gathers_the_model_to_show_it_to_the_job(gang: Gang, name: str) -> None:
    case = LAYOUTS[name].of(Case(job=OddToy(lr=0.02), train=having(global_batch_size=32)))
    (shown, saved), *others = gang.run(gathered_model, case, world_size=LAYOUTS[name].world_size)
    assert shown is not None
    assert saved is not None
    assert list(shown) == list(saved)
    assert [name for name in saved if not torch.equal(shown[name], saved[name])] == []
    assert others == [(None, None)] * len(others)


def gathered_before(rank: int, case: Case) -> list[int]:
    """How many gathers have begun at the first forward and the first backward pass of each of the blocks."""
    begun: list[WaitTimer] = []
    waiting = WaitTimer.waiting

    def counted(timer: WaitTimer) -> contextlib.AbstractContextManager[None]:
        begun.append(timer)
        return waiting(timer)

    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WaitTimer, "waiting", counted)
        strategy = make(case, rank)
        assert isinstance(strategy, MeshTrainer)
        assert isinstance(strategy.part, Gathered)
        gathers = strategy.part.passes.divided.gathers

        def count(*_: object) -> None:
            seen.append(sum(timer is gathers for timer in begun))

        for block in strategy.part.passes.model.blocks:
            block.norm.register_forward_hook(count)
            block.norm.register_full_backward_pre_hook(count)
        list(steps(strategy, last=1))
    return seen[:8]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, [2, 3, 3, 4, 5, 6, 7, 7]),
        (1, [2, 3, 3, 4, 6, 7, 7, 7]),
        (2, [3, 4, 4, 4, 7, 7, 7, 7]),
    ],
)
def test_blocks_are_gathered_ahead_of_the_one_that_runs(gang: Gang, ahead: int, expected: list[int]) -> None:
    """In the forward pass, then in the backward pass.

    The root is one group, and the first block and the third, which share a tensor, are another.
    """
    case = LAYOUTS["fsdp-2"].of(Case(job=OddToy(), train=having(global_batch_size=8, check="never")), prefetch=ahead)
    assert gang.run(gathered_before, case, world_size=2) == [expected] * 2


looks: list[Callable[[], int]] = []
noted: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Watched(TinyGPT):
    """Takes each of the ``looks`` when its loss is computed, and notes them in ``noted``. Its activations are small."""

    layers: int = 6
    width: int = 128
    context: int = 2
    tied: bool = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        noted.extend(look() for look in looks)
        return super().loss(output, target)


def held_after_forward_passes(rank: int, case: Case) -> list[int]:
    """The bytes that autograd has kept in a forward pass of training, and what there is more after it, and after one of
    an evaluation, than between two steps; the latter not for compiled code, which would not run, nor for stages, which
    have the whole gradients of earlier micro-batches."""
    strategy, saved = make(case, rank), {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    noted.clear()
    looks[:] = []
    with contextlib.nullcontext() if case.train.compile or strategy.context.pipeline else Allocations() as seen:
        list(steps(strategy, last=1))
        before = 0 if seen is None else seen.present_bytes
        looks[:] = [lambda: sum(storage.nbytes() for storage in saved.values())]
        if seen is not None:
            looks.append(lambda: seen.present_bytes - before)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            list(steps(strategy, first=2, last=2))
        strategy.evaluate(default_collate([case.job.dataset("val")[i] for i in range(strategy.eval_batch_size)]), 1)
    return list(noted)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fsdp-2", {}),
        *in_campaign(
            ("fsdp-2", {"activation_checkpointing": "blocks"}),
            ("fsdp-1F1B-2x2", {}),
            ("fsdp-2", {"compile": "blocks"}),
        ),
    ],
    ids=["kept", "recomputed", "stages", "compiled"],
)
def test_no_copy_of_the_model_is_kept_for_the_backward_pass(gang: Gang, name: str, changes: dict[str, Any]) -> None:
    """Autocast would cast each weight that is gathered in float32, and autograd would keep the casts."""
    case = LAYOUTS[name].of(Case(job=Watched(), train=having(global_batch_size=4, precision="bf16", **changes)))
    bytes_of_block = max(sum(2 * p.numel() for p in child.parameters()) for child in Watched().model())
    for sizes in gang.run(held_after_forward_passes, case, world_size=LAYOUTS[name].world_size, timeout_s=400):
        assert all(size < 2 * bytes_of_block for size in sizes), (sizes, bytes_of_block)
    assert any(sizes)


LIKE = {
    "fsdp-1F1B-2x2": "1F1B-2x2",
    "hsdp-2x2": "ddp-4",
    "fsdp-ZBVZeroBubble-2x2": "ZBVZeroBubble-2x2",
}


@pytest.mark.parametrize(("name", "like"), [("fsdp-2", "ddp-2"), *in_campaign(*LIKE.items())])
def test_weights_are_used_as_autocast_uses_those_of_whole_models(gang: Gang, name: str, like: str) -> None:
    """Whatever their shapes; what is cast for nothing would be rounded, or refused by an operation."""
    case = Case(job=MixedDigits(val_size=16), train=having(steps=6, global_batch_size=16, precision="bf16"))
    found, expected = (
        gang.run(train, LAYOUTS[of].of(case), True, world_size=LAYOUTS[of].world_size) for of in (name, like)
    )
    torch.testing.assert_close(losses(found), losses(expected), rtol=1e-5, atol=0)
    norms = [torch.tensor(ranks[0].norms) for ranks in (found, expected)]
    torch.testing.assert_close(*norms, rtol=2e-3, atol=0)  # of gradients in 16 bits


def adapted() -> nn.Module:
    """A frozen model in bfloat16 with trained adapters in float32, as LoRA has them."""
    model = Odd(counts=False).requires_grad_(False)
    for block in model.blocks:
        block.layer.to(torch.bfloat16)
        block.layer = nn.Sequential(block.layer, nn.Linear(10, 2, bias=False), nn.Linear(2, 10))
    return model


@pytest.mark.parametrize("precision", ["bf16", *in_campaign("fp16")])
def test_adapters_of_a_frozen_model_in_another_dtype(gang: Gang, precision: str) -> None:
    case = Case(job=OddToy(build=adapted, adamw=True), train=having(global_batch_size=24, steps=8, precision=precision))
    assert_as_alone(gang, case, "hsdp-2x2", rtol=2e-3, want_grad_norm=True)


class InFloat64(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


class OfTwoTypes(Odd):
    """Trains norms in float64 beside weights in float32, and has parameters without an element."""

    def __init__(self) -> None:
        super().__init__(counts=False)
        for block in self.blocks:
            block.norm = InFloat64(10, dtype=torch.float64)
        self.blocks[1].none = nn.Parameter(torch.empty(0, 3))
        self.nothing = nn.Linear(0, 10)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.nothing(x[:, :0]))


@pytest.mark.parametrize(
    ("adamw", "layouts"),
    [(False, ("fsdp-3",)), *in_campaign(*((adamw, ("fsdp-2", "fsdp-1F1B-2x2")) for adamw in (False, True)))],
)
def test_parameters_of_two_types_and_without_elements(gang: Gang, adamw: bool, layouts: tuple[str, ...]) -> None:
    case = Case(
        job=OddToy(build=OfTwoTypes, adamw=adamw, lr=0.02), train=having(global_batch_size=32, steps=8, clip_norm=0.5)
    )
    rtol = ADAMW if adamw else SGD
    assert_as_alone(gang, case, *layouts, rtol=rtol, want_grad_norm=True)
    assert_as_alone(gang, case, "sharded-ddp-3", rtol=rtol, want_grad_norm=True, find_unused_parameters=True)


class Penalised(nn.Module):
    """Returns a gradient of its output and a norm of all its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Odd(counts=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.stack([p.square().sum() for p in self.net.blocks.parameters()]).sum()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.net(x)
            (slopes,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out, slopes.square().sum(1) + 0.1 * decay


def penalised(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.01 * output[1].mean()


@pytest.mark.parametrize("adamw", [False, *in_campaign(True)])
def test_gradients_in_the_forward_pass_and_norms_of_all_weights(gang: Gang, adamw: bool) -> None:
    """The whole model is gathered for a step."""
    case = Case(
        job=OddToy(build=Penalised, loss_of=penalised, adamw=adamw, lr=0.02),
        train=having(global_batch_size=24, grad_accumulation=2, steps=8),
    )
    keys = {"reshard_after_forward": False}
    assert_as_alone(gang, case, "hsdp-2x2", rtol=ADAMW if adamw else SGD, want_grad_norm=True, **keys)


class Unfreezing(nn.Module):
    """A block that unfreezes a layer in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 10)
        self.first.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.first.requires_grad_(self.calls > 2)
        return self.last(self.first(x).tanh())


def unfreezing() -> nn.Module:
    return nn.Sequential(Unfreezing(), Unfreezing(), nn.Linear(10, 4))


@pytest.mark.parametrize("name", ["single", "ddp-2", "sharded-ddp-2", "fsdp-2", "model_parallel-2"])
def test_what_is_unfrozen_during_training_is_found(gang: Gang, name: str) -> None:
    case = LAYOUTS[name].of(Case(job=Toy(build=unfreezing), train=having(global_batch_size=8, steps=4)))
    answers = gang.ask(train, case, world_size=LAYOUTS[name].world_size)
    assert "0.first.weight, 0.first.bias" in str(answers[0].error)
    assert "was frozen when the run began, so no optimizer updates it" in str(answers[0].error)


class Backwards(nn.Sequential):
    """Runs its layers in the other order than it has them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def backwards() -> nn.Module:
    return Backwards(*(nn.Linear(10, width) for width in (4, 10, 10, 10)))


def evaluated_between_steps(rank: int, case: Case) -> tuple[list[float], list[float]]:
    """The loss of this rank's samples at each step, and of the same samples with averaged weights after it."""
    strategy = make(case, rank)
    batch = default_collate([case.job.dataset("val")[i] for i in range(8)])
    trained, evaluated = [], []
    for result in steps(strategy):
        trained.append(float(result.loss_sum))
        with strategy.weights_to_evaluate(averaged=True):
            evaluated.append(float(strategy.evaluate(batch, 8).loss_sum))
    return trained, evaluated


def test_what_an_evaluation_gathers_ahead_is_not_trained_with(gang: Gang) -> None:
    """Layers that have run are gathered again, because torch gathers ahead in the order that the model has them in."""
    case = Case(job=Toy(build=backwards, lr=0.02), train=having(global_batch_size=16, steps=6, ema_decay=0.8))
    ((trained, evaluated),) = gang.run(evaluated_between_steps, case, world_size=1)
    case = LAYOUTS["fsdp-2"].of(case, wrap=("Linear",), prefetch=2)
    ranks = gang.run(evaluated_between_steps, case, world_size=2)
    assert [sum(losses) for losses in zip(*(own for own, _ in ranks), strict=True)] == pytest.approx(trained, rel=SGD)
    for _, own in ranks:
        assert own == pytest.approx(evaluated, rel=SGD)


def test_each_rank_of_ddp_holds_its_part_of_the_optimizer_state_and_all_parameters(gang: Gang) -> None:
    job = digits(depth=3, hidden=24)
    case = LAYOUTS["sharded-ddp-3"].of(Case(job=job, train=having(global_batch_size=24)))
    total = sum(parameter.numel() for parameter in job.model().parameters())
    sizes = gang.run(held, case, world_size=3)
    assert [size["parameter"] for size in sizes] == [total] * 3
    assert sum(size["optimizer state"] for size in sizes) == total
    assert max(size["optimizer state"] for size in sizes) <= 1.02 * total / 3


def waits(rank: int, case: Case) -> tuple[float | None, dict[str, float]]:
    strategy = make(case, rank)
    list(steps(strategy, last=2))
    return strategy.comm_ms(), {name: metric.value for name, metric in strategy.metrics().items()}


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("hsdp-2x2", {"all_gather", "reduce_scatter", "all_reduce"}),
        *in_campaign(("mesh-tensor-in-stages-2x2", {"all_reduce", "tensor"})),
        *in_campaign(("mesh-sharded-tensor-2x2", {"all_gather", "reduce_scatter", "all_reduce", "tensor"})),
    ],
)
def test_the_time_of_communication_is_told_by_operation(gang: Gang, name: str, operations: set[str]) -> None:
    job = TinyGPT(layers=2, variant="llama", kv_heads=2)
    case = (LAYOUTS | TENSOR)[name].of(Case(job=job, train=having(global_batch_size=8)))
    for total, parts in gang.run(waits, case, world_size=4):
        assert parts.keys() == {f"perf/{what}_ms" for what in operations}
        assert min(parts.values()) > 0
        assert total == pytest.approx(sum(parts.values()))


def marked(rank: int, case: Case) -> list[bool]:
    """Whether marks are made in an evaluation, in a step that is not logged, in one that is, and in an evaluation."""
    strategy = make(case, rank)
    marks: list[object] = []
    batch = default_collate([case.job.dataset("val")[i] for i in range(strategy.eval_batch_size)])
    found: list[bool] = []

    def marking(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def mark(clock: Any) -> Any:
            marks.append(clock)
            return read(clock)

        return mark

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((type(clock_of(torch.device("cpu"))), "mark"), (Clock, "_now")):
            patch.setattr(owner, name, marking(getattr(owner, name)))
        for work in (
            lambda: strategy.evaluate(batch, 8),
            lambda: list(steps(strategy, first=1, last=1, log_every=2)),
            lambda: list(steps(strategy, first=2, last=2, log_every=2)),
            lambda: strategy.evaluate(batch, 8),
        ):
            marks.clear()
            work()
            found.append(bool(marks))
    return found


@pytest.mark.parametrize("name", ["fsdp-2", "1F1B-2x2", *in_campaign("fsdp-1F1B-2x2")])
def test_only_a_step_that_is_logged_is_timed(gang: Gang, name: str) -> None:
    """On a GPU, a mark is an event, which would be kept up to the next step."""
    case = LAYOUTS[name].of(Case(job=Toy(), train=having(global_batch_size=32)))
    world_size = LAYOUTS[name].world_size
    assert gang.run(marked, case, world_size=world_size) == [[False, False, True, False]] * world_size


class Meaned(nn.Module):
    """Returns a number for the whole batch beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.head(x), x.square().mean()


def meaned(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + output[1]


@pytest.mark.parametrize(
    "job",
    [digits(depth=3, val_size=33), Toy(build=Meaned, loss_of=meaned, samples=33)],
    ids=["rows", "a scalar"],
)
def test_an_evaluation_counts_each_sample_once_although_a_rank_has_none_in_the_last_batch(gang: Gang, job: Any) -> None:
    case = Case(job=job, train=having(global_batch_size=32))
    ((_, expected),) = gang.run(evaluated_in_slices, case, world_size=1)
    ranks = gang.run(evaluated_in_slices, LAYOUTS["fsdp-2"].of(case), world_size=2)
    assert [point.weight for _, point in ranks] == [17, 16]
    assert expected.weight == 33
    assert sum(point.loss_sum for _, point in ranks) == pytest.approx(expected.loss_sum, rel=1e-5)
