"""Whether a job can be trained by a plan, without allocating memory for its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from orchestrator.compat.modules import own_buffers
from orchestrator.config.eval_splits import metric_prefix
from orchestrator.config.schema import Config
from orchestrator.config.text import did_you_mean, first_few, to_cli
from orchestrator.job import Job, has_training_step
from orchestrator.model.tensor_slots import sparse_error, tensor_slots
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.state.model_state import saving_errors
from orchestrator.strategies.checks.memory_plan import memory_notes
from orchestrator.strategies.checks.optimizer_trials import check_whole_tensors, optimizer_errors
from orchestrator.strategies.constructor import Outline, lazy_names
from orchestrator.strategies.measure.metric_objects import metric_object_errors, misspelled
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.training_step import training_step_errors
from orchestrator.strategies.transforms.blocks import blocks_note
from orchestrator.strategies.update.gradients import backward_hooks_note
from orchestrator.strategies.update.job_optimizer import check_optimizer


def check_job(rules: type[Rules[Any]], config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check what every strategy demands of a job, and what ``rules`` do; see :meth:`Rules.check`."""
    options, outline = rules.keys(config.strategy), Outline(job, config.train)
    trainer = rules.trainer(options, plan.mesh, job)
    unusable = metric_object_errors(job, config.train.eval_splits)
    errors += unusable
    best, prefixes = config.checkpoint.best, {split: metric_prefix(split) for split in config.train.eval_splits}
    if best is not None and not unusable and (meant := misspelled(job, prefixes, best)) is not None:
        errors.append(f"checkpoint.best={best}: no evaluation reports it; did you mean {meant}?")
    if has_training_step(job):
        errors += training_step_errors(config, outline, supported=trainer.traits.runs_training_step)
        if not trainer.traits.runs_training_step:
            return ()
    if config.train.compile is not False and (reason := rules.why_not_compiled(plan)) is not None:
        errors.append(f"train.compile={to_cli(config.train.compile)}: strategy={config.strategy.name}: {reason}")
    model = outline.model
    if model is not None and (lazy := lazy_names(model)):
        errors.append(
            f"job.model(): {first_few(lazy, 2)} have no shape before the first call, and optimizers, stages and "
            "checkpoints need it; give the sizes, as in nn.Linear(in_features, out_features), or call the model "
            "once in Job.model"
        )
        return ()
    if model is not None and not has_training_step(job) and (refused := check_optimizer(job, model, config)):
        errors += refused
        return ()
    if job.carried:
        errors += carried_errors(config, job, model)
    in_memory = _memory_errors(config, outline, plan, moves=rules.moves_parameters(options, plan.mesh, job))
    errors += in_memory
    notes = [] if in_memory else [*rules.check_job(config, outline, plan, errors)]
    division = rules.division(options, plan.mesh)
    if not errors and division is not None and model is not None and not has_training_step(job):
        of_worker = _outline_of_worker(outline, plan.mesh)
        gathered = rules.gathered_bytes(config, plan.mesh, of_worker.model or model)
        notes += memory_notes(config, of_worker, plan, division, gathered, errors)
    if model is not None:
        errors += saving_errors(model, in_parts=plan.mesh.is_divided)
        if not errors and config.evaluate is None:
            errors += optimizer_errors(config, job, plan, model)
        if not errors and config.evaluate is None and plan.mesh.divides_tensors:
            notes += check_whole_tensors(config, job, model, plan, errors)
        notes += [n for n in (blocks_note(model, config.train), backward_hooks_note(model, plan)) if n is not None]
    if config.train.init == "fast" and not plan.mesh.divides_tensors:
        notes.append(f"train.init=fast has no effect: strategy={config.strategy.name} divides no tensors")
    return tuple(notes)


def _outline_of_worker(outline: Outline, mesh: Mesh) -> Outline:
    if mesh.workers_per_sample == 1:
        return outline
    from orchestrator.strategies.transforms.every import outline_of_parts  # which few runs need

    return outline_of_parts(outline, mesh)


def _memory_errors(config: Config, outline: Outline, plan: Plan, *, moves: bool) -> list[str]:
    """Refuse tensors that share memory or are sparse, where tensors are moved (``moves``) or divided."""
    if not moves and not plan.mesh.divides_tensors:
        return []
    sparse = [slot for slot in tensor_slots(outline.whole.model) if slot.tensor.layout is not torch.strided]
    if sent := [s.name for s in sparse if plan.pipeline is not None or s.attribute in own_buffers(s.owner)]:
        return [sparse_error(sent)]
    if (overlap := outline.whole.overlap) is None:
        return []
    by = f"strategy={config.strategy.name}" if moves else "strategy.shard_optimizer=true"
    return [
        f"job.model(): {' and '.join(overlap)} share memory, and {by} would train them apart; use one parameter "
        "for both, as in b.weight = a.weight, compute one from the other in forward(), or use strategy=ddp without "
        "strategy.shard_optimizer"
    ]


def carried_errors(config: Config, job: Job, model: nn.Module | None) -> list[str]:
    """Return why a run cannot carry the buffers in ``job.carried``. ``model``: None if it is not known here."""
    train = config.train
    what = f"Job.carried: row i of {', '.join(job.carried)} belongs to row i of every batch"
    if config.strategy.name != "single":
        return [f"strategy={config.strategy.name}: {what}, and workers divide batches; use strategy=single"]
    errors = []
    if train.grad_accumulation > 1:
        errors.append(f"train.grad_accumulation={train.grad_accumulation}: {what}, and slices are parts of it; set 1")
    if train.activation_checkpointing != "none":
        errors.append(
            f"train.activation_checkpointing={train.activation_checkpointing}: {what}, and a block that is computed "
            "again would begin with its own result; set none"
        )
    buffers = {} if model is None else dict(model.named_buffers())
    saved = () if model is None else model.state_dict()
    for name in () if model is None else job.carried:
        if name not in buffers:
            errors.append(f"Job.carried: the model has no buffer {name}; {did_you_mean(name, buffers)}")
        elif name not in saved:
            errors.append(f"Job.carried: the buffer {name} is in no checkpoint; register it with persistent=True")
        elif (shape := tuple(buffers[name].shape))[:1] != (train.global_batch_size,):
            errors.append(
                f"train.global_batch_size={train.global_batch_size}: {what}, and {name} has the shape {list(shape)}; "
                "make the first dimension this size"
            )
    return errors
