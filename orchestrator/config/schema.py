"""The configuration schema: one frozen dataclass per section, with the type, limits and meaning of each key.

Default values are in ``conf/``; the dataclasses have none, so that each default is written once. The sections that do
not say what is trained are in :mod:`orchestrator.config.operation`. Neither imports torch, Ray or Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from orchestrator.config.build import option
from orchestrator.config.eval_splits import TRAIN, check_metric, check_splits, metric_prefix
from orchestrator.config.operation import (
    ClusterConfig,
    DisplayConfig,
    RecoveryConfig,
    StorageConfig,
    SweepConfig,
    TrackingConfig,
)

LARGEST_SEED = 2**63 - 1
LONGEST_HANG_FACTOR = 4
"""After two hangs at the same step, the hang detector waits there for this many times ``recovery.hang_max_s``."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop: length, batch, logging and numerics."""

    steps: int = option("optimizer steps of the whole run", minimum=1)
    epochs: float | None = option(
        "passes over the training set, which need not be whole, in place of train.steps; null: train.steps", above=0
    )
    global_batch_size: int = option("samples per optimizer step, over all workers", minimum=1)
    grad_accumulation: int = option(
        "slices of each worker's share of the batch, processed one after another", minimum=1
    )
    limit_batches: int | None = option(
        "global batches to train on: the first ones of the first epoch, in every epoch; null: the whole training set",
        minimum=1,
    )
    limit_eval_batches: int | None = option(
        "global batches to evaluate at most of each split, its first samples; null: the whole split", minimum=1
    )
    log_every: int = option("steps between logged points", minimum=1, epochs=True)
    eval_every: int = option(
        "steps between evaluations, or epochs, as in '1 epoch'; 0: evaluate only after the last step",
        minimum=0,
        epochs=True,
    )
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
        "steps between histograms of all parameters and gradients, in the samples of the run; 0: none",
        minimum=0,
        epochs=True,
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
    lr_range: tuple[float, float] | None = option(
        "let all learning rates rise exponentially between these two over the steps of the run, in place of "
        "job.scheduler, and suggest one; such a run saves no checkpoint; null: train"
    )
    init: Literal["seeded", "fast"] = option(
        "initial values: seeded: those of one worker, for which each worker draws all random numbers; fast: workers of "
        "fsdp, hsdp and fsdp_pipeline draw only those of their shards, which depend on the number of workers"
    )
    detect_anomaly: bool = option(
        "stop at a backward pass that returns NaN, and name the line of the forward pass that it belongs to; slow"
    )
    deterministic: bool = option("fail on operations without a deterministic implementation")
    check: Literal["auto", "always", "never"] = option(
        "compare what several workers compute of a few samples with the whole model, before the first step: auto: "
        "unless an earlier run of this job, code and layout has"
    )

    def __post_init__(self) -> None:
        check_splits(self.eval_splits)
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError(
                f"train.clip_value={self.clip_value:g}: train.clip_norm={self.clip_norm:g} clips the same gradients; "
                "set one of them to null"
            )
        if self.lr_range is not None and not 0 < self.lr_range[0] < self.lr_range[1]:
            first, last = self.lr_range
            raise ValueError(
                f"train.lr_range=[{first:g},{last:g}]: expected two numbers above 0, the smaller one first"
            )
        if self.detect_anomaly and self.on_nonfinite == "skip":
            raise ValueError(
                "train.detect_anomaly=true: it ends the run at the NaN that train.on_nonfinite=skip leaves out; set "
                "that to stop"
            )
        if self.detect_anomaly and self.precision == "fp16":
            raise ValueError(
                "train.detect_anomaly=true: train.precision=fp16 finds its loss scale by steps whose gradients may be "
                "NaN; set it to bf16 or fp32"
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
            epochs=None,
            log_every=log_every,
            histograms_every=0,
            eval_every=0,
            eval_splits=(),
            stop_after=None,
            lr_range=None,
            stop_min_delta=0,
        )

    @property
    def limit_samples(self) -> int | None:
        """The number of samples in ``limit_batches``; None for the whole training set."""
        return None if self.limit_batches is None else self.limit_batches * self.global_batch_size

    def limit_eval_samples(self, split: str) -> int | None:
        """Return how many samples of a split are evaluated at most; None for all. Of the training set, no others."""
        limit = self.limit_eval_batches
        limits = [
            None if limit is None else limit * self.global_batch_size,
            self.limit_samples if split == TRAIN else None,
        ]
        return min((limit for limit in limits if limit is not None), default=None)

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
    read: Literal["rank", "node", "run"] = option(
        "who reads a stream: each rank all of it, or one process for all ranks of a node, or of the run, which get "
        "their shares from it; a ray.data.Dataset is read once for the run, or for each node"
    )
    shuffle_window: int = option(
        "number of consecutive rows of a ray.data.Dataset whose order is drawn anew in each epoch; 0: its own order",
        minimum=0,
    )
    batches_ahead: int = option(
        "global batches that are read ahead where one process reads for several ranks", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: int = option(
        "steps between checkpoints, or epochs, as in '1 epoch'; 0: save only at the end", minimum=0, epochs=True
    )
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
class StrategyConfig:
    """The keys that every strategy has. Strategies add their own in :mod:`orchestrator.strategies.keys`.

    Attributes:
        implied: the keys that this strategy sets, unless they are given.
        named_after: the key with a file after which a run is named, unless it is given a name; None if there is none.
        unread: the beginnings of keys that this strategy does not read, and refuses.
        why_unread: why, and what to do.

    Raises:
        ValueError: ``num_workers`` is a range that the strategy does not support, or not a valid range.
    """

    implied: ClassVar[Mapping[str, str]] = {}
    named_after: ClassVar[str | None] = None
    unread: ClassVar[tuple[str, ...]] = ()
    why_unread: ClassVar[str] = ""

    name: str
    num_workers: int | Literal["auto"] | tuple[int, int] = option(
        "number of workers; auto: one per GPU of the cluster, spares included, or on CPUs the fewest that the other "
        "keys need, at least 2; [min,max]: as many as currently fit",
        minimum=1,
    )

    @classmethod
    def of(cls, options: StrategyConfig) -> Self:
        """Return ``options``, which are known to have the keys of this class."""
        assert isinstance(options, cls)
        return options

    @property
    def elastic(self) -> bool:
        """Whether ``num_workers`` may be a range."""
        return False

    @property
    def is_choice(self) -> bool:
        """Whether another strategy is chosen in place of this one before the run starts."""
        return False

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
    debug: bool = option(
        "train in this process, as one worker without Ray, loader processes and uploads, so that breakpoint(), pdb and "
        "an attached debugger work"
    )
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
    display: DisplayConfig
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
    def saves(self) -> bool:
        """Whether the run leaves a model: it does not only evaluate one, or look for a learning rate."""
        return self.evaluate is None and self.train.lr_range is None

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
