"""The optimizer of a job, for the whole model or for a part of it, and its schedule."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.compat.torch import DataDependentOutputException, FakeTensor, pytree
from orchestrator.config.schema import Config
from orchestrator.job import Job, has_steering
from orchestrator.state.schedule import Schedule
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.strategies.update.closure import closure_errors
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of, needs_closure


def optimizer_of(job: Job, model: nn.Module) -> Optimizer:
    """Return the optimizer of the trained parameters of ``model``."""
    return _made(job, _groups_of(job, model))


def optimizer_of_part(job: Job, whole: nn.Module, part: nn.Module) -> Optimizer:
    """Return the optimizer of a part of the model, with all groups of the whole: some may be empty.

    The job sees the parameters of the whole model, so that its groups and its rates do not depend on the part.

    Args:
        job: makes the optimizer.
        whole: the whole model, which may be of fake tensors.
        part: a module with some of its parameters, or with shards of them, under the model's own names.

    Raises:
        JobError: the optimizer depends on values that the whole model does not have.
    """
    own = dict(part.named_parameters(remove_duplicate=False))
    replaced: dict[Tensor, nn.Parameter | None] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        replaced[parameter] = own.get(name, replaced.get(parameter))
    remedy = "let it depend on names and shapes alone, or use strategy=ddp"
    try:
        optimizer = optimizer_of(job, whole)
    except DataDependentOutputException as e:
        raise JobError(f"job.optimizer reads values of parameters, which no worker has of the whole; {remedy}") from e
    _take_part(optimizer, replaced)
    kept = pytree.tree_leaves([optimizer.param_groups, *optimizer.state.values()])
    if any(isinstance(value, FakeTensor) for value in kept):
        what = f"{kind_of(optimizer)} that keeps values of parameters, which no worker has of the whole"
        raise JobError(f"job.optimizer returns {what}; {remedy}")
    return optimizer


def schedule_of(
    job: Job, optimizers: Sequence[Optimizer], *, steps: int, steps_per_epoch: float | None
) -> Schedule | None:
    """Return the schedule of the learning rates of ``optimizers``; None if all are constant."""
    made = Schedule(optimizers, functools.partial(scheduler_of, job), steps=steps, steps_per_epoch=steps_per_epoch)
    return made if made.label or has_steering(job) else None


def scheduler_of(job: Job, optimizer: Optimizer, *, steps: int, steps_per_epoch: float | None) -> LRScheduler | None:
    """Return the schedule of the learning rates of ``optimizer``; None if they are constant.

    Args:
        job: makes the scheduler.
        optimizer: an optimizer of the job.
        steps: the number of updates in the run.
        steps_per_epoch: the number of updates in an epoch; None if it is not known.

    Raises:
        DatasetError: the job needs ``steps_per_epoch``, and it is not known.
    """
    argument = inspect.signature(job.scheduler).parameters.get("steps_per_epoch")
    if argument is None:
        return job.scheduler(optimizer, steps)
    if steps_per_epoch is not None:
        by_epochs: Any = job.scheduler
        return cast("LRScheduler | None", by_epochs(optimizer, steps, steps_per_epoch=steps_per_epoch))
    if argument.default is argument.empty:
        raise DatasetError(
            "job.scheduler takes steps_per_epoch, and job.dataset('train') returns a stream that does not tell its "
            "length: give the stream __len__, or the argument a default, or leave it out"
        )
    return job.scheduler(optimizer, steps)


def check_optimizer(job: Job, model: nn.Module, config: Config) -> list[str]:
    """Make the optimizer and its schedule, for a model that may have no values, to see whether they can be used.

    Returns:
        Why this strategy cannot use them.

    Raises:
        JobError: none can. Any other error may come from the missing values; a worker reports it.
    """
    train = config.train
    try:
        optimizer = optimizer_of(job, model)
        scheduler_of(job, optimizer, steps=train.steps, steps_per_epoch=float(train.steps))
    except JobError:
        raise
    except Exception:
        return []
    return closure_errors(optimizer, train, config.strategy) if needs_closure(optimizer) else []


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are not frozen, with their names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _groups_of(job: Job, model: nn.Module) -> list[Any]:
    """Return the parameters of ``model`` as the optimizer takes them.

    Raises:
        JobError: there are none to train, or a group has none.
    """
    if not (trained := trained_parameters(model)):
        frozen = any(True for _ in model.parameters())
        what = "whose parameters are all frozen; unfreeze some" if frozen else "which has no parameters to train"
        raise JobError(f"job.model returns {kind_of(model)}, {what}")
    groups = list(job.parameter_groups(trained))
    if any(isinstance(group, Mapping) and "params" not in group for group in groups):
        raise JobError("job.parameter_groups returns a dict without 'params'; put the parameters of the group there")
    return groups


def _made(job: Job, entries: Iterable[Any]) -> Optimizer:
    """Return the optimizer of parameters or groups.

    Raises:
        JobError: an optimizer of torch holds other tensors, such as the parameters of another model.
    """
    listed = [{**e, "params": _listed(e["params"])} if isinstance(e, Mapping) else e for e in entries]
    optimizer = job.optimizer(listed)
    if type(optimizer).__module__.startswith("torch.optim."):  # others may hold copies
        parts = [part for e in listed for part in (e["params"] if isinstance(e, Mapping) else [e])]
        given = {part[1] if isinstance(part, tuple) else part for part in parts}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if foreign := [parameter for parameter in held if parameter not in given]:
            what = f"{kind_of(optimizer)} of {kind_of(foreign[0])} that it was not given"
            raise JobError(f"job.optimizer returns {what}; make it of its argument")
    return optimizer


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _take_part(optimizer: Optimizer, replaced: Mapping[Tensor, nn.Parameter | None]) -> None:
    """Replace the parameters of an optimizer in its groups, which stay the same lists, and in its state."""
    for group in optimizer.param_groups:
        parameters = [replaced.get(parameter, parameter) for parameter in group["params"]]
        group["params"][:] = [p for p in parameters if p is not None]
        if names := group.get("param_names"):
            group["param_names"] = [name for name, p in zip(names, parameters, strict=True) if p is not None]
    state = {p: optimizer.state.pop(p) for p in replaced if p in optimizer.state}
    optimizer.state.update({own: values for p, values in state.items() if (own := replaced[p]) is not None})
    if isinstance(optimizer, Adagrad) and optimizer.state:  # which does not wait for the first gradient
        first = optimizer.defaults["initial_accumulator_value"]
        optimizer.state.update(Adagrad(list(optimizer.state), initial_accumulator_value=first).state)
