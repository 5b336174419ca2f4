"""Checks that the job's model can be cut into stages as planned, on the driver and with fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Sized
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.torch import BatchNorm, has_accumulation_hooks
from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.job import Job
from orchestrator.model.batch import has_row_per_sample, map_tensors, split_batch, tensors_in
from orchestrator.model.modes import evaluation_mode, note_on_dropout
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.precision import Precision
from orchestrator.model.stages.boundary import Boundary
from orchestrator.model.stages.cut import balance, cut_at
from orchestrator.model.stages.layers import change_their_input, flow
from orchestrator.model.stages.own_stages import boundaries_of, sequence_of
from orchestrator.model.stages.sequence import LayerSequence
from orchestrator.model.tensor_slots import random_like
from orchestrator.planning.mesh import even_shares
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES, note_on_size
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.batch_parts import spread
from orchestrator.strategies.data.datasets import (
    Sampled,
    example_batch,
    is_stream,
    known_length,
    make_batch,
    opened_dataset,
    ragged_error,
)
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.measure.flop_counter import FlopCounter
from orchestrator.strategies.measure.job_metrics import is_scalar, loss_reads
from orchestrator.strategies.parts.stage_builder import recorded_call
from orchestrator.strategies.transforms.every import used_in
from orchestrator.strategies.update.job_optimizer import optimizer_of_part

SAMPLES_OF_SHAPES = 8
"""Training samples that are read to see whether batches differ in shape."""


def check_stages(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Cut the job's model as planned, with fake tensors.

    Args:
        config: the configuration of a strategy with stages.
        outline: the job and its model, which is cut.
        plan: the plan of the run.
        errors: receives a line for each reason why the model cannot be cut as planned.

    Returns:
        Notes for the user, printed with the plan.
    """
    job = outline.job
    strategy, layout = MeshConfig.of(config.strategy), plan.pipeline
    assert layout is not None
    rows = plan.microbatch_rows
    split = () if strategy.split == "auto" else strategy.split
    try:
        precision, train_set = outline.precision, opened_dataset(job, "train", config.seed)

        def as_called(inputs: Any) -> Any:
            for part in used_in(plan.mesh):
                inputs = part.called_with(job, inputs)
            return precision.inputs(inputs)

        inputs, target = example_batch(job, train_set, rows)
        ragged = ragged_error((inputs, target), rows, strategy=strategy.name)
        if ragged is not None and layout.num_microbatches > 1:
            errors.append(ragged)
            return ()
        loss_reads_inputs = target is inputs
        inputs = as_called(inputs)
        sequence = sequence_of(
            outline.whole, inputs, split=split, num_stages=layout.num_stages, job=job, call=recorded_call(job)
        )
        layer_errors = _layer_errors(sequence, plan, strategy.size_key)
        all_layers = range(len(sequence.names))
        if loss_reads_inputs and change_their_input(sequence, all_layers, inputs, precision=precision):
            layer_errors.append(
                f"strategy={strategy.name}: the model changes its batch in place, and the loss, which another worker "
                "computes, would read what the batch was; let Job.model change a copy"
            )
        values = flow(sequence, inputs, precision=precision)
        with evaluation_mode(*sequence.modules):
            *_, evaluated = flow(sequence, inputs, precision=precision)
        layer_errors += _evaluation_errors(config, job, precision.outputs(evaluated), target, plan)
        starts: Sequence[int] = range(1, len(sequence.names))
        if strategy.split != "auto" and not layer_errors:
            cut, layer_errors = cut_at(sequence.layers, split, layout.num_stages)
            if cut is not None:
                boundaries_of(sequence, values, cut)
                starts = cut.starts[1:]
        other = None if layer_errors else _of_other_shape(job, train_set, inputs, rows, as_called)
        if other is not None:
            _check_shapes(sequence, values, flow(sequence, other, precision=precision), starts, layout.num_stages)
        errors += layer_errors
        if not layer_errors:
            optimizer_of_part(job, sequence.whole.model, nn.Module())  # which refuses to depend on values
        notes = notes_of(sequence.whole, plan, rows)
        if config.plan and (note := _note_on_size(sequence, inputs, plan, precision)) is not None:
            notes.append(note)
        return tuple(notes)
    except ValueError as e:
        errors.append(str(e) if str(e).startswith("strategy.") else f"strategy={strategy.name}: {e}")
        return ()


def notes_of(whole: FakeModel, plan: Plan, rows: int) -> list[str]:
    """Return notes on what differs from ``strategy=single`` with micro-batches of ``rows`` samples."""
    notes = []
    if (reason := whole.full_build_reason) is not None:
        notes.append(
            f"job.model() cannot build a part of the model ({reason}): each worker builds all of it at the "
            "start, which needs memory for the whole model, and then keeps its stages"
        )
    if (note := note_on_dropout(whole.model)) is not None:
        notes.append(note)
    slice_size = plan.global_batch_size // plan.grad_accumulation
    norms = [name for name in _names_of(whole.model, BatchNorm) if whole.model.get_submodule(name).training]
    if norms and rows < slice_size:
        notes.append(
            f"BatchNorm ({first_few(norms, 2)}) uses the statistics of micro-batches of {rows} samples, with "
            f"strategy=single those of {slice_size}: expect another loss curve; GroupNorm and LayerNorm are unaffected"
        )
    return notes


def _note_on_size(sequence: LayerSequence, inputs: Any, plan: Plan, precision: Precision) -> str | None:
    try:
        return note_on_size(plan, forward_flops(sequence, inputs, precision=precision))
    except Exception:  # whatever the model raises with fake tensors, the plan holds without the note
        return None


def forward_flops(sequence: LayerSequence, inputs: Any, *, precision: Precision) -> int:
    """Count the floating-point operations of a forward pass with fake tensors.

    Takes the arguments of :func:`~orchestrator.model.stages.layers.flow`.

    Raises:
        Exception: an operation could not be counted, or the model raised it.
    """
    counter = FlopCounter()
    flow(sequence, inputs, precision=precision, observer=counter)
    if counter.error is not None:
        raise counter.error
    return sum(counter.flops.values())


def _layer_errors(sequence: LayerSequence, plan: Plan, size_key: str) -> list[str]:
    """Return the errors that do not depend on where the model is cut."""
    layers, layout, name = sequence.layers, plan.pipeline, plan.strategy
    assert layout is not None
    errors = []
    if not any(layer.trainable for layer in layers):
        errors.append(f"strategy={name}: the model has no trainable parameters; set requires_grad=True on some")
    if synchronised := _names_of(sequence.whole.model, nn.SyncBatchNorm):
        errors.append(
            f"strategy={name}: SyncBatchNorm ({first_few(synchronised, 2)}) would wait for workers that have other "
            "stages; use BatchNorm"
        )
    hooked = [n for n, p in sequence.whole.model.named_parameters() if has_accumulation_hooks(p)]
    if hooked and SCHEDULES[layout.schedule].splits_backward:
        errors.append(
            f"strategy.schedule={layout.schedule}: it computes the gradients of parameters in passes of their own, "
            f"which do not run the post_accumulate_grad hooks of {first_few(hooked, 2)}; use strategy.schedule=1F1B"
        )
    if plan.split is None:
        try:
            balance(layers, [1.0] * len(layers), layout.num_stages)
        except ValueError as e:
            errors.append(_too_few_layers_error(plan, str(e), size_key))
    return errors


def _of_other_shape(job: Job, train_set: Any, inputs: Any, rows: int, as_called: Callable[[Any], Any]) -> Any:
    """Return the inputs of a micro-batch of another shape, from some training samples; None if there is none."""
    for item in spread(train_set, SAMPLES_OF_SHAPES):
        other = as_called(split_batch(make_batch(job.collate, [item] * rows))[0])
        if [t.shape for t in tensors_in(other)] != [t.shape for t in tensors_in(inputs)]:
            return other
    return None


def _check_shapes(
    sequence: LayerSequence, values: Sequence[Any], others: Sequence[Any], starts: Sequence[int], num_stages: int
) -> None:
    """Check that at enough of the places ``starts``, micro-batches of two shapes lead to tensors of one shape.

    Raises:
        ValueError: a stage would receive tensors of several shapes.
    """
    errors = []
    for start in starts:
        try:
            Boundary.of(values[start], after=sequence.names[start - 1]).pack(others[start])
        except ValueError as e:
            errors.append(e)
    if len(starts) - len(errors) < num_stages - 1:
        raise errors[0]


def _evaluation_errors(config: Config, job: Job, output: Any, target: Any, plan: Plan) -> list[str]:
    """Return why the padding of the last batch of an evaluation could not be left out of the loss; empty if it can."""
    rows = plan.microbatch_rows
    if has_row_per_sample(output, rows):
        return []
    found = (_padding_error(config, job, split, output, target, plan) for split in config.train.eval_splits)
    return [error for error in found if error is not None]


def _padding_error(config: Config, job: Job, split: str, output: Any, target: Any, plan: Plan) -> str | None:
    rows = plan.microbatch_rows
    multiple = rows * plan.mesh.data_parallel_size
    remedy = f"or let job.dataset({split!r}) have a multiple of {multiple} samples, or use strategy=ddp"
    error = None
    if _loss_may_read(job, output, target, is_scalar):
        error = (
            f"strategy={plan.strategy}: the loss has a part that the model has computed over a whole batch, so it "
            f"would count the padding of the last evaluation batch; compute it in Job.loss, {remedy}"
        )
    elif _loss_may_read(job, output, target, lambda tensor: len(tensor) != rows if tensor.ndim else False):
        shape = next(list(t.shape) for t in tensors_in(output) if t.ndim and len(t) != rows)
        error = (
            f"strategy={plan.strategy}: the model returns a tensor of shape {shape} for {rows} samples, so the "
            f"padding of the last evaluation batch cannot be cut off; return a row for each sample, {remedy}"
        )
    limit = config.train.limit_eval_samples(split)
    return error if error is not None and _is_padded(opened_dataset(job, split, 0), plan, limit) else None


def _loss_may_read(job: Job, output: Any, target: Any, which: Callable[[Tensor], bool]) -> bool:
    """Return what :func:`loss_reads` does of random outputs; if the loss refuses them, whether such tensors exist."""
    try:
        return loss_reads(job, map_tensors(random_like, output), target, which)
    except Exception:
        return any(tensor.is_floating_point() and which(tensor) for tensor in tensors_in(output))


def _is_padded(dataset: Any, plan: Plan, limit: int | None) -> bool:
    """Return whether the last micro-batch of an evaluation has padding. Reads a stream that has no length.

    ``limit``: the most samples that are evaluated; None for all.
    """
    rows, replicas = plan.microbatch_rows, plan.mesh.data_parallel_size
    if dataset is None:
        return False
    if isinstance(dataset, Sampled):
        return True  # as far as is known
    if is_stream(dataset):
        length = known_length(dataset) or sum(1 for _ in itertools.islice(dataset, limit))
        return min(length, limit or length) % rows != 0
    assert isinstance(dataset, Sized)
    return any(share % rows for share in even_shares(min(len(dataset), limit or len(dataset)), replicas))


def _too_few_layers_error(plan: Plan, reason: str, size_key: str) -> str:
    assert plan.pipeline is not None
    size = plan.mesh.pipeline
    remedy = f"lower {size_key}" + (" or strategy.stages_per_rank" if plan.pipeline.num_stages > size else "")
    return f"{size_key}={size}: the model has {reason}; {remedy}, or give the model more layers"


def _names_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]
