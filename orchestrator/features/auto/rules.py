"""``auto``, whose run trains with another strategy: the one that the driver has chosen."""

from __future__ import annotations

from orchestrator.features.auto.choice import server_counts
from orchestrator.features.auto.strategies import AutoConfig
from orchestrator.job import Job
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.keys import mesh_config
from orchestrator.strategies.presets import Product
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules


@register("auto")
class AutoRules(Rules[AutoConfig]):
    """As many workers as the chosen strategy may have, each with the whole model."""

    @classmethod
    def is_synchronous(cls, options: AutoConfig) -> bool:
        return False

    @classmethod
    def extra_processes(cls, options: AutoConfig, num_workers: int) -> int:
        return server_counts(num_workers)[-1] if options.with_servers else 0

    @classmethod
    def trainer(cls, options: AutoConfig, mesh: Mesh, job: Job) -> type[Strategy]:
        return Product.trainer(mesh_config("single"), Mesh(), job)
