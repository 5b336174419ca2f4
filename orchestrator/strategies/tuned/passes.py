"""What forward and backward passes, updates and batches cost: of the whole model, and of its layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job
from orchestrator.model.batch import tensors_in, to_device
from orchestrator.model.precision import Precision, gathered_share
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.constructor import Outline, constructor_of
from orchestrator.strategies.data.datasets import example_batch, is_stream, make_batch
from orchestrator.strategies.keys import DPConfig, mesh_config
from orchestrator.strategies.measure.device import LEAST_RUNS, mean_over, medians_ms
from orchestrator.strategies.parts.stage_builder import StageBuilder, recorded_call
from orchestrator.strategies.parts.wrapping import bytes_by_group
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.replicated.dp import DP
from orchestrator.strategies.trainer import Trainer
from orchestrator.tuning.profile import Affine, LayerProfile, PassCost, StageDivision, fit

NUM_SIZES = 5
"""The whole model is measured with this many sizes of batch: a worker's share, and each half of the one before."""
LONGEST_PASS_MS = 500.0
"""Batches larger than one for which a pass takes longer are not measured: their passes are in proportion."""
ADAM_BYTES = 2.0
"""The state of Adam for each byte of the parameters, for an optimizer that could not be tried."""
TOGETHER_S, MOST_TOGETHER = 0.8, 8
"""Steps that all ranks make together are repeated for about so long, but not more often."""
STEPS = 10**9
"""The steps of the learning-rate schedule, which no measurement reaches."""


def slice_rows(context: Context) -> int:
    """Return the samples in a slice of the global batch."""
    return max(1, context.train.global_batch_size // context.train.grad_accumulation)


def layer_rows(context: Context) -> int:
    """Return the samples with which layers are measured: as many as in a micro-batch of a pipeline over all ranks.

    One sample would be too few for BatchNorm.
    """
    return max(2, slice_rows(context) // (2 * context.mesh.world_size))


def data_cost(job: Job, train_set: Any, rows: int) -> Affine:
    """Measure reading and collating a batch of up to ``rows`` samples on this worker; the unit of size is a sample."""
    host = torch.device("cpu")
    sizes = sorted({rows, max(1, rows // 4)})
    return fit([(n, medians_ms([functools.partial(_batch, job, train_set, n)], host)[0]) for n in sizes])


def divisions(job: Job, train_set: Any, context: Context, stage_counts: Sequence[int]) -> tuple[StageDivision, ...]:
    """Divide the model for each number of stages, as a run does, and measure its layers one by one on this worker."""
    batch = to_device(example_batch(job, train_set, layer_rows(context)), context.device)
    measured: dict[tuple[str, ...], tuple[LayerProfile, ...]] = {}
    found = []
    for num_stages in stage_counts:
        try:
            builder = _outline(job, batch, context, num_stages)
            names = tuple(builder.sequence.names)
            if names not in measured:
                measured[names] = _layer_profiles(builder, layer_rows(context))
        except Exception as e:  # whatever the model raises, the other strategies can still train it
            found.append(StageDivision(num_stages=num_stages, layers=(), refused=f"{type(e).__name__}: {e}"))
            continue
        found.append(StageDivision(num_stages=num_stages, layers=measured[names], refused=""))
    return tuple(found)


def _outline(job: Job, batch: tuple[Any, Any], context: Context, num_stages: int) -> StageBuilder:
    precision = Precision.named(context.train.precision, context.device.type)
    inputs, target = batch
    return StageBuilder.outline(
        job,
        inputs,
        target,
        constructor=constructor_of(job, context.train, precision),
        split=(),
        num_stages=num_stages,
        device=context.device,
        seed=context.seed,
        precision=precision,
        call=recorded_call(job),
    )


def _layer_profiles(builder: StageBuilder, rows: int) -> tuple[LayerProfile, ...]:
    """Measure the layers; the batch of the builder has ``rows`` samples."""
    sequence = builder.sequence
    measured = zip(sequence.layers, sequence.modules, builder.measure_costs(), builder.values[1:], strict=True)
    return tuple(
        LayerProfile(
            name=layer.name,
            num_parameters=layer.num_parameters,
            trainable=layer.trainable,
            parameter_bytes=sum(p.nbytes for p in module.parameters()),
            forward_ms=cost.forward_ms,
            backward_ms=cost.backward_ms,
            activation_bytes=cost.activation_bytes / rows,
            output_bytes=sum(t.nbytes for t in tensors_in(output)) / rows,
            cast_bytes=cost.cast_bytes,
        )
        for layer, module, cost, output in measured
    )


@dataclass(frozen=True, kw_only=True)
class WholeModelCost:
    """Training steps of the whole model.

    Attributes:
        bytes_by_group: the parameters that are gathered together where tensors are divided.
        gathered_share: the part of these bytes that is gathered.
        gradient_bytes: the size of the gradients of a batch, which counts for sparse gradients.
        optimizer_bytes: the state of the optimizer for each byte of the parameters.
    """

    passes: tuple[PassCost, ...]
    parameter_bytes: int
    bytes_by_group: tuple[int, ...]
    gathered_share: float
    gradient_bytes: int
    optimizer_bytes: float


def whole_model_cost(
    job: Job,
    train_set: Any,
    context: Context,
    counts: Sequence[int],
    *,
    control: dist.ProcessGroup | None,
    free_bytes: float,
    activation_bytes: float,
    cast_bytes: int,
    with_servers: bool,
) -> WholeModelCost:
    """Measure training steps as ``single`` makes them, on one worker and on several at once. Collective.

    Args:
        context: the place of this rank.
        counts: numbers of workers. Those that take no part leave their threads to the others.
        control: a group of all ranks, on the hosts; None with one worker.
        free_bytes: the memory that is free for the model of this worker.
        activation_bytes: what a sample keeps in memory until the backward pass; 0 if that is unknown.
        cast_bytes: the copies of the parameters that autocast makes for a pass; 0 if that is unknown.
        with_servers: whether to measure workers that leave threads to a parameter server, too.

    Returns:
        The costs; without passes if the model does not fit in the memory of some worker.
    """
    world_size, device, largest = context.mesh.world_size, context.device, slice_rows(context)
    precision = Precision.named(context.train.precision, device.type)
    outline = Outline(job, context.train).model
    groups = () if outline is None else tuple(bytes_by_group(outline, "auto"))
    share = 1.0 if outline is None else gathered_share(outline, precision.autocast_dtype)
    parameters = [] if outline is None else list(outline.parameters())
    parameter_bytes = sum(p.nbytes for p in parameters)
    needed = parameter_bytes * (2 + ADAM_BYTES) + cast_bytes + activation_bytes * largest
    if mean_over(world_size, float(needed > free_bytes), control):
        trained_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
        return WholeModelCost(
            passes=(),
            parameter_bytes=parameter_bytes,
            bytes_by_group=groups or (parameter_bytes,),
            gathered_share=share,
            gradient_bytes=trained_bytes,
            optimizer_bytes=ADAM_BYTES,
        )
    train = dataclasses.replace(context.train, grad_accumulation=1, steps=STEPS)
    alone = dataclasses.replace(context, mesh=Mesh(), global_rank=0, train=train, options=mesh_config("single"))
    strategy = Trainer(alone, job)
    _prepare(strategy, train_set)
    sizes = sorted({max(1, math.ceil(largest / 2**i)) for i in range(NUM_SIZES)})
    batches = {rows: _batch(job, train_set, rows) for rows in sizes}

    def step(rows: int) -> None:
        strategy.train_step([batches[rows]], want_grad_norm=False, want_metrics=False)

    optimizer = strategy.trained.optimizer
    costs: list[PassCost] = []
    own_threads = torch.get_num_threads()
    for threads, busy in _arrangements(counts, world_size, own_threads, with_servers=with_servers):
        torch.set_num_threads(threads)
        for rows in sizes:
            of_size = dataclasses.replace(train, global_batch_size=rows)
            strategy.reassign(dataclasses.replace(alone, train=of_size))
            mean_over(world_size, 0.0, control)  # a barrier
            step_ms = update_ms = 0.0
            if context.global_rank < busy:
                try:
                    step_ms, update_ms = medians_ms([functools.partial(step, rows), optimizer.step], device)
                except Exception:
                    if rows == sizes[-1]:
                        raise
                    step_ms = math.nan  # the batch may be too small for the model, as one sample is for BatchNorm
            step_ms, update_ms = mean_over(busy, step_ms, control), mean_over(busy, update_ms, control)
            if math.isnan(step_ms):
                continue
            pass_ms = max(0.0, step_ms - update_ms)
            costs.append(PassCost(threads=threads, busy=busy, rows=rows, pass_ms=pass_ms, update_ms=update_ms))
            if pass_ms > LONGEST_PASS_MS and rows > sizes[0]:
                break
    torch.set_num_threads(own_threads)
    gradients = [p.grad for p in strategy.trained.parameters if p.grad is not None]
    parameter_bytes = sum(p.nbytes for p in strategy.trained.module().parameters())
    state = [t for of_one in optimizer.state.values() for t in of_one.values() if isinstance(t, Tensor)]
    return WholeModelCost(
        passes=tuple(costs),
        parameter_bytes=parameter_bytes,
        bytes_by_group=groups or (parameter_bytes,),
        gathered_share=share,
        gradient_bytes=sum(map(_bytes_of, gradients)),
        optimizer_bytes=sum(t.nbytes for t in state) / max(1, parameter_bytes),
    )


def devices_ms(job: Job, train_set: Any, context: Context, control: dist.ProcessGroup) -> float | None:
    """Measure a step of ``dp`` over a slice of the batch, on the first worker with the threads of all. Collective.

    Returns:
        Milliseconds; None on GPUs, of which a worker sees one, and if ``dp`` cannot train this job.
    """
    if context.device.type != "cpu":
        return None
    step_ms, n = 0.0, context.mesh.world_size
    if context.global_rank == 0:
        options = DPConfig(name="dp", num_workers=n, loss_on="device0", verbose=False)
        on_devices = _over_slice(context, mesh=Mesh(), options=options, num_devices=n)
        step_ms = _step_ms(DP(on_devices, job), train_set, slice_rows(context))
    step_ms = mean_over(1, step_ms, control)
    return None if math.isnan(step_ms) else step_ms


def together_ms(
    strategy_class: type[Trainer],
    options: StrategyConfig,
    mesh: Mesh,
    job: Job,
    train_set: Any,
    context: Context,
    control: dist.ProcessGroup,
    *,
    expected_ms: float,
) -> float | None:
    """Measure a step that all ranks make together, over a slice of the batch. Collective.

    Args:
        strategy_class: a strategy in which every rank reads as many samples.
        mesh: all ranks.
        context: the place of this rank.
        control: a group of all ranks, on the hosts.
        expected_ms: about how long the step takes, the same on all ranks: long ones are repeated less often.

    Returns:
        Milliseconds; None if the strategy cannot train this job.
    """
    n = context.mesh.world_size
    runs = min(MOST_TOGETHER, max(LEAST_RUNS, round(1e3 * TOGETHER_S / max(1.0, expected_ms))))
    strategy = strategy_class(_over_slice(context, mesh=mesh, options=options), job)
    step_ms = mean_over(n, _step_ms(strategy, train_set, max(1, slice_rows(context) // n), runs=runs), control)
    return None if math.isnan(step_ms) else step_ms


def _over_slice(context: Context, **changes: Any) -> Context:
    """Return the context of a strategy whose steps are over a slice of the batch."""
    rows = slice_rows(context)
    train = dataclasses.replace(context.train, grad_accumulation=1, global_batch_size=rows, steps=STEPS)
    return dataclasses.replace(context, train=train, **changes)


def _step_ms(strategy: Trainer, train_set: Any, rows: int, *, runs: int | None = None) -> float:
    """Return the time of a step over ``rows`` samples on this rank; NaN if the strategy cannot train its job."""
    try:
        _prepare(strategy, train_set)
        batches = [_batch(strategy.job, train_set, rows)]
        step = functools.partial(strategy.train_step, batches, want_grad_norm=False, want_metrics=False)
        (step_ms,) = medians_ms([step], strategy.context.device, runs=runs)
    except Exception:  # whatever the model raises, other strategies can still train it
        return math.nan
    finally:
        strategy.close()
    return step_ms


def _prepare(strategy: Trainer, train_set: Any) -> None:
    """Build the model, and let updates change nothing: weights that fit the batch would have denormal gradients, which
    compute slowly.
    """
    strategy.setup(train_set)
    strategy.attach()
    strategy.trained.scheduler = None
    for group in strategy.trained.optimizer.param_groups:
        group["lr"] = 0.0


def _arrangements(
    counts: Sequence[int], world_size: int, own_threads: int, *, with_servers: bool
) -> list[tuple[int, int]]:
    """Return pairs of threads and of workers that are busy at once: for each count, one worker and all of them."""
    threads = {n: own_threads * (world_size // n) for n in counts}
    found = {(threads[n], busy) for n in counts for busy in (1, n)}
    if with_servers:
        found |= {(max(1, own_threads * world_size // (n + 1)), n) for n in counts if n > 1}
    return sorted(found)


def _batch(job: Job, train_set: Any, rows: int) -> Any:
    """Return a batch of the first ``rows`` samples of the training set, repeated if it has fewer."""
    if is_stream(train_set):
        items = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(train_set)), rows))
    else:
        items = [train_set[i % len(train_set)] for i in range(rows)]
    return make_batch(job.collate, items)


def _bytes_of(gradient: Tensor) -> int:
    if not gradient.is_sparse:
        return gradient.nbytes
    gradient = gradient.coalesce()
    return gradient.indices().nbytes + gradient.values().nbytes
