"""Whether a job can go on from a checkpoint. What the driver cannot know, such as data on the workers, they check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from orchestrator.config.schema import Config
from orchestrator.driver.preflight.in_child import ChildDiedError, in_child
from orchestrator.job import Job, has_training_step
from orchestrator.state.checkpoint import load, step_of
from orchestrator.state.joint import AnyOptimizer, label_of
from orchestrator.state.model_state import LEFT_OUT, further_entries, mismatches, own_tensors
from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.state.schedule import ScheduleError, made_for
from orchestrator.state.train_state import TrainState, outline, restore
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import opened_dataset, size_error
from orchestrator.strategies.training_step import joined, optimizers_of
from orchestrator.strategies.update.job_optimizer import optimizer_of, schedule_of


def continuation_errors(
    config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any], *, is_own: bool
) -> list[str]:
    """Return why ``job`` cannot go on from a checkpoint, without allocating its model.

    The checks run in child processes, because the model is built of fake tensors and the data may be large.

    Args:
        config: of the run that would go on.
        job: the job.
        checkpoint: its directory.
        meta: its metadata.
        is_own: whether the run would read the data of before to their end.
    """

    checks: list[Callable[[], list[str]]] = [lambda: _model_errors(config, job, checkpoint, meta)]
    if is_own:
        checks.append(lambda: _data_errors(config, job, checkpoint, meta))
    found: list[str] = []
    for check in checks:
        with contextlib.suppress(ChildDiedError):
            found += in_child(check, timeout_s=config.recovery.build_max_s)
    return found


def _data_errors(config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return whether the training set has another size; empty if it cannot be opened here."""
    try:
        dataset = opened_dataset(job, "train", config.seed)
    except Exception:  # the data may be on the workers alone
        return []
    error = size_error(dataset, meta, step=step_of(checkpoint.name), checkpoint=checkpoint)
    return [] if error is None else [error]


def _model_errors(config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return how model, optimizer and schedule differ; empty if the model cannot be built without memory."""
    model = Outline(job, config.train).model
    if model is None:
        return []
    state = load(checkpoint)
    own = {name: t for name, t in own_tensors(model).items() if name not in meta.get(LEFT_OUT, {})}
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    further = further_entries(model)
    saved = {name: t for name, t in outline(state.model).items() if name not in further}
    errors = [f"of another model: {line}" for line in mismatches(shapes, saved)]
    made = joined(optimizers_of(job, model)) if has_training_step(job) else optimizer_of(job, model)
    optimizer = label_of(made)
    if optimizer != meta["optimizer"]:
        errors.append(f"of another optimizer: {meta['optimizer']}, the job has {optimizer}")
    if not errors and config.evaluate is None and (error := _schedule_error(config, job, model, made, state)):
        errors.append(error)
    return errors


def _schedule_error(
    config: Config, job: Job, model: nn.Module, optimizer: AnyOptimizer, state: TrainState
) -> str | None:
    """Return why the schedule of a checkpoint cannot go on for ``train.steps``; None if it can, or if unknown.

    The settings of the optimizer are loaded without tensors, so a setting that is a tensor lacks its value.
    """
    if state.meta["scheduler"] is None or _has_tensors(optimizer.param_groups):
        return None
    before = made_for(state.meta["scheduler"]["state"])
    try:
        schedule = schedule_of(
            job,
            optimizers_in(optimizer),
            steps=config.train.steps,
            steps_per_epoch=before.get("steps_per_epoch"),
        )
        shapes = {name: tensor.to("meta") for name, tensor in outline(state.model).items()}
        restore(replace(state, model=shapes, optimizer={}), model, optimizer, schedule)
    except ScheduleError as e:
        return str(e)
    except Exception:  # of the job, or because of the missing values
        pass
    return None


def _has_tensors(groups: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(value, Tensor) for group in groups for value in group.values())
