"""The keys of what was measured: of a job, everything on which it depends, and of the hardware alone."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import platform
from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.config.schema import Config
from orchestrator.driver.preflight.in_child import ChildDiedError, in_child
from orchestrator.driver.preflight.params import plain_fields
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan
from orchestrator.records.process import processor
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.tuned.auto import AutoConfig
from orchestrator.tuning.proposals import stage_counts


def profile_key(config: Config, job: Job, plan: Plan, nodes: Sequence[Node]) -> str:
    """Return the key of the profile of ``job``, which another run may use if it has the same one.

    Args:
        config: the configuration, with ``strategy=auto``.
        job: the job.
        plan: the plan of the run which measures.
        nodes: the nodes of the cluster.
    """
    assert isinstance(config.strategy, AutoConfig)
    return _digest(
        config.job.target,
        plain_fields(job),
        _code_of(type(job)),
        _shape_of(Outline(job, config.train), timeout_s=config.recovery.build_max_s),
        dataclasses.asdict(config.train.only_training(steps=1, log_every=1)),
        plan.world_size,
        plan.threads_per_worker,
        plan.device,
        stage_counts(plan.world_size, config.strategy.schedules),
        config.strategy.with_servers,
        config.strategy.with_parts,
        config.strategy.with_pipelines,
        config.strategy.with_devices,
        *_hardware(nodes),
        torch.__version__,
    )


def hardware_key(plan: Plan, nodes: Sequence[Node]) -> str:
    """Return the key of the hardware on which a run with ``plan`` measures."""
    return _digest(plan.device, *_hardware(nodes))


def _digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _hardware(nodes: Sequence[Node]) -> tuple[Any, ...]:
    # The driver does not know the model of a GPU, so that nodes with GPUs are told apart by name.
    sizes = sorted((node.cpus, node.gpus, node.name if node.gpus else "") for node in nodes)
    return sizes, platform.machine(), processor()


def _code_of(cls: type) -> list[str]:
    """Return the source of a job's class and of its bases below :class:`Job`, but for classes typed at a terminal."""
    sources = []
    for base in cls.__mro__[: cls.__mro__.index(Job)]:
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return sources


def _shape_of(outline: Outline, *, timeout_s: float) -> list[str]:
    """Return the modules of the model with the shapes of their tensors; nothing if they are unknown."""

    def shape() -> list[str]:
        if (model := outline.model) is None:
            return []
        return [repr(model), *(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items())]

    try:
        return in_child(shape, timeout_s=timeout_s)
    except ChildDiedError:
        return []
