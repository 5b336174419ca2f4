"""Strategies by their word. One file a strategy."""

from __future__ import annotations

import importlib
from typing import Any

from orchestrator.job import Job
from orchestrator.strategies.base import Context, Strategy

_MAKERS = {
    "single": "orchestrator.strategies.replicated.single.Single",
    "ddp": "orchestrator.strategies.replicated.ddp.DDP",
    "dp": "orchestrator.strategies.replicated.dp.DP",
    "hogwild": "orchestrator.strategies.asynchronous.hogwild.Hogwild",
    "locked_sgd": "orchestrator.strategies.asynchronous.hogwild.LockedSGD",
    "parameter_server": "orchestrator.strategies.asynchronous.parameter_server.worker.make",
    "model_parallel": "orchestrator.strategies.pipelined.pipeline.Pipeline",
    "pipeline": "orchestrator.strategies.pipelined.pipeline.Pipeline",
    "ddp_pipeline": "orchestrator.strategies.pipelined.pipeline.Pipeline",
}


def make_strategy(name: str, context: Context, job: Job) -> Strategy:
    """The strategy of that word; the configuration has checked that it exists."""
    strategy = load_maker(name)(context, job)
    assert isinstance(strategy, Strategy)
    return strategy


def load_maker(name: str) -> Any:
    """What makes it, with all that it imports: of a pipeline that takes a second."""
    module, _, maker = _MAKERS[name].rpartition(".")
    return getattr(importlib.import_module(module), maker)
