"""Calls of ``orchestrator.run``, which are checked, but start nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import orchestrator
from helpers.jobs.toys import Toy
from orchestrator.config.arguments import read_arguments
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job
from orchestrator.strategies import registry

__all__ = ["check", "orchestrator"]


@dataclass(frozen=True, kw_only=True)
class MyJob(Toy):
    width: int = 32


read: list[Any] = []


def checked(*arguments: Any, **settings: Any) -> SimpleNamespace:
    given = read_arguments(arguments, settings)
    errors: list[str] = []
    config, spec = compose(given.overrides, errors, registry.config_class)
    job = load_job(spec, errors, given=given.job) if spec is not None else None
    assert errors == []
    read.append(config if job is None or given.job is None else job)
    return SimpleNamespace(status="FINISHED", summary={"val_accuracy": 0.9}, run_dir=None)


def check() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.run", checked)
        # the example
    assert read == [read[0]] * len(read), "these calls are not equal"
