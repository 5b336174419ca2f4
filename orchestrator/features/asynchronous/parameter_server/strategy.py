"""``parameter_server``: servers own the parameters and the optimizer; workers push gradients and pull parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from orchestrator.config.schema import Config, TrainConfig
from orchestrator.config.text import first_few
from orchestrator.features.asynchronous.parameter_server.server import Server
from orchestrator.features.asynchronous.parameter_server.worker import ParameterWorker
from orchestrator.features.asynchronous.staleness import statistics_notes
from orchestrator.features.asynchronous.strategies import ParameterServerConfig
from orchestrator.job import Job
from orchestrator.model.parameter_division import extents_of, optimizer_error
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.constructor import Outline, changed_weights, diverging_errors
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.update.job_optimizer import optimizer_of, own_step_errors


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
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        options, model = ParameterServerConfig.of(config.strategy), outline.model
        if every := config.recovery.peer_copy_every:
            errors.append(
                f"recovery.peer_copy_every={every}: servers have no copies; leave it out, and set checkpoint.every to "
                "the steps that may be lost with a server"
            )
        if model is not None:  # otherwise the workers find out
            errors += _sharding_errors(options.name, outline.job, model, options.num_shards)
            served = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            if changed := [name for name in changed_weights(outline) if name in served]:
                errors.append(
                    f"job.model: forward() changes {first_few(changed, 2)}, which the servers own, so that the change "
                    "would be lost; use torch.nn.utils.parametrize, or strategy=ddp"
                )
        if options.consistency == "sync":
            from orchestrator.strategies.checks.mesh_checks import check_whole  # which no rank needs

            return check_whole(config, outline, plan, errors)
        errors += diverging_errors(model, plan)
        return () if model is None else statistics_notes(model)

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        if context.mesh.server(context.global_rank) is None:
            return super().create(context, job)
        return Server(context, job)


def _sharding_errors(strategy: str, job: Job, model: nn.Module, num_servers: int) -> list[str]:
    """Return why the parameters of the ``model`` and their optimizer cannot be divided over ``num_servers`` servers."""
    errors = []
    max_servers = sum(extent.units for extent in extents_of(model))
    if num_servers > max_servers:
        errors.append(f"strategy.num_shards={num_servers}: the model allows at most {max_servers} servers; lower it")
    optimizer = optimizer_of(job, model)
    if error := optimizer_error(optimizer):
        errors.append(f"strategy={strategy}: Job.optimizer: {error}")
    else:
        errors += own_step_errors(f"strategy={strategy}", optimizer, otherwise="use strategy=ddp")
    return errors


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
