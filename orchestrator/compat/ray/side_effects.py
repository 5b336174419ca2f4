"""What Ray does to a process that uses it: signals, handlers, messages, titles.

What a context manager patches here is restored when it exits; only :func:`keep_process_title` patches for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import ray

from orchestrator.compat.ray import idle_agent
from orchestrator.compat.ray.internals import Internal, find_internal, owner_of, replaced

_SIGNALS_OF_RAY = (
    signal.SIGTERM,
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGTRAP,
)
"""Signals for which Ray sets handlers below Python, which print the stack and abort."""

_SIGACTION_SIZE = 512
"""Bytes; more than a ``struct sigaction`` of any platform has."""


@contextlib.contextmanager
def signals_kept_from_ray() -> Iterator[None]:
    """Start Ray in this context to keep the handling of SIGINT and SIGTERM with the caller.

    Ray then leaves the handlers of signals alone, and each process that it starts gets its own process group, so a
    signal to the caller's group (Ctrl-C, ``timeout``) reaches only the caller.
    """
    popen = functools.partial(find_internal(Internal.POPEN), process_group=0)
    has_alarm = signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)
    with (
        replaced(Internal.SET_SIGTERM_HANDLER, lambda handler: None),
        replaced(Internal.POPEN, popen),
        _signal_actions_kept(),
    ):
        try:
            yield
        finally:
            if not has_alarm:  # Ray's handler aborts the process three seconds after a SIGTERM
                signal.alarm(0)


@contextlib.contextmanager
def breakpoints_kept_from_ray() -> Iterator[None]:
    """Connect to Ray in this context: ``breakpoint()`` then does here, and in children, what it did before."""
    variable = "PYTHONBREAKPOINT"
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


@contextlib.contextmanager
def without_services() -> Iterator[None]:
    """Start a Ray in this context without the processes that actors do not need.

    These are the API server, the autoscaler's monitor, the log monitor and the agent of the dashboard, which together
    take 2.5 s of CPU time to start.
    """
    python_command = find_internal(Internal.PYTHON_COMMAND)

    def command_of(component: str, *args: Any, **options: Any) -> list[str]:
        if component == find_internal(Internal.DASHBOARD_AGENT):
            return [sys.executable, "-I", "-S", idle_agent.__file__]
        command: list[str] = python_command(component, *args, **options)
        return command

    with contextlib.ExitStack() as stack:
        for start in (Internal.START_API_SERVER, Internal.START_AUTOSCALER, Internal.START_LOG_MONITOR):
            stack.enter_context(replaced(start, lambda node, **_: None))
        stack.enter_context(replaced(Internal.PYTHON_COMMAND, command_of))
        stack.enter_context(replaced(Internal.FIND_DASHBOARD_ERROR, lambda: ImportError("no dashboard is wanted")))
        yield


@contextlib.contextmanager
def process_kept_from_ray() -> Iterator[None]:
    """Start and shut down Ray in this context; the level of Ray's logger and ``faulthandler`` are then as before."""
    logger = logging.getLogger("ray")
    level, had_faulthandler = logger.level, faulthandler.is_enabled()
    with _signal_actions_kept():
        try:
            yield
        finally:
            logger.setLevel(level)
            if not had_faulthandler:
                faulthandler.disable()


@contextlib.contextmanager
def _signal_actions_kept() -> Iterator[None]:
    """Restore on exit what the signals of Ray do below Python. Unlike ``signal.signal``, this works in every thread."""
    libc = ctypes.CDLL(None)
    actions = {number: ctypes.create_string_buffer(_SIGACTION_SIZE) for number in _SIGNALS_OF_RAY}
    for number, action in actions.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in actions.items():
            libc.sigaction(number, action, None)


def raylet_messages_muted() -> contextlib.AbstractContextManager[None]:
    """Keep Ray's own messages about lost workers and nodes off the console; the run reports them itself."""
    return replaced(Internal.PRINT, lambda *_, **__: None)


@contextlib.contextmanager
def ray_logs_errors_only() -> Iterator[None]:
    """Mute what Ray's Python code logs in this context, except errors."""
    root = logging.getLogger("ray")
    # Some of Ray's modules set a level of their own, which the level of their parent does not change.
    loggers = [logger for name, logger in root.manager.loggerDict.items() if name.startswith("ray.")]
    levels = {logger: logger.level for logger in loggers if isinstance(logger, logging.Logger) and logger.level}
    levels[root] = root.level
    for logger in levels:
        logger.setLevel(max(logger.level, logging.ERROR))
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def environment_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are not set yet, for Ray to read as it starts; remove them again on exit."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def pickled_by_value(module: ModuleType) -> Iterator[None]:
    """Send the functions of ``module`` to other processes with their code, which need not be able to import it."""
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)


def keep_process_title(title: str) -> None:
    """Give this worker process the title ``ray::<title>`` for ``ps`` and the dashboard; Ray no longer changes it."""
    _take_title()(f"ray::{title}")


@functools.cache
def _take_title() -> Callable[[str], None]:
    """Return the function with which Ray would set the title at each call, and take it away from Ray."""
    set_title: Callable[[str], None] = find_internal(Internal.SET_TITLE)
    owner, attribute = owner_of(Internal.SET_TITLE)
    setattr(owner, attribute, lambda title: None)
    return set_title
