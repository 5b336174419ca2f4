"""A bare training loop, to run a case on a rank, and comparisons of what it trained."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.ranks.batches import HERE, opened
from helpers.ranks.gang import own_device
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job
from orchestrator.model.stages.own_stages import module_of
from orchestrator.planning.mesh import DIVIDING, Mesh
from orchestrator.planning.placement import Box
from orchestrator.state.checkpoint import load
from orchestrator.state.checkpoint_uploader import Written
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.part_writers import Writers
from orchestrator.state.train_state import TrainState
from orchestrator.strategies import registry
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.owner import Shards
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.trainer import Trainer
from orchestrator.user_code.callbacks import set_current_step
from orchestrator.worker.control.rendezvous import seed_step
from orchestrator.worker.data.batches import Sampling, Share, checked_weights, train_batches
from orchestrator.worker.data.opened import Datasets, batches_of

CPU = torch.device("cpu")
made: list[Strategy] = []
"""To be closed before the process group ends, as the training loop does."""


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


def built(
    job: Job, options: StrategyConfig, *, accumulation: int = 1, replicas: int = 2, devices: int = 1, rank: int = 0
) -> Trainer:
    """The strategy on this rank, set up without a process group."""
    context = Context(
        mesh=Mesh(shard=replicas) if options.name == "fsdp" else Mesh(replicate=replicas),
        global_rank=rank,
        device=torch.device("cpu"),
        seed=3,
        train=having(global_batch_size=16, grad_accumulation=accumulation),
        options=options,
        collective_timeout_s=1,
        num_devices=devices,
    )
    strategy = registry.load(options.name).create(context, job)
    assert isinstance(strategy, Trainer)
    strategy.setup(job.dataset("train"))
    return strategy


def make(case: Case, rank: int, *, peer_copy_every: int = 0, refused_by_one: bool = False) -> Strategy:
    """The strategy of ``case`` on this rank of the default group, set up.

    Args:
        case: the job and how it is trained.
        rank: the rank of this process.
        peer_copy_every: the steps between copies in the memory of a neighbour.
        refused_by_one: whether a rank may refuse what others would go on with; then all end, as the driver ends them.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = config_of(case, world_size)
    plan = plan_of(config)
    context = Context(
        mesh=plan.mesh,
        global_rank=rank,
        device=own_device(),
        seed=case.seed,
        train=case.train,
        options=config.strategy,
        collective_timeout_s=config.cluster.collective_timeout_s,
        pipeline=plan.pipeline,
        num_devices=plan.devices_per_worker,
        peer_copy_every=peer_copy_every,
    )
    strategy = registry.load(config.strategy.name).create(context, case.job)
    made.append(strategy)
    error: Exception | None = None
    try:
        strategy.setup(case.job.dataset("train"))
    except Exception as e:
        error = e
    failed = [error is not None]
    if refused_by_one and world_size > 1:
        failed *= world_size
        dist.all_gather_object(failed, error is not None)
    if error is not None:
        raise error
    if any(failed):
        raise ConnectionError("another rank has refused")
    strategy.attach()
    strategy.sync_initial_state()
    if case.train.check == "always":
        set_current_step(1)
        strategy.compare_with_whole(case.job.dataset("train"), known=lambda model: False, is_cut=lambda: False)
    return strategy


def close_strategies() -> None:
    while made:
        made.pop().close()


def steps(
    strategy: Strategy, *, first: int = 1, last: int | None = None, want_grad_norm: bool = False, log_every: int = 1
) -> Iterator[StepResult]:
    """Train from step ``first`` to ``last``, with the data and seeds that the training loop gives."""
    context = strategy.context
    train, mesh = context.train, context.mesh
    last = train.steps if last is None else last
    share = Share(
        global_batch_size=train.global_batch_size,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=context.dp_rank,
        grad_accumulation=train.grad_accumulation,
    )
    batches = batches_in(strategy.job, context.seed, share, range(first, last + 1), read=strategy.traits.reads_data)
    for step, batch in zip(range(first, last + 1), batches, strict=True):
        set_current_step(step)
        seed_step(context.seed, step, context.mesh.seed_rank(context.global_rank))
        yield strategy.train_step(batch, want_grad_norm=want_grad_norm, want_metrics=step % log_every == 0)


def batches_in(job: Job, seed: int, share: Share, steps: range, *, read: bool = True) -> Iterator[Any]:
    """The micro-batches of each of the ``steps``, as the training loop reads them."""
    dataset, samples_consumed = job.dataset("train"), (steps.start - 1) * share.global_batch_size
    weights = checked_weights(job.sample_weights("train"), dataset)
    batches = batches_of(job, Datasets(train=dataset, evaluated={}, weights=weights), share.global_batch_size)
    return train_batches(
        opened(dataset, samples_consumed),
        Sampling(seed=seed, weights=weights, batches=batches),
        share,
        replace(HERE, collate=job.collate),
        samples_consumed=samples_consumed,
        steps=len(steps),
        read=read,
    )


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
    """This rank's part of the model; a server has none."""
    if not isinstance(strategy, Trainer):
        return nn.Module()
    if (pull := getattr(strategy, "pull", None)) is not None:
        pull()
    if isinstance(strategy, MeshTrainer) and isinstance(strategy.owner, Shards) and strategy.context.mesh.tensor == 1:
        return strategy.part.module()
    is_divided = strategy.context.mesh.divides_tensors
    return module_of(gathered(strategy)) if is_divided else strategy.trained.module()


def gathered(strategy: Trainer) -> dict[str, Tensor]:
    """The tensors of this rank's replica. Not by torch, which may remember a mesh of the test before."""
    own, context, boxes = strategy.trained.module().state_dict(), strategy.context, strategy.trained.boxes
    ranks: list[tuple[dict[str, Tensor], Mapping[str, Box]]] = [({}, {})] * context.mesh.world_size
    dist.all_gather_object(ranks, (own, boxes))
    whole = {n: torch.empty(boxes[n].full, dtype=t.dtype) if n in boxes else t for n, t in own.items()}
    for rank in context.mesh.group(DIVIDING, context.global_rank):
        parts, places = ranks[rank]
        for name in parts.keys() & places.keys():
            whole[name][places[name].slices_in(Box.whole(places[name].full))] = parts[name]
    return whole


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
    with strategy.quiesced():
        return seen, strategy.capture(step=stop, samples_consumed=stop * case.train.global_batch_size, into=None)


def default_store() -> dist.Store | None:
    """The store by which the ranks of the default group have met; None without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def saved_piece(rank: int, case: Case, stop: int, root: Path) -> tuple[Steps, TrainState | None]:
    """Train from the first step to step ``stop`` and save a checkpoint in ``root``, as the ranks of a run do; what rank
    0 would save alone."""
    strategy = make(case, rank)
    seen = watched(strategy, steps(strategy, last=stop))
    position = {"step": stop, "samples_consumed": stop * case.train.global_batch_size}
    own = strategy.capture(part=True, **position, into=None)
    if own is not None:
        jointly = None
        if len(strategy.saved.writers) > 1:
            store = default_store()
            assert store is not None
            jointly = Writers(
                store=store,
                ranks=strategy.saved.writers,
                rank=rank,
                names=strategy.saved.names,
                stall_timeout_s=20,
                lost_timeout_s=20,
                ended=threading.Event(),
            ).joint_save("checkpoint")
        writer = CheckpointWriter(root, keep=1, run_uid="r")
        assert writer.submit(own, jointly=jointly) is None
        assert writer.close(30) is None
        assert [type(result) for result in writer.results()] == ([Written] if rank == 0 else [])
    return seen, strategy.capture(**position, into=None)


def restored(rank: int, case: Case, checkpoints: dict[str, Path]) -> dict[str, list[str]]:
    """Load each of the checkpoints in turn; on rank 0, what differs in the state that it would save then."""
    strategy, found = make(case, rank), {}
    for name, path in checkpoints.items():
        state = load(path)
        if len(strategy.saved.writers) > 1:
            meta = strategy.restore(state, source=None)
        else:
            meta = strategy.restore(state if rank == 0 else None, source=0)
        again = strategy.capture(step=meta["step"], samples_consumed=meta["samples_consumed"], into=None)
        if again is not None:
            found[name] = differences(again, load(path))
    return found


def differences(a: TrainState, b: TrainState) -> list[str]:
    """The names of the tensors that are not equal bit for bit, and of the entries of ``meta`` that differ."""
    pairs = ((a.model, b.model), (a.optimizer, b.optimizer))
    unequal = [n for x, y in pairs for n in {*x, *y} if n not in x or n not in y or not torch.equal(x[n], y[n])]
    return unequal + [key for key in {*a.meta, *b.meta} if a.meta.get(key) != b.meta.get(key)]


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def assert_same_state(a: TrainState, b: TrainState) -> None:
    assert_same(a.model, b.model)
    assert_same(a.optimizer, b.optimizer)
    assert a.meta == b.meta
