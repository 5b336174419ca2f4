"""The keys of every strategy, by the dimensions that they open. Imports no torch, so that a typo is answered at once.

The default values are in ``conf/strategy/<name>.yaml``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from orchestrator.config.build import option
from orchestrator.config.schema import StrategyConfig
from orchestrator.planning.mesh import TOGETHER
from orchestrator.tuning.choice import StrategyName

Pairs = Literal["auto"] | tuple[str, ...]
"""What is divided: what is found, or pairs as ``q + k + v -> out``, with the names of layers in a block."""

LEAST_SIZE = 2
"""The least number of workers that a tensor is divided over."""


@dataclass(frozen=True, kw_only=True)
class TensorConfig(StrategyConfig):
    """How the layers of blocks are divided."""

    tensor: int = option("workers that the linear layers of each block of the model are divided over", minimum=1)
    tensor_pairs: Literal["auto"] | tuple[str, ...] = option(
        "the linear layers of a block that are divided together; auto: what is found in the model; or their names, as "
        "in ['q + k + v -> out']"
    )
    sequence: bool = option(
        "whether each of the workers that divide a block computes only its own tokens between the divided layers"
    )

    @property
    def group_sizes(self) -> Mapping[str, Any]:
        """The numbers of workers that compute the same samples together, by dimension."""
        return {dimension: getattr(self, dimension) for dimension in TOGETHER if hasattr(self, dimension)}

    @property
    def group_size(self) -> int:
        """The product of :attr:`group_sizes`."""
        return math.prod(self.group_sizes.values())

    @property
    def group_keys(self) -> str:
        """What makes the groups, as typed on the command line."""
        sizes = {key: size for key, size in self.group_sizes.items() if size > 1}
        return " x ".join(f"strategy.{key}={size}" for key, size in sizes.items())

    def groups(self, num_workers: int, errors: list[str]) -> int:
        """Return how many groups of workers that compute together ``num_workers`` make; append an error for others."""
        size, (groups, rest) = self.group_size, divmod(num_workers, self.group_size)
        if rest:
            fitting = " or ".join(str(n * size) for n in (groups, groups + 1) if n)
            errors.append(
                f"strategy.num_workers={num_workers}: not divisible by {self.group_keys}; set it to {fitting}"
            )
        return max(1, groups)


@dataclass(frozen=True, kw_only=True)
class ContextConfig(TensorConfig):
    """How the tokens of a sample are divided."""

    context: int = option("workers that the tokens of each sample are divided over", minimum=1)


@dataclass(frozen=True, kw_only=True)
class StagedConfig(ContextConfig):
    """The keys of every strategy that cuts the model into stages."""

    elastic = True
    size_key: ClassVar[str] = "strategy.num_workers"
    """The key that says how many workers a pipeline has."""

    split: Literal["auto"] | tuple[str, ...] = option(
        "where to cut the model; auto: into stages of equal measured time; or the first layer of each stage after the "
        "first, as in [layer2,layer4]"
    )


@dataclass(frozen=True, kw_only=True)
class PipelinedConfig(StagedConfig):
    """The further keys of a strategy with micro-batches."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = option("schedule of the forward and backward passes")
    num_microbatches: int | Literal["auto"] = option(
        "micro-batches per slice of the batch; auto: about two per stage", minimum=1
    )
    stages_per_rank: int | Literal["auto"] = option("stages per worker; auto: as many as the schedule needs", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ShardedConfig(TensorConfig):
    """How tensors are gathered."""

    wrap: Literal["auto"] | tuple[str, ...] = option(
        "modules that are gathered one by one; auto: the repeated blocks of the model; or the names of their classes, "
        "as in [Block]"
    )
    reshard_after_forward: bool = option(
        "free what the forward pass has gathered, and gather it again in the backward pass; false: keep it up to the "
        "end of the step, which takes memory for the whole model"
    )
    prefetch: int = option(
        "how many of the modules that are gathered one by one are gathered ahead of the one that runs; each takes "
        "memory for one more, and 0 takes least",
        minimum=0,
    )

    @property
    def gathers(self) -> bool:
        return True

    @property
    def offloads(self) -> bool:
        """Whether shards, their gradients and their optimizer state are in host memory."""
        return False


@dataclass(frozen=True, kw_only=True)
class ReplicatedConfig(TensorConfig):
    """How gradients of replicas are averaged, and what is divided over them."""

    bucket_mb: float | Literal["auto"] = option(
        "size of the gradient buckets, in MiB; auto: 25 on CPUs, on GPUs an eighth of the gradients, from 25 to 200",
        above=0,
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option("compression of the gradients that are exchanged")
    powersgd_rank: int = option("rank of the approximation with comm_hook=powersgd", minimum=1)
    find_unused_parameters: bool = option("allow parameters that do not contribute to the loss of every step")
    static_graph: bool = option("every step uses the same parameters in the same order, which DDP then does not check")
    shard_optimizer: bool = option(
        "each worker keeps the optimizer's state of a shard of the parameters alone, and updates that shard; the "
        "workers then exchange what they have updated"
    )
    sync_batchnorm: bool = option("BatchNorm uses the statistics of all workers' samples, not of each worker's own")


@dataclass(frozen=True, kw_only=True)
class SingleConfig(StrategyConfig):
    """The keys of ``single``. Raises ValueError unless ``num_workers`` is 1 or auto."""

    name: Literal["single"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers not in (1, "auto"):
            raise ValueError(
                f"strategy.num_workers={self.num_workers}: strategy=single has one worker; use strategy=ddp for more"
            )


@dataclass(frozen=True, kw_only=True)
class DDPConfig(ReplicatedConfig):
    """The keys of ``ddp``."""

    elastic = True

    name: Literal["ddp"]


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(ContextConfig, ShardedConfig):
    """The keys of ``fsdp``."""

    elastic = True

    name: Literal["fsdp"]
    cpu_offload: bool = option(
        "keep shards, their gradients and their optimizer state in host memory, where updates are made; a GPU has only "
        "what it has gathered, and activations"
    )

    @property
    def offloads(self) -> bool:
        return self.cpu_offload


@dataclass(frozen=True, kw_only=True)
class HSDPConfig(ContextConfig, ShardedConfig):
    """The keys of ``hsdp``."""

    elastic = True

    name: Literal["hsdp"]
    shard_size: int | Literal["auto"] = option(
        "number of workers that each tensor is divided over; the replicas have as many each; auto: those of a node",
        minimum=LEAST_SIZE,
    )


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig(StagedConfig):
    """The keys of ``model_parallel``."""

    name: Literal["model_parallel"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(PipelinedConfig):
    """The keys of ``pipeline``."""

    name: Literal["pipeline"]


@dataclass(frozen=True, kw_only=True)
class GridConfig(PipelinedConfig):
    """The further keys of a strategy with several workers for each stage."""

    pipeline_parallel_size: int = option("number of workers of each pipeline", minimum=2)

    size_key: ClassVar[str] = "strategy.pipeline_parallel_size"


@dataclass(frozen=True, kw_only=True)
class DDPPipelineConfig(GridConfig):
    """The keys of ``ddp_pipeline``."""

    name: Literal["ddp_pipeline"]
    close: Literal["stages", "replicas"] = option(
        "ranks to place on one node if not all fit: the stages of a pipeline, or the replicas of a stage"
    )


@dataclass(frozen=True, kw_only=True)
class FSDPPipelineConfig(GridConfig, ShardedConfig):
    """The keys of ``fsdp_pipeline``."""

    name: Literal["fsdp_pipeline"]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(ReplicatedConfig, PipelinedConfig, ContextConfig, ShardedConfig):
    """The keys of ``mesh``. Raises ValueError for sizes that make no mesh."""

    name: Literal["mesh"]
    pipeline: int | Literal["auto"] = option("workers that the layers of the model are divided over", minimum=1)
    replicate: int | Literal["auto"] = option("copies of the model; auto: as many as the other sizes leave", minimum=1)
    shard: int | Literal["auto"] = option("workers that each tensor is divided over", minimum=1)
    expert: int = option("workers that the experts of a layer are divided over; 1 for now", minimum=1)

    size_key: ClassVar[str] = "strategy.pipeline"

    def __post_init__(self) -> None:
        super().__post_init__()
        automatic = [name for name, size in self.sizes.items() if size == "auto"]
        if len(automatic) > 1:
            raise ValueError(
                f"{' and '.join(f'strategy.{name}=auto' for name in automatic)}: one size follows from the others and "
                "strategy.num_workers; give a number for all but one"
            )
        if self.expert > 1:
            raise ValueError(
                f"strategy.expert={self.expert}: this dimension comes with a later version; set it to 1, and use "
                f"strategy.shard={self.expert} to divide the model over as many workers"
            )

    @property
    def sizes(self) -> dict[str, int | Literal["auto"]]:
        """The sizes by the names of their dimensions."""
        outer = {"pipeline": self.pipeline, "replicate": self.replicate, "shard": self.shard}
        return {**outer, **self.group_sizes}

    @property
    def known_size(self) -> int:
        """The product of the sizes that are numbers."""
        return math.prod(size for size in self.sizes.values() if size != "auto")

    @property
    def gathers(self) -> bool:
        return (self.shard != 1 or self.context > 1) and not self.shard_optimizer


@dataclass(frozen=True, kw_only=True)
class DPConfig(StrategyConfig):
    """The keys of ``dp``."""

    name: Literal["dp"]
    loss_on: Literal["device0", "replicas"] = option(
        "device0: outputs are gathered there and the loss computed; replicas: each computes its own"
    )
    verbose: bool = option("print the sizes inside the replicas and outside into the worker's log")


@dataclass(frozen=True, kw_only=True)
class HogwildConfig(StrategyConfig):
    """The keys of ``hogwild``."""

    name: Literal["hogwild"]


@dataclass(frozen=True, kw_only=True)
class LockedSGDConfig(HogwildConfig):
    """The keys of ``locked_sgd``."""

    name: Literal["locked_sgd"]  # type: ignore[assignment]
    lock: Literal["step", "update"] = option(
        "step: one worker at a time reads, computes and updates; update: one at a time updates"
    )


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig(StrategyConfig):
    """The keys of ``parameter_server``."""

    name: Literal["parameter_server"]
    num_shards: int = option(
        "parameter servers, in addition to the workers, each with an equal share of the parameters",
        minimum=1,
    )
    consistency: Literal["sync", "async", "stale"] = option(
        "when gradients are applied; sync: the gradients of all workers together, as in ddp; async: each as it "
        "arrives; stale: async within max_staleness"
    )
    max_staleness: int = option(
        "steps by which a worker may be ahead of the slowest, with consistency=stale", minimum=0
    )
    compression: Literal["none", "bf16"] = option("compression of the gradients that are pushed")


@dataclass(frozen=True, kw_only=True)
class AutoConfig(StrategyConfig):
    """The keys of ``auto``."""

    name: Literal["auto"]
    candidates: tuple[StrategyName, ...] = option("the strategies to choose from")
    schedules: tuple[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        ...,
    ] = option("the pipeline schedules to choose from")
    measured: int = option(
        "candidates to measure at least, those with the best predictions; then each one that is predicted to be faster "
        "than the best of them; 0: trust the prediction",
        minimum=0,
    )
    measured_steps: int = option("steps for which each of them is measured", minimum=1)
    profile: Literal["reuse", "fresh"] = option(
        "reuse: take the measurements of an earlier run of this job with these sizes on this hardware, if there are any"
    )

    @property
    def with_servers(self) -> bool:
        """Whether a candidate has parameter servers, which are measured too then."""
        return "parameter_server" in self.candidates

    @property
    def with_parts(self) -> bool:
        """Whether a candidate divides tensors over workers, which is measured too then."""
        return any("fsdp" in name or name in ("hsdp", "mesh") for name in self.candidates)

    @property
    def with_pipelines(self) -> bool:
        """Whether a candidate has stages, whose passes are measured too then."""
        return any("pipeline" in name or name == "model_parallel" for name in self.candidates)

    @property
    def with_devices(self) -> bool:
        """Whether a candidate trains on several devices in one process, which is measured too then."""
        return "dp" in self.candidates


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(StrategyConfig):
    """The keys of ``script``."""

    name: Literal["script"]

    elastic: ClassVar[bool] = True


BY_STRATEGY: Mapping[str, type[StrategyConfig]] = {
    "single": SingleConfig,
    "ddp": DDPConfig,
    "fsdp": FSDPConfig,
    "hsdp": HSDPConfig,
    "model_parallel": ModelParallelConfig,
    "pipeline": PipelineConfig,
    "ddp_pipeline": DDPPipelineConfig,
    "fsdp_pipeline": FSDPPipelineConfig,
    "mesh": MeshConfig,
    "dp": DPConfig,
    "hogwild": HogwildConfig,
    "locked_sgd": LockedSGDConfig,
    "parameter_server": ParameterServerConfig,
    "auto": AutoConfig,
    "script": ScriptConfig,
}
