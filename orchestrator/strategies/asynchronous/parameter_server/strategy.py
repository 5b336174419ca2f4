"""``parameter_server``: servers own the parameters and the optimizer; workers push gradients and pull parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.asynchronous.parameter_server.server import Server
from orchestrator.strategies.asynchronous.parameter_server.worker import ParameterWorker
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.keys import ParameterServerConfig
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules


@register("parameter_server")
class ParameterServer(Rules[ParameterServerConfig]):
    """Workers, and servers on the ranks after them."""

    averages_weights = False
    observes_gradients = False
    refused_precisions: ClassVar[Mapping[str, str]] = {
        "fp16": "its workers push gradients before they can agree on which steps to skip",
        "bf16-true": "its servers hold the parameters as the job builds them",
    }
    cpu_only = "its workers run on CPUs only"

    @classmethod
    def is_synchronous(cls, options: ParameterServerConfig) -> bool:
        return options.consistency == "sync"

    @classmethod
    def plan_layout(
        cls, options: ParameterServerConfig, train: TrainConfig, num_workers: int, errors: list[str]
    ) -> Layout:
        mesh = Mesh(replicate=num_workers, num_servers=options.num_shards)
        note = (
            f"placement: gradients are computed on {_ranks(range(mesh.num_workers))}, parameters are held by "
            f"{_ranks(mesh.servers)}, spread over the nodes"
        )
        return Layout(mesh=mesh, notes=(note,))

    @classmethod
    def trainer(cls, options: ParameterServerConfig, mesh: Mesh, job: Job) -> type[ParameterWorker]:
        return ParameterWorker

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        if context.mesh.server(context.global_rank) is None:
            return super().create(context, job)
        return Server(context, job)


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
