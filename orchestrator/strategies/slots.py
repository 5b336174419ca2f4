"""What a mesh and the keys make of the slots of a trainer, as data."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.config.schema import StrategyConfig
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.keys import MeshConfig

if TYPE_CHECKING:
    from orchestrator.strategies.parts.part import ModelPart


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What trains.

    Attributes:
        stages: whether the model is cut into stages.
        gathers: whether workers have shards of parameters, which are gathered to be used.
        divides_optimizer: whether each worker updates a shard of the parameters that it has whole.
        together: whether several workers compute the same samples.
    """

    stages: bool
    gathers: bool
    divides_optimizer: bool
    together: bool

    @property
    def part_class(self) -> type[ModelPart]:
        """The class of the part. Only one is needed, and each imports another part of torch."""
        module, name = _PARTS[self.stages, self.gathers]
        found: type[ModelPart] = getattr(importlib.import_module(f"{__package__}.parts.{module}"), name)
        return found

    @property
    def has_buckets(self) -> bool:
        """Whether the gradients of whole models are summed in buckets."""
        return not (self.stages or self.gathers or self.together)

    @property
    def moves_parameters(self) -> bool:
        """Whether workers have parameters in other memory than the job gives them, so that none has the whole model."""
        return not self.has_buckets


_PARTS = {
    (False, False): ("whole", "Whole"),
    (False, True): ("gathered", "Gathered"),
    (True, False): ("stages", "Stages"),
    (True, True): ("divided_stages", "GatheredStages"),
}


def slots_of(options: StrategyConfig, mesh: Mesh) -> Slots:
    """Return the slots for the keys of a synchronous strategy and a mesh that they make."""
    keys = MeshConfig.of(options)
    return Slots(
        stages=mesh.pipeline > 1,
        gathers=keys.opens("wrap") and mesh.num_shards > 1 and not keys.shard_optimizer,
        divides_optimizer=keys.shard_optimizer,
        together=mesh.workers_per_sample > 1,
    )
