"""The configuration schema: one frozen dataclass per section, with the type, limits and meaning of each key.

Default values are in ``conf/``; the dataclasses have none, so that each default is written once. This module imports
neither torch nor Ray nor Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from orchestrator.config.eval_splits import check_metric, check_splits, metric_prefix

LARGEST_SEED = 2**63 - 1
TENSORBOARD = "orchestrator.tracking.sinks.TensorBoard"
"""The import path of the sink of ``tracking.tensorboard``."""
LONGEST_HANG_FACTOR = 4
"""After two hangs at the same step, the hang detector waits there for this many times ``recovery.hang_max_s``."""


def option(
    meaning: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a required configuration key.

    Args:
        meaning: the text that ``--help`` prints for the key.
        minimum: the smallest valid value.
        above: the exclusive lower limit.
        maximum: the largest valid value.
        below: the exclusive upper limit.
    """
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    return field(metadata={"meaning": meaning, **limits})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop: length, batch, logging and numerics."""

    steps: int = option("optimizer steps of the whole run", minimum=1)
    global_batch_size: int = option("samples per optimizer step, over all workers", minimum=1)
    grad_accumulation: int = option(
        "slices of each worker's share of the batch, processed one after another", minimum=1
    )
    log_every: int = option("steps between logged points", minimum=1)
    eval_every: int = option("steps between evaluations; 0: evaluate only after the last step", minimum=0)
    eval_splits: tuple[str, ...] = option(
        "data to evaluate, by the names that job.dataset knows: [val,test] logs val/* and test/*, train logs "
        "train_eval/*; []: no evaluation"
    )
    stop_after: int | None = option(
        "end the run after so many evaluations in a row without a better value of checkpoint.best; null: never",
        minimum=1,
    )
    stop_min_delta: float = option(
        "how much better a value has to be than the one before that counted, for train.stop_after", minimum=0
    )
    histograms_every: int = option(
        "steps between histograms of all parameters and gradients, in the samples of the run; 0: none", minimum=0
    )
    clip_norm: float | None = option("maximum gradient norm over all parameters; null: no clipping", above=0)
    clip_value: float | None = option("maximum size of each entry of the gradient; null: no clipping", above=0)
    precision: Literal["auto", "fp32", "tf32", "bf16", "bf16-true", "fp16"] = option(
        "bf16, fp16: autocast of forward pass and loss, with fp16 scaling the loss; bf16-true: also parameters and "
        "gradients; tf32: fp32 with faster matrix products on GPUs; auto: bf16 on GPUs that have it, else fp32, and on "
        "resume what the run has had so far"
    )
    activation_checkpointing: Literal["none", "blocks", "selective"] = option(
        "blocks: compute the model's repeated blocks again in the backward pass, to keep fewer activations in memory; "
        "selective: but keep the results of their matrix products and convolutions"
    )
    compile: bool | Literal["blocks", "max-autotune-no-cudagraphs"] = option(
        "compile the model with torch.compile, or its blocks if they are computed again; blocks: only the model's "
        "repeated blocks, once for all that are alike; max-autotune-no-cudagraphs: as true, and choose the fastest "
        "kernels by trial; modes with CUDA graphs overwrite results that are still needed"
    )
    on_nonfinite: Literal["stop", "skip"] = option("on a NaN or infinite gradient, stop the run or skip the update")
    ema_decay: float | None = option(
        "decay of an exponential moving average of the weights, which is evaluated too; null: none", above=0, below=1
    )
    init: Literal["seeded", "fast"] = option(
        "initial values: seeded: those of one worker, for which each worker draws all random numbers; fast: workers of "
        "fsdp, hsdp and fsdp_pipeline draw only those of their shards, which depend on the number of workers"
    )
    deterministic: bool = option("fail on operations without a deterministic implementation")

    def __post_init__(self) -> None:
        check_splits(self.eval_splits)
        if self.ema_decay is not None and self.precision == "bf16-true":
            raise ValueError(
                f"train.ema_decay={self.ema_decay:g}: an average in bfloat16 loses its small updates; set it to null, "
                "or train.precision=bf16"
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError(
                f"train.clip_value={self.clip_value:g}: train.clip_norm={self.clip_norm:g} clips the same gradients; "
                "set one of them to null"
            )
        if self.compile is not False and self.activation_checkpointing == "selective":
            raise ValueError(
                "train.activation_checkpointing=selective: torch.compile merges the operations of a block, so that "
                "single results cannot be kept; set it to blocks, or train.compile=false"
            )

    def only_training(self, *, steps: int, log_every: int) -> TrainConfig:
        """Return this section for a run of ``steps`` that evaluates nothing."""
        return replace(
            self,
            steps=steps,
            log_every=log_every,
            histograms_every=0,
            eval_every=0,
            eval_splits=(),
            stop_after=None,
            stop_min_delta=0,
        )

    @property
    def compiles_blocks(self) -> bool:
        """Whether the blocks of the model are compiled, and not the model: what is computed again must be a block."""
        return self.compile == "blocks" or (self.compile is not False and self.activation_checkpointing != "none")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data loading."""

    num_workers: int | Literal["auto"] = option(
        "data-loading processes per worker; 0: load in the training thread; auto: 0 on CPUs, and on GPUs one less than "
        "the cores per GPU, but at most 8",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: int = option("steps between checkpoints; 0: save only at the end", minimum=0)
    keep: int = option("number of checkpoints to keep; older ones are deleted", minimum=1)
    only_trained: bool = option(
        "leave out frozen parameters, which the job builds again, such as those that LoRA leaves as they are"
    )
    best: str | None = option(
        "metric of the evaluations, such as val/loss, by which the checkpoint of the best one is kept too; null: none"
    )
    best_direction: Literal["minimize", "maximize"] | None = option(
        "whether small or large values of checkpoint.best are better; null: small ones if it is a loss"
    )

    def __post_init__(self) -> None:
        if self.best is not None and self.best_direction is None and not self.best.endswith("loss"):
            raise ValueError(
                f"checkpoint.best={self.best}: say which values are better, with checkpoint.best_direction=maximize or "
                "checkpoint.best_direction=minimize"
            )

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Which values of ``best`` are better."""
        return self.best_direction or "minimize"


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Metric tracking with MLflow, and where else."""

    uri: str | None = option("MLflow tracking URI; null: log to the run directory only")
    experiment: str = option("name of the MLflow experiment")
    request_timeout_s: float = option("timeout of a request to the tracking server, in seconds", above=0)
    upload_every_s: float = option(
        "seconds from the first logged point to the first upload, and between uploads; the rest follows at the end",
        minimum=0,
    )
    flush_timeout_s: float = option(
        "maximum wait for uploads to finish after the last step, in seconds; in a terminal, a single run does not wait",
        minimum=0,
    )
    background_timeout_s: float = option(
        "maximum time for which an upload goes on without the command, in seconds; then the next command takes it up",
        minimum=0,
    )
    log_model: bool = option("upload the final model to MLflow, in the background after the end of the run")
    log_dataset: bool = option("tell MLflow name, digest and size of the training set, in the same way")
    system_metrics_every_s: float = option("seconds between samples of CPU, memory and GPU usage; 0: off", minimum=0)
    tensorboard: bool = option("write event files for TensorBoard to sinks/tensorboard in the run directory")
    sinks: tuple[str, ...] = option(
        "classes that receive the run too, by their import paths, as in tracking.sinks=[my_package.Sink]"
    )

    @property
    def all_sinks(self) -> tuple[str, ...]:
        """The import paths of ``sinks`` and, with ``tensorboard``, of that."""
        return (TENSORBOARD, *self.sinks) if self.tensorboard else self.sinks

    def __post_init__(self) -> None:
        names = [path.rpartition(".")[2].lower() for path in self.all_sinks]
        if len(set(names)) < len(names):
            raise ValueError(
                f"tracking.sinks=[{','.join(self.sinks)}]: two of {', '.join(names)} would write to one folder; rename "
                "a class"
            )
        if not (0 < len(self.experiment) <= 250 and self.experiment.isprintable()):
            raise ValueError(
                f"tracking.experiment={self.experiment[:50]}: expected 1 to 250 characters without control characters"
            )


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Runs whose ``output_dir`` is the URL of an object store."""

    staging_dir: str | None = option(
        "local directory of each node, from which files go to the URL output_dir; null: one below the directory for "
        "temporary files"
    )
    upload_every_s: float = option("seconds between two uploads of records and logs that have changed", above=0)
    timeout_s: float = option("seconds without progress after which a request to the store fails", above=0)
    flush_timeout_s: float = option("maximum wait for uploads of records and logs at the end, in seconds", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The Ray cluster, what a worker reserves in it, and the timeouts."""

    address: str | None = option(
        "Ray cluster; null: RAY_ADDRESS if set, else an embedded Ray; local: embedded; auto: RAY_ADDRESS if "
        "set, else the Ray running on this machine; host:port: the Ray at that address"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "device to train on; auto: GPUs if the cluster has any and the strategy can use them"
    )
    cpus_per_worker: float = option("CPUs reserved in Ray for each worker; fractions are allowed", above=0)
    autoscaling: bool = option("the cluster adds nodes on demand: wait for resources that it does not have yet")
    exclude_nodes: tuple[str, ...] = option("host names or addresses of nodes on which no worker is started")
    dashboard: bool = option("start the Ray dashboard along with an embedded Ray")
    env: Mapping[str, str | None] = option(
        "environment variables to set on the workers, as in cluster.env.NCCL_DEBUG=INFO; null: the value here. NCCL_*, "
        "OFI_NCCL_*, FI_*, UCX_*, GLOO_*, TORCH_*, TORCHINDUCTOR_*, PYTORCH_* and HF_* are forwarded without being "
        "named, unless Ray was started with another value"
    )
    queue: bool = option(
        "wait for the turn of the run in the queue of a cluster that several commands share; false: reserve at once"
    )
    priority: int = option(
        "place in the queue: a higher one goes first, and makes running runs of lower priority yield their resources"
    )
    user_share: float | None = option(
        "share of a cluster's CPUs or GPUs, from 0 to 1; further runs of a user whose runs have so much go behind "
        "the runs of others in the queue; null: no limit",
        above=0,
        maximum=1,
    )
    queue_timeout_s: float | None = option("maximum wait in the queue, in seconds; null: no limit", above=0)
    unfit_timeout_s: float | None = option(
        "maximum wait, in seconds, while the cluster is too small for the run and adds no nodes; null: no limit",
        above=0,
    )
    pip: str | tuple[str, ...] = option(
        "packages to install for the workers, as in cluster.pip=[einops], or a file of requirements"
    )
    py_modules: tuple[str, ...] = option(
        "directories, .py files and wheels that the workers can import, from outside of the working directory"
    )
    pending_timeout_s: float = option(
        "maximum wait, in seconds, for the nodes to report, and for resources when it is the turn of the run",
        above=0,
    )
    start_timeout_s: float = option(
        "maximum wait for the processes of the workers to start, in seconds, with what pip installs; longer with "
        "several workers per core",
        above=0,
    )
    rendezvous_timeout_s: float = option(
        "maximum wait for all ranks to join the process group, in seconds; longer with several workers per core",
        above=0,
    )
    collective_timeout_s: float = option(
        "timeout of a collective operation, in seconds: the last resort, above every limit of the hang detector",
        above=0,
    )
    heartbeat_s: float = option("seconds between two polls of the workers by the driver", above=0)
    heartbeat_timeout_s: float = option("seconds without an answer after which a worker counts as lost", above=0)
    stopped_timeout_s: float = option(
        "seconds without an answer after which a worker counts as lost whose process is stopped (SIGSTOP)", above=0
    )
    node_timeout_s: float = option("seconds without an answer from a whole node after which it counts as lost", above=0)
    stop_grace_s: float = option("seconds allowed for the last checkpoint after Ctrl-C, SIGTERM or SIGHUP", above=0)

    def __post_init__(self) -> None:
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"cluster.env.{name}: expected the name of an environment variable")
            if name == "CUDA_VISIBLE_DEVICES" or name.startswith("RAY_"):
                raise ValueError(f"cluster.env.{name}: Ray sets this variable on each worker; remove it")


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Detection of failures and recovery from them."""

    max_failures: int = option("worker failures that a run survives; 0: the first failure ends the run", minimum=0)
    spares: int = option("idle workers kept ready to replace a lost one", minimum=0)
    peer_copy_every: int = option(
        "steps between copies of each pipeline stage, shard or parameter server to a neighbour's memory; 0: no copies",
        minimum=0,
    )
    backoff_s: float = option(
        "seconds before the next recovery attempt if the last made no progress; doubled each time", minimum=0
    )
    hang_factor: float = option(
        "multiple of the usual time of a batch, in training or evaluation, after which a worker counts as hanging",
        above=1,
    )
    hang_min_s: float = option("seconds without progress before which no worker counts as hanging", above=0)
    hang_max_s: float = option(
        "seconds without progress after which a worker counts as hanging in training, evaluation or a checkpoint; also "
        "the limit of the first batch of a data loader, while the usual time is unknown, and of a write that stalls",
        above=0,
    )
    build_max_s: float = option(
        "seconds after which a worker counts as hanging while it loads the job, builds the model and the datasets, "
        "compiles the model, or ends the run",
        above=0,
    )
    replace_stragglers: bool = option("replace a worker that is persistently slower than the others")
    chaos: tuple[str, ...] = option(
        "faults to inject, to test recovery: <kind>@<step>:<rank>[:<phase>], as in kill@40:1, or random:<count>"
    )

    def __post_init__(self) -> None:
        if self.hang_min_s > self.hang_max_s:
            raise ValueError(
                f"recovery.hang_min_s={self.hang_min_s:g}: above recovery.hang_max_s={self.hang_max_s:g}; lower it"
            )

    @property
    def loader_timeout_s(self) -> float:
        """How long a batch may take to load; below ``hang_max_s``, so that the error of the loader is reported."""
        return 0.9 * self.hang_max_s


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Several runs in one command, with ``-m``."""

    unfit: Literal["refuse", "skip"] = option(
        "if the configuration or the plan of a run is wrong: refuse the sweep, or skip the run; skip also leaves out "
        "runs that need more CPUs than there are"
    )
    parallel: int | Literal["auto"] = option(
        "runs in progress at once, on a cluster; auto: as many as it has room for, one without a cluster", minimum=1
    )
    trials: int | None = option(
        "runs in which Optuna searches the given values; null: a run for each combination", minimum=1
    )
    metric: str = option("the result of a run by which Optuna searches")
    direction: Literal["minimize", "maximize"] = option("whether small or large values of sweep.metric are sought")
    pruner: Literal["asha"] | None = option(
        "ends runs of a search early whose sweep.metric is poor: asha: asynchronous successive halving; null: none"
    )
    min_steps: int | None = option("steps before which no run is pruned; null: train.eval_every", minimum=1)
    reduction_factor: int = option(
        "of the runs that get to sweep.min_steps, and to this many times that, and so on, one in so many goes on",
        minimum=2,
    )

    def __post_init__(self) -> None:
        if self.pruner is not None and self.trials is None:
            raise ValueError(
                f"sweep.pruner={self.pruner}: only the runs of a search are pruned; set sweep.trials to their number"
            )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """The keys that every strategy has. Each strategy adds its own in a subclass, in its own module.

    Raises:
        ValueError: ``num_workers`` is a range that the strategy does not support, or not a valid range.
    """

    name: str
    num_workers: int | Literal["auto"] | tuple[int, int] = option(
        "number of workers; auto: one per GPU of the cluster, spares included, or 2 on CPUs; [min,max]: as many as "
        "currently fit",
        minimum=1,
    )

    elastic: ClassVar[bool] = False
    """Whether ``num_workers`` may be a range."""

    @classmethod
    def of(cls, options: StrategyConfig) -> Self:
        """Return ``options``, which are known to have the keys of this class."""
        assert isinstance(options, cls)
        return options

    @property
    def gathers(self) -> bool:
        """Whether workers gather parameters of each other while they use them."""
        return False

    def __post_init__(self) -> None:
        if not isinstance(self.num_workers, tuple):
            return
        least, most = self.num_workers
        override = f"strategy.num_workers=[{least},{most}]"
        if not self.elastic:
            raise ValueError(f"{override}: strategy={self.name} needs a fixed number of workers; set one number")
        if not 1 <= least <= most:
            raise ValueError(f"{override}: expected [min,max] with 1 <= min <= max")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The job, or a callback, as configured: the import path of its class, and the values given for its fields."""

    target: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        return self.target  # the fields may hold secrets


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    name: str | None = option("name of the run; null: <job>-<strategy>")
    seed: int = option("random seed for weights, sample order and dropout", minimum=0, maximum=LARGEST_SEED)
    resume: str = option(
        "run to continue: never, auto (the newest unfinished run of this name with a checkpoint), last (the newest run "
        "that has trained), or a run directory or its URL"
    )
    evaluate: str | None = option(
        "run whose newest checkpoint a new run evaluates, without training (last: the newest run that has trained); or "
        "one of its checkpoints, such as <run>/checkpoints/best; null: train"
    )
    start_from: str | None = option(
        "run whose newest checkpoint a new run continues from (last: the newest run that has trained); or one of its "
        "checkpoints, such as <run>/checkpoints/best; null: from the first step"
    )
    output_dir: str = option("directory in which run directories are created, or a URL, such as s3://bucket/runs")
    plan: bool = option("print the plan and exit")
    profile: bool = option("record a torch.profiler trace of ten steps on every worker")
    callbacks: tuple[JobSpec, ...] = option(
        "classes that the training calls, subclasses of orchestrator.Callback, as in callbacks=[my_package.Beep] or, "
        "with arguments, callbacks=[{_target_:my_package.Beep,every:10}]"
    )
    train: TrainConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    recovery: RecoveryConfig
    tracking: TrackingConfig
    storage: StorageConfig
    cluster: ClusterConfig
    sweep: SweepConfig
    strategy: StrategyConfig
    job: JobSpec

    def __post_init__(self) -> None:
        # Run directories, actors and MLflow runs have this name.
        if self.name is not None and not (re.fullmatch(r"[^/]{1,100}", self.name) and self.name.isprintable()):
            raise ValueError(f"name={self.name}: expected 1 to 100 characters without slashes or control characters")
        if self.evaluate is not None and self.resume != "never":
            raise ValueError(f"evaluate={self.evaluate}: a run that is resumed trains; set resume=never")
        if self.evaluate is not None and self.start_from is not None:
            raise ValueError(f"start_from={self.start_from}: nothing is trained with evaluate; set one of them")
        if self.evaluate is not None and not self.train.eval_splits:
            raise ValueError(f"evaluate={self.evaluate}: train.eval_splits=[] leaves nothing to evaluate; add a split")
        if (best := self.checkpoint.best) is not None:
            check_metric(best, self.train.eval_splits)
        if (stop_after := self.train.stop_after) is not None and (best is None or self.train.eval_every == 0):
            remedy = (
                "set checkpoint.best to the metric that has to improve, such as checkpoint.best=val/loss"
                if best is None
                else "there is no evaluation before the last step with train.eval_every=0; set both, or neither"
            )
            raise ValueError(f"train.stop_after={stop_after}: {remedy}")
        if (pruner := self.sweep.pruner) is not None and self.train.eval_every == 0:
            raise ValueError(
                f"sweep.pruner={pruner}: there is no evaluation before the last step with train.eval_every=0; set both"
            )
        prefixes = [metric_prefix(split).replace("/", "_") for split in self.train.eval_splits]
        if pruner is not None and not self.sweep.metric.startswith(tuple(prefixes)):
            raise ValueError(
                f"sweep.pruner={pruner}: no evaluation reports sweep.metric={self.sweep.metric} with "
                f"train.eval_splits=[{','.join(self.train.eval_splits)}]; choose one that does, such as val_loss"
            )
        longest_s = LONGEST_HANG_FACTOR * self.recovery.hang_max_s
        if (timeout_s := self.cluster.collective_timeout_s) <= longest_s:
            raise ValueError(
                f"cluster.collective_timeout_s={timeout_s:g}: the ranks that wait for one that hangs would give up "
                f"before it is found; set it above {longest_s:g}, {LONGEST_HANG_FACTOR} times "
                f"recovery.hang_max_s={self.recovery.hang_max_s:g}, or lower that"
            )

    @property
    def job_name(self) -> str:
        """The job's class name in lower case."""
        return self.job.target.rpartition(".")[2].lower()

    def modules(self, *, with_job: bool = True) -> set[str]:
        """Return the modules of the classes that the workers import, ``with_job`` unless they are given its object."""
        specs = (self.job, *self.callbacks) if with_job else self.callbacks
        return {spec.target.rpartition(".")[0] for spec in specs}

    @property
    def run_name(self) -> str:
        """``name``, or ``<job>-<strategy>`` if it is null."""
        return self.name if self.name is not None else f"{self.job_name}-{self.strategy.name}"
