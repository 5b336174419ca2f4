"""A Ray-based cluster job orchestrator for PyTorch training.

:func:`run` starts a run from Python; ``python -m orchestrator.launch`` does so from the command line. A job is a
subclass of :class:`Job`. :func:`gather_batch` is for losses over the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.build import ConfigError
from orchestrator.job import Job
from orchestrator.version import __version__

if TYPE_CHECKING:
    from orchestrator.driver.run import RunResult
    from orchestrator.strategies.replicated.gather import gather_batch

__all__ = ["ConfigError", "Job", "__version__", "gather_batch", "run"]


def run(overrides: Sequence[str] = ()) -> RunResult | None:
    """Run one training job, as ``python -m orchestrator.launch <overrides>`` does.

    Blocks until the run has ended.

    Args:
        overrides: the arguments of the command line, such as ``["job=gpt", "strategy=ddp", "train.steps=100"]``.

    Returns:
        How the run ended, or None after ``plan=true``, which starts nothing.

    Raises:
        ConfigError: the configuration or the plan is wrong. Nothing was started.
    """
    from orchestrator.driver.session import check_all, run_all

    return next(iter(run_all(check_all([overrides]))), None)


def __getattr__(name: str) -> Any:
    if name == "gather_batch":  # not at the top: it imports torch
        from orchestrator.strategies.replicated.gather import gather_batch

        return gather_batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
