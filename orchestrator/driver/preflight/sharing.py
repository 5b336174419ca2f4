"""Whether the job's model suits a strategy that shares or serves its parameters: found out on the driver."""

from __future__ import annotations

from torch import nn

from orchestrator.compat import deferred_dynamo
from orchestrator.config.schema import Config, HogwildConfig, ParameterServerConfig
from orchestrator.driver.preflight.prepare import outline
from orchestrator.job import Job
from orchestrator.model.sharding import extents_of, optimizer_error


def sharing_errors(config: Config, job: Job) -> list[str]:
    """Why the parameters and their optimizer cannot be cut into the shards that are asked for."""
    strategy = config.strategy
    if not isinstance(strategy, ParameterServerConfig):
        return []
    deferred_dynamo.install()
    model = outline(job)
    errors = []
    numbers = sum(extent.units for extent in extents_of(model))
    if strategy.num_shards > numbers:
        errors.append(
            f"strategy.num_shards={strategy.num_shards}: the model can be cut into {numbers} parts at most; lower it"
        )
    if error := optimizer_error(job.optimizer([p for p in model.parameters() if p.requires_grad])):
        errors.append(f"strategy={strategy.name}: Job.optimizer: {error}")
    return errors


def sharing_notes(config: Config, job: Job) -> list[str]:
    """What to know of the model where workers do not wait for each other."""
    strategy = config.strategy
    waits = not isinstance(strategy, HogwildConfig)
    if isinstance(strategy, ParameterServerConfig):
        waits = strategy.consistency == "sync"
    if waits or not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in outline(job).modules()):
        return []
    return [
        "BatchNorm: each worker has running statistics of its own batches, and those of rank 0 are saved; "
        "use GroupNorm or LayerNorm, or a synchronous strategy"
    ]
