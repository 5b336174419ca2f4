"""What each metric means: the reference that ``docs/metrics.md`` shows, and a test compares with the code.

A part in angle brackets stands for any text, as ``<n>`` for the number of a rank or a stage.
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Training and validation": {
        "train/loss": "mean training loss since the last logged point, over all workers",
        "train/samples_seen": "samples that the run has trained on",
        "train/epoch": "the same in epochs; a stream of unknown length has none",
        "train/lr": "learning rate of the first parameter group",
        "train/lr_group_<i>": "learning rate of each parameter group, numbered from 0, while they differ",
        "train/loss_scale": "factor of the loss with `train.precision=fp16`",
        "train/grad_norm": "norm of the complete gradient, at the first step and at multiples of ten; with "
        "`train.clip_norm`, at every point",
        "train/<name>": "metrics of the training batch of this step, of `Job.train_metrics` or `Job.training_step`",
        "val/loss": "validation loss",
        "val/accuracy": "one of the metrics `val/<name>` of `Job.metrics` and `Job.metric_objects`",
        "val/perplexity": "the exponential of the validation loss, for jobs with `reports_perplexity`",
        "val/ema_loss": "`val/loss` with the averaged weights of `train.ema_decay`; `val/ema_<name>` for other metrics",
        "<split>/<name>": "the same for the other splits of `train.eval_splits`; `train_eval/` for the training set",
    },
    "Performance": {
        "perf/samples_per_s": "unique samples per second after warm-up, without evaluations and checkpoints",
        "perf/samples_per_s_per_worker": "the same, divided by the number of workers",
        "perf/tokens_per_s": "the same in tokens, if the job defines `tokens_per_sample`",
        "perf/step_ms": "mean time of a step: the sum of `perf/compute_ms`, `perf/comm_ms`, `perf/data_wait_ms` and "
        "`perf/idle_ms`",
        "perf/compute_ms": "part of a step that is none of the other three; means over the workers, as these are",
        "perf/comm_ms": "part of a step spent waiting for gradients of other ranks, and for what the next five name",
        "perf/all_gather_ms": "with `fsdp` and `hsdp`, time of a step for gathering parameters; on GPUs, also what "
        "computation hides",
        "perf/reduce_scatter_ms": "the same for summing gradients into shards",
        "perf/all_reduce_ms": "the same for summing over replicas, and what is not divided; also of pipelines",
        "perf/context_ms": "the same for the keys, values and losses of samples that `strategy.context` divides",
        "perf/tensor_ms": "the same for the sums of layers that `strategy.tensor` divides, unless they are compiled",
        "perf/data_wait_ms": "part of a step spent waiting for samples",
        "perf/idle_ms": "part of a step spent waiting for other stages of a pipeline",
        "perf/comm_pct": "share of a step spent waiting for the gradients of other ranks; on GPUs measured by events",
        "perf/data_wait_pct": "share of a step spent waiting for samples",
        "perf/data_rows_per_s": "rows of Ray Data, or samples of a stream that is read once, per second in which the "
        "process that reads for all ranks waits for them",
        "perf/data_store_mb": "rows that are kept in Ray's object store for the ranks",
        "perf/flops_per_sample": "floating-point operations of matrix products, convolutions and attention, per sample",
        "perf/mfu_pct": "model FLOPs utilization: the rate of these operations over the peak rates of all GPUs",
        "perf/compile_s": "seconds that `torch.compile` has taken so far",
        "perf/recompiles": "how often `torch.compile` has compiled something again",
        "perf/peak_memory_mb": "peak memory of the largest worker: allocated by torch on a GPU, resident on a CPU",
        "memory/rank_<n>_peak_mb": "the same of each rank, in a run of 2 to 16 ranks",
    },
    "Pipelines": {
        "pipeline/bubble_pct": "share of the workers' time that their stages wait for each other (measured)",
        "pipeline/bubble_theory_pct": "bubble of the same schedule with equally fast stages and free communication",
        "pipeline/busiest_worker_pct": "share of the time that the busiest worker computes",
        "pipeline/stage_<n>_busy_pct": "share of the time that a stage computes",
        "pipeline/stage_<n>_peak_memory_mb": "peak memory of the worker that holds the stage",
    },
    "Recovery": {
        "recovery/seconds": "time from a failure or a planned pause to the end of the next step",
        "recovery/num_workers": "number of workers after it",
        "recovery/straggler_rank": "a rank that is persistently slower than the others",
    },
    "The whole run": {
        "summary/<key>": "values of the summary in `run.json`, once at the end",
    },
    "Nodes": {
        "system/<node>/cpu_utilization_percentage": "use of all CPUs since the last reading",
        "system/<node>/system_memory_usage_megabytes": "memory in use",
        "system/<node>/system_memory_usage_percentage": "the same as a share of all memory",
        "system/<node>/gpu_<i>_utilization_percentage": "share of the driver's last sample period in which it was busy",
        "system/<node>/gpu_<i>_memory_usage_megabytes": "memory in use on the GPU",
        "system/<node>/gpu_<i>_memory_usage_percentage": "the same as a share of the GPU's memory",
        "system/<node>/gpu_<i>_power_usage_watts": "power",
        "system/<node>/gpu_<i>_power_usage_percentage": "power as a share of the limit",
        "system/<node>/gpu_<i>_temperature_celsius": "temperature",
        "system/<node>/gpu_<i>_ecc_uncorrected_errors": "memory errors that ECC could not correct, since the "
        "driver was loaded",
        "system/<node>/gpu_<i>_xid_errors": "critical errors (XID) since the first reading",
    },
}
"""The metrics by section: the name of each and what it measures. Features add sections, in modules of this name."""
