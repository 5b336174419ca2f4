"""The sections of the configuration that say where a run is executed, what it survives, and what is kept of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import option

TENSORBOARD = "tensorboard"
"""The sink of ``tracking.tensorboard``."""
SINKS = (TENSORBOARD, "wandb")
"""The sinks that have a word of their own."""


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
        "what receives the run too: wandb (Weights & Biases), tensorboard, or classes by their import paths, as in "
        "tracking.sinks=[wandb,my_package.Sink]"
    )

    @property
    def all_sinks(self) -> tuple[str, ...]:
        """The sinks, by word or import path; with ``tensorboard``, also that."""
        return tuple(dict.fromkeys([TENSORBOARD, *self.sinks] if self.tensorboard else self.sinks))

    def __post_init__(self) -> None:
        for sink in self.sinks:
            if "." not in sink and sink not in SINKS:
                raise ValueError(
                    f"tracking.sinks=[{sink}]: no sink has this name; there are {' and '.join(SINKS)}, or give the "
                    "import path of a class, such as my_package.Sink"
                )
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
class DisplayConfig:
    """What the console shows."""

    metrics: tuple[str, ...] = option(
        "metrics, such as val/f1, that the progress lines, the panel and the verdict show too, each with its best "
        "evaluation; that of checkpoint.best is always there"
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
        "steps between copies of each pipeline stage or shard to a neighbour's memory; 0: no copies",
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
