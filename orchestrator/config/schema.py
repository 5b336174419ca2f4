"""What can be configured: one frozen dataclass per section, with types, limits and meaning.

Values live in ``conf/*.yaml``; the dataclasses have no defaults, so that each value is written once.
This module imports neither torch nor Ray nor Hydra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

LARGEST_SEED = 2**63 - 1


def option(
    meaning: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None
) -> Any:
    """A required dataclass field with its meaning and its limits; ``above`` is the exclusive lower one."""
    return field(metadata={"meaning": meaning, "minimum": minimum, "above": above, "maximum": maximum})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = option("optimizer updates of the whole run", minimum=1)
    global_batch_size: int = option("samples per step over all workers", minimum=1)
    grad_accumulation: int = option("slices each worker cuts its share into", minimum=1)
    log_every: int = option("steps between two logged points", minimum=1)
    eval_every: int = option("steps between evaluations; 0: only after the last step", minimum=0)
    clip_norm: float | None = option("largest gradient norm, over all parameters", above=0)
    precision: Literal["fp32", "bf16"] = option("bf16: autocast of forward and loss")
    on_nonfinite: Literal["stop", "skip"] = option("what a NaN or infinite gradient does")
    deterministic: bool = option("refuse operations whose result varies between runs")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    num_workers: int = option("loader processes per worker; 0: in the training thread", minimum=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = option("steps between checkpoints; 0: only at the end", minimum=0)
    keep: int = option("checkpoints kept, the newest first", minimum=1)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    uri: str | None = option("MLflow tracking URI; null: the run directory only")
    experiment: str = option("MLflow experiment")
    request_timeout_s: float = option("longest wait for one answer of the server", above=0)
    flush_timeout_s: float = option("longest wait for the upload after the last step", minimum=0)
    system_metrics_every_s: float = option("interval of CPU, memory and GPU readings; 0: off", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    address: str | None = option(
        "null: RAY_ADDRESS or an embedded Ray; local: embedded; auto: the Ray of this machine; host:port: that one"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto: GPUs wherever the cluster has them")
    cpus_per_worker: float = option("CPU share that a worker asks Ray for", above=0)
    autoscaling: bool = option("the cluster can grow: wait for what does not fit yet")
    dashboard: bool = option("start Ray's dashboard with an embedded Ray")
    pending_timeout_s: float = option("longest wait for resources", above=0)
    rendezvous_timeout_s: float = option("longest wait for all ranks to join", above=0)
    collective_timeout_s: float = option("longest wait of one collective operation", above=0)
    heartbeat_s: float = option("interval at which the driver asks the workers", above=0)
    heartbeat_timeout_s: float = option("silence after which a worker counts as lost", above=0)
    node_timeout_s: float = option("silence of a whole node after which it counts as lost", above=0)
    stop_grace_s: float = option("time for the last checkpoint after Ctrl-C or SIGTERM", above=0)


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    max_failures: int = option("failures of workers that a run outlives; 0: the first one ends it", minimum=0)
    spares: int = option("workers kept ready to take the place of a lost one", minimum=0)
    peer_copy_every: int = option(
        "steps between the copies of each pipeline stage, or parameter shard, in its neighbour's memory; 0: none",
        minimum=0,
    )
    backoff_s: float = option(
        "pause before another try where the last brought no progress, doubled each time", minimum=0
    )
    hang_factor: float = option("a step that takes so many times the usual one hangs", above=1)
    hang_min_s: float = option("time that no step is said to hang before", above=0)
    hang_max_s: float = option("time after which any step hangs, also where none is usual yet", above=0)
    replace_stragglers: bool = option("replace a worker that is persistently slower than the others")
    chaos: tuple[str, ...] = option(
        "faults to rehearse: <kind>@<step>:<rank>[:<phase>], as in kill@40:1; random:<count>"
    )

    def __post_init__(self) -> None:
        if self.hang_min_s > self.hang_max_s:
            raise ValueError(
                f"recovery.hang_min_s={self.hang_min_s:g}: more than recovery.hang_max_s={self.hang_max_s:g}; lower it"
            )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """What every strategy has. Each strategy adds its own keys, in its own module."""

    name: str
    num_workers: int | Literal["auto"] | tuple[int, int] = option(
        "workers; auto: every GPU of the cluster, or 2 on CPUs; [least,most]: as many as there is room for at the time",
        minimum=1,
    )

    elastic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_workers, tuple):
            return
        least, most = self.num_workers
        asked = f"strategy.num_workers=[{least},{most}]"
        if not self.elastic:
            raise ValueError(f"{asked}: strategy={self.name} has a fixed number of workers; give one number")
        if not 1 <= least <= most:
            raise ValueError(f"{asked}: expected [least,most], at least 1 and the smaller number first")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The job as configured: its class by import path and the fields given for it."""

    target: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str | None = option("name of the run; null: <job>-<strategy>")
    seed: int = option("seeds weights, order of the samples and dropout", minimum=0, maximum=LARGEST_SEED)
    resume: str = option("never; auto: the newest unfinished run of this name; or a run directory")
    output_dir: str = option("where run directories go")
    plan: bool = option("print the plan and stop")
    profile: bool = option("record a torch.profiler trace of ten steps on every worker")
    train: TrainConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    recovery: RecoveryConfig
    tracking: TrackingConfig
    cluster: ClusterConfig
    strategy: StrategyConfig
    job: JobSpec

    def __post_init__(self) -> None:
        # Directories, actors and MLflow runs bear it.
        if self.name is not None and not re.fullmatch(r"[^/\x00-\x1f]{1,100}", self.name):
            raise ValueError(f"name={self.name}: expected 1 to 100 characters, none of them a slash")

    @property
    def job_name(self) -> str:
        """The job's class name in lower case, for names and tables."""
        return self.job.target.rpartition(".")[2].lower()

    @property
    def run_name(self) -> str:
        return self.name if self.name is not None else f"{self.job_name}-{self.strategy.name}"
