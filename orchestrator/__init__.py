"""A Ray-based cluster job orchestrator for PyTorch training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.config.build import ConfigError
from orchestrator.job import Job
from orchestrator.version import __version__

if TYPE_CHECKING:
    from orchestrator.driver.run import RunResult

__all__ = ["ConfigError", "Job", "__version__", "run"]


def run(overrides: Sequence[str] = ()) -> RunResult | None:
    """Do what ``python -m orchestrator.launch <overrides>`` does; returns how the run ended.

    None after ``plan=true``, which starts nothing.

    Raises:
        ConfigError: the configuration or the plan is wrong; nothing was started.
    """
    from orchestrator.driver.session import check_all, run_all

    return next(iter(run_all(check_all([overrides]))), None)
