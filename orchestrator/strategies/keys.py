"""The keys of the strategies, by the dimensions that they open. Imports no torch, so that a typo is answered at once.

The default values are in ``conf/strategy/<name>.yaml``. A preset is such a file alone: it opens keys of a mesh, whose
values are in ``conf/mesh/``, and may have ``fixed`` ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from orchestrator.config.build import option
from orchestrator.config.files import group_values, preset_values
from orchestrator.config.schema import StrategyConfig
from orchestrator.config.synonyms import SIZES
from orchestrator.planning.mesh import TOGETHER

Pairs = Literal["auto"] | tuple[str, ...]
"""What is divided: what is found, or pairs as ``q + k + v -> out``, with the names of layers in a block."""
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(StrategyConfig):
    """The keys of every product of dimensions. A preset opens some of them; the others have the values of its file.

    Raises:
        ValueError: the sizes make no mesh.
    """

    pipeline: int | Literal["auto"] = option("workers that the layers of the model are divided over", minimum=1)
    replicate: int | Literal["auto"] = option("copies of the model; auto: as many as the other sizes leave", minimum=1)
    shard: int | Literal["auto"] = option("workers that each tensor is divided over", minimum=1)
    context: int = option("workers that the tokens of each sample are divided over", minimum=1)
    tensor: int = option("workers that the linear layers of each block of the model are divided over", minimum=1)
    tensor_pairs: Literal["auto"] | tuple[str, ...] = option(
        "the linear layers of a block that are divided together; auto: what is found in the model; or their names, as "
        "in ['q + k + v -> out']"
    )
    sequence: bool = option(
        "whether each of the workers that divide a block computes only its own tokens between the divided layers"
    )
    expert: int = option("workers that the experts of a layer are divided over; 1 for now", minimum=1)
    close: Literal["stages", "replicas"] = option(
        "ranks to place on one node if not all fit: the stages of a pipeline, or the replicas of a stage"
    )
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = option("schedule of the forward and backward passes")
    num_microbatches: int | Literal["auto"] = option(
        "micro-batches per slice of the batch; auto: about two per stage", minimum=1
    )
    stages_per_rank: int | Literal["auto"] = option("stages per worker; auto: as many as the schedule needs", minimum=1)
    split: Literal["auto"] | tuple[str, ...] = option(
        "where to cut the model; auto: into stages of equal measured time; or the first layer of each stage after the "
        "first, as in [layer2,layer4]"
    )
    shard_optimizer: bool = option(
        "each worker keeps the optimizer's state of a shard of the parameters alone, and updates that shard; the "
        "workers then exchange what they have updated"
    )
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
    cpu_offload: bool = option(
        "keep shards, their gradients and their optimizer state in host memory, where updates are made; a GPU has only "
        "what it has gathered, and activations"
    )
    bucket_mb: float | Literal["auto"] = option(
        "size of the gradient buckets, in MiB; auto: 25 on CPUs, on GPUs an eighth of the gradients, from 25 to 200",
        above=0,
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option("compression of the gradients that are exchanged")
    powersgd_rank: int = option("rank of the approximation with comm_hook=powersgd", minimum=1)
    find_unused_parameters: bool = option("allow parameters that do not contribute to the loss of every step")
    static_graph: bool = option("every step uses the same parameters in the same order, which DDP then does not check")
    sync_batchnorm: bool = option("BatchNorm uses the statistics of all workers' samples, not of each worker's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "single" and self.num_workers not in (1, "auto"):
            raise ValueError(
                f"strategy.num_workers={self.num_workers}: strategy=single has one worker; use strategy=ddp for more"
            )
        automatic = [f"strategy.{name}=auto" for name, size in self.sizes.items() if size == "auto"]
        if self.name == "mesh" and len(automatic) > 1:
            raise ValueError(
                f"{' and '.join(automatic)}: one size follows from the others and strategy.num_workers; give a number "
                "for all but one"
            )
        if self.expert > 1:
            raise ValueError(
                f"strategy.expert={self.expert}: this dimension comes with a later version; set it to 1, and use "
                f"strategy.shard={self.expert} to divide the model over as many workers"
            )

    @property
    def elastic(self) -> bool:
        return self.name != "single"

    def opens(self, key: str) -> bool:
        """Return whether the key can be set."""
        return key in _opened(self.name)

    def typed(self, dimension: str) -> str:
        """Return the size of a dimension as it is usually typed in this preset."""
        return f"{self._key(dimension)}={getattr(self, dimension)}"

    def _key(self, dimension: str) -> str:
        return f"strategy.{_opened(self.name).get(dimension, dimension)}"

    @property
    def size_key(self) -> str:
        """The key that says how many workers a pipeline has."""
        return self._key("pipeline") if self.opens("pipeline") else "strategy.num_workers"

    @property
    def sizes(self) -> Mapping[str, int | Literal["auto"]]:
        """The sizes by the names of their dimensions."""
        outer = {"pipeline": self.pipeline, "replicate": self.replicate, "shard": self.shard}
        if self.shard_optimizer and not self.opens("shard"):
            outer |= {"replicate": self.shard, "shard": self.replicate}
        return {**outer, **self.group_sizes}

    @property
    def known_size(self) -> int:
        """The product of the sizes that are numbers."""
        return math.prod(size for size in self.sizes.values() if size != "auto")

    @property
    def group_sizes(self) -> Mapping[str, int]:
        """The numbers of workers that compute the same samples together, by dimension."""
        return {dimension: getattr(self, dimension) for dimension in TOGETHER}

    @property
    def group_size(self) -> int:
        """The product of :attr:`group_sizes`."""
        return math.prod(self.group_sizes.values())

    @property
    def group_keys(self) -> str:
        """What makes the groups, as typed on the command line."""
        return " x ".join(self.typed(dimension) for dimension, size in self.group_sizes.items() if size > 1)

    @property
    def gathers(self) -> bool:
        return self.opens("wrap") and (self.shard != 1 or self.context > 1) and not self.shard_optimizer


@dataclass(frozen=True, kw_only=True)
class _OtherNames:
    """The sizes that a preset may open by another name, with their types and limits there."""

    shard_size: int | Literal["auto"] = option(
        "number of workers that each tensor is divided over; the replicas have as many each; auto: those of a node",
        minimum=2,
    )
    pipeline_parallel_size: int = option("number of workers of each pipeline", minimum=2)


@functools.cache
def _opened(preset: str) -> Mapping[str, str]:
    """Return the keys that a preset opens, each with its name in the file of the preset."""
    return {SIZES.get(name, name): name for name in group_values("strategy", preset)}


@functools.cache
def keys_of(preset: str) -> type[Any]:
    """Return a dataclass of the keys that a preset opens; ``make`` makes a :class:`MeshConfig` of their values."""
    declared = {field.name: field.metadata for cls in (MeshConfig, _OtherNames) for field in dataclasses.fields(cls)}
    hints = {**get_type_hints(MeshConfig), **get_type_hints(_OtherNames)}
    names = [_opened(preset)[f.name] for f in dataclasses.fields(MeshConfig) if f.name in _opened(preset)]
    fields = [(name, hints[name], dataclasses.field(metadata=declared[name])) for name in names]
    own = {"__doc__": f"The keys of ``{preset}``.", "make": functools.partial(mesh_config, preset)}
    return dataclasses.make_dataclass(preset, fields, frozen=True, kw_only=True, namespace=own)


def mesh_config(preset: str, **given: Any) -> MeshConfig:
    """Return the keys of a preset, with the values of its file but for those ``given``.

    Raises:
        ValueError: the sizes make no mesh.
    """
    values = {**preset_values(preset), **given}
    return MeshConfig(**{SIZES.get(name, name): value for name, value in values.items()})


PRESETS = ("single", "ddp", "fsdp", "hsdp", "model_parallel", "pipeline", "ddp_pipeline", "fsdp_pipeline", "mesh")
"""The products of dimensions that have a name."""
