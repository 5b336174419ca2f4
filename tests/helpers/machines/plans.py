"""Nodes to plan for, the plan of a command line, and workers on nodes."""

import functools

import pytest

from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.protocol.messages import WorkerInfo
from orchestrator.strategies import registry
from orchestrator.strategies.constructor import Outline

LAPTOP = (Node(node_id="local", name="laptop", cpus=2, gpus=0),)
GPU_BOX = (Node(node_id="a", name="box", cpus=16, gpus=4),)


@functools.cache
def config_of(*words: str) -> Config:
    errors: list[str] = []
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None, errors
    return config


UNEVEN = (
    Node(node_id="a", name="big", cpus=8, gpus=4),
    Node(node_id="b", name="small", cpus=2, gpus=1),
    Node(node_id="c", name="none", cpus=32, gpus=0),
)


def plan_of(nodes: tuple[Node, ...], *words: str, embedded: bool = False) -> Plan:
    config = config_of(*words)
    return make_plan(config, registry.load(config.strategy.name), nodes, oversubscribe_cpus=embedded)


def notes_of(job: Job, *words: str) -> tuple[tuple[str, ...], list[str]]:
    """The notes on the job's model, and the errors."""
    config, plan, errors = config_of(*words), plan_of(LAPTOP, *words, embedded=True), list[str]()
    return registry.load(config.strategy.name).check_job(config, Outline(job, config.train), plan, errors), errors


def errors_of(nodes: tuple[Node, ...], *words: str, embedded: bool = False) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        plan_of(nodes, *words, embedded=embedded)
    return error.value.errors


def worker_on(ip: str, gpu: int | None = None, uuid: str | None = None) -> WorkerInfo:
    return WorkerInfo(node_id=ip, node_ip=ip, hostname=ip, pid=1, gpu_index=gpu, gpu_uuid=uuid)
