"""The keys of strategies with whole models on each worker, which of them go together, and the size of buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor, nn

from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job, has_training_step
from orchestrator.planning.plan import Plan
from orchestrator.strategies.keys import MeshConfig

SMALLEST_COMPILED_BUCKET_MB = 1.0
"""The size of the first bucket of ``DistributedDataParallel``, in MiB."""
SMALLEST_MB, LARGEST_MB = 25.0, 200.0
"""Limits of ``auto`` in MiB: torch's default, and somewhat more than the 40 million gradients of Megatron-LM."""
BUCKETS = 8
"""The buckets of a model that is large enough. Few large messages use the network best, but the exchange overlaps with
the backward pass only from the first complete bucket on; see Li et al., VLDB 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training"."""


def option_errors(options: MeshConfig, train: TrainConfig, job: Job, plan: Plan) -> list[str]:
    """Return why the options cannot be combined with each other, or with the job."""
    errors: list[str] = []
    if has_training_step(job):
        errors += _unsupported(options, plan)
    if options.comm_hook == "powersgd" and train.precision == "fp16":
        errors.append(
            "strategy.comm_hook=powersgd: it carries errors of gradients to the next step, which has another scale "
            "of the loss with train.precision=fp16; set that to bf16 or fp32"
        )
    if options.comm_hook == "powersgd" and options.shard_optimizer:
        errors.append(
            "strategy.comm_hook=powersgd: it keeps errors of whole gradients on every worker; set it to bf16, or "
            "strategy.shard_optimizer=false"
        )
    if options.static_graph:
        errors += _not_static(options, train)
    too_small = options.bucket_mb != "auto" and options.bucket_mb < SMALLEST_COMPILED_BUCKET_MB
    if train.compile is not False and too_small:
        errors.append(
            f"strategy.bucket_mb={options.bucket_mb:g}: torch.compile cuts the backward pass at the buckets, which "
            f"have to be larger than the first one; set it to {SMALLEST_COMPILED_BUCKET_MB:g} or more"
        )
    return errors


def bucket_notes(options: MeshConfig, model: nn.Module | None, plan: Plan) -> tuple[str, ...]:
    """Return a note if ``strategy.bucket_mb=auto`` chooses other buckets for a ``model`` than torch does."""
    if options.bucket_mb != "auto" or plan.device == "cpu" or model is None:
        return ()
    chosen_mb = bucket_mb_for(model.parameters(), "auto", device=plan.device)
    return () if chosen_mb == SMALLEST_MB else (f"strategy.bucket_mb=auto: gradient buckets of {chosen_mb:g} MiB",)


def _not_static(options: MeshConfig, train: TrainConfig) -> list[str]:
    """Return why the steps do not have one graph, as ``strategy.static_graph=true`` says."""
    key, errors = "strategy.static_graph=true", []
    if train.grad_accumulation > 1:
        errors.append(
            f"{key}: DDP learns the graph from the first backward pass, which exchanges no gradients with "
            f"train.grad_accumulation={train.grad_accumulation}; set that to 1, or static_graph to false"
        )
    if train.compile is not False:
        errors.append(f"{key}: code that is compiled again has another graph; set it to false, or train.compile=false")
    if options.find_unused_parameters:
        errors.append(f"{key}: every step uses the same parameters then; set strategy.find_unused_parameters=false")
    return errors


def _unsupported(options: MeshConfig, plan: Plan) -> list[str]:
    """Return an error for each option that cannot be combined with ``Job.training_step``."""
    errors = []
    if options.shard_optimizer:
        errors.append(
            "strategy.shard_optimizer=true: the job overrides Job.training_step, which makes its own updates of whole "
            "parameters; set it to false"
        )
    if options.comm_hook != "none":
        errors.append(
            f"strategy.comm_hook={options.comm_hook}: the job overrides Job.training_step, whose gradients are not "
            "compressed; set it to none"
        )
    shares = {worker.samples_per_step for worker in plan.workers}
    if options.sync_batchnorm and len(shares) > 1:
        errors.append(
            f"train.global_batch_size={plan.global_batch_size}: with Job.training_step, strategy.sync_batchnorm=true "
            f"needs equal shares of the batch; set it to a multiple of {len(plan.workers)}"
        )
    return errors


def bucket_arguments(parameters: Iterable[Tensor], option: float | Literal["auto"], *, device: str) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallel`` for the buckets that :func:`bucket_mb_for` chooses.

    Without a size, torch makes the first bucket small, so that the exchange begins early in the backward pass. With
    one, even with the limit of torch, the first is as large as the others.
    """
    size_mb = bucket_mb_for(parameters, option, device=device)
    leaves_to_torch = option == "auto" and device != "cpu" and size_mb == SMALLEST_MB
    return {} if leaves_to_torch else {"bucket_cap_mb": size_mb}


def bucket_mb_for(parameters: Iterable[Tensor], option: float | Literal["auto"], *, device: str) -> float:
    """Return the size of the buckets in MiB.

    Args:
        parameters: the parameters of the model; a gradient has the size of its parameter.
        option: the value of ``strategy.bucket_mb``.
        device: the type of the device; on CPUs, ``auto`` is torch's default.
    """
    if option != "auto":
        return option
    if device == "cpu":
        return SMALLEST_MB
    gradients_mb = sum(p.nbytes for p in parameters if p.requires_grad) / 2**20
    return float(round(min(LARGEST_MB, max(SMALLEST_MB, gradients_mb / BUCKETS))))
