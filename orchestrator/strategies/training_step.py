"""The training of a job that overrides ``Job.training_step``, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.config.schema import Config
from orchestrator.job import Job, has_loss
from orchestrator.state.optimizers import AnyOptimizer, JointOptimizer
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.measure.job_metrics import checked_metrics
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of, needs_closure, optimizer_problem


def models_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the models by name: the members of an ``nn.ModuleDict``, or else the one model as ``"model"``."""
    return dict(model.items()) if isinstance(model, nn.ModuleDict) else {"model": model}


def optimizers_of(job: Job, model: nn.Module) -> dict[str, Optimizer]:
    """Return the optimizers of the job by name.

    Raises:
        JobError: there are none, or they do not share out parameters of ``model``; the text says what to change.
    """
    made = job.optimizers(models_of(model))
    if not isinstance(made, Mapping) or not all(isinstance(o, Optimizer) for o in made.values()):
        raise JobError(f"Job.optimizers returned {kind_of(made)}; return a dict of optimizers by name")
    for label, optimizer in made.items():
        if (problem := optimizer_problem(optimizer)) is not None:
            raise JobError(f"Job.optimizers: {label!r} {problem}")
        if needs_closure(optimizer):
            raise JobError(
                f"Job.optimizers: {label!r} is {kind_of(optimizer)}, whose step() needs a closure; a job with it has "
                "Job.loss and no Job.training_step"
            )
    if not made:
        raise JobError("Job.optimizers returned no optimizer: no model has trainable parameters; unfreeze some")
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[Tensor, str] = {}
    for label, optimizer in made.items():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter not in names:
                raise JobError(
                    f"Job.optimizers: {label!r} holds a tensor of shape {list(parameter.shape)} that is not a "
                    "parameter of the model; add it to a module of Job.model"
                )
            if parameter in owners:
                raise JobError(
                    f"Job.optimizers: {names[parameter]} is in the optimizers {owners[parameter]!r} and {label!r}; "
                    "put it into one of them"
                )
            owners[parameter] = label
    return dict(made)


def joined(optimizers: Mapping[str, Optimizer]) -> AnyOptimizer:
    """Return what a checkpoint regards as the optimizer."""
    each = list(optimizers.values())
    return each[0] if len(each) == 1 else JointOptimizer(each)


def checked_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the further metrics that ``Job.training_step`` returned, without their graph.

    Raises:
        JobError: it returned something else; the text says what to return.
    """
    values = {"loss": result} if isinstance(result, Tensor) else result
    if not isinstance(values, Mapping) or "loss" not in values:
        kind = kind_of(values) + (" without 'loss'" if isinstance(values, Mapping) else "")
        raise JobError(
            f"job.training_step returned {kind}; return the loss, a scalar tensor, or a dict of scalar tensors "
            "with the loss under 'loss'"
        )
    further = {name: value for name, value in values.items() if name != "loss"}
    metrics = checked_metrics(further, "training_step")
    loss = values["loss"]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise JobError(f"job.training_step: the loss is {kind_of(loss)}; return a scalar tensor, a mean over the batch")
    return loss.detach().reshape(()), {name: value.detach() for name, value in metrics.items()}


def training_step_errors(config: Config, outline: Outline, *, supported: bool) -> list[str]:
    """Return why the job, which overrides ``Job.training_step``, cannot be trained.

    Args:
        outline: the job and its model.
        supported: whether the strategy calls ``Job.training_step``.
    """
    job, name, train = outline.job, config.strategy.name, config.train
    overrides = "the job overrides Job.training_step"
    if not supported:
        divided = getattr(config.strategy, "tensor", 1) > 1
        return [
            f"strategy={name}: {overrides}, which needs the whole model and makes its own updates; use strategy=single "
            "or strategy=ddp" + (", with strategy.tensor=1" if divided else "")
        ]
    errors = []
    if train.grad_accumulation > 1:
        errors.append(
            f"train.grad_accumulation={train.grad_accumulation}: {overrides}, which gets the whole batch of a worker; "
            "set it to 1, and cut the batch there"
        )
    if train.precision in ("fp16", "bf16-true"):
        reason = "calls backward() itself, so that its losses are not scaled"
        if train.precision == "bf16-true":
            reason = "gets the batches as they are, and not in bfloat16"
        errors.append(f"train.precision={train.precision}: {overrides}, which {reason}; set it to bf16 or fp32")
    if train.on_nonfinite == "skip":
        errors.append(
            f"train.on_nonfinite=skip: {overrides}, and updates that it has made cannot be undone; set it to stop, and "
            "check the loss there"
        )
    if train.histograms_every:
        errors.append(
            f"train.histograms_every={train.histograms_every}: {overrides}, whose gradients are gone after it; set it "
            "to 0, and count them there"
        )
    if config.checkpoint.only_trained:
        errors.append(
            f"checkpoint.only_trained=true: {overrides}, which may change frozen parameters by hand; set it to false"
        )
    if has_loss(job) and type(job).forward is Job.forward and isinstance(outline.model, nn.ModuleDict):
        errors.append(
            "job: Job.model returns several models, so an evaluation needs Job.forward(models, inputs): override it, "
            "or leave out Job.loss and return None from Job.dataset('val')"
        )
    return errors
