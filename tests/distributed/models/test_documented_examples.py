"""Every example of the documentation runs: its checks, and each of its jobs under the strategies that can train it."""

import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from helpers.conformance import cases
from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import pipeline
from helpers.conformance.training import losses, train
from helpers.files.documents import PAGES, Example, examples
from helpers.ranks.gang import Gang
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job, has_training_step

OPTIONAL = ("transformers",)
STRATEGIES: Mapping[str, StrategyConfig] = {"ddp": replace(DDP, bucket_mb="auto"), "pipeline": pipeline("1F1B", 2)}
TIMEOUT_S = 300
"""An example may import transformers."""
EXAMPLES = [example for page in PAGES for example in examples(page)]


def module_of(source: str) -> types.ModuleType:
    module = sys.modules["example"] = types.ModuleType("example")  # dataclasses look their module up
    exec(compile(source, "example", "exec"), vars(module))
    return module


def jobs_of(source: str) -> dict[str, Job]:
    kinds = [value for value in vars(module_of(source)).values() if isinstance(value, type) and issubclass(value, Job)]
    return {kind.__name__: kind() for kind in kinds if kind.__module__ == "example"}


def checked(rank: int, source: str) -> dict[str, list[str]]:
    """Run the example; the names of its jobs, and of the strategies that can train each."""
    getattr(module_of(source), "check", lambda: None)()
    return {
        name: ["ddp"] if has_training_step(job) or type(job).forward is not Job.forward else list(STRATEGIES)
        for name, job in jobs_of(source).items()
    }


def trained(rank: int, source: str, name: str, strategy: str) -> Any:
    job, options = jobs_of(source)[name], STRATEGIES[strategy]
    case = Case(job=job, train=having(steps=2, global_batch_size=8), options=options)
    assert cases.checked(case, 2)[0] == []
    return train(rank, case)


@pytest.mark.parametrize("example", [pytest.param(e, id=e.where) for e in EXAMPLES if e.not_run is None])
def test_an_example_runs(gang: Gang, example: Example) -> None:
    if missing := [name for name in OPTIONAL if name in example.source and importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is missing")
    (found,) = gang.run(checked, example.source, world_size=1, timeout_s=TIMEOUT_S)
    for name, strategies in found.items():
        for strategy in strategies:
            ranks = gang.run(trained, example.source, name, strategy, world_size=2, timeout_s=TIMEOUT_S)
            assert losses(ranks).isfinite().all(), strategy
