"""Whether the job's model suits a strategy that shares or serves its parameters. Checked on the driver."""

from __future__ import annotations

from orchestrator.compat.torch import BatchNorm
from orchestrator.job import Job
from orchestrator.model.meta import on_meta_device
from orchestrator.model.sharding import extents_of, optimizer_error


def sharding_errors(strategy: str, job: Job, num_shards: int) -> list[str]:
    """Why the job's parameters and its optimizer cannot be cut into ``num_shards`` shards."""
    model = on_meta_device(job.model)
    errors = []
    numbers = sum(extent.units for extent in extents_of(model))
    if num_shards > numbers:
        errors.append(f"strategy.num_shards={num_shards}: the model can be cut into {numbers} parts at most; lower it")
    if error := optimizer_error(job.optimizer([p for p in model.parameters() if p.requires_grad])):
        errors.append(f"strategy={strategy}: Job.optimizer: {error}")
    return errors


def statistics_notes(job: Job) -> tuple[str, ...]:
    """What to know about a model with running statistics where workers do not wait for each other."""
    model = on_meta_device(job.model)
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        return ()
    return (
        "BatchNorm: each worker has running statistics of its own batches, and those of rank 0 are saved; "
        "use GroupNorm or LayerNorm, or a synchronous strategy",
    )
