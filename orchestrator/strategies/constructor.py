"""How a strategy builds the model of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job
from orchestrator.model.meta import on_meta_device
from orchestrator.model.modes import in_train_mode
from orchestrator.model.precision import Precision
from orchestrator.model.recompute import blocks_of, recomputing


def constructor_of(job: Job, train: TrainConfig, precision: Precision) -> Callable[[], nn.Module]:
    """Return a constructor of the job's model in ``precision``, which recomputes its blocks if ``train`` says so."""
    build = precision.converted(in_train_mode(job.model))
    if train.activation_checkpointing == "none":
        return build
    return recomputing(build, selective=train.activation_checkpointing == "selective")


def compile_in_place(module: nn.Module, train: TrainConfig) -> None:
    """Let later calls of ``module`` run compiled code, if ``train`` says so. The names of its tensors do not change.

    ``nn.Module.compile`` does not serve: up to torch 2.13 it compiles nothing of an ``nn.Sequential``, because the
    compiler skips functions that are defined in torch. It inlines them when they are called by another function.
    """
    if train.compile is False:
        return
    forward = module.forward

    def inlined(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # The compiler keeps what it has compiled, up to a limit, with the code object. So each module gets one of its own.
    inlined.__code__ = inlined.__code__.replace()
    module.forward = torch.compile(inlined, mode="default" if train.compile is True else train.compile)


def recompute_note(job: Job, train: TrainConfig) -> str | None:
    """Return a note if the model has no blocks to recompute; None if it has, or cannot be built without memory."""
    if train.activation_checkpointing == "none":
        return None
    model = on_meta_device(job.model)
    if model is None or blocks_of(model):
        return None
    key = f"train.activation_checkpointing={train.activation_checkpointing}"
    return (
        f"{key} has no effect: the model has no nn.ModuleList or nn.Sequential with several blocks of one class; put "
        "the repeated part of the model into one"
    )
