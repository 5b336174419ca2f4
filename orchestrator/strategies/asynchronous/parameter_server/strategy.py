"""``parameter_server``: servers own the parameters and the optimizer; workers push gradients and pull parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.job import Job
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.asynchronous.preflight import sharding_errors, statistics_notes
from orchestrator.strategies.base import Context, Strategy
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.sync_batchnorm import check_batchnorm
from orchestrator.strategies.update.diverging import diverging_errors


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


@register("parameter_server")
class ParameterServer(Strategy):
    """The layout and the checks; :meth:`create` makes a worker or a server."""

    config_class: ClassVar[type[StrategyConfig]] = ParameterServerConfig
    moves_parameters = True
    averages_weights = False
    observes_gradients = False
    refused_precisions: ClassVar[Mapping[str, str]] = {
        "fp16": "its workers push gradients before they can agree on which steps to skip",
        "bf16-true": "its servers hold the parameters as the job builds them",
    }
    cpu_only = "its workers run on CPUs only"

    @classmethod
    def is_synchronous(cls, options: StrategyConfig) -> bool:
        assert isinstance(options, ParameterServerConfig)
        return options.consistency == "sync"

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        options = config.strategy
        assert isinstance(options, ParameterServerConfig)
        mesh = Mesh(replicate=num_workers, num_servers=options.num_shards)
        note = (
            f"placement: gradients are computed on {_ranks(range(mesh.num_workers))}, parameters are held by "
            f"{_ranks(mesh.servers)}, spread over the nodes"
        )
        return Layout(mesh=mesh, notes=(note,))

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        options = config.strategy
        assert isinstance(options, ParameterServerConfig)
        model = outline.model
        if model is not None:  # otherwise the workers find out
            errors += sharding_errors(options.name, outline.job, model, options.num_shards)
        errors += diverging_errors(model, plan)
        if cls.is_synchronous(options):
            return check_batchnorm(model, plan, synchronized=False, errors=errors)
        return () if model is None else statistics_notes(model)

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        """Return a worker, or a server on the ranks after the workers."""
        from orchestrator.strategies.asynchronous.parameter_server.server import Server
        from orchestrator.strategies.asynchronous.parameter_server.worker import ParameterWorker

        role = ParameterWorker if context.mesh.server(context.global_rank) is None else Server
        return role(context, job)


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
