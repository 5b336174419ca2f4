"""Checks of the job's model for strategies that share or serve parameters, on the driver."""

from __future__ import annotations

from torch import nn

from orchestrator.compat.torch import BatchNorm
from orchestrator.job import Job
from orchestrator.model.parameter_division import extents_of, optimizer_error
from orchestrator.strategies.update.elementwise import own_step_errors
from orchestrator.strategies.update.job_optimizer import optimizer_of


def sharding_errors(strategy: str, job: Job, model: nn.Module, num_servers: int) -> list[str]:
    """Return why the parameters of the ``model`` and their optimizer cannot be divided over ``num_servers`` servers."""
    errors = []
    max_servers = sum(extent.units for extent in extents_of(model))
    if num_servers > max_servers:
        errors.append(f"strategy.num_shards={num_servers}: the model allows at most {max_servers} servers; lower it")
    optimizer = optimizer_of(job, model)
    if error := optimizer_error(optimizer):
        errors.append(f"strategy={strategy}: Job.optimizer: {error}")
    else:
        errors += own_step_errors(f"strategy={strategy}", optimizer, otherwise="use strategy=ddp")
    return errors


def statistics_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note if the model has running statistics, which asynchronous workers do not share."""
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        return ()
    return (
        "BatchNorm: each worker has the running statistics of its own batches, and those of rank 0 are saved; "
        "use GroupNorm or LayerNorm, or a synchronous strategy",
    )
