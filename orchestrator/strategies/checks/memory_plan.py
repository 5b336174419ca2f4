"""The memory that a run will take on each worker, computed on the driver from a model without memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.attention import FusedAttention
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors
from orchestrator.model.repeated_blocks import Block, blocks_of
from orchestrator.model.stages.layers import Kept, kept_tensors
from orchestrator.planning.memory import (
    Division,
    HostMemory,
    ParameterSize,
    WorkerMemory,
    fewest_parts,
    size_text,
    worker_memory,
)
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.checks.optimizer_memory import NO_STATE, state_sizes
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch, opened_dataset
from orchestrator.strategies.peer_copies import KEPT

_ALL_AT_ONCE = ("GPipe", "LoopedBFS")
"""The schedules that make the forward passes of all micro-batches before a backward pass."""
UNKNOWN_STATE = "the optimizer cannot be tried with tensors without values, so its state is not counted in the memory"
_ROWS = (2, 4)
"""The numbers of samples with which passes are tried: what they keep grows with the samples by the difference."""


def memory_notes(
    config: Config, outline: Outline, plan: Plan, division: Division, gathered: float, errors: list[str]
) -> tuple[str, ...]:
    """Compute the memory of a worker, and whether it has as much.

    Args:
        outline: the job and its model, which is known.
        division: what is divided over how many workers.
        gathered: the bytes that a worker gathers at the same time.
        errors: receives a line if the training state alone does not fit.

    Returns:
        Notes for the user, printed with the plan.
    """
    model = outline.model
    assert model is not None
    sizes = parameter_sizes(config, outline.job, model)
    of_hosts = _host_notes(config, plan, sizes, division, errors)
    memory = replace(worker_memory(sizes, division), gathered=gathered)
    if config.plan:
        with contextlib.suppress(Exception):  # whatever the job raises, the plan holds without these numbers
            kept = kept_by_rows(outline, fused_attention=plan.device == "cuda")
            memory = kept.added(
                memory,
                rows=plan.rows_of_pass,
                mesh=plan.mesh,
                pipeline=plan.pipeline,
                is_gathered=division.parameters > 1,
            )
    count = plan.mesh.num_workers
    limit_bytes = plan.memory.of_each(count)
    notes = [_text(config, model, memory)] if config.plan or gathered else []
    notes += [UNKNOWN_STATE] if config.plan and not all(size.state_known for size in sizes) else []
    notes += of_hosts
    if not limit_bytes or memory.total <= limit_bytes:
        return tuple(notes)
    there = f"{size_text(limit_bytes)} of memory for {f'each of {count} workers' if count > 1 else 'one worker'}"
    if memory.state <= limit_bytes:
        notes.append(
            f"training is estimated to take {size_text(memory.total)} on a worker, and there are {there}; raise "
            "train.grad_accumulation, or set train.activation_checkpointing=blocks"
        )
        return tuple(notes)
    tensor = plan.mesh.tensor
    parts = fewest_parts(sizes, replace(plan.memory, total_bytes=plan.memory.total_bytes / tensor))
    if parts is None:
        whole = worker_memory(sizes, Division()).state * tensor
        remedy = f"all of them take {size_text(whole)} without the activations: add memory, or use a smaller model"
    else:
        remedy = f"use strategy=fsdp with strategy.num_workers={parts * tensor} or more"
    errors.append(
        f"strategy={plan.strategy}: parameters, gradients and optimizer state take {size_text(memory.state)} on a "
        f"worker, and there are {there}; {remedy}"
    )
    return ()


def _host_notes(
    config: Config, plan: Plan, sizes: Sequence[ParameterSize], division: Division, errors: list[str]
) -> list[str]:
    """Return notes on the host memory of a node; an error is added if there cannot be enough."""
    node, every = plan.node, config.recovery.peer_copy_every
    host = host_memory(config, plan, sizes, division)
    copies = f"{size_text(host.peer_copies)} of copies for recovery (recovery.peer_copy_every={every})"
    parts = [
        *([f"{size_text(host.models)} of what they train"] if host.models else []),
        *([copies] if host.peer_copies else []),
        f"up to {size_text(host.snapshots)} of snapshots for checkpoints",
    ]
    workers = f"{node.workers} workers" if node.workers > 1 else "one worker"
    on_node, taken = f"host memory of a node with {workers}", f"{', '.join(parts)}: {size_text(host.total)}"
    notes = [f"{on_node}: {taken}"] if config.plan and (plan.device == "cuda" or host.peer_copies) else []
    trains_here = plan.device == "cpu"
    if not node.memory_bytes or host.total <= node.memory_bytes or (trains_here and host.models > node.memory_bytes):
        return notes
    remedies = [
        *(["set recovery.peer_copy_every=0"] if host.peer_copies else []),
        *(["set strategy.cpu_offload=false"] if host.models and not trains_here else []),
        "raise checkpoint.every, so that a checkpoint is written before the next one, or use more nodes",
    ]
    text = f"{on_node}: there are {size_text(node.memory_bytes)} for {taken}; {', or '.join(remedies)}"
    if node.is_only and host.models + host.peer_copies > node.memory_bytes:
        errors.append(text)
    else:
        notes.append(text)
    return notes


def host_memory(config: Config, plan: Plan, sizes: Sequence[ParameterSize], division: Division) -> HostMemory:
    """Return what the workers of ``plan.node`` take of its memory.

    Each has :data:`~orchestrator.strategies.peer_copies.KEPT` snapshots of its own part and as many of a neighbour's.
    A part that is written into a checkpoint has one snapshot, and a second if the next one is due meanwhile.
    """
    mesh, workers, steps = plan.mesh, plan.node.workers, config.train.steps
    memory = worker_memory(sizes, division)
    part = worker_memory(sizes, replace(division, parameters=division.optimizer))  # what is saved
    part_bytes = part.parameters + part.optimizer
    every, saved_every = config.recovery.peer_copy_every, config.checkpoint.every
    parts = mesh.num_workers // mesh.replicate
    kept = min(KEPT, steps // every) if every and parts > 1 else 0
    saved = min(2, math.ceil(steps / saved_every)) if saved_every else 1  # there is one at the end in any case
    is_here = plan.device == "cpu" or memory.on_host
    return HostMemory(
        models=workers * (memory.parameters + memory.gradients + memory.optimizer) if is_here else 0.0,
        peer_copies=workers * 2 * kept * part_bytes,
        snapshots=min(workers, parts) * saved * part_bytes,
    )


def parameter_sizes(config: Config, job: Job, model: nn.Module) -> list[ParameterSize]:
    """Return the sizes of the parameters, with their optimizer state as far as it is known."""
    has_average = config.train.ema_decay is not None
    state = state_sizes(job, model)
    found = []
    for name, parameter in model.named_parameters():
        rows = len(parameter) if parameter.ndim else 1
        row_bytes = parameter.nbytes // max(1, rows)
        own = NO_STATE if state is None or not parameter.requires_grad else state.get(name, NO_STATE)
        averages = has_average * max(1.0, 4 / parameter.itemsize)  # at least float32
        found.append(
            ParameterSize(
                rows=rows,
                row_bytes=row_bytes,
                trained=parameter.requires_grad,
                state_bytes=own.divided / max(1, rows) + averages * row_bytes * parameter.requires_grad,
                whole_bytes=own.whole,
                state_known=state is not None,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class KeptByRows:
    """What a forward pass keeps, in bytes. Only what grows with the batch is in proportion to its samples.

    Attributes:
        a_sample: of activations for each sample.
        always: what does not grow with the samples, such as a mask.
        casts: the copies of parameters in 16 bits.
    """

    a_sample: float
    always: float
    casts: float

    def added(
        self, memory: WorkerMemory, *, rows: float, mesh: Mesh, pipeline: PipelineLayout | None, is_gathered: bool
    ) -> WorkerMemory:
        """Return ``memory`` with what the forward passes of a worker keep.

        Args:
            memory: of the state.
            rows: the samples of a pass.
            pipeline: the stages; None if the model is not cut.
            is_gathered: whether parameters are gathered: they are so in the type of the passes.
        """
        passes = 1.0
        if pipeline is not None:
            at_once = pipeline.num_microbatches
            if pipeline.schedule not in _ALL_AT_ONCE:
                at_once = min(at_once, pipeline.num_stages)
            passes = at_once / mesh.pipeline
        return replace(
            memory,
            activations=(self.always + self.a_sample * rows) * passes,
            casts=0.0 if is_gathered else self.casts * passes,
        )


def kept_by_rows(outline: Outline, *, fused_attention: bool) -> KeptByRows:
    """Return what forward passes of the model keep.

    Args:
        outline: the job and its model.
        fused_attention: whether attention keeps what it keeps on a GPU.

    Raises:
        Exception: whatever the job raises with fake tensors.
    """
    blocks = blocks_of(outline.whole.model)
    few, more = (kept_of(outline, rows, blocks, fused_attention=fused_attention) for rows in _ROWS)
    a_sample = max(0.0, (more.activations - few.activations) / (_ROWS[1] - _ROWS[0]))
    return KeptByRows(a_sample=a_sample, always=max(0.0, few.activations - a_sample * _ROWS[0]), casts=more.casts)


def kept_of(outline: Outline, rows: int, blocks: Sequence[nn.Module], *, fused_attention: bool) -> Kept:
    """Return what a forward pass keeps; see :func:`fake_loss`."""
    batch = fake_batch(outline, rows)
    with kept_tensors(outline.whole.model) as kept:
        loss = fake_loss(outline, batch, blocks, fused_attention=fused_attention)
    del loss  # up to here, its graph has kept the tensors
    return kept


def fake_batch(outline: Outline, rows: int) -> tuple[Any, Any]:
    """Return the inputs and the target of a batch with fake tensors, which has the first sample ``rows`` times."""
    job = outline.job
    found: tuple[Any, Any] = map_tensors(
        outline.whole.fake_like, example_batch(job, opened_dataset(job, "train", 0), rows)
    )
    return found


def fake_loss(
    outline: Outline, batch: tuple[Any, Any], blocks: Sequence[nn.Module], *, fused_attention: bool
) -> Tensor:
    """Return the loss of a batch with fake tensors.

    Args:
        outline: the job and its model.
        batch: see :func:`fake_batch`.
        blocks: the repeated blocks that run; the others return their first argument.
        fused_attention: whether attention runs as on a GPU.
    """
    job, whole, precision = outline.job, outline.whole, outline.precision
    left_out = [block for block in blocks_of(whole.model) if block not in {*blocks}]
    for block in blocks:
        if isinstance(block, Block):
            # Selective keeps some, which cannot be seen here.
            block.__block_recomputes_fakes__ = block.__block_recomputes__ == "blocks"
    inputs, target = batch
    with (
        contextlib.ExitStack() as replaced,
        whole.mode,
        precision.autocast(),
        FusedAttention() if fused_attention else contextlib.nullcontext(),
    ):
        for block in left_out:
            replaced.enter_context(patched_forward(block, lambda first, *_, **__: first))
        output = job.forward(whole.model, precision.inputs(inputs))
        return job.loss(precision.outputs(output), target)


@contextlib.contextmanager
def patched_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward pass of a module in this context."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _text(config: Config, model: nn.Module, memory: WorkerMemory) -> str:
    """Return the parts of the memory of a worker, and the types of what it has."""
    state = [
        f"{size_text(memory.parameters)} of parameters",
        f"{size_text(memory.gradients)} of gradients",
        f"{size_text(memory.optimizer)} of optimizer state",
    ]
    computed = {"bf16": "bfloat16", "fp16": "float16"}.get(config.train.precision)
    of_passes = [
        *([f"{size_text(memory.casts)} of casts to {computed}"] if memory.casts and computed else []),
        *([f"{size_text(memory.gathered)} gathered from other workers"] if memory.gathered else []),
        *([] if memory.activations is None else [f"about {size_text(memory.activations)} of activations"]),
    ]
    dtypes = " and ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in model.parameters()))
    what = "parameters are kept, gathered and summed" if memory.gathered else "parameters and gradients are"
    if memory.on_host:
        parts = f"{', '.join(state)} in host memory; on its GPU, {', '.join(of_passes)}"
    else:
        parts = ", ".join([*state, *of_passes])
    passes = f"; passes compute in {computed}" if computed else ""
    return f"memory of a worker: {parts}: {size_text(memory.total)}; {what} in {dtypes}{passes}"
