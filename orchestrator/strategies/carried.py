"""Hidden states that a model carries from one batch to the next: what they need of a run."""

from __future__ import annotations

from torch import nn

from orchestrator.config.schema import Config
from orchestrator.config.text import did_you_mean
from orchestrator.job import Job


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
