"""Configurations, small jobs with one quirk each, and a bare training loop to run them on a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset

from jobs.digits import Digits, Images
from jobs.gpt import GPT, Windows
from orchestrator.config import schema
from orchestrator.job import Job, Split
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.protocol.messages import Assignment, WorkerEnvironment
from orchestrator.state.train_state import TrainState
from orchestrator.strategies import registry
from orchestrator.strategies.asynchronous.parameter_server.shard import Shard
from orchestrator.strategies.asynchronous.parameter_server.worker import Worker
from orchestrator.strategies.base import Context, StepResult, Strategy
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.strategies.replicated.ddp import DDPConfig
from orchestrator.strategies.replicated.single import SingleConfig
from orchestrator.strategies.replicated.whole_model import WholeModel
from orchestrator.worker.data import checked_weights, train_batches
from orchestrator.worker.loop import seed_step

CPU = torch.device("cpu")

TRAIN = schema.TrainConfig(
    steps=20,
    global_batch_size=64,
    grad_accumulation=1,
    log_every=1,
    eval_every=0,
    clip_norm=None,
    precision="fp32",
    on_nonfinite="stop",
    ema_decay=None,
    deterministic=False,
)
SINGLE = SingleConfig(name="single", num_workers=1)
DDP = DDPConfig(
    name="ddp",
    num_workers="auto",
    bucket_mb=0.001,  # several buckets even in these models
    comm_hook="none",
    powersgd_rank=4,
    find_unused_parameters=False,
    sync_batchnorm=False,
)
CLUSTER = schema.ClusterConfig(
    address=None,
    device="cpu",
    cpus_per_worker=1,
    autoscaling=False,
    dashboard=False,
    pending_timeout_s=5,
    rendezvous_timeout_s=20,
    collective_timeout_s=20,
    heartbeat_s=1,
    node_timeout_s=4,
    heartbeat_timeout_s=5,
    stopped_timeout_s=5,
    stop_grace_s=5,
)


RECOVERY = schema.RecoveryConfig(
    max_failures=0,
    spares=0,
    peer_copy_every=0,
    backoff_s=1,
    hang_factor=10,
    hang_min_s=10,
    hang_max_s=20,
    build_max_s=20,
    replace_stragglers=False,
    chaos=(),
)

made: list[Strategy] = []
"""To be closed before the process group ends, as the training loop does."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and how it is trained; ``options`` are for more than one rank, ``alone`` for one (None: ``single``)."""

    job: Job
    train: schema.TrainConfig = TRAIN
    options: schema.StrategyConfig = DDP
    alone: schema.StrategyConfig | None = None
    seed: int = 3


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a rank saw at each step, and its model after the last one."""

    loss_sums: list[float]
    weights: list[float]
    norms: list[float | None]
    skipped: list[bool]
    metrics: list[dict[str, float]]
    model: dict[str, Tensor]


def losses(ranks: list[Steps]) -> Tensor:
    """The loss of the run at every step: summed over the ranks, divided by the summed weight."""
    sums = torch.tensor([r.loss_sums for r in ranks], dtype=torch.float64).sum(0)
    return sums / torch.tensor([r.weights for r in ranks], dtype=torch.float64).sum(0)


def metrics_of(ranks: list[Steps]) -> list[dict[str, float]]:
    """The job's metrics of the run at every step: summed over the ranks, divided by the summed weight."""
    return [
        {
            name: sum(r.metrics[step].get(name, 0.0) for r in ranks) / sum(r.weights[step] for r in ranks)
            for name in {name for r in ranks for name in r.metrics[step]}
        }
        for step in range(len(ranks[0].weights))
    ]


def config_of(case: Case, world_size: int, **changes: Any) -> schema.Config:
    """The configuration of ``case`` for that many workers and shards."""
    num_workers = world_size - getattr(case.options, "num_shards", 0)
    options = (case.alone or SINGLE) if world_size == 1 else replace(case.options, num_workers=num_workers)
    config = schema.Config(
        name="test",
        seed=case.seed,
        resume="never",
        output_dir="outputs",
        plan=False,
        profile=False,
        train=case.train,
        data=schema.DataConfig(num_workers=0),
        checkpoint=schema.CheckpointConfig(every=0, keep=3),
        recovery=RECOVERY,
        tracking=schema.TrackingConfig(
            uri=None,
            experiment="test",
            request_timeout_s=1,
            upload_every_s=0,
            flush_timeout_s=1,
            system_metrics_every_s=0,
        ),
        cluster=CLUSTER,
        strategy=options,
        job=schema.JobSpec(target="test.Test", fields={}),
    )
    return replace(config, **changes)


def plan_of(config: schema.Config) -> Plan:
    return make_plan(
        config,
        registry.load(config.strategy.name),
        (Node(node_id="here", name="here", cpus=8, gpus=0),),
        oversubscribe_cpus=True,
    )


def make(case: Case, rank: int, *, peer_copy_every: int = 0) -> Strategy:
    """The strategy of ``case`` on this rank of the default group, set up."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = config_of(case, world_size)
    plan = plan_of(config)
    context = Context(
        mesh=plan.mesh,
        global_rank=rank,
        device=CPU,
        seed=case.seed,
        train=case.train,
        options=config.strategy,
        pipeline=plan.pipeline,
        num_devices=plan.devices_per_worker,
        peer_copy_every=peer_copy_every,
    )
    strategy = registry.load(config.strategy.name).create(context, case.job)
    made.append(strategy)
    strategy.setup(case.job.dataset("train"))
    strategy.attach()
    strategy.sync_initial_state()
    return strategy


def close_strategies() -> None:
    while made:
        made.pop().close()


def steps(
    strategy: Strategy, *, first: int = 1, last: int | None = None, want_grad_norm: bool = False
) -> Iterator[StepResult]:
    """Train from step ``first`` to ``last``, with the data and seeds that the training loop gives."""
    context = strategy.context
    train, mesh = context.train, context.mesh
    last = train.steps if last is None else last
    batches = train_batches(
        strategy.job.dataset("train"),
        collate=strategy.job.collate,
        seed=context.seed,
        samples_consumed=(first - 1) * train.global_batch_size,
        steps=last - first + 1,
        global_batch_size=train.global_batch_size,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=context.dp_rank,
        grad_accumulation=train.grad_accumulation,
        num_workers=0,
        pin_memory=False,
        timeout_s=10,
        weights=checked_weights(strategy.job.sample_weights("train"), strategy.job.dataset("train")),
        read=strategy.reads_data,
    )
    for step, batch in zip(range(first, last + 1), batches, strict=True):
        seed_step(context.seed, step, context.global_rank)
        yield strategy.train_step(batch, want_grad_norm=want_grad_norm, want_metrics=True)


def train(rank: int, case: Case, want_grad_norm: bool = False) -> Steps:
    """Train ``case`` on this rank from the first step to the last."""
    strategy = make(case, rank)
    return watched(strategy, steps(strategy, want_grad_norm=want_grad_norm))


def watched(strategy: Strategy, results: Iterable[StepResult]) -> Steps:
    kept = list(results)
    return Steps(
        loss_sums=[float(r.loss_sum) for r in kept],
        weights=[float(r.weight) for r in kept],
        norms=[None if r.grad_norm is None else float(r.grad_norm) for r in kept],
        skipped=[r.skipped for r in kept],
        metrics=[{name: float(value) for name, value in r.metrics.items()} for r in kept],
        model=snapshot(model_of(strategy)),
    )


def model_of(strategy: Strategy) -> nn.Module:
    """This rank's part of the model; a shard has none."""
    if isinstance(strategy, Shard):
        return nn.Module()
    if isinstance(strategy, Pipeline):
        return strategy.state_module()
    if isinstance(strategy, Worker):
        strategy.pull()
    assert isinstance(strategy, WholeModel)
    return strategy.model


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def piece(rank: int, case: Case, state: TrainState | None, stop: int) -> tuple[Steps, TrainState | None]:
    """Train from ``state``, which rank 0 alone looks at, to step ``stop``; what rank 0 would save."""
    strategy, done = make(case, rank), 0
    if state is not None:
        meta = strategy.restore(state if rank == 0 else None, source=0)
        assert meta["samples_consumed"] == meta["step"] * case.train.global_batch_size
        done = meta["step"]
    seen = watched(strategy, steps(strategy, first=done + 1, last=stop))
    return seen, strategy.capture(step=stop, samples_consumed=stop * case.train.global_batch_size, into=None)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def assert_same_state(a: TrainState, b: TrainState) -> None:
    assert_same(a.model, b.model)
    assert_same(a.optimizer, b.optimizer)
    assert a.meta == b.meta


def assignment(
    *,
    rank: int,
    world_size: int,
    generation: int,
    store_port: int,
    run_dir: str,
    case: Case | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int = 0,
    rendezvous_timeout_s: float = 20,
) -> Assignment:
    """Orders as the driver would give them, on this machine and with gloo."""
    case = case or Case(job=digits(), seed=0)
    config = config_of(
        case,
        world_size,
        output_dir=run_dir,
        checkpoint=schema.CheckpointConfig(every=checkpoint_every, keep=3),
        cluster=replace(CLUSTER, rendezvous_timeout_s=rendezvous_timeout_s),
    )
    return Assignment(
        generation=generation,
        global_rank=rank,
        local_rank=rank,
        store_host="127.0.0.1",
        store_port=store_port,
        backend="gloo",
        run_dir=run_dir,
        run_uid="test",
        environment=WorkerEnvironment(working_dir=run_dir, import_paths=(), config=config),
        plan=plan_of(config),
        checkpoint=checkpoint,
    )


def having(train: schema.TrainConfig = TRAIN, **changes: Any) -> schema.TrainConfig:
    return replace(train, **changes)


def digits(**fields: Any) -> Digits:
    return QuickDigits(**{"hidden": 24, **fields})


@cache
def _digits(split: Split) -> Images:
    dataset = Digits().dataset(split)
    assert isinstance(dataset, Images)
    return dataset


@dataclass(frozen=True, kw_only=True)
class QuickDigits(Digits):
    """Digits that each process reads once; ``val_size`` limits the validation set."""

    val_size: int | None = None

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, int]]:
        images = _digits(split)
        if split == "train" or self.val_size is None:
            return images
        return Rows(list(itertools.islice(images.items, self.val_size)))


@dataclass(frozen=True, kw_only=True)
class MeasuredDigits(QuickDigits):
    """Measures its training batches, once for each loss and without gradients."""

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        assert not output.requires_grad
        assert not torch.is_grad_enabled()
        large = target > 4
        return {**self.metrics(output, target), "large/share": large.sum(), "large/logit": output[large].sum()}


@dataclass(frozen=True, kw_only=True)
class AdamDigits(QuickDigits):
    lr: float = 2e-3

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class ScheduledDigits(QuickDigits):
    """The learning rate is halved every three steps."""

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=3, gamma=0.5)


@cache
def _windows(split: Split, context: int) -> Windows:
    dataset = GPT(context=context).dataset(split)
    assert isinstance(dataset, Windows)
    return dataset


@dataclass(frozen=True, kw_only=True)
class TinyGPT(GPT):
    layers: int = 1
    width: int = 16
    heads: int = 2
    context: int = 16
    warmup_steps: int = 5

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        return _windows(split, self.context)


class Rows(Dataset[Any]):
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@dataclass(frozen=True, kw_only=True)
class Toy(Job):
    """Ten numbers in, four classes out. A subclass changes one thing."""

    samples: int = 200
    lr: float = 0.1
    momentum: float = 0.9

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))

    def dataset(self, split: Split) -> Dataset[Any]:
        random = torch.Generator().manual_seed(17 if split == "train" else 18)
        inputs = torch.randn(self.samples, 10, generator=random)
        targets = inputs[:, :4].argmax(dim=-1)
        return Rows([self.item(i, x, int(y)) for i, (x, y) in enumerate(zip(inputs, targets, strict=True))])

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Any, Any]:
        return inputs, target

    def loss(self, output: Any, target: Any) -> Tensor:
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class Tokens(Toy):
    """Sequences of 12 tokens, of which each sample has its own number of valid ones.

    ``empty``: samples in every ten that have none at all.
    """

    empty: int = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20))

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, Tensor]:
        tokens = (inputs.repeat(2)[:13] * 3).long().abs() % 20
        valid = 0 if index % 10 < self.empty else 1 + (7 * index) % 12
        return tokens[:-1], torch.where(torch.arange(12) < valid, tokens[1:], -100)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)

    def weight(self, target: Tensor) -> Tensor:
        return (target != -100).sum()

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return self.metrics(output, target)


@dataclass(frozen=True, kw_only=True)
class Normed(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


@dataclass(frozen=True, kw_only=True)
class Dropped(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))


@dataclass(frozen=True, kw_only=True)
class Steep(Toy):
    """Its only gradient is 5e4, on every rank."""

    lr: float = 1e-9

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, float]:
        return torch.ones(1), 0.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 5e4 * output.mean()


@dataclass(frozen=True, kw_only=True)
class Wide(Toy):
    """Matrices large enough for PowerSGD to compress."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@dataclass(frozen=True, kw_only=True)
class Constant(Toy):
    """Gradients depend on the samples alone, so that what every step applies can be added up."""

    lr: float = 0.5
    momentum: float = 0.0

    def model(self) -> nn.Module:
        return nn.Linear(32, 32, bias=False)

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, Tensor]:
        return inputs.repeat(4)[:32].roll(target), inputs.square().repeat(4)[:32]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * target).sum(dim=-1).mean()


@dataclass(frozen=True, kw_only=True)
class Poisoned(Normed):
    """The samples numbered ``bad`` are NaN."""

    bad: tuple[int, ...] = ()

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, int]:
        return inputs * float("nan") if index in self.bad else inputs, target

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=1, gamma=0.9)


@dataclass(frozen=True, kw_only=True)
class Branched(Toy):
    """No Sequential: a value skips layers, one weight is used at both ends, another hangs in the root."""

    def model(self) -> nn.Module:
        return _Branched()


class _Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10, bias=False))
        self.last = nn.Linear(10, 16, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor) -> Tensor:
        mask = inputs[:, :1] > 0
        skipped = self.first(inputs)
        hidden = skipped
        for block in self.blocks:
            hidden = block(hidden).relu()
        hidden = self.last(self.deep(hidden)) * self.scale
        out: Tensor = self.head(hidden + skipped * mask)
        return out


@dataclass(frozen=True, kw_only=True)
class ConstantHeads(Constant):
    """``uses(rank, call)`` says whether the head named ``spare`` takes part in a forward pass."""

    uses: Callable[[int, int], bool]

    def model(self) -> nn.Module:
        return _ConstantHeads(self.uses)


class _ConstantHeads(nn.Module):
    def __init__(self, uses: Callable[[int, int], bool]):
        super().__init__()
        self.head = nn.Linear(32, 32, bias=False)
        self.spare = nn.Linear(32, 32, bias=False)
        self.uses = uses
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        out: Tensor = self.head(inputs)
        return out + self.spare(inputs) if self.uses(rank, self.calls) else out


@dataclass(frozen=True, kw_only=True)
class Cliff(Toy):
    """At the step ``at`` the gradient is NaN, and the loss is not."""

    at: int
    calls: list[int] = field(default_factory=lambda: [0])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().loss(output, target)
        self.calls[0] += torch.is_grad_enabled()
        return loss + (0 * output).sum().sqrt() if self.calls[0] == self.at else loss


@dataclass(frozen=True, kw_only=True)
class TwoHeads(Toy):
    """``uses(rank, call)`` says whether the head named ``spare`` takes part in a forward pass."""

    uses: Callable[[int, int], bool]

    def model(self) -> nn.Module:
        return _TwoHeads(self.uses)


class _TwoHeads(nn.Module):
    def __init__(self, uses: Callable[[int, int], bool]):
        super().__init__()
        self.body = nn.Linear(10, 16)
        self.head = nn.Linear(16, 4)
        self.spare = nn.Linear(16, 4)
        self.uses = uses
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.body(inputs).relu()
        out: Tensor = self.head(hidden)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return out + self.spare(hidden) if self.uses(rank, self.calls) else out
