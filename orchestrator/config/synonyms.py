"""What keys of other launchers are called here: those of Accelerate, Lightning, transformers' Trainer and torchrun."""

from __future__ import annotations

import re
from typing import Any

_FIELD = "a field of the job is given as job.{}=...; --help with job=<name> lists its fields"

NAMES = {
    "train.epochs": "num_epochs max_epochs num_train_epochs n_epochs",
    "train.steps": "max_steps num_steps n_steps total_steps max_iters iterations num_training_steps",
    "train.global_batch_size, the samples of all workers together": (
        "batch batch_size bs train_batch_size micro_batch_size local_batch_size per_device_train_batch_size "
        "global_batch per_device_batch_size auto_find_batch_size"
    ),
    "train.grad_accumulation": (
        "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches grad_accum accumulation_steps"
    ),
    "train.clip_norm": "max_norm max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping",
    "train.precision": "mixed_precision amp fp16 bf16 dtype half tf32 use_amp",
    "train.activation_checkpointing=blocks": "gradient_checkpointing checkpoint_activations recompute",
    "train.compile": "torch_compile compile_model",
    "train.eval_every": (
        "eval_steps eval_interval val_every val_check_interval check_val_every_n_epoch evaluation_strategy "
        "eval_strategy validate_every"
    ),
    "train.log_every": "logging_steps log_interval log_every_n_steps log_freq logging_interval",
    "train.stop_after, with checkpoint.best=<metric>": "early_stopping early_stop patience early_stopping_patience",
    "train.ema_decay": "ema use_ema ema_rate",
    "train.deterministic": "use_deterministic_algorithms full_determinism",
    "checkpoint.every": (
        "save_steps save_every save_interval checkpoint_every checkpoint_interval save_freq save_strategy "
        "every_n_train_steps checkpointing_steps"
    ),
    "checkpoint.best_direction, maximize or minimize": "mode greater_is_better monitor_mode",
    "checkpoint.keep": "save_total_limit save_top_k keep_latest_k num_to_keep",
    "checkpoint.best": "monitor metric_for_best_model load_best_model_at_end best_metric",
    "resume=auto": "resume_from_checkpoint ckpt_path resume_from auto_resume",
    "resume=last, or resume=<run>": "resume continue restart resume_run resume_training resume_last continue_from",
    "start_from=<run>": "init_from load_from pretrained_checkpoint initial_load_path",
    "strategy.num_workers": (
        "devices device_count num_gpus n_gpus gpus ngpus nproc_per_node num_processes world_size nproc "
        "num_devices gpus_per_node"
    ),
    "cluster=auto, which takes all nodes of the Ray cluster": (
        "nnodes num_nodes num_machines nodes machine_rank node_rank master_addr master_port main_process_ip "
        "main_process_port rdzv_endpoint rdzv_backend rdzv_id"
    ),
    "cluster.device": "accelerator use_cpu use_gpu no_cuda device",
    "cluster.cpus_per_worker": "cpus_per_task num_cpus resources_per_worker",
    "cluster.address": "ray_address address",
    "strategy.tensor": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size"
    ),
    "strategy.context": "cp cp_size context_parallel context_parallel_size context_parallel_degree",
    "strategy=pipeline, or strategy.pipeline with strategy=mesh": (
        "pp pp_size pipeline_parallel pipeline_parallel_degree"
    ),
    "strategy=fsdp, or strategy.shard with strategy=mesh": (
        "zero zero_stage sharding fsdp_config use_fsdp dp_shard deepspeed data_parallel_shard_degree"
    ),
    "strategy.num_microbatches": "microbatches micro_batches num_micro_batches n_microbatches",
    "data.num_workers": "dataloader_num_workers num_loader_workers loader_workers dataloader_workers",
    "recovery.max_failures": "max_restarts max_retries num_retries",
    "tracking.experiment": "experiment_name project project_name mlflow_experiment_name",
    "tracking.uri": "tracking_uri mlflow_tracking_uri mlflow",
    "tracking.sinks=[wandb]": "wandb use_wandb wandb_mode",
    "tracking.sinks=[wandb], whose project is tracking.experiment": "wandb_project",
    "tracking.sinks": "logger loggers report_to log_with comet neptune clearml",
    "tracking.sinks=[tensorboard]": "tensorboard tb",
    "name": "run_name job_name wandb_name",
    "output_dir": (
        "default_root_dir log_dir logging_dir save_dir out_dir project_dir output storage_path checkpoint_dir"
    ),
    "plan=true, or experiment=quick": "fast_dev_run dry_run dryrun",
    "experiment=overfit": "overfit_batches debug_overfit overfit overfit_batch",
    "train.limit_batches": "limit_train_batches max_train_batches max_train_samples",
    "train.limit_eval_batches": "limit_val_batches limit_test_batches max_eval_batches max_eval_samples",
    "train.detect_anomaly": "anomaly_detection set_detect_anomaly",
    "experiment=rate_finder": "lr_find auto_lr_find lr_finder rate_finder",
    "train.global_batch_size, which `orchestrator batch-size` finds": "auto_scale_batch_size scale_batch_size",
    "profile": "profiler enable_profiling",
    "callbacks": "callback",
    "seed": "random_seed manual_seed seed_everything",
}
"""The key here, and what others call it."""
_FIELDS = (
    "lr learning_rate base_lr weight_decay momentum betas optimizer optim scheduler lr_scheduler lr_scheduler_type "
    "warmup_steps warmup_ratio warmup min_lr dropout hidden_size model model_name_or_path dataset data_path train_file "
    "max_length max_seq_length seq_len block_size"
)
GONE = {
    "strategy.max_staleness": "staleness has no bound any more: use strategy.consistency=async, or sync",
    "strategy.compression": "pushes are not compressed: leave it out, or use strategy=ddp strategy.comm_hook=bf16",
}
"""Keys of earlier versions, which records still have, and what to use in their place."""
_REMEDIES = (
    {word: f"use {key}" for key, words in NAMES.items() for word in words.split()}
    | {word: _FIELD.format(word) for word in _FIELDS.split()}
    | {key.rpartition(".")[2]: remedy for key, remedy in GONE.items()}
)


_VALUES = {
    "train.precision": {
        "fp16": "16 16-mixed 16-true float16 half",
        "bf16": "bf16-mixed bfloat16",
        "fp32": "32 32-true float32 full no",
    },
    "strategy.consistency": {"async": "stale ssp asynchronous", "sync": "synchronous"},
    "checkpoint.best_direction": {"maximize": "max", "minimize": "min"},
    "sweep.direction": {"maximize": "max", "minimize": "min"},
}
"""Values by what others, or earlier versions, call them."""
_VARIABLE = re.compile(r"(?:WANDB|MLFLOW|RAY|NCCL|CUDA|TORCH|OMP|HF|PYTHON)_[A-Z0-9_]+")

SIZES = {"shard_size": "shard", "pipeline_parallel_size": "pipeline"}
"""Sizes of a mesh, by other names that presets have for them."""

_STRATEGIES = {
    "fsdp, which is ZeRO-3": "deepspeed deepspeed_stage_3 zero zero3 zero_3 fsdp2 fully_shard fully_sharded full_shard",
    "ddp strategy.shard_optimizer=true, which is ZeRO-1": "zero1 zero_1 deepspeed_stage_1 zero_redundancy_optimizer",
    "hsdp": "hybrid_shard",
    "ddp": "distributed distributed_data_parallel ddp_spawn multi_gpu data_parallel",
    "ddp strategy.tensor=2": "tp tensor tensor_parallel",
    "fsdp strategy.context=2": "cp context context_parallel",
    "pipeline": "pp pipeline_parallel gpipe",
}
"""Names of strategies, with keys, by what others call them."""
_CHOICES = {
    "strategy": {word: f"use strategy={ours}" for ours, theirs in _STRATEGIES.items() for word in theirs.split()},
    "tracking": {
        "wandb": "use tracking.sinks=[wandb]",
        "tensorboard": "use tracking.sinks=[tensorboard]",
        "tb": "use tracking.sinks=[tensorboard]",
        "mlflow": "leave it out, because every run is in MLflow; tracking.uri names its server or file",
    },
}


def instead_of_choice(group: str, name: str) -> str | None:
    """Return what to do in place of a choice that other launchers call ``name``; None if it is not known."""
    return _CHOICES.get(group, {}).get(name.lower().replace("-", "_"))


def instead_of_value(key: str, value: Any) -> str | None:
    """Return the override in place of one with a value of another launcher; None if that is not known."""
    words = _VALUES.get(key, {}).items()
    return next((f"use {key}={ours}" for ours, theirs in words if str(value).lower() in theirs.split()), None)


def instead_of_override(key: str, value: Any) -> str | None:
    """Return what to use in place of an unknown key, as :func:`instead` does, with the value if that is known too."""
    remedy = instead(key)
    if _VARIABLE.fullmatch(key) or (remedy is None and key.isupper() and "_" in key):
        return f"a variable of the environment stands before the command, as in {key}=... orchestrator ..."
    meant = [ours for ours in _VALUES if ours.endswith(f".{key}") or (remedy or "").startswith(f"use {ours}")]
    return next(filter(None, (instead_of_value(ours, value) for ours in meant)), remedy)


def instead(key: str) -> str | None:
    """Return what to use in place of an unknown key of another launcher; None if it is not known.

    Args:
        key: without its section; written with dashes or capitals too.
    """
    return _REMEDIES.get(re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", key.lstrip("-")).lower())
