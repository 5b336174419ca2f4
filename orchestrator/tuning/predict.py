"""The step time and the memory of a plan, predicted from a profile. Pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.model.stages.cut import balance
from orchestrator.planning.memory import WorkerMemory, gathered_bytes
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.prediction.cost import Step, sent_bytes
from orchestrator.prediction.work import ModelWork
from orchestrator.timeline import Action, busy_s, extent_s, simulate
from orchestrator.tuning.profile import MIB, LayerProfile, Profile

BUCKET_BYTES = 25 * MIB
"""Gradients are exchanged in messages of this size."""
SUMS_OF_LAYER = 4
"""How often workers that divide a layer sum what it passes on, and the gradients of what it receives."""
BACKWARD_SHARE = 2 / 3
"""The part of a pass of which the exchange of gradients on GPUs can take place at the same time."""

Orders = Callable[[PipelineLayout], Sequence[Sequence[Action]]]
"""Returns what each worker of a pipeline computes in a step, in order."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of the slowest worker, by its parts, and the memory of the worker that needs most.

    Attributes:
        compute_ms: forward and backward passes, and the update.
        exchange_ms: gradients, parameters and what workers divide of a sample, exchanged while nothing is computed.
        idle_ms: waiting for other stages.
        input_ms: reading the batch, and the training loop.
        memory_bytes: parameters, gradients, optimizer state and activations.
    """

    compute_ms: float
    exchange_ms: float
    idle_ms: float
    input_ms: float
    memory_bytes: float

    @property
    def step_ms(self) -> float:
        """The time of a step, in milliseconds."""
        return self.compute_ms + self.exchange_ms + self.idle_ms + self.input_ms


@dataclass(frozen=True, kw_only=True)
class DividedSamples:
    """A layout whose workers compute a sample together: the work of the model, and what a worker does and has."""

    work: ModelWork
    step: Step
    memory: WorkerMemory


def predict(profile: Profile, plan: Plan, orders: Orders, divided: DividedSamples | None = None) -> Prediction:
    """Predict a step of ``plan``, which is one of a synchronous strategy.

    Args:
        profile: the measurements of the job.
        plan: the layout of the run.
        orders: the schedules, for a plan with a pipeline.
        divided: for a plan whose workers divide layers or tokens.
    """
    if divided is not None:
        return _within_samples(profile, plan, divided)
    if plan.pipeline is not None:
        return _pipeline(profile, plan, plan.pipeline, orders(plan.pipeline))
    if plan.mesh.num_servers:
        return _servers(profile, plan)
    if plan.mesh.shard > 1:
        return _parts(profile, plan)
    return _devices(profile, plan) if plan.devices_per_worker > 1 else _replicas(profile, plan)


def step_of_replicas_ms(profile: Profile, workers: int, *, rows: float, threads: int) -> float:
    """Return the time of a step of ``ddp`` over one slice, as the sum of its passes, its transfer and its update.

    Args:
        profile: the measurements of the job.
        workers: how many replicas there are.
        rows: the samples of each of them.
        threads: the threads of each of them.
    """
    pass_ms = profile.pass_ms(rows, threads=threads, busy=workers)
    update_ms = profile.update_ms(threads=threads, busy=workers)
    return pass_ms + _replicas_transfer_ms(profile, workers, pass_ms) + update_ms


def step_in_parts_ms(profile: Profile, workers: int, *, rows: float, threads: int) -> float:
    """Return the same of ``fsdp`` on ``workers`` that divide the model; see :func:`step_of_replicas_ms`."""
    pass_ms = profile.pass_ms(rows, threads=threads, busy=workers)
    update_ms = profile.update_ms(threads=threads, busy=workers) / workers
    return pass_ms + _slice_transfer_ms(profile, workers, pass_ms) + update_ms


def memory_error(profile: Profile, plan: Plan, prediction: Prediction, *, num_nodes: int) -> str | None:
    """Return why the plan does not fit in memory; None if it does. On a CPU, the workers of a node share its memory.

    What is free was measured. Where the plan knows of less, as in a container with a limit, there is less.
    """
    sharing = math.ceil(plan.world_size / num_nodes) if profile.device == "cpu" else 1
    needed = prediction.memory_bytes * sharing
    free = min(profile.free_bytes, plan.memory.of_each(num_nodes) or math.inf)
    if needed <= free:
        return None
    where = f"the {sharing} workers of a node need" if sharing > 1 else "a worker needs"
    return f"{where} {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def _replicas(profile: Profile, plan: Plan) -> Prediction:
    """``single`` and ``ddp``."""
    n, threads, slices = plan.world_size, plan.threads_per_worker, plan.grad_accumulation
    share = plan.workers[0].samples_per_step
    rows = share / slices
    pass_ms = profile.pass_ms(rows, threads=threads, busy=n)
    exchange_ms = max(0.0, _replicas_transfer_ms(profile, n, pass_ms) + profile.ddp_ms) if n > 1 else 0.0
    return Prediction(
        compute_ms=slices * pass_ms + profile.update_ms(threads=threads, busy=n),
        exchange_ms=exchange_ms,
        idle_ms=0.0,
        input_ms=profile.loop_ms + profile.data.at(share),
        memory_bytes=_state_bytes(profile, profile.parameter_bytes)
        + profile.cast_bytes
        + profile.activation_bytes * rows,
    )


def _parts(profile: Profile, plan: Plan) -> Prediction:
    """``fsdp`` and ``hsdp``: each slice gathers all groups for both passes, the rest once, and sums the gradients."""
    n, shards, replicas = plan.world_size, plan.mesh.shard, plan.mesh.replicate
    threads, slices = plan.threads_per_worker, plan.grad_accumulation
    share = plan.workers[0].samples_per_step
    rows = share / slices
    pass_ms = profile.pass_ms(rows, threads=threads, busy=n)
    transfer_ms = max(0.0, _slice_transfer_ms(profile, shards, pass_ms) + profile.parts_ms)
    replicas_ms = profile.group(replicas).all_reduce.overhead_ms if replicas > 1 else 0.0
    if replicas > 1:
        replicas_ms += _transfer_ms(profile, replicas, profile.gradient_bytes / shards)
    return Prediction(
        compute_ms=slices * pass_ms + profile.update_ms(threads=threads, busy=n) / shards,
        exchange_ms=slices * transfer_ms + replicas_ms,
        idle_ms=0.0,
        input_ms=profile.loop_ms + profile.data.at(share),
        memory_bytes=_state_bytes(profile, profile.parameter_bytes / shards)
        + gathered_bytes(profile.bytes_by_group, keep_whole=False, share=profile.gathered_share)
        + profile.activation_bytes * rows,
    )


def _within_samples(profile: Profile, plan: Plan, divided: DividedSamples) -> Prediction:
    """``mesh`` with ``tensor`` or ``context``: each pass over its share of the samples, and what it exchanges then."""
    step, n, threads = divided.step, plan.world_size, plan.threads_per_worker
    pass_ms = profile.pass_ms(step.rows / step.mesh.workers_per_sample, threads=threads, busy=n)
    part = divided.memory.parameters * step.shards / max(1, profile.parameter_bytes)
    own = dataclasses.replace(
        profile,
        gradient_bytes=round(part * profile.gradient_bytes),
        bytes_by_group=tuple(round(part * size) for size in profile.bytes_by_group),
    )
    exchange_ms = step.passes * _in_layers_ms(profile, divided.work, step)
    if step.gathers:
        exchange_ms += step.passes * max(0.0, _slice_transfer_ms(own, step.shards, pass_ms) + profile.parts_ms)
    if step.copies > 1:
        sums_ms = _replicas_transfer_ms(own, step.copies, pass_ms) / step.shards
        exchange_ms += sums_ms if step.gathers else max(0.0, sums_ms + profile.ddp_ms)
    samples = step.rows * step.passes
    return Prediction(
        compute_ms=step.passes * pass_ms + part * profile.update_ms(threads=threads, busy=n) / step.shards,
        exchange_ms=exchange_ms,
        idle_ms=0.0,
        input_ms=profile.loop_ms + profile.data.at(samples),
        memory_bytes=divided.memory.total,
    )


def _in_layers_ms(profile: Profile, work: ModelWork, step: Step) -> float:
    """Return the time of what workers exchange in the layers of a pass, of which nothing is hidden."""
    tensor, context = step.mesh.tensor, step.mesh.context
    found = 0.0
    if tensor > 1:
        sums = profile.group(tensor).all_reduce
        of_layer = sent_bytes(work, step).tensor * tensor / (2 * (tensor - 1))
        of_ends = 2 * step.rows / context * work.layer.output_bytes * step.divides_ends
        found += sums.ms_per_unit * (work.layers * of_layer + of_ends) / MIB
        found += sums.overhead_ms * (SUMS_OF_LAYER * work.layers + 2 * step.divides_ends)
    if context > 1:
        group, keys = profile.group(context), step.rows * work.layer.key_bytes / 2 / tensor / MIB
        found += 2 * work.layers * (group.all_gather.at(keys) + group.reduce_scatter.at(keys))
    return found


def _devices(profile: Profile, plan: Plan) -> Prediction:
    """``dp``: as it was measured on a CPU; on GPUs, replicas at once, and copies of the parameters and gradients."""
    n, threads, slices = plan.devices_per_worker, plan.threads_per_worker, plan.grad_accumulation
    rows = plan.global_batch_size / slices
    update_ms = profile.update_ms(threads=threads, busy=1)
    pass_ms, copies_ms = profile.pass_ms(rows / n, threads=threads, busy=n), 0.0
    if profile.devices_ms is not None:
        pass_ms = max(0.0, profile.devices_ms - update_ms)
    else:
        copies_ms = 2 * profile.message.at(profile.parameter_bytes / MIB)
    replicas = n if profile.device == "cpu" else 1
    return Prediction(
        compute_ms=slices * pass_ms + update_ms,
        exchange_ms=slices * copies_ms,
        idle_ms=0.0,
        input_ms=profile.loop_ms + profile.data.at(plan.global_batch_size),
        memory_bytes=_state_bytes(profile, profile.parameter_bytes)
        + (profile.cast_bytes + profile.activation_bytes * math.ceil(rows / n)) * replicas,
    )


def _servers(profile: Profile, plan: Plan) -> Prediction:
    """``parameter_server``: servers wait for the gradients of all workers, update, and send the parameters."""
    n, servers = plan.mesh.num_workers, plan.mesh.num_servers
    threads, slices = plan.threads_per_worker, plan.grad_accumulation
    share = plan.workers[0].samples_per_step
    rows = share / slices
    received_bytes = n * profile.gradient_bytes / servers
    update_ms = profile.update_ms(threads=threads, busy=servers) / servers
    of_pass_bytes = profile.cast_bytes + profile.activation_bytes * rows
    worker_bytes = 2 * profile.parameter_bytes + profile.gradient_bytes + of_pass_bytes
    server_bytes = _state_bytes(profile, profile.parameter_bytes / servers) + received_bytes
    return Prediction(
        compute_ms=slices * profile.pass_ms(rows, threads=threads, busy=n) + update_ms,
        exchange_ms=profile.server.at(received_bytes / MIB),
        idle_ms=0.0,
        input_ms=profile.loop_ms + profile.data.at(share),
        memory_bytes=max(worker_bytes, server_bytes),
    )


def _pipeline(profile: Profile, plan: Plan, layout: PipelineLayout, orders: Sequence[Sequence[Action]]) -> Prediction:
    """``model_parallel`` and all pipelines: a replay of the schedule in the times of the stages."""
    stages, threads, rows = _stages(profile, layout.num_stages), plan.threads_per_worker, plan.microbatch_rows
    alone_ms = profile.pass_ms(rows, threads=threads, busy=1)
    scale = max(0.0, alone_ms - profile.base_ms) / math.fsum(layer.total_ms for layers in stages for layer in layers)
    replicas, shards = plan.mesh.data_parallel_size, plan.mesh.shard
    own = profile.interleaved if layout.num_stages > plan.mesh.pipeline else profile.pipeline

    def duration_of(action: Action) -> float:
        kind, stage, _ = action
        measured_ms = math.fsum(layer.forward_ms if kind == "F" else layer.backward_ms for layer in stages[stage])
        return own.ms_per_unit + scale * measured_ms * (0.5 if kind in "IW" else 1.0)

    def delay_of(stage: int) -> float:
        return profile.message.at(rows * stages[stage][-1].output_bytes / MIB) - profile.message.overhead_ms

    def slowdown(busy: int) -> float:
        at_once = busy * replicas
        return max(1.0, profile.pass_ms(rows, threads=threads, busy=at_once) / alone_ms) if alone_ms else 1.0

    spans = simulate(orders, duration_of=duration_of, delay_of=delay_of, slowdown=slowdown)
    slices, schedule_ms = plan.grad_accumulation, extent_s(spans)
    compute_ms = max(busy_s(worker) for worker in spans)
    of_rank = [
        [layer for stage in layout.stages_of(rank) for layer in stages[stage]] for rank in range(plan.mesh.pipeline)
    ]
    largest_bytes = max(sum(layer.parameter_bytes for layer in layers) for layers in of_rank)
    part = largest_bytes / max(1, profile.parameter_bytes)
    exchange_ms = 0.0
    if shards > 1:  # once in a step, because what is gathered and the gradients stay whole during it
        gathered_ms = _gathering_ms(profile, shards) + _sums_ms(profile, shards)
        exchange_ms = part * max(0.0, gathered_ms + profile.parts_ms)
    elif replicas > 1:
        exchange_ms = profile.group(replicas).all_reduce.overhead_ms + _transfer_ms(
            profile, replicas, part * profile.gradient_bytes
        )
    update_ms = part * profile.update_ms(threads=threads, busy=plan.world_size) / shards

    def state_bytes(parameter_bytes: float) -> float:
        if shards == 1:
            return _state_bytes(profile, parameter_bytes)
        return parameter_bytes * (profile.gathered_share + 1 + (1 + profile.optimizer_bytes) / shards)

    return Prediction(
        compute_ms=slices * compute_ms + update_ms,
        exchange_ms=exchange_ms,
        idle_ms=slices * (schedule_ms - compute_ms),
        input_ms=profile.loop_ms + own.overhead_ms + profile.data.at(plan.global_batch_size / replicas),
        memory_bytes=max(
            state_bytes(sum(layer.parameter_bytes for layer in layers))
            + _held_bytes(stages, order, lambda layer: (shards == 1) * layer.cast_bytes + layer.activation_bytes * rows)
            for layers, order in zip(of_rank, orders, strict=True)
        ),
    )


def _stages(profile: Profile, num_stages: int) -> list[Sequence[LayerProfile]]:
    """Return the layers of each stage, cut as a run does it."""
    layers = profile.division(num_stages).layers
    cut = balance([layer.layer for layer in layers], [layer.total_ms for layer in layers], num_stages)
    return [[layers[i] for i in cut.layers_of(stage, len(layers))] for stage in range(num_stages)]


def _held_bytes(
    stages: Sequence[Sequence[LayerProfile]], order: Iterable[Action], of_pass: Callable[[LayerProfile], float]
) -> float:
    """Return the most that a worker holds of passes of micro-batches, each of which keeps ``of_pass`` of a layer."""
    held: Counter[int] = Counter()
    largest = 0.0
    for kind, stage, _ in order:
        held[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        now = math.fsum(held[s] * sum(map(of_pass, stages[s])) for s in held)
        largest = max(largest, now)
    return largest


def _transfer_ms(profile: Profile, workers: int, num_bytes: float) -> float:
    """Return the time to sum gradients over ``workers``; the first message has no overhead here."""
    cost = profile.group(workers).all_reduce
    messages = max(1, math.ceil(num_bytes / BUCKET_BYTES))
    return cost.ms_per_unit * num_bytes / MIB + cost.overhead_ms * (messages - 1)


def _replicas_transfer_ms(profile: Profile, workers: int, pass_ms: float) -> float:
    """Return the time that a step waits for the sum of the gradients: on GPUs, what the backward pass does not hide."""
    transfer_ms = _transfer_ms(profile, workers, profile.gradient_bytes)
    return max(0.0, transfer_ms - BACKWARD_SHARE * pass_ms) if profile.device == "cuda" else transfer_ms


def _gathering_ms(profile: Profile, workers: int, *, last: int | None = None) -> float:
    """Return the time to gather the groups of parameters up to ``last``, one by one; None for all."""
    cost = profile.group(workers).all_gather
    return math.fsum(cost.at(profile.gathered_share * size / MIB) for size in profile.bytes_by_group[:last])


def _slice_transfer_ms(profile: Profile, workers: int, pass_ms: float) -> float:
    """Return the time that a slice waits for shards: on GPUs, what its passes do not hide."""
    in_all_ms = _gathering_ms(profile, workers) + _gathering_ms(profile, workers, last=-1) + _sums_ms(profile, workers)
    return max(0.0, in_all_ms - pass_ms) if profile.device == "cuda" else in_all_ms


def _sums_ms(profile: Profile, workers: int) -> float:
    """Return the time to sum the gradients of all groups into the shards, one by one."""
    cost = profile.group(workers).reduce_scatter
    trained = min(1.0, profile.gradient_bytes / max(1, profile.parameter_bytes))
    return math.fsum(cost.at(trained * size / MIB) for size in profile.bytes_by_group)


def _state_bytes(profile: Profile, parameter_bytes: float) -> float:
    """Return the memory of parameters, their gradients and the state of the optimizer."""
    return parameter_bytes * (2 + profile.optimizer_bytes)
