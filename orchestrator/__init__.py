"""A Ray-based cluster job orchestrator for PyTorch training.

:func:`run` starts a run from Python; ``python -m orchestrator.launch`` does so from the command line. A job is a
subclass of :class:`Job`, and a :class:`Callback` is told of its training. :func:`gather_batch` is for losses over the
global batch, :func:`current_step` for losses that change with the step, and :func:`batches_by_length` for batches of
samples of similar length. A script of your own, run by ``strategy=script``, has :func:`report` and
:func:`checkpoint_dir`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.build import ConfigError
from orchestrator.job import Job, MetricObject
from orchestrator.script_api import checkpoint_dir, report
from orchestrator.user_code.callbacks import (
    Callback,
    Evaluation,
    RunBegin,
    RunEnd,
    SavedCheckpoint,
    Steering,
    StepEnd,
    current_step,
)
from orchestrator.user_code.errors import exits_refused
from orchestrator.version import __version__

if TYPE_CHECKING:
    from orchestrator.driver.process.run_context import RunResult
    from orchestrator.strategies.replicated.gather import gather_batch
    from orchestrator.worker.data.data_loader import batches_by_length

__all__ = [
    "Callback",
    "ConfigError",
    "Evaluation",
    "Job",
    "MetricObject",
    "RunBegin",
    "RunEnd",
    "SavedCheckpoint",
    "Steering",
    "StepEnd",
    "__version__",
    "batches_by_length",
    "checkpoint_dir",
    "current_step",
    "gather_batch",
    "report",
    "run",
]

__path__ += sorted(map(str, Path(__path__[0]).glob("features/*/verbs")))  # for `python -m orchestrator.<verb>`

Argument = Job | type[Job] | str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""What :func:`run` takes: a job, its class, an override such as ``"train.steps=100"``, a mapping of keys to values, or
a list of overrides and mappings."""


def run(*arguments: Argument, **settings: Any) -> RunResult | None:
    """Run one training job, and return when it has ended.

    These calls are equal to ``python -m orchestrator.launch strategy=ddp train.steps=100``:

        run(["strategy=ddp", "train.steps=100"])
        run({"strategy": "ddp", "train.steps": 100})
        run(strategy="ddp", train={"steps": 100})

    They may be mixed, as in ``run(MyJob(width=64), "strategy=ddp", train={"steps": 100})``. Text in mappings and
    keyword arguments is taken literally; an override is read as on the command line.

    Args:
        arguments: overrides, mappings, lists of them, and the job to train: an instance, or a class, whose fields are
            then set by ``job={"width": 64}``. The class may be defined in a notebook or in the calling script.
        settings: a value, or a mapping of values, by the name of a group or key.

    Returns:
        How the run ended, or None after ``plan=true``, which starts nothing.

    Raises:
        ConfigError: the arguments, the configuration or the plan are wrong. Nothing was started.
        RuntimeError: another thread of this process is inside this function.
        KeyboardInterrupt: Ctrl-C while Ray was starting, or a second Ctrl-C during the run. The first Ctrl-C during the
            run saves a checkpoint and returns a result with the status KILLED.
        SystemExit: the same for a second SIGTERM.
    """
    from orchestrator.config.arguments import read_arguments
    from orchestrator.config.overrides import last_of_each
    from orchestrator.display.plain_text import say_note
    from orchestrator.display.terminal import lasting_output
    from orchestrator.driver.process.host_process import only_run, quiet_imports, unchanged

    read = read_arguments(arguments, settings)
    with only_run(), unchanged():
        with quiet_imports():
            from orchestrator.driver.checked_runs import check_all
            from orchestrator.driver.process.signals import StopSignals
            from orchestrator.driver.session import run_all
        with lasting_output(), exits_refused(hard=True):
            checked_runs = check_all([last_of_each(read.overrides, say_note)], job=read.job)
            with StopSignals() as stop:
                return next(iter(run_all(checked_runs, stop)), None)


def __getattr__(name: str) -> Any:
    if name == "gather_batch":  # not at the top: it imports torch
        from orchestrator.strategies.replicated.gather import gather_batch

        return gather_batch
    if name == "batches_by_length":
        from orchestrator.worker.data.data_loader import batches_by_length

        return batches_by_length
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
